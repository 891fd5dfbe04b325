"""The command-line program, as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import zeroshard
from documents import ROOT
from safetensors.torch import save_file

BIN = Path(sys.executable).parent
FACTORY = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1))
    def forward(self, x):
        return self.net(x).square().mean()
def make():
    return Model(), lambda rank, step: (torch.randn(4, 8, generator=torch.Generator().manual_seed(step * 10 + rank)),)
def nan():
    return Model(), lambda rank, step: (torch.full((4, 8), torch.nan),)
"""


@pytest.mark.full
def test_estimate_gives_the_figures_of_the_paper_and_2_bytes_less_at_stage_3() -> None:
    """In a process of its own, as a user runs it. At stage 3 the paper has 1.88 GB: masters and parameters, which we have once."""
    command = [str(BIN / "zeroshard"), "estimate", "--parameters", "7.5e9", "--ranks", "64"]
    environment = dict(os.environ, COLUMNS="150", OMP_NUM_THREADS="1")
    output = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    for figure in ("120.0 GB", "31.4 GB", "16.6 GB", "1.64 GB", "3.8 x", "7.2 x", "73.1 x"):
        assert figure in output


def test_estimate_counts_a_model_file(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FACTORY)
    save_file({"a": torch.zeros(1000, 1000)}, tmp_path / "m.safetensors")
    assert "4.01e-07 B parameters" in zeroshard("estimate", "--model", f"{tmp_path / 'model.py'}:make").stdout
    assert "0.001 B parameters" in zeroshard("estimate", "--model", str(tmp_path / "m.safetensors")).stdout


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / "compare.py"), *arguments]
    # In UTF-8 under every locale: with ASCII, rich draws tables in other characters.
    environment = dict(os.environ, COLUMNS="150", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT), PYTHONUTF8="1")
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, check=False)


@pytest.mark.full
def test_compare_trains_the_users_model_and_draws_unless_losses_are_nan(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FACTORY)
    plot, table = tmp_path / "plot.svg", tmp_path / "table.txt"
    model = ("--model", f"{tmp_path / 'model.py'}:make")
    result = compare(*model, "--steps", "2", "--within", "1", "--plot", str(plot), "--table", str(table))
    assert result.returncode == 0, result.stderr
    rows = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.count("│") > 4}
    assert rows["bit-equal to stage 0"].count("yes") == 4
    assert "of that, across hosts" in rows
    assert plot.read_text().startswith("<?xml")
    *lines, run = table.read_text(encoding="utf-8").splitlines()
    assert lines == [line.rstrip() for line in result.stdout.splitlines()[: len(lines)]], "what was printed"
    assert f"{tmp_path / 'model.py'}:make in fp32" in run and "torch 2" in run
    result = compare("--model", f"{tmp_path / 'model.py'}:nan", "--steps", "1")
    assert result.returncode == 2
    assert "are NaN at stage 0" in result.stderr and "Traceback" not in result.stderr


def test_doctor_names_versions_devices_and_memory() -> None:
    output = zeroshard("doctor").stdout
    for word in (f"torch {torch.__version__}", "CPU memory: ", "accelerators: ", "ranks of this host: "):
        assert word in output
