"""Runs of examples/ray_gpt.py, which is on the path, on two workers of Ray's, for test_ray.py: ray_job.py FOLDER."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import ray_gpt
import torch.distributed as dist

STEPS, SAVE_EVERY, KILLED_AT = 8, 4, 6


def is_killed_once(settings: dict[str, Any]) -> None:
    """The example's loop on each worker; the second dies in the middle of it, and writes down its steps."""
    windows, steps = ray_gpt.windows, Path(settings["storage"], "steps")

    def watched(text: Any, first: int, count: int) -> Any:
        if dist.get_rank() == 1:
            step = first // ray_gpt.BATCH
            done = steps.read_text().split() if steps.exists() else []
            with steps.open("a") as file:
                file.write(f"{step}\n")
            if step == KILLED_AT and str(step) not in done:
                os.kill(os.getpid(), signal.SIGKILL)
        return windows(text, first, count)

    ray_gpt.windows = watched
    try:
        ray_gpt.train(settings)
    finally:
        ray_gpt.windows = windows


def main(storage: Path) -> None:
    """A run in which nothing happens, one that a worker's death breaks, and one in two parts."""

    def run(name: str, steps: int = STEPS) -> dict[str, Any]:
        return dict(ray_gpt.trainer(storage, name, 2, steps, SAVE_EVERY).fit().metrics)

    ray.init(num_cpus=2, include_dashboard=False)
    found = {"whole": run("whole"), "half": run("halves", SAVE_EVERY), "halves": run("halves")}
    setattr(ray_gpt, "train", is_killed_once)  # noqa: B010  here alone: workers import the example's own
    found["killed"] = run("killed")
    (storage / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
