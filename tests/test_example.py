"""Ctrl-C in the example saves between two steps, says how to go on, and is no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = str(ROOT / "examples" / "train_gpt.py")
TORCHRUN = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2"]


def start(launcher: list[str], tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 200)
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    arguments = ["--config", str(ROOT / "examples" / "zero2.json"), "--text", str(text), *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*launcher, SCRIPT, *arguments], stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True
    )


@pytest.mark.full
@pytest.mark.parametrize("launcher", [TORCHRUN, [sys.executable]], ids=["torchrun", "one process"])
def test_ctrl_c_saves_and_says_how_to_go_on(launcher: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    running = start(launcher, tmp_path, "--checkpoints", str(folder), "--steps", "100000")
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("step    0"):
            break
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to torchrun and to its processes
    output, errors = running.communicate(timeout=120)
    assert "and saved. To go on:" in output, errors
    again = next(line.split() for line in output.splitlines() if "train_gpt.py" in line)
    assert again[0].startswith("torchrun" if launcher is TORCHRUN else "python")
    assert again[again.index("--checkpoints") + 1] == str(folder)
    ours = errors[: errors.index("torch/distributed/elastic")] if launcher is TORCHRUN else errors
    assert "Traceback" not in ours, errors
    if launcher is not TORCHRUN:
        assert running.returncode == 130
    step = int((folder / "latest").read_text().removeprefix("global_step"))
    assert step >= 1
    on = start([sys.executable], tmp_path, "--checkpoints", str(folder), "--steps", str(step + 1), "--sample", "1")
    output, errors = on.communicate(timeout=120)
    assert on.returncode == 0, errors
    assert f"going on from {folder}" in output.replace("\n", "")
