"""The command-line program, as users run it: what it prints, imports and leaves behind."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import zeroshard
from documents import ROOT
from safetensors.torch import save_file
from torch import nn

from zeroshard.engine.config.schema import OptimizerBlock
from zeroshard.engine.from_config import create_optimizer
from zeroshard.tools.configs import is_usual

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


BOUND = """
import ctypes
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
errors = ctypes.c_void_p(libc.fdopen(2, b"w"))
libc.setvbuf(errors, None, 0, 4096)
libc.fputs(b"nanobind: leaked 1 instances!", errors)

class nb_meta(type):
    __module__ = "nanobind"

class Instance(metaclass=nb_meta):
    def __del__(self, clear=getattr(libc, "__fpurge"), errors=errors):
        clear(errors)

instance = Instance()
instance.itself = instance
"""
"""A module like those that nanobind binds: C prints a report when the process ends, unless the last collection freed an object."""


@pytest.mark.parametrize(
    "arguments",
    [
        ("estimate", "--parameters", "7B"),
        ("config", "check", "config.json"),
        pytest.param(("plan", "model.py:make", "--config", "config.json", "--gpus", "1"), marks=pytest.mark.full),
        pytest.param(("doctor", "--size", "1MiB"), marks=pytest.mark.full),
    ],
    ids=lambda arguments: arguments[0],
)
def test_nothing_is_printed_after_the_result(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "bound.py").write_text(BOUND)
    (tmp_path / "model.py").write_text(FACTORY)
    (tmp_path / "config.json").write_text('{"train_micro_batch_size_per_gpu": 1}')
    program = "import bound; from zeroshard.tools.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout
    assert "leaked" not in done.stderr
    if arguments[0] != "plan":  # which prints its progress there
        assert done.stderr == ""


CHECKED = [
    {"train_micro_batch_size_per_gpu": 1},
    {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3}},
        "activation_checkpointing": {"partition_activations": False},
    },
    {
        "train_batch_size": 8,
        "optimizer": {"type": "Lion", "params": {"lr": 1e-3}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 0.1}},
    },
]


@pytest.mark.parametrize("config", CHECKED, ids=len)
def test_a_config_is_checked_without_torch(config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    program = (
        "import sys; from zeroshard.tools.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", program, "config", "check", str(path)]
    environment = os.environ | {"COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "..." not in done.stdout and max(map(len, done.stdout.splitlines())) <= 80
    assert "--all prints every key" in done.stdout


NUMBERS = [0, 0.0, 1, 1.5]
USUAL: dict[str, dict[str, list[Any]]] = {
    "Adam": {
        "lr": NUMBERS, "eps": NUMBERS, "weight_decay": NUMBERS, "betas": [[0.0, 0.99]], "torch_adam": [True, False],
    },
    "AdamW": {
        "lr": NUMBERS, "eps": NUMBERS, "weight_decay": NUMBERS, "betas": [[0.9, 0.0]], "adam_w_mode": [True, False],
    },
    "SGD": {"lr": NUMBERS, "momentum": NUMBERS, "weight_decay": NUMBERS},
    "Lion": {"lr": NUMBERS, "weight_decay": NUMBERS, "betas": [[0.9, 0.5]]},
}  # fmt: skip
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("Muon", {}), ("Adagrad", {}), ("Adam", {"lr": -1}), ("Adam", {"lr": "1"}), ("Adam", {"lr": True}),
    ("AdamW", {"fused": True}), ("AdamW", {"betas": [0.9]}), ("AdamW", {"betas": [0, 0.9]}), ("AdamW", {"betas": [0.9, 1.0]}),
    ("SGD", {"eps": 1}), ("SGD", {"betas": [0.9, 0.9]}), ("Lion", {"eps": 1}), ("Adam", {"bias_correction": False}),
    ("Adam", {"eps": float("inf")}), ("Lion", {"torch_adam": True}),
]  # fmt: skip


def test_only_optimizers_that_are_never_refused_are_checked_without_being_built() -> None:
    for name, values in USUAL.items():
        for chosen in itertools.zip_longest(*values.values()):
            params = {key: value for key, value in zip(values, chosen, strict=True) if value is not None}
            block = OptimizerBlock(type=name, params=params)
            assert is_usual(block), (name, params)
            create_optimizer(block, [nn.Parameter(torch.zeros(2, 2))])
    for name, params in OTHERS:
        assert not is_usual(OptimizerBlock(type=name, params=params)), (name, params)
