"""Rank 0 warns once if a CPU lacks instructions for a dtype. Other CPUs, and fp32, cause no warning."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from insides import print_machine
from ranks import on_ranks
from rich.console import Console
from torch import nn

import zeroshard
from zeroshard import Policy, Precision
from zeroshard.observe import emulation

BF16 = {
    "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}  # fmt: skip

CPUINFO = Path("/proc/cpuinfo")


class Cpu:
    """What torch says of one."""

    def __init__(self, *has: torch.dtype) -> None:
        self._is_mkldnn_bf16_supported = lambda: torch.bfloat16 in has
        self._is_mkldnn_fp16_supported = lambda: torch.float16 in has


def pretend(monkeypatch: pytest.MonkeyPatch, *has: torch.dtype) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", Cpu(*has))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)


def told(way: str, dtype: torch.dtype) -> list[str]:
    """Make an engine, and return what is said of the dtype."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = nn.Linear(4, 4)
        if way == "shard":
            optimizer = torch.optim.AdamW(model.parameters())
            zeroshard.shard(model, optimizer, Policy.stage(3), precision=Precision(param_dtype=dtype))
        else:
            config = BF16 | ({} if dtype is torch.bfloat16 else {"bf16": {"enabled": False}})
            autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
            if way == "autocast" and dtype is torch.bfloat16:
                config = BF16 | {"bf16": {"enabled": False}} | autocast
            zeroshard.initialize(model=model, config=config)
    return [str(one.message) for one in caught if "no instructions" in str(one.message)]


@pytest.mark.parametrize("way", ["shard", "initialize", "autocast"])
def test_a_training_in_a_dtype_that_the_cpu_lacks_is_told_so(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> list[list[str]]:
        pretend(monkeypatch)
        slow = told(way, torch.bfloat16), told(way, torch.float32)
        pretend(monkeypatch, torch.bfloat16)
        return [*slow, told(way, torch.bfloat16)]

    (first, *others), second = on_ranks(body, 2)
    assert first == [
        "this CPU has no instructions for bfloat16: matrix products take tens of times as long as in fp32. Train in fp32 "
        "here, or on an accelerator."
    ]
    assert others == [[], []]
    assert second == [[], [], []]


def test_only_a_cpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    assert not emulation.is_emulated(torch.bfloat16, torch.device("cuda"))
    assert not emulation.is_emulated(torch.float64, torch.device("cpu"))
    assert emulation.is_emulated(torch.float16, torch.device("cpu"))


def test_fp16_alone_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch.bfloat16)
    with pytest.warns(UserWarning, match="Train in bf16 here"):
        emulation.warn_if_emulated(nn.Linear(2, 2).half())


def test_the_cpu_here_has_what_the_kernel_says() -> None:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    if not flags or not torch.backends.mkldnn.is_available():
        pytest.skip("no x86 CPU whose instructions the kernel names, or torch without oneDNN")
    is_slow = emulation.is_emulated(torch.bfloat16, torch.device("cpu"))
    if "avx512bw" in flags:
        assert not is_slow
    elif "avx_ne_convert" not in flags:
        assert is_slow


def test_doctor_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pretend(monkeypatch)
    print_machine(Console(width=200))
    assert "bfloat16: this CPU has no instructions for it" in capsys.readouterr().out
