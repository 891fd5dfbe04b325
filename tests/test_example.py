"""The example: Ctrl-C saves between two steps, slow CPUs take fewer steps, and the end shows a curve of the loss."""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import json5
import pytest
from rich.console import Console

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
    assert "and saved. To resume:" in output, errors
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
    assert f"resuming from {folder}" in output.replace("\n", "")


@pytest.fixture
def script() -> Any:
    """The example's module."""
    return SimpleNamespace(**runpy.run_path(SCRIPT))


def test_a_curve_is_text_that_falls_with_the_loss(script: Any) -> None:
    drawn = script.curve([5.0 - 0.01 * step for step in range(300)], first=100, width=60, height=10).splitlines()
    assert [line.index("*") for line in drawn[:10]] == sorted(line.index("*") for line in drawn[:10])
    assert drawn[0].startswith("  4.98") and drawn[-1].split() == ["step", "100", "399"]
    assert "*" in script.curve([2.0], first=0)


@pytest.mark.parametrize("installed", [True, False])
def test_the_curve_is_a_picture_or_text(
    script: Any, installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(script.draw.__globals__, "find_spec", lambda name: name if installed else None)
    script.draw([3.0, 2.5, 2.0], 0, Console())
    printed = capsys.readouterr().out
    if installed:
        picture = tmp_path / "runs" / "train_gpt.png"
        assert str(picture) in printed and picture.read_bytes().startswith(b"\x89PNG")
    else:
        assert "*" in printed and "step" in printed and not list(tmp_path.iterdir())


@pytest.mark.parametrize("emulated", [True, False])
def test_a_cpu_without_bf16_takes_fewer_steps_and_says_so(
    script: Any, emulated: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(script.set_steps.__globals__, "is_emulated_on_any_rank", lambda dtype: emulated)
    config = json5.loads((ROOT / "examples" / "zero2.json").read_text(encoding="utf-8"))
    options = argparse.Namespace(steps=None)
    script.set_steps(options, config, Console(width=200))
    assert options.steps == config["scheduler"]["params"]["total_num_steps"] == (250 if emulated else 500)
    assert ("250 steps, not 500" in capsys.readouterr().out) is emulated
    given = argparse.Namespace(steps=7)
    script.set_steps(given, config, Console())
    assert given.steps == 7
