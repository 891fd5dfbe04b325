"""Ray Train: after a worker's death or a restart, a run continues with the losses of an uninterrupted run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).with_name("ray_job.py")


def run(script: Path, *arguments: str) -> str:
    path = f"{ROOT}:{ROOT / 'examples'}"
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install -e .[ray]")
def test_workers_go_on_from_their_checkpoints(tmp_path: Path) -> None:
    output = run(ROOT / "examples" / "ray_gpt.py", "--storage", str(tmp_path), "--steps", "8", "--save-every", "4")
    whole = next(line for line in output.splitlines() if line.startswith("{"))
    run(JOB, str(tmp_path))
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["half"]["step"] == 4
    assert f"{found['halves']}, in {tmp_path}/gpt/step8" == whole
    assert found["killed"] == found["halves"]
    steps = {path.suffix: [int(step) for step in path.read_text().split()] for path in tmp_path.glob("steps.*")}
    assert steps[".halves"] == list(range(8))
    assert steps[".killed"] == [*range(7), *range(4, 8)]
