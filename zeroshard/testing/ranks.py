"""Owns `run_ranks`, which runs a function in several processes of one gloo process group.

Ranks are forked, so they start in a tenth of a second and can run any closure. If a rank hangs or raises,
the run fails with the rank's stack or traceback.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from zeroshard.errors import ZeroshardError

_POLL_SECONDS = 0.01
_GRACE_SECONDS = 10.0


class RankError(ZeroshardError):
    """An error about ranks that raised, died or hung. The message has the traceback, stack or exit status of each."""


@dataclass
class _Rank:
    rank: int
    pid: int
    folder: Path
    status: int | None = None

    def poll(self) -> bool:
        """Return whether the rank has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def read(self, name: str) -> str:
        path = self.folder / f"{name}.{self.rank}"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    collective_timeout: float = 60.0,
    initialise: bool = True,
) -> list[Any]:
    """Run `function(rank, *args)` in `world_size` forked processes and return the results in rank order.

    Args:
        function: a callable. Its result may contain only values that `torch.load(weights_only=True)` accepts, such as tensors and
            plain containers.
        world_size: the number of ranks.
        timeout: the number of seconds after which ranks that are still running count as hung. After a rank fails, the
            others have at most 10 more seconds.
        collective_timeout: the process group's timeout in seconds.
        initialise: whether to join the ranks in a gloo process group on the loopback.

    Raises:
        RankError: a rank raised, died or hung.
    """
    # Rank 0 serves the store at a socket that is already open: a free port might be taken in the meantime.
    with socket.create_server(("127.0.0.1", 0)) as door, tempfile.TemporaryDirectory(prefix="ranks") as name:
        folder = Path(name)
        sys.stdout.flush()
        sys.stderr.flush()
        ranks = []
        for number in range(world_size):
            pid = os.fork()
            if pid == 0:
                _child(function, args, number, world_size, door if initialise else None, folder, collective_timeout)
            ranks.append(_Rank(number, pid, folder))
        door.close()
        hung = _wait(ranks, timeout)
        reports = []
        for rank in ranks:
            if rank in hung:
                reports.append(f"--- rank {rank.rank} hung; its stack:\n{rank.read('stack')}")
            elif rank.status:
                error = rank.read("error") or f"ended with exit status {rank.status} and no traceback"
                reports.append(f"--- rank {rank.rank} failed:\n{error}")
        if reports:
            raise RankError(f"{len(reports)} of {world_size} ranks failed\n" + "\n".join(reports))
        return [torch.load(folder / f"result.{number}", weights_only=True) for number in range(world_size)]


def _child(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, door: socket.socket | None, folder: Path,
    collective_timeout: float,
) -> None:  # fmt: skip
    """Run the function in the fork and end the process."""
    code = 1
    try:
        gc.freeze()  # this rank's garbage collections neither scan nor copy objects from before the fork
        torch.set_num_threads(1)
        with (folder / f"stack.{rank}").open("w", encoding="utf-8") as stack:
            faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
            if door is not None:
                timeout = timedelta(seconds=collective_timeout)
                store = join_store(door, rank, world_size, timeout)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
            result = function(rank, *args)
            buffer = io.BytesIO()
            torch.save(result, buffer)
            (folder / f"result.{rank}").write_bytes(buffer.getvalue())
            if door is not None and dist.is_initialized():
                dist.barrier()  # no rank closes connections that others are still using
            code = 0
    except BaseException:
        (folder / f"error.{rank}").write_bytes(traceback.format_exc().encode(errors="backslashreplace"))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def join_store(door: socket.socket, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Connect to the store of all ranks, which rank 0 serves at `door`. Set MASTER_ADDR and MASTER_PORT."""
    port = door.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    own = door.detach()
    if rank != 0:
        os.close(own)  # with an open copy, ranks would wait for a store that died
    serving: dict[str, Any] = {"is_master": True, "master_listen_fd": own} if rank == 0 else {}
    store: Store = dist.TCPStore("127.0.0.1", port, world_size, timeout=timeout, **serving)  # type: ignore[attr-defined]
    return store


def _wait(ranks: list[_Rank], timeout: float) -> list[_Rank]:
    """Wait until all ranks have ended, or time is up. Then kill hung ranks, after their stacks are on disk, and return them."""
    deadline = time.monotonic() + timeout
    while [rank for rank in ranks if not rank.poll()]:
        if any(rank.status for rank in ranks):  # one failed: the others notice it by their connections, or never
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    hung = [rank for rank in ranks if not rank.poll()]
    for rank in hung:
        os.kill(rank.pid, signal.SIGUSR1)
    if hung:
        time.sleep(0.5)
    for rank in hung:
        os.kill(rank.pid, signal.SIGKILL)
        os.waitpid(rank.pid, 0)
    return hung
