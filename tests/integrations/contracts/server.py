"""Owns the process that forks the contracts' scripts. It imports the trainers once, with zeroshard's `deepspeed` first.

A rank then starts in a tenth of a second, instead of ten seconds of imports. `zeroshard run` starts ranks in the same
environment, as test_run and test_trainer_contract check.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from folders import PYTHONPATH as TESTS
from served import Server, answer

CONTRACTS = Path(__file__).parent
SECONDS = 400.0


@dataclass(frozen=True)
class Job:
    """A script of this folder, on some ranks."""

    script: str
    arguments: Sequence[str]
    ranks: int
    environment: dict[str, str]


_servers: dict[tuple[str, ...], Server] = {}


def run(job: Job, imports: Sequence[str]) -> None:
    """Run a job on the server of this process that has these imports."""
    key = tuple(imports)
    if key not in _servers:
        from zeroshard.integrations.shim_path import PYTHONPATH, python_path

        paths = [python_path(os.environ), str(CONTRACTS), TESTS]
        code = f"from contracts.server import serve; serve({{}}, {list(imports)})"
        _servers[key] = Server(code, {PYTHONPATH: os.pathsep.join(paths), "OMP_NUM_THREADS": "1"})
    _servers[key].run(job)


# ---------------------------------------------------------------------- in the server


def serve(descriptor: int, imports: Sequence[str]) -> None:
    """Run jobs until the other side closes."""
    import torch

    torch.set_num_threads(1)
    for name in imports:
        importlib.import_module(name)
    from ports import free_port

    from zeroshard.testing import run_ranks

    answer(descriptor, lambda job: run_ranks(_rank, job.ranks, job, free_port(), initialise=False, timeout=SECONDS))


def _rank(rank: int, job: Job, port: int) -> Any:
    """Run the script as torchrun starts it."""
    os.environ.update(job.environment)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.ranks), LOCAL_WORLD_SIZE=str(job.ranks), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="contracts",
    )  # fmt: skip
    sys.argv = [job.script, *job.arguments]
    runpy.run_path(str(CONTRACTS / job.script), run_name="__main__")
