"""The end of the command-line program, in a process of its own: what it prints, imports and leaves behind."""

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
from torch import nn

from zeroshard.engine.config.schema import OptimizerBlock
from zeroshard.engine.from_config import create_optimizer
from zeroshard.tools.configs import is_usual

MODEL = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.net(x).square().mean()
def make():
    return Model(), lambda rank, step: (torch.zeros(4, 8),)
"""
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
    (tmp_path / "model.py").write_text(MODEL)
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
