"""LLaMA-Factory v1 finds "zeroshard" in its registries. If it is not installed, stand-ins with the same calls replace it."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.integrations import llama_factory

ROOT = "llamafactory.v1.plugins.trainer_plugins"


def stand_in(monkeypatch: pytest.MonkeyPatch, later: bool) -> tuple[Any, Any]:
    """Registries as in 0.9.5 (a function for each method of a name) or later (one object for each name)."""

    def family() -> Any:
        class Plugin:
            registry: dict[str, Any] = {}  # noqa: RUF012

            def __init__(self, name: str) -> None:
                self.name = name

            def register(self, *methods: str) -> Any:
                def enter(entered: Any) -> Any:
                    self.registry[self.name] = entered
                    return entered

                return enter

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return self.registry[self.name](*args, **kwargs)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.registry[self.name], name)

        return Plugin

    distributed, optimizers = family(), family()
    parts = ROOT.split(".")
    names = [".".join(parts[: n + 1]) for n in range(len(parts))] + [f"{ROOT}.distributed"]
    for name in [*names, *([f"{ROOT}.optimizers"] if later else [])]:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__path__ = []  # type: ignore[attr-defined]
    for name, attribute, value in (
        (f"{ROOT}.distributed.{'interface' if later else 'hub'}", "DistributedPlugin", distributed),
        (f"{ROOT}.optimizers.optimizer" if later else f"{ROOT}.optimizer", "OptimizerPlugin", optimizers),
    ):
        module = ModuleType(name)
        setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)
    return distributed, optimizers


def train(rank: int, plugins: tuple[Any, Any] | None, later: bool) -> tuple[list[Tensor], dict[str, Any]]:
    """The calls of its BaseTrainer: shard, optimizer, microbatches, clip, step, state on rank 0 alone."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    if plugins is None:
        model = nn.parallel.DistributedDataParallel(model)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        distributed, optimizers = (plugin("zeroshard") for plugin in plugins)
        model = (distributed.shard_model if later else distributed)(model, {"name": "zeroshard"}, bf16=False)
        optimizer = optimizers(model, {"name": "zeroshard", "lr": 1e-2, "consolidate_every": 2})
    for step in range(4):
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            (model(torch.randn(3, 4, generator=generator)).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"][0] if rank == 0 else {}
    return [p.detach() for p in model.parameters()], dict(state)


@pytest.mark.parametrize("later", [False, True])
def test_the_registries_calls_train_as_ddp(monkeypatch: pytest.MonkeyPatch, later: bool) -> None:
    plugins = stand_in(monkeypatch, later)
    llama_factory.register()
    plain, ours = on_ranks(train, 2, None, later), on_ranks(train, 2, plugins, later)
    for (one, _), (other, _) in zip(plain, ours, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for name, value in plain[0][1].items():
        assert torch.equal(ours[0][1][name], value), "the whole state, on rank 0, after a step that is saved"


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="name: deepspeed"):
        llama_factory.wrap_model(nn.Linear(2, 2), {"name": "zeroshard", "stage": 3})
    with pytest.raises(UsageError, match="stag has no meaning"):
        llama_factory.wrap_model(nn.Linear(2, 2), {"name": "zeroshard", "stag": 1})
    with pytest.raises(UsageError, match="has no lr"):
        llama_factory.make_optimizer(nn.Linear(2, 2), {"name": "zeroshard"})
    if find_spec("llamafactory") is None:
        with pytest.raises(UsageError, match="pip install llamafactory"):
            llama_factory.register()


@pytest.mark.skipif(find_spec("llamafactory") is None, reason="LLaMA-Factory is not installed")
def test_llama_factory_itself() -> None:
    llama_factory.register()
    from llamafactory.v1.plugins.trainer_plugins.optimizer import OptimizerPlugin

    made = OptimizerPlugin("zeroshard")(nn.Linear(2, 2), {"name": "zeroshard", "lr": 0.1})
    assert isinstance(made, llama_factory.ConsolidatingOptimizer)
