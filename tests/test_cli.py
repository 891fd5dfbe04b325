"""The command-line program, as users run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from command_line import zeroshard
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
def frozen():
    return Model().requires_grad_(False), lambda rank, step: (torch.zeros(4, 8),)
"""


def test_estimate_gives_the_figures_of_the_paper() -> None:
    """In a process of its own, as a user runs it."""
    command = [str(BIN / "zeroshard"), "estimate", "--parameters", "7.5e9", "--ranks", "64"]
    environment = dict(os.environ, COLUMNS="150", OMP_NUM_THREADS="1")
    output = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    for figure in ("120.0 GB", "31.4 GB", "16.6 GB", "1.88 GB", "3.8 x", "7.2 x", "64.0 x"):
        assert figure in output


def test_estimate_counts_a_model_file(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FACTORY)
    save_file({"a": torch.zeros(1000, 1000)}, tmp_path / "m.safetensors")
    assert "4.01e-07 B parameters" in zeroshard("estimate", "--model", f"{tmp_path / 'model.py'}:make").stdout
    assert "0.001 B parameters" in zeroshard("estimate", "--model", str(tmp_path / "m.safetensors")).stdout


def test_compare_trains_the_users_model_and_draws(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FACTORY)
    plot, table = tmp_path / "plot.svg", tmp_path / "table.txt"
    model = ("--model", f"{tmp_path / 'model.py'}:make")
    result = zeroshard("compare", *model, "--steps", "3", "--plot", str(plot), "--table", str(table))
    assert result.returncode == 0, result.stderr
    row = next(line for line in result.stdout.splitlines() if "bit-equal" in line)
    assert row.count("yes") == 4
    assert plot.read_text().startswith("<?xml")
    *rows, run = table.read_text(encoding="utf-8").splitlines()
    assert rows == [line.rstrip() for line in result.stdout.splitlines()[: len(rows)]], "what was printed"
    assert f"{tmp_path / 'model.py'}:make in fp32" in run and "torch 2" in run


def test_compare_takes_neighbours_for_a_host(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(FACTORY)
    result = zeroshard("compare", "--model", f"{tmp_path / 'model.py'}:make", "--steps", "2", "--within", "1")
    assert result.returncode == 0, result.stderr
    rows = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.count("│") > 4}
    assert rows["bit-equal to stage 0"].count("yes") == 4
    assert "of that, across hosts" in rows


def test_an_error_is_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(FACTORY)
    for arguments, expected in (
        (("compare", "--model", f"{file}:nan", "--steps", "1"), "are NaN at stage 0"),
        (("compare", "--model", f"{file}:frozen"), "has no parameter that requires a gradient"),
        (("doctor", "--net", "--profile", "p.json"), "--profile would get no figures"),
        (("estimate",), "either --parameters N or --model FILE"),
        (("compare", "--model", "nowhere.py:make"), "no file at nowhere.py"),
        (("compare", "--ranks", "3", "--within", "2"), "does not divide --ranks 3"),
        (("compare", "--model", "zeroshard.cli.main:nothing"), "has no function 'nothing'"),
    ):
        result = zeroshard(*arguments)
        assert result.returncode == 2
        assert expected in result.stderr
        assert "Traceback" not in result.stderr


def test_explain() -> None:
    assert "UsageError" in zeroshard("explain").stdout
    said = zeroshard("explain", "embedding.weight is sharded at rest, and `add_` needs its values").stdout
    assert "zeroshard.unsharded(module)" in said
    assert "is also a RuntimeError" in zeroshard("explain", "CollectiveError").stdout
    near = zeroshard("explain", "my parameter is sharded when at rest")
    assert near.returncode == 0
    assert "No error is called" in near.stdout
    assert "is sharded at rest" in near.stdout


def test_doctor_measures(tmp_path: Path) -> None:
    output = zeroshard("doctor", "--io", str(tmp_path), "--size", "16MiB").stdout
    for word in ("write to", "read from", "AdamW on the CPU"):
        assert word in output
    assert not list(tmp_path.iterdir())
    refused = zeroshard("doctor", "--io", str(tmp_path / "nowhere"))
    assert refused.returncode == 2 and "nowhere" in refused.stderr and "Traceback" not in refused.stderr
