"""The examples run: the script, which ends well at Ctrl-C, the notebook, whose stored outputs are current, and those for Slurm."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from zeroshard.checkpoint.consolidated import state_dict_of

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "examples" / "train_gpt.py")
BIN = Path(sys.executable).parent
RUN = [str(BIN / "zeroshard"), "run", "--standalone", "--nproc-per-node", "2"]


def start(launcher: list[str], tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 200)
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    arguments = ["--config", str(ROOT / "examples" / "zero2.json"), "--text", str(text), "--sample", "3", *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*launcher, SCRIPT, *arguments], stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True,
        cwd=tmp_path,
    )  # fmt: skip


def interrupt(running: subprocess.Popen[str]) -> tuple[str, str]:
    """Press Ctrl-C after the first step, and return the rest of the output, and the errors."""
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("step    0"):
            break
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does: to the launcher and to its processes
    return running.communicate(timeout=120)


@pytest.mark.full
@pytest.mark.parametrize("launcher", [RUN, [sys.executable]], ids=["two ranks", "one process"])
def test_ctrl_c_saves_and_says_how_to_go_on(launcher: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    running = start(launcher, tmp_path, "--checkpoints", str(folder), "--steps", "100000")
    output, errors = interrupt(running)
    assert "and saved. To resume:" in output, errors
    again = next(line.split() for line in output.splitlines() if "train_gpt.py" in line)
    assert again[0].startswith("torchrun" if launcher is RUN else "python")
    assert again[again.index("--checkpoints") + 1] == str(folder)
    assert "Traceback" not in errors, errors
    assert running.returncode == 130
    step = int((folder / "latest").read_text(encoding="utf-8").removeprefix("global_step"))
    assert step >= 1
    on = start([sys.executable], tmp_path, "--checkpoints", str(folder), "--steps", str(step + 1))
    output, errors = on.communicate(timeout=120)
    assert on.returncode == 0, errors
    assert f"resuming from {folder}" in output.replace("\n", "")
    (tmp_path / "other").write_bytes(b"other words, " * 10_000)
    other = start([sys.executable], tmp_path, "--checkpoints", str(folder), "--text", str(tmp_path / "other"))
    assert "was trained on another text" in other.communicate(timeout=120)[1]
    assert other.returncode == 1


@pytest.mark.full
def test_ctrl_c_shows_what_was_learnt(tmp_path: Path) -> None:
    output, errors = interrupt(start(RUN, tmp_path))
    assert errors.strip() == "zeroshard run: stopped by SIGINT, with all ranks.", errors
    parts = ["validation:", "a sample", "Memory between steps", "loss +-", "report.png", "nothing was saved"]
    assert [part for part in parts if part not in output] == []


@pytest.mark.full
def test_a_run_of_a_given_time_says_how_long_it_takes(tmp_path: Path) -> None:
    running = start([sys.executable], tmp_path, "--minutes", "0")
    output, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors
    said = " ".join(output.split())
    assert "about 60 steps, done in about 0:" in said, "as few as make sense"
    assert said.index("Ctrl-C stops earlier and shows") < said.index("step 0 loss")
    assert "step 59 loss" in said
    assert "until a step frees them" in said
    assert (tmp_path / "runs" / "train_gpt" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "runs" / "train_gpt" / "steps.jsonl").read_text(encoding="utf-8").splitlines()) == 61


@pytest.fixture
def script() -> Any:
    """The example's module."""
    return SimpleNamespace(**runpy.run_path(SCRIPT))


def test_the_number_of_steps_fits_the_time(script: Any) -> None:
    seconds = {0.4: 300, 0.0001: script.MOST, 100.0: script.FEWEST}
    assert {one: script.steps_for(2.0, one, Console(quiet=True)) for one in seconds} == seconds


def test_a_text_is_bytes_and_its_words(script: Any) -> None:
    data = (ROOT / "README.md").read_bytes() * 8 + "Grüße\n    def 中\n".encode()
    text = script.Text(data)
    assert text.decode(text.tokens) == data.decode()
    assert text.lengths[text.tokens.int()].sum() == len(data)
    assert len(text.tokens) < len(data) / 2, "words make it shorter"
    assert len(text.vocabulary) <= script.VOCABULARY
    assert torch.equal(script.Text(data).tokens, text.tokens)
    assert script.Text(data + b"zeros " * 100).checksum != text.checksum
    with pytest.raises(SystemExit, match="Choose one of at least"):
        script.Text(b"too short")


def test_a_curve_is_text_that_falls_with_the_loss(script: Any) -> None:
    drawn = script.curve([5.0 - 0.01 * step for step in range(300)], first=100, width=60, height=10).splitlines()
    assert [line.index("*") for line in drawn[:10]] == sorted(line.index("*") for line in drawn[:10])
    assert drawn[0].startswith("  4.98") and drawn[-1].split() == ["step", "100", "399"]


def test_without_matplotlib_the_curve_is_text_alone(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(script.show.__globals__, "find_spec", lambda name: None)
    script.show([2.0], 0, Console())
    printed = capsys.readouterr().out
    assert "*" in printed and "step" in printed and not list(tmp_path.iterdir())


@pytest.mark.full
def test_experts_over_their_own_ranks(tmp_path: Path) -> None:
    """The loss falls, on four ranks; the checkpoint has whole experts, as one process would save them."""
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*torchrun, str(ROOT / "examples" / "train_experts.py")], cwd=tmp_path, check=True, stdout=subprocess.PIPE,
        text=True, timeout=300, env=dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
    )  # fmt: skip
    losses = [float(line.split()[3].rstrip(",")) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 10 and losses[-1] < losses[0] - 1
    state = state_dict_of(tmp_path / "checkpoints")
    assert len(state["model.layers.0.mlp.experts.down_proj"]) == 8


# ---------------------------------------------------------------------- the notebook

NOTEBOOK = ROOT / "examples" / "zero_stage_by_stage.ipynb"


def printed(notebook: Any) -> list[str]:
    """What each cell wrote to stdout."""
    streams = [[out for out in cell.get("outputs", []) if out["output_type"] == "stream"] for cell in notebook["cells"]]
    return ["".join("".join(one["text"]) for one in outputs if one["name"] == "stdout") for outputs in streams]


def pictures(notebook: Any) -> int:
    outputs = [out for cell in notebook["cells"] for out in cell.get("outputs", [])]
    return sum("image/png" in out.get("data", {}) for out in outputs)


@pytest.mark.full
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parent.parent), os.environ.get("PYTHONPATH", "")]))
    kept = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.from_dict(kept)
    nbclient.NotebookClient(run, timeout=300, kernel_name="python3").execute()
    said = "".join(printed(run))
    assert "to the last bit: [True, True, True, True]" in said
    assert "stage 2: parameters take 10.5 MiB at least, 10.5 MiB at most" in said
    assert "stage 3: parameters take 5.3 MiB at least, 9.0 MiB at most" in said, "two blocks are whole, and the root"
    assert pictures(run) == pictures(kept) == 2
    sent, sent_before = ([one for one in printed(notebook) if "sent by a rank" in one] for notebook in (run, kept))
    assert sent == sent_before, "what is kept in it is of another version: make notebook"


def test_what_is_kept_of_it_reads_on_the_web() -> None:
    assert NOTEBOOK.stat().st_size < 300_000
    kept = json.loads(NOTEBOOK.read_text())
    assert pictures(kept) == 2
    assert "to the last bit: [True, True, True, True]" in "".join(printed(kept))
    assert not [out for cell in kept["cells"] for out in cell.get("outputs", []) if out["output_type"] == "error"]


# ---------------------------------------------------------------------- Slurm, under a local srun

SCRIPTS = sorted((ROOT / "examples").glob("*.sbatch"))
SRUN = """#!{python}
import os, subprocess, sys
given = sys.argv[1:]
command = given[next(i for i, word in enumerate(given) if not word.startswith("-")) :]
count = os.environ["SLURM_NTASKS"]
step = dict(os.environ, SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS=count, SLURM_STEP_NODELIST=os.environ["SLURM_JOB_NODELIST"])
tasks = [
    subprocess.Popen(command, env=dict(step, SLURM_PROCID=str(n), SLURM_LOCALID=str(n))) for n in range(int(count))
]
sys.exit(max([abs(task.wait()) for task in tasks]))
"""
SCONTROL = '#!/bin/sh\n[ "$1 $2" = "show hostnames" ] && echo "$3"\n'
OF_THE_JOB = {
    "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_SUBMIT_DIR", "SLURM_NNODES", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE",
}  # fmt: skip
"""What a batch script may ask for; the last two where the job asked for processors and accelerators."""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_batch_script_is_one(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert text.startswith("#!/bin/bash\n")
    lines = text.splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH --")]
    assert options
    assert max(options) < first_command, "Slurm reads no option below the first command"
    assert set(re.findall(r"\b(SLURM_[A-Z_]+)", text)) <= OF_THE_JOB
    assert "srun " in text


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "tasks", "processes"),
    [("slurm.sbatch", 2, None), ("slurm_elastic.sbatch", 1, 2)],
    ids=["srun alone", "torchrun"],
)
def test_a_batch_script_trains(script: str, tasks: int, processes: int | None, tmp_path: Path) -> None:
    for name, text in (("srun", SRUN.format(python=sys.executable)), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 200)
    job = {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "localhost", "SLURM_NTASKS": str(tasks),
        "SLURM_NNODES": "1", "SLURM_SUBMIT_DIR": str(ROOT), "CHECKPOINTS": str(tmp_path / "checkpoints"),
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    job |= {"SLURM_GPUS_ON_NODE": str(processes)} if processes else {}
    done = subprocess.run(
        ["bash", str(ROOT / "examples" / script), "--steps", "2", "--sample", "1", "--text", str(text)],
        env={**os.environ, **job}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks, a step of 8 sequences" in " ".join(done.stdout.split())
    assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step2"
