"""No wrapper of torch's shows in a name of zeroshard: not in files, states, checkpoints or errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from twin import build, update

import zeroshard
from zeroshard import UsageError

Wrap = Callable[[nn.Module], nn.Module]
WRAPS: dict[str, Wrap] = {
    "checkpoint_wrapper": checkpoint_wrapper,
    "offload_wrapper": offload_wrapper,
    "compile": lambda module: torch.compile(module, backend="eager"),  # type: ignore[dict-item, return-value]
    "both": lambda module: torch.compile(checkpoint_wrapper(module), backend="eager"),  # type: ignore[dict-item, return-value]
    "compile, and the model": lambda module: torch.compile(module, backend="eager"),  # type: ignore[dict-item, return-value]
}
PARTS = ("_orig_mod", "_checkpoint_wrapped_module")


class Inner(nn.Module):
    """A block that is wrapped, with a wrapped module inside, a buffer and an extra state."""

    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.one = wrap(nn.Linear(4, 4))
        self.register_buffer("scale", torch.ones(1))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.one(x) * self.scale

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


class Model(nn.Module):
    """Two blocks and a head that shares the weight of the first module."""

    def __init__(self, wrap: Wrap = lambda module: module, ties: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        first, head = nn.Linear(4, 4), nn.Linear(4, 4)
        if ties:
            head.weight = first.weight
        self.first = wrap(first)
        self.blocks = nn.ModuleList(wrap(Inner(wrap)) for _ in range(2))
        self.frozen = wrap(nn.Linear(4, 4).requires_grad_(False))
        self.head = wrap(head)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def wrapped(kind: str) -> Any:
    model = Model(WRAPS[kind])
    return torch.compile(model, backend="eager") if kind.endswith("the model") else model


def step(sharded: zeroshard.Sharded) -> None:
    update(sharded.model(torch.ones(2, 4)).square().sum(), sharded.optimizer)


def shows_a_wrapper(text: str) -> bool:
    return any(part in text for part in PARTS)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", WRAPS)
def test_names(kind: str, stage: int, tmp_path: Path) -> None:
    plain = [name for name in Model().state_dict() if not name.endswith("_extra_state")]
    _, sharded = build(stage, make_model=partial(wrapped, kind))
    step(sharded)
    once = sorted(set(plain) - {"head.weight"})
    assert sorted(name for name, _ in sharded.named_weights()) == once
    assert not shows_a_wrapper(json.dumps(list(zeroshard.DistributedState(sharded).state_dict()["model"])))
    sharded.export(tmp_path / "exported")
    with safe_open(tmp_path / "exported" / "model.safetensors", "pt") as file:
        assert not shows_a_wrapper("".join(file.keys()))
    loaded = Model()
    zeroshard.load_pretrained(loaded, tmp_path / "exported")
    sharded.save(tmp_path / "saved", "one")
    assert not shows_a_wrapper((tmp_path / "saved" / "one" / "manifest.json").read_text())
    if "compile" not in kind and kind != "both":  # compiled modules keep torch's names in torch's own state dicts
        state = sharded.consolidated_state_dict()
        assert state is not None and {*plain} < {*state}
        assert state["head.weight"] is state["first.weight"]
    (_, other), (_, again) = (build(stage, make_model=make) for make in (Model, partial(wrapped, kind)))
    other.load(tmp_path / "saved", "one")
    other.save(tmp_path / "plain", "one")
    again.load(tmp_path / "plain", "one")
    calls = sharded.model.blocks[0].calls  # type: ignore[union-attr, index]
    for one in (sharded, other, again):
        assert one.model.blocks[0].calls == calls > 0  # type: ignore[union-attr, index]
        step(one)
    for name, own in zip(dict(other.model.named_parameters()), dict(sharded.model.named_parameters()), strict=True):
        value = sharded.states.get(name)
        assert torch.equal(sharded.states.get(own), value)  # type: ignore[arg-type]
        for one in (other, again):
            torch.testing.assert_close(one.states.get(name), value)  # offload_wrapper changes strides
    with zeroshard.unsharded(other.model):
        assert torch.equal(other.model.first.weight, other.model.head.weight)  # type: ignore[arg-type, union-attr]


@pytest.mark.parametrize("kind", WRAPS)
def test_names_in_errors_and_patterns(kind: str) -> None:
    def refusal(call: Callable[[], Any]) -> str:
        with pytest.raises((zeroshard.ZeroshardError, ValueError)) as caught:
            call()
        assert not shows_a_wrapper(str(caught.value)), str(caught.value)
        return str(caught.value)

    def inner(block: Any) -> Any:
        for part in PARTS * 2:
            block = getattr(block, part, block)
        return block

    made = wrapped(kind)
    inner(made.blocks[1]).lazy = nn.LazyLinear(3)
    assert "blocks.1.lazy.weight is lazy" in refusal(
        lambda: zeroshard.shard(made, torch.optim.SGD([made.head.bias]), 2)
    )
    made = wrapped(kind)
    inner(made.blocks[1]).scale = torch.ones(1, device="meta")
    take = partial(build, 2, make_model=lambda: made)
    assert "buffer blocks.1.scale" in refusal(take)
    made = wrapped(kind)
    inner(made.blocks[1]).alias = nn.Parameter(inner(inner(made.blocks[1]).one).weight[0])
    assert "blocks.1." in refusal(take)
    made = wrapped(kind)
    _, sharded = take()
    assert "first" in refusal(take)
    assert "no parameter" in refusal(lambda: sharded.states.get("blocks.9.one.weight"))
    inner(made.blocks[0]).late = nn.Linear(4, 4)
    assert "blocks.0.late.weight" in refusal(lambda: step(sharded))
    patterns = zeroshard.Units(leaf_names=("blocks.1", f"blocks.{PARTS[0]}.0"))
    build(3, make_model=partial(wrapped, kind), units=patterns)  # would raise for a pattern without a module


def test_a_file_of_wrapped_modules_loads(tmp_path: Path) -> None:
    """Other programs save torch's names."""
    from safetensors.torch import save_file

    torch.manual_seed(1)
    module = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    assert [*saved] == ["_orig_mod.0.weight", "_orig_mod.0.bias"]
    save_file(saved, tmp_path / "model.safetensors")
    plain = nn.Sequential(nn.Linear(4, 4))
    wrapped_models = (
        plain,
        nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4))),
        nn.DataParallel(nn.Sequential(nn.Linear(4, 4))),
        torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager"),
    )
    for other in wrapped_models:
        assert zeroshard.load_pretrained(other, tmp_path) == ([], [])  # type: ignore[arg-type]
        assert all(map(torch.equal, other.state_dict().values(), saved.values()))  # type: ignore[attr-defined]
    save_file({name.removeprefix("_orig_mod."): value for name, value in saved.items()}, tmp_path / "model.safetensors")
    for other in wrapped_models:
        assert zeroshard.load_pretrained(other, tmp_path) == ([], [])  # type: ignore[arg-type]


@pytest.mark.ranks(2)
def test_ranks_may_not_wrap_differently(rank: int) -> None:
    with pytest.raises(UsageError, match="built different models"):
        build(3, make_model=partial(Model, WRAPS["checkpoint_wrapper"]) if rank else Model)
