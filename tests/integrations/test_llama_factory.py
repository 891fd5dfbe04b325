"""LLaMA-Factory v1 trains with zeroshard: its own SFT loop, and stand-ins for the registries of later releases."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ranks import on_ranks
from test_trainer_contract import run
from torch import nn

from zeroshard.errors import UsageError
from zeroshard.integrations import llama_factory

ROOT = "llamafactory.v1.plugins.trainer_plugins"
SCRIPT = "llama_factory.py"
INSTALLED = Path(sys.prefix, "llama_factory")
needs_llama_factory = pytest.mark.skipif(
    not INSTALLED.is_dir(), reason=f"LLaMA-Factory is not in {INSTALLED}: `make test` installs it"
)


def case(name: str, stage: int | None = None, **arguments: Any) -> dict[str, Any]:
    """One training; its name is a folder. Without a stage, on LLaMA-Factory's own backends."""
    return {"name": name, "stage": stage, "arguments": arguments, "throw_away": False}


@needs_llama_factory
def test_its_own_loop(tmp_path: Path) -> None:
    """Losses, norms and weights are DDP's at every stage, and a resumed run goes on with the same bits."""
    stages = (1, 2, 3)
    cases = [case("ddp"), *(case(f"stage{stage}", stage) for stage in stages)]
    for stage in stages:
        saved = str(tmp_path / f"stage{stage}" / "checkpoint-2")
        cases.append(case(f"again{stage}", stage, resume_from_checkpoint=saved, save_ckpt_as_hf=True))
    ddp, *found = run(2, SCRIPT, cases, tmp_path)
    for stage, one, again in zip(stages, found[:3], found[3:], strict=True):
        assert one["step"] == [1, 2, 3, 4]
        for what in ("loss", "grad_norm"):
            assert one[what] == pytest.approx(ddp[what], abs=1e-6, rel=0), (stage, what)
        assert one["weights"] == pytest.approx(ddp["weights"], abs=1e-5, rel=0), stage
        assert {"checkpoint-4/zeroshard/manifest.json", "tokenizer.json", "config.json"} < set(one["files"])
        assert again["loss"] == one["loss"][2:] and again["grad_norm"] == one["grad_norm"][2:], stage
        assert again["weights"] == one["weights"], stage
        assert "checkpoint-4/hf_model/model.safetensors" in again["files"]


@needs_llama_factory
@pytest.mark.full
def test_bf16_as_its_own_fsdp2(tmp_path: Path) -> None:
    """The default of its arguments: it computes in bf16, with fp32 master weights."""
    own = case("fsdp2", bf16=True, dist_config={"name": "fsdp2"})
    wanted, *found = run(2, SCRIPT, [own, *(case(f"stage{n}", n, bf16=True) for n in (2, 3))], tmp_path)
    for one in found:
        for what in ("loss", "grad_norm"):
            assert one[what] == pytest.approx(wanted[what], abs=1e-2), what


# ---------------------------------------------------------------------- the calls of releases after 0.9.5


def stand_in(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Registries as after 0.9.5: one for each family, with one object for each name."""

    def family() -> Any:
        class Plugin:
            registry: dict[str, Any] = {}  # noqa: RUF012

            def __init__(self, name: str) -> None:
                self.name = name

            def register(self) -> Any:
                def enter(entered: Any) -> Any:
                    self.registry[self.name] = entered
                    return entered

                return enter

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return self.registry[self.name](*args, **kwargs)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.registry[self.name], name)

        return Plugin

    plugins = family(), family()
    names = ("distributed.interface", "DistributedPlugin"), ("optimizers.optimizer", "OptimizerPlugin")
    for (name, attribute), plugin in zip(names, plugins, strict=True):
        parts = f"{ROOT}.{name}".split(".")
        for length in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:length]))
            module.__path__ = []  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(module, attribute, plugin)
    return plugins


def train(rank: int, plugins: tuple[Any, Any], folder: Path) -> list[float]:
    """Shard, make the optimizer, train, save, load and train on, through the registries."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    backend, optimizers = plugins[0]("fsdp2"), plugins[1]("zeroshard")
    model = backend.shard_model(model, {"name": "fsdp2", "stage": 3}, bf16=False)
    optimizer = optimizers(model, {"name": "zeroshard", "lr": 1e-2})
    norms = []
    for step, seed in enumerate((0, 1, 1)):
        generator = torch.Generator().manual_seed(10 * seed + rank)
        model(torch.randn(3, 4, generator=generator)).square().mean().backward()
        norms.append(backend.clip_grad_norm(model, 0.1))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            backend.load_checkpoint(model, optimizer, str(folder))
        if step == 0:
            backend.save_checkpoint(model, optimizer, str(folder), save_ckpt_as_hf=False)
    return norms


def test_later_registries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plugins = stand_in(monkeypatch)
    llama_factory.register()
    one, other = on_ranks(train, 2, plugins, tmp_path)
    assert one == other
    assert one[1] == one[2], "the checkpoint that was loaded after the second step was saved after the first"


@pytest.mark.ranks(2)
def test_a_copy_of_the_model_runs(rank: int) -> None:
    """As a reference model is made; a copy before the optimizer is refused like the model itself."""
    model = llama_factory.shard_model(nn.Linear(2, 2), {"name": "fsdp2"})
    with pytest.raises(UsageError, match="optim_config does not name zeroshard"):
        copy.deepcopy(model)(torch.zeros(1, 2))
    llama_factory.make_optimizer(model, {"name": "zeroshard", "lr": 0.1})
    copied = copy.deepcopy(model)
    assert torch.equal(copied(torch.ones(1, 2)), model(torch.ones(1, 2)))


# ---------------------------------------------------------------------- refusals


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    zero, no_values = {"name": "zeroshard", "lr": 0.1}, nn.Linear(2, 2)
    no_values._init_mode = "init_on_rank0"  # type: ignore[assignment]
    model, shard_model, make_optimizer = nn.Linear(2, 2), llama_factory.shard_model, llama_factory.make_optimizer

    def refused(words: str, call: Callable[[], object]) -> None:
        with pytest.raises((UsageError, ValueError), match=words):
            call()

    refused("stag has no meaning here", lambda: shard_model(model, {"name": "fsdp2", "stag": 1}))
    refused("cp_size is 1 here", lambda: shard_model(model, {"name": "fsdp2", "cp_size": 2}))
    refused("a ZeRO stage is", lambda: shard_model(model, {"name": "fsdp2", "stage": 4}))
    refused("Leave init_config out", lambda: shard_model(no_values, {"name": "fsdp2"}))
    refused("the model's backend is not zeroshard's", lambda: make_optimizer(model, zero))
    refused(
        r"dist_config names zeroshard.*name: fsdp2", lambda: make_optimizer(model, {"name": "zeroshard"}, bf16=False)
    )
    refused("was not sharded by zeroshard", lambda: llama_factory.save_model(model, "out", None))
    assert shard_model(model, {"name": "fsdp2"}) is model
    refused("optim_config does not name zeroshard", lambda: model(torch.zeros(1, 2)))
    refused("has no lr", lambda: make_optimizer(model, {"name": "zeroshard"}))
    monkeypatch.setitem(sys.modules, "llamafactory", None)
    refused("pip install llamafactory", llama_factory.register)
