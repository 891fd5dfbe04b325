"""`zeroshard run`: torchrun with the package named deepspeed on the path, and one-line errors."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from insides import LAUNCH
from typer.testing import CliRunner

import zeroshard
from zeroshard.errors import UsageError
from zeroshard.integrations.shim_path import shim_path
from zeroshard.tools.main import app

ROOT = Path(zeroshard.__file__).parent.parent
SCRIPT = """
import json, os, sys
from pathlib import Path
import torch, deepspeed
model = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
if "--idle" not in sys.argv:
    engine, *_ = deepspeed.initialize(model=model, config_params=config, model_parameters=list(model.parameters()))
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
told = {
    "arguments": sys.argv[1:], "deepspeed": deepspeed.__file__, "threads": os.environ.get("OMP_NUM_THREADS"),
    "world": os.environ["WORLD_SIZE"], "joined": deepspeed.comm.get_world_size() if deepspeed.comm.is_initialized() else 0,
}
Path(f"rank{os.environ['RANK']}.json").write_text(json.dumps(told))
if os.environ["RANK"] == "1":
    if "--exit" in sys.argv: sys.exit(3)
    if "--kill" in sys.argv: os.kill(os.getpid(), 9)
    if "--once" in sys.argv and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0": sys.exit(4)
    if "--raise" in sys.argv: raise KeyError("what the rank says")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def here(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the script's folder this process's, and keeps what the program sets in the environment out of later tests."""
    monkeypatch.chdir(script.parent)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("ZEROSHARD_RUN_MARK", "")


def run(folder: Path, *arguments: str, before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "PYTHONPATH")}
    env |= {"PYTHONPATH": os.pathsep.join([*filter(None, [before]), str(ROOT)]), **environment}
    command = [sys.executable, "-m", "zeroshard", "run", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


def ours(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith(("zeroshard run:", "error:"))]


def told(folder: Path) -> list[Any]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


@pytest.mark.full
def test_a_script_finds_zeroshard_as_deepspeed_on_every_rank(script: Path, tmp_path: Path) -> None:
    """Even where a DeepSpeed is installed; what stands behind the script's name is the script's."""
    real = tmp_path / "site" / "deepspeed"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("raise RuntimeError('the real one')")
    done = run(tmp_path, "--nproc-per-node", "2", "train.py", "--help", "-m", "x", "--log", before=str(real.parent))
    assert done.returncode == 0, done.stderr
    ranks = told(tmp_path)
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["arguments"] == ["--help", "-m", "x", "--log"]
        assert Path(rank["deepspeed"]).is_relative_to(shim_path())
        assert (rank["threads"], rank["world"], rank["joined"]) == ("1", "2", 2)
    assert ours(done) == [f"zeroshard run: DeepSpeed is installed ({real}); this run imports zeroshard in its place."]


@pytest.mark.full
def test_a_module_on_one_process_and_a_warning_where_nothing_was_trained(script: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "--nproc-per-node", "1", "-m", "train")
    assert done.returncode == 0, done.stderr
    assert told(tmp_path)[0]["joined"] == 1
    assert ours(done) == []
    done = run(tmp_path, "--nproc-per-node", "1", "train.py", "--idle")
    assert done.returncode == 0
    assert len(ours(done)) == 1 and "ended without using zeroshard" in ours(done)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "status", "sentence"),
    [
        ("--exit", 3, "rank 1 ended with exit status 3"),
        ("--kill", 137, "rank 1 was ended by SIGKILL"),
        ("--raise", 1, "rank 1 ended with exit status 1"),
        ("--once", 0, None),  # the second attempt goes through
    ],
)
def test_a_rank_that_fails_is_told_once(
    script: Path, tmp_path: Path, how: str, status: int, sentence: str | None
) -> None:
    restarts = ("--max-restarts", "1") if how == "--once" else ()
    done = run(tmp_path, "--nproc-per-node", "2", *restarts, "train.py", "--idle", how)
    assert done.returncode == status
    if sentence is None:
        assert "may restart the ranks" not in done.stderr
        return
    assert len(ours(done)) == 1 and sentence in ours(done)[0], done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) <= (8 if how == "--raise" else 1), done.stderr  # the rank's own traceback
    assert done.stderr.count("KeyError: 'what the rank says'") == (how == "--raise")


def test_a_port_in_use_is_named_with_the_remedy(script: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = run(script.parent, "--nproc-per-node", "1", "--master-port", port, "train.py")
    assert done.returncode == 2
    assert f"port: {port}" in done.stderr
    assert "pass --standalone, or --master-port with a free one" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there is no script to run"),
        (["nothere.py"], "there is no file at nothere.py"),
        (["--nproc-per-node", "two", "train.py"], "not 'two'"),
        (["--nproc-per-node", "0", "train.py"], "at least 1"),
        (["--nproc-per-node"], "expected one argument"),
        (["--nproces", "2", "train.py"], "unrecognized arguments: --nproces"),
        (["--nnodes", "0", "train.py"], "pass a number of machines"),
        (["--nnodes", "two", "train.py"], "pass a number of machines"),
        (["--nnodes", "1:2", "train.py"], "--nnodes 1:2: a changing number of machines"),
        (["--nnodes", "1:2", "--rdzv-backend", "c10d", "train.py"], "--rdzv-endpoint FIRST_HOST:29400"),
        (["train.py", "--deepspeed", "nothere.json"], "there is no config at nothere.json"),
        (["train.py", "--deepspeed=nothere.json"], "there is no config at nothere.json"),
    ],
)
@pytest.mark.quick(12)
def test_a_mistake_is_a_sentence(here: None, arguments: list[str], sentence: str) -> None:
    error = CliRunner().invoke(app, ["run", *arguments]).exception
    assert isinstance(error, UsageError)
    assert sentence in str(error)
    assert len(str(error).splitlines()) == 1


def test_accelerators_are_counted(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many processes as accelerators; more are refused, and so is the CPU beside them."""
    started: list[Any] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(*LAUNCH, started.append)
    Path("zero.json").write_text("{}")
    for arguments, sentence in (
        (["--nproc-per-node", "5", "train.py"], "this machine has 4 accelerator(s)"),
        (["train.py", "--deepspeed", "zero.json", "--use_cpu"], 'CUDA_VISIBLE_DEVICES=""'),
    ):
        error = CliRunner().invoke(app, ["run", *arguments]).exception
        assert isinstance(error, UsageError) and sentence in str(error)
    assert CliRunner().invoke(app, ["run", "train.py"]).exception is None
    assert [options.nproc_per_node for options in started] == ["4"]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    error = CliRunner().invoke(app, ["run", "train.py"]).exception
    assert isinstance(error, UsageError) and "turns DeepSpeed off in accelerate" in str(error)


def test_the_path_is_printed() -> None:
    assert CliRunner().invoke(app, ["shim-path"]).stdout == f"{shim_path()}\n"
    assert (shim_path() / "deepspeed" / "__init__.py").is_file()
