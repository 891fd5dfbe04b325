"""Runs examples/ray_gpt.py, which must be on the path, on two Ray workers, for test_ray.py: `ray_job.py FOLDER`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray_gpt
import torch.distributed as dist

STEPS, SAVE_EVERY, KILLED_AT = 8, 4, 6


def train(settings: dict[str, Any]) -> None:
    """Run the example's loop on each worker. The second worker records its steps, and dies within a step of the run `killed`."""
    windows, written = ray_gpt.windows, Path(settings["storage"], f"steps.{settings['name']}")

    def watched(text: Any, first: int, count: int) -> Any:
        step = first // ray_gpt.BATCH
        if dist.get_rank() == 1:
            done = written.read_text().split() if written.exists() else []
            written.write_text("\n".join([*done, str(step)]))
            if settings["name"] == "killed" and step == KILLED_AT and str(step) not in done:
                ray.train.get_all_reported_checkpoints()  # waits until Ray has registered the last checkpoint
                os.kill(os.getpid(), signal.SIGKILL)
        return windows(text, first, count)

    ray_gpt.windows = watched
    try:
        ray_gpt.train(settings)  # the example's own function, since only the driver replaced it
    finally:
        ray_gpt.windows = windows


def main(storage: Path) -> None:
    """Run the example in two parts, and once with a worker's death."""

    def run(name: str, steps: int = STEPS) -> dict[str, Any]:
        return dict(ray_gpt.trainer(storage, name, 2, steps, SAVE_EVERY).fit().metrics)

    ray.init(num_cpus=2, include_dashboard=False)
    ray_gpt.train = train
    found = {"half": run("halves", SAVE_EVERY), "halves": run("halves"), "killed": run("killed")}
    (storage / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
