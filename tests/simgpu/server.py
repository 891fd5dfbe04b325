"""Owns the process in which the pretend accelerator lives. Ranks are forked from it, so each begins with everything imported.

It is a process of its own because a device, once registered, is there for good: in the process of the tests, and in all that it
forks, zeroshard would find an accelerator. Nothing here runs a backward before the fork, which autograd's threads do not survive.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from forks import prepare

from simgpu.build import why_not

TESTS = Path(__file__).parents[1]
SECONDS = 120.0


@dataclass(frozen=True)
class Request:
    """Call `function` of `module` with `options`, and with `rank` first where there are several ranks or a group is wanted."""

    module: str
    function: str
    options: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "at once"
    ranks: int = 0
    """0: one process without a process group."""
    backend: str = "cpu:gloo,simgpu:simccl"
    fault: str | None = None
    timeout: float = SECONDS


def _send(connection: Connection, value: Any) -> None:
    connection.send_bytes(pickle.dumps(value))  # its own `send` would have tensors shared, not copied


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


# ---------------------------------------------------------------------- in the process of the tests


class Server:
    """The process, from the side of the tests."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        paths = [str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from simgpu.server import serve; serve({theirs.fileno()})"],
            env=environment,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        atexit.register(self.close)

    def run(self, request: Request) -> list[Any]:
        """What each rank returned.

        Raises:
            RankError: with every failed rank's traceback.
        """
        from zeroshard.testing import RankError

        _send(self._connection, request)
        results, error = _receive(self._connection)
        if error is not None:
            raise RankError(error)
        return list(results)

    def close(self) -> None:
        """End the process. Ranks that were forked since hold copies of the socket, so closing ours would not be seen."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._connection.close()
        self._process.wait()


_server: list[Server] = []


def run(request: Request) -> list[Any]:
    """On the one server of this process, which begins with the first request. The test is skipped where no device can be built."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    if not _server:
        _server.append(Server())
    return _server[0].run(request)


def call(function: Callable[..., Any], *, ranks: int = 2, mode: str = "at once", **options: Any) -> list[Any]:
    """Run a function of a module, `function(rank, **options)`, on `ranks` ranks of the pretend accelerator."""
    return run(Request(function.__module__, function.__qualname__, options, mode, ranks))


# ---------------------------------------------------------------------- in the server


def serve(descriptor: int) -> None:
    """Until the other side closes."""
    import torch
    import torch._dynamo  # optimizers import it at their first step: once here, not once in each rank

    from simgpu import device, rare, simccl  # noqa: F401
    from zeroshard.testing import RankError, run_ranks

    torch.set_num_threads(1)
    device.load()
    simccl.register()
    shapes = torch.ones(2, 2, device="meta")
    torch.nn.functional.layer_norm(shapes + 1, (2,))  # imports torch's meta kernels in Python: two seconds of each rank
    prepare()
    connection = Connection(descriptor)
    while True:
        try:
            request: Request = _receive(connection)
        except EOFError:
            return
        try:
            # The ranks' store is served at a socket that is open already, see `run_ranks`.
            with socket.create_server(("127.0.0.1", 0)) as door:
                ranks = max(request.ranks, 1)
                results = run_ranks(_rank, ranks, request, door, timeout=request.timeout, initialise=False)
            _send(connection, (results, None))
        except RankError as error:
            _send(connection, ([], str(error)))


def _rank(rank: int, request: Request, door: socket.socket) -> Any:
    import torch
    import torch.distributed as dist

    from simgpu import device, faults
    from zeroshard.testing.ranks import join_store

    device.set_mode(request.mode)
    arguments: list[Any] = []
    if request.ranks:
        timeout = timedelta(seconds=min(request.timeout / 2, 60))
        store = join_store(door, rank, request.ranks, timeout)
        dist.init_process_group(request.backend, store=store, rank=rank, world_size=request.ranks, timeout=timeout)
        arguments = [rank]
    function: Any = importlib.import_module(request.module)
    for name in request.function.split("."):
        function = getattr(function, name)
    if request.fault is not None:
        faults.plant(request.fault)
    result = function(*arguments, **request.options)
    torch.accelerator.synchronize()
    if request.ranks:
        dist.barrier()  # nobody closes connections that others still use
    return result
