"""Owns the ranks that tests share: processes that run many cases, in one gloo process group.

`on_ranks` works as `zeroshard.testing.run_ranks` without its tenths of a second to start. Ranks are replaced after a
failure or a timeout, and after a case that leaves a patch, a process group or a thread. Cases that end their processes,
patch zeroshard in the parent, or measure their process need fresh ranks: `run_ranks`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import pickle
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from insides import GRACE_SECONDS_OF_RANKS
from ports import free_port

from zeroshard.testing import RankError, run_ranks
from zeroshard.testing.ranks import join_store

__all__ = ["Lines", "RankError", "launched", "on_ranks", "run_ranks", "run_until_all_end", "until"]

PATCHED = (
    types.FunctionType, types.BuiltinFunctionType, type, property, staticmethod, classmethod, int, float, str,
)  # fmt: skip
"""Types of the values that cases replace."""
GRACE_SECONDS = 10.0
"""Seconds for the other ranks to fail after one rank failed. They see its closed connections, or hang."""
PATCHABLE = ("os", "time", "socket", "select", "signal", "pathlib", "torch.accelerator")
"""Modules outside zeroshard that cases patch."""


class Lines(logging.Handler):
    """The lines that zeroshard logs on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("zeroshard").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def until(path: Path) -> None:
    """Wait for a file that another rank writes: for ever, so that this rank is reported as hung, with its stack."""
    while not path.exists():
        time.sleep(0.005)


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300.0) -> list[Any]:
    """Call `function(rank, *args)` on `world_size` ranks that are joined, and return their results in rank order.

    Args:
        function: a module's function or a closure, sent by cloudpickle; its result returns by pickle. A closure gets copies
            of the globals that it names, so changes to them do not leave the rank.
        timeout: seconds after which ranks that still run are hung; the error contains the stacks of these ranks.

    Raises:
        RankError: with every failed rank's traceback.
    """
    if changed := _AS_IMPORTED.changed():
        raise ValueError(f"{', '.join(changed)} is patched in this process, which warm ranks do not see: use run_ranks")
    ranks = _warm.pop(world_size, None) or Ranks(world_size)
    results = ranks.run(function, args, timeout)
    if ranks.are_clean:
        _warm[world_size] = ranks
    else:
        ranks.end()
    return results


def run_until_all_end(function: Callable[..., Any], world_size: int, **options: Any) -> list[Any]:
    """Call `run_ranks`, with time for the other ranks to end after a rank's death: until the timeout.

    The timeout of collectives is longer, so a rank that waits in one is reported as hung.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(GRACE_SECONDS_OF_RANKS, float("inf"))
        return run_ranks(function, world_size, **{"timeout": 180.0, "collective_timeout": 600.0, **options})


def launched(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(*args)` on fresh ranks as torchrun starts them: trainers initialise torch.distributed themselves."""
    port = free_port()

    def body(rank: int) -> Any:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test", ACCELERATE_USE_CPU="true",
        )  # fmt: skip
        return function(*args)

    return run_ranks(body, world_size, initialise=False, timeout=300)


class Ranks:
    """A set of processes that wait for the next case."""

    def __init__(self, world_size: int) -> None:
        self.are_clean = True
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._pids: list[int] = []
        self._connections: list[Connection] = []
        door = socket.create_server(("127.0.0.1", 0))
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(world_size):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                ours.close()
                _serve(Connection(theirs.detach()), rank, world_size, door, self._stack(rank))
            theirs.close()
            self._pids.append(pid)
            self._connections.append(Connection(ours.detach()))
        door.close()

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        """Call a function on every rank. An error ends the ranks."""
        request = cloudpickle.dumps((function, args, dict(os.environ)))
        for connection in self._connections:
            connection.send_bytes(request)
        answers, reports = self._answers(timeout)
        if reports:
            self.end()
            raise RankError(f"{len(reports)} of {len(self._pids)} ranks failed\n" + "\n".join(reports))
        self.are_clean = all(is_clean for _, is_clean in answers.values())
        return [answers[rank][0] for rank in sorted(answers)]

    def _answers(self, timeout: float) -> tuple[dict[int, tuple[Any, bool]], list[str]]:
        """Return (result, whether the rank is clean) by rank, and a report for each rank that failed or hung."""
        deadline = time.monotonic() + timeout
        waited_for = {connection: rank for rank, connection in enumerate(self._connections)}
        answers, reports = {}, []
        while waited_for:
            ready = wait(list(waited_for), max(deadline - time.monotonic(), 0))
            if not ready:
                break
            for connection in ready:
                rank = waited_for.pop(connection)
                error, *answer = self._receive(connection, rank)
                if error is None:
                    answers[rank] = answer
                else:
                    reports.append(f"--- rank {rank} failed:\n{error}")
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers, reports + [self._stack_of_hung(rank) for rank in waited_for.values()]

    def _receive(self, connection: Any, rank: int) -> Any:
        try:
            return pickle.loads(connection.recv_bytes())
        except EOFError:
            _, status = os.waitpid(self._pids[rank], 0)
            self._pids[rank] = 0
            return f"ended with exit status {os.waitstatus_to_exitcode(status)} and no traceback", None, False

    def _stack(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stack.{rank}"

    def _stack_of_hung(self, rank: int) -> str:
        os.kill(self._pids[rank], signal.SIGUSR1)
        for _ in range(50):  # the handler writes within milliseconds on an idle machine
            time.sleep(0.05)
            if self._stack(rank).exists() and "most recent call first" in self._stack(rank).read_text():
                break
        return f"--- rank {rank} hung; its stack:\n{self._stack(rank).read_text()}"

    def end(self) -> None:
        """Kill the processes."""
        for connection in self._connections:
            connection.close()
        for pid in filter(None, self._pids):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._folder.cleanup()


_warm: dict[int, Ranks] = {}
"""Waiting ranks by world size. They end with this process."""


# ---------------------------------------------------------------------- in a rank


def _serve(connection: Connection, rank: int, world_size: int, door: socket.socket, stack: Path) -> None:
    """Run cases until one fails or the parent is gone. Never returns."""
    try:
        _end_with_parent()
        torch.set_num_threads(1)
        faulthandler.register(signal.SIGUSR1, file=stack.open("w"), all_threads=True)
        gc.freeze()  # imported objects are in no cycle that a case makes
        # Shorter than the wait of `on_ranks`, so that errors name missing ranks; longer than delays on a busy machine.
        timeout = timedelta(seconds=270)
        store = join_store(door, rank, world_size, timeout)
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        own |= {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        names = _Names()
        while True:
            function, args, environment = pickle.loads(connection.recv_bytes())
            answer = _case(function, rank, args, {**environment, **own}, names)
            _save_coverage()
            connection.send_bytes(pickle.dumps(answer))
            if answer[0] is not None:
                break  # its connections close, so that the others do not wait for it
    except (EOFError, OSError):
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _end_with_parent() -> None:
    """End this process with its parent. Other children hold copies of the connections, so these would not close."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _save_coverage() -> None:
    """Write the data of `make coverage` so far, since a signal ends this process."""
    coverage = sys.modules.get("coverage")
    measured = coverage.Coverage.current() if coverage else None
    if measured is not None:
        measured.save()


def _state() -> tuple[Any, ...]:
    """Return the state of the process that a case may change, other than names."""
    groups = len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0
    limits = [resource.getrlimit(one) for one in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS)]
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGXFSZ)]
    torch_wide = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    return groups, limits, handlers, torch_wide, Path.cwd()


def _case(
    function: Any, rank: int, args: Any, environment: dict[str, str], names: _Names
) -> tuple[str | None, Any, bool]:
    """Return (traceback or None, result, whether the rank is clean)."""
    state, threads = _state(), set(threading.enumerate())
    os.environ.clear()
    os.environ.update(environment)
    torch.manual_seed(0)
    random.seed(0)
    try:
        result = function(rank, *args)
    except BaseException:
        return traceback.format_exc(), None, False
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    del function
    gc.collect()
    gc.freeze()  # the remaining objects were imported
    is_clean = not names.changed() and _state() == state and set(threading.enumerate()) <= threads
    names.note_imported()
    return None, result, is_clean


# ---------------------------------------------------------------------- what a case may leave behind


class _Names:
    """The values of names in modules, and in the classes that they define, when they were first seen."""

    def __init__(self) -> None:
        self._modules: dict[str, Any] = {}
        self._scopes: list[tuple[str, Mapping[str, Any], dict[str, Any]]] = []
        self.note_imported()

    def note_imported(self) -> None:
        """Add the modules that are not recorded yet."""
        for name in sys.modules.keys() - self._modules.keys():
            module = self._modules[name] = sys.modules[name]
            if name in PATCHABLE or name.partition(".")[0] == "zeroshard":
                self._note(name, vars(module))
                for key, value in list(vars(module).items()):
                    if type(value) is type and value.__module__ == name:
                        self._note(f"{name}.{key}", vars(value))

    def _note(self, scope: str, names: Mapping[str, Any]) -> None:
        kept = {key: value for key, value in names.items() if type(value) in PATCHED}
        self._scopes.append((scope, names, kept))

    def changed(self) -> list[str]:
        """Return the names whose values changed.

        torch wraps an optimizer class's `step` when the first object is made. This is not a change.
        """
        return [
            f"{scope}.{key}"
            for scope, names, kept in self._scopes
            if not kept.items() <= names.items()
            for key, value in kept.items()
            if names.get(key) is not value and not hasattr(names.get(key), "hooked")
        ]


_AS_IMPORTED = _Names()
