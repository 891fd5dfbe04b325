"""Runs the example on a small model, and records its samples, for test_elastic.py: `elastic.py FOLDER ARGUMENTS...`.

At each step of HOLDS, a rank waits to be killed, only once per step.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import train_gpt

from zeroshard import Engine
from zeroshard.testing.gpt import GPTConfig

HOLDS = [(2, 1, 10), (1, 0, 20)]
"""(ranks, this rank, step)."""
FOLDER = Path(sys.argv.pop(1))


def held_at(step: int) -> Path:
    """Return the path of the file that shows that a rank has waited at this step."""
    return FOLDER / f"held.{step}"


class Written(train_gpt.Windows):
    """A source of samples that records which ones were taken."""

    def batch(self, first: int, engine: Engine) -> tuple[Tensor, Tensor]:
        ranks, step = dist.get_world_size(), engine.global_steps
        if engine.training:
            if (ranks, dist.get_rank(), step) in HOLDS and not held_at(step).exists():
                held_at(step).touch()
                time.sleep(3600)
            taken = {
                "life": f"{ranks} ranks at {os.environ['MASTER_PORT']}", "ranks": ranks, "step": step,
                "samples": list(range(first, first + engine.train_micro_batch_size_per_gpu())),
            }  # fmt: skip
            with (FOLDER / f"taken.{socket.gethostname()}.{os.getpid()}").open("a") as file:
                file.write(json.dumps(taken) + "\n")
        return super().batch(first, engine)


if __name__ == "__main__":
    torch.set_num_threads(1)
    setattr(train_gpt, "Windows", Written)  # noqa: B010
    train_gpt.SIZES["1M"] = (GPTConfig(vocabulary=train_gpt.VOCABULARY, layers=2, width=64, heads=2), 1e-3)
    raise SystemExit(train_gpt.main())
