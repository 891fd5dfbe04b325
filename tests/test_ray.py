"""Ray Train: what a worker's death or a new start breaks goes on, to the very losses of a run in which nothing happened."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
JOB = ROOT / "tests" / "ray_job.py"


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install -e .[ray]")
def test_workers_go_on_from_their_checkpoints(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
        "OMP_NUM_THREADS": "1",
        "RAY_DEDUP_LOGS": "0",
    }
    done = subprocess.run(
        [sys.executable, str(JOB), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["whole"]["step"] == 8
    assert found["half"]["step"] == 4
    assert found["killed"] == found["whole"]
    assert found["halves"] == found["whole"]
    steps = [int(step) for step in (tmp_path / "steps").read_text().split()]
    assert steps == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7]
