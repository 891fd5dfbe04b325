"""Owns the process that forks the contracts' scripts. It imports the trainers once, with zeroshard's `deepspeed` first.

A rank then starts in a tenth of a second, instead of ten seconds of imports. `zeroshard run` starts ranks in the same
environment, as test_run and test_trainer_contract check.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import runpy
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CONTRACTS = Path(__file__).parent
SECONDS = 200.0


@dataclass(frozen=True)
class Job:
    """A script of this folder, on some ranks."""

    script: str
    arguments: Sequence[str]
    ranks: int
    environment: dict[str, str]


class Server:
    """A handle of the process, for the tests."""

    def __init__(self, imports: Sequence[str]) -> None:
        from zeroshard.integrations.shim_path import PYTHONPATH, python_path

        ours, theirs = socket.socketpair()
        code = f"from contracts.server import serve; serve({theirs.fileno()}, {list(imports)})"
        paths = [python_path(os.environ), str(CONTRACTS), str(CONTRACTS.parent), str(CONTRACTS.parents[1])]
        environment = {**os.environ, PYTHONPATH: os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen([sys.executable, "-c", code], env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self._connection = Connection(ours.detach())
        atexit.register(self.close)

    def run(self, job: Job) -> None:
        """Run a script to its end on every rank.

        Raises:
            RankError: with every failed rank's traceback.
        """
        from zeroshard.testing import RankError

        self._connection.send_bytes(pickle.dumps(job))
        error = pickle.loads(self._connection.recv_bytes())
        if error is not None:
            raise RankError(error)

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.wait()


_servers: dict[tuple[str, ...], Server] = {}


def run(job: Job, imports: Sequence[str]) -> None:
    """Run a job on the server of this process that has these imports."""
    key = tuple(imports)
    if key not in _servers:
        _servers[key] = Server(imports)
    _servers[key].run(job)


# ---------------------------------------------------------------------- in the server


def serve(descriptor: int, imports: Sequence[str]) -> None:
    """Run jobs until the other side closes."""
    import torch

    torch.set_num_threads(1)
    for name in imports:
        importlib.import_module(name)
    from ports import free_port

    from zeroshard.testing import RankError, run_ranks

    connection = Connection(descriptor)
    while True:
        try:
            job: Job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        error = None
        try:
            run_ranks(_rank, job.ranks, job, free_port(), initialise=False, timeout=SECONDS)
        except RankError as failed:
            error = str(failed)
        connection.send_bytes(pickle.dumps(error))


def _rank(rank: int, job: Job, port: int) -> Any:
    """Run the script as torchrun starts it."""
    os.environ.update(job.environment)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.ranks), LOCAL_WORLD_SIZE=str(job.ranks), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="contracts",
    )  # fmt: skip
    sys.argv = [job.script, *job.arguments]
    runpy.run_path(str(CONTRACTS / job.script), run_name="__main__")
