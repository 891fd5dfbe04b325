"""The examples for Slurm, under a local srun that sets the same variables as the real one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
