"""Owns the process with the simulated accelerator. It forks ranks, so each rank starts with all modules imported.

The process is separate since a registered device cannot be removed. Otherwise zeroshard would find an accelerator in the process
of the tests, and in all its forks. The server runs no backward before a fork, which autograd's threads would not survive.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from typing import Any

import pytest
from folders import PYTHONPATH
from forks import prepare
from served import Server, answer

from simgpu.build import why_not

SECONDS = 120.0


@dataclass(frozen=True)
class Request:
    """A request to call `function` of `module` with `options`, and with the rank as the first argument if `ranks` is not 0."""

    module: str
    function: str
    options: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "at once"
    ranks: int = 0
    """The number of ranks; 0: one process without a process group."""
    backend: str = "cpu:gloo,simgpu:simccl"
    fault: str | None = None
    timeout: float = SECONDS


# ---------------------------------------------------------------------- in the process of the tests


_server: list[Server] = []


def start() -> Server:
    """Start a process with the device."""
    paths = [PYTHONPATH, *filter(None, [os.environ.get("PYTHONPATH")])]
    return Server("from simgpu.server import serve; serve({})", {"PYTHONPATH": os.pathsep.join(paths)})


def run(request: Request) -> list[Any]:
    """Run a request on this process's only server, which the first request starts. Skip the test if no device can be built."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    if not _server:
        _server.append(start())
    return _server[0].run(request)


def call(function: Callable[..., Any], *, ranks: int = 2, mode: str = "at once", **options: Any) -> list[Any]:
    """Run a module's function, `function(rank, **options)`, on `ranks` ranks with the simulated accelerator."""
    return run(Request(function.__module__, function.__qualname__, options, mode, ranks))


def simulated(ranks: int = 2, mode: str = "at once") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test on `ranks` ranks with the simulated accelerator, each of which gets its `rank`."""

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        @wraps(test)
        def in_the_server(*, rank: None, **options: Any) -> None:
            run(Request(test.__module__, f"{test.__qualname__}.__wrapped__", options, mode, ranks))

        return in_the_server

    return decorated


# ---------------------------------------------------------------------- in the server


def serve(descriptor: int) -> None:
    """Serve requests until the other side closes the connection."""
    import torch
    import torch._dynamo  # otherwise each rank would import it at its optimizer's first step

    from simgpu import device, rare, simccl  # noqa: F401

    torch.set_num_threads(1)
    device.load()
    simccl.register()
    shapes = torch.ones(2, 2, device="meta")
    torch.nn.functional.layer_norm(shapes + 1, (2,))  # imports torch's meta kernels in Python: two seconds of each rank
    prepare()
    answer(descriptor, _answered)


def _answered(request: Request) -> list[Any]:
    from zeroshard.testing import run_ranks

    # The ranks' store uses a socket that is already open, see `run_ranks`.
    with socket.create_server(("127.0.0.1", 0)) as door:
        return run_ranks(_rank, max(request.ranks, 1), request, door, timeout=request.timeout, initialise=False)


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
        dist.barrier()  # no rank closes connections that others still use
    return result
