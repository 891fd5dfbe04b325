"""Rank 0 warns once if a CPU lacks instructions for a dtype. Other CPUs, and fp32, cause no warning."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from insides import print_machine
from ranks import on_ranks
from rich.console import Console
from torch import nn
from twin import build

import zeroshard
from zeroshard import UsageError
from zeroshard.model import emulation

CPUINFO = Path("/proc/cpuinfo")
CPU = torch.device("cpu")
VARIABLE = emulation.VARIABLE


def told(way: str, dtype: torch.dtype) -> list[str]:
    """Shard a model or make an engine, and return what is said of the dtype."""
    model = nn.Linear(4, 4)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    if dtype is torch.bfloat16:
        block = {"enabled": True}
        config |= {"torch_autocast": block | {"dtype": "bfloat16"}} if way == "autocast" else {"bf16": block}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "shard":
            build(3, make_model=lambda: model, precision=dtype)
        else:
            zeroshard.initialize(model=model, config=config)
    return [str(one.message) for one in caught if "no instructions" in str(one.message)]


@pytest.mark.parametrize("way", ["shard", "initialize", "autocast"])
def test_a_training_in_a_dtype_that_the_cpu_lacks_is_told_so(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> list[list[str]]:
        monkeypatch.setenv(VARIABLE, "bf16,fp16")
        slow = told(way, torch.bfloat16), told(way, torch.float32)
        monkeypatch.setenv(VARIABLE, "fp16")
        return [*slow, told(way, torch.bfloat16)]

    (first, *others), second = on_ranks(body, 2)
    assert first == [
        "this CPU has no instructions for bfloat16: matrix products take tens of times as long as in fp32. Train in fp32 "
        "here, or on an accelerator."
    ]
    assert others == [[], []]
    assert second == [[], [], []]


def test_the_variable_is_a_cpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "fp16")
    assert not emulation.is_emulated(torch.float16, torch.device("cuda"))
    assert not emulation.is_emulated(torch.float64, CPU)
    assert emulation.is_emulated(torch.float16, CPU)
    with pytest.warns(UserWarning, match="Train in bf16 here"):
        emulation.warn_if_emulated(nn.Linear(2, 2).half())


@pytest.mark.parametrize("has", [True, False])
def test_without_the_variable_torch_is_asked(has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    answers = SimpleNamespace(_is_mkldnn_bf16_supported=lambda: has, _is_mkldnn_fp16_supported=lambda: not has)
    monkeypatch.setattr(torch.ops, "mkldnn", answers)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert emulation.is_emulated(torch.bfloat16, CPU) is not has
    assert emulation.is_emulated(torch.float16, CPU) is has
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not emulation.is_emulated(torch.bfloat16, CPU) and not emulation.is_emulated(torch.float16, CPU)


@pytest.mark.parametrize("text", ["", "fp32", "bf16 fp16", "none,bf16", "1"])
def test_a_wrong_value_of_the_variable_is_refused_on_every_rank(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)

    def body(rank: int) -> str:
        with pytest.raises(UsageError, match=VARIABLE) as caught:
            told("shard", torch.float32)
        return str(caught.value)

    assert set(on_ranks(body, 2)) == {f"{VARIABLE} is {text!r}: give bf16, fp16, both as bf16,fp16, or none."}


def test_the_cpu_here_has_what_the_kernel_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    if not flags or not torch.backends.mkldnn.is_available():
        pytest.skip("no x86 CPU whose instructions the kernel names, or torch without oneDNN")
    is_slow = emulation.is_emulated(torch.bfloat16, CPU)
    if "avx512bw" in flags:
        assert not is_slow
    elif "avx_ne_convert" not in flags:
        assert is_slow


def test_doctor_says_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for given, lacks in (("bf16,fp16", 2), ("bf16", 1), ("none", 0)):
        monkeypatch.setenv(VARIABLE, given)
        print_machine(Console(width=200))
        printed = capsys.readouterr().out
        assert printed.count("this CPU has no instructions for it") == lacks
        assert ("bfloat16: this CPU" in printed) is ("bf16" in given)
