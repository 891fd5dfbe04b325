"""Values from files: each rank reads only its own part, and the model equals the saved one."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from mixtures import MIXTURES
from models import MODELS, Stack, sgd
from ranks import on_ranks
from safetensors.torch import save_model
from torch import nn
from twin import build, same, step, whole

import zeroshard
from zeroshard import CheckpointError, UsageError
from zeroshard.checkpoint.safetensors_file import SafetensorsReader
from zeroshard.testing.parity import buffers_of


def save(model: nn.Module, folder: Path) -> Path:
    """Save a model in one file, each tied parameter once."""
    folder.mkdir(exist_ok=True)
    save_model(model, str(folder / "model.safetensors"))
    return folder


def empty(make: Any, how: str) -> nn.Module:
    torch.manual_seed(99)  # other numbers than those in the file
    if how == "meta":
        with torch.device("meta"):
            return make()
    if how == "born sharded":
        with zeroshard.sharded_init():
            return make()
    return make()


TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    name: FAMILIES[name][0] for name in ("Llama", "T5", "GPT-2")
} | MIXTURES
"""Models of transformers, which saves them itself: of mixtures, with other names and shapes in files than in memory."""
LIMIT = 3000
"""The largest size of a file, in bytes: smaller than some tensors of the mixtures, and larger than most."""


@pytest.mark.quick(4)
@pytest.mark.parametrize("how", ["meta", "born sharded", "whole"])
@pytest.mark.parametrize(
    ("name", "limit"), [*product(["tied", "batch norm", "frozen"], [None]), *product(TRANSFORMERS, [LIMIT, 10**9])]
)
def test_the_model_is_the_one_that_was_saved(name: str, limit: int | None, how: str, tmp_path: Path) -> None:
    make: Any = (MODELS | TRANSFORMERS)[name]
    torch.manual_seed(0)
    original = make()
    if limit is not None:
        original.save_pretrained(tmp_path, max_shard_size=limit)
    else:
        save(original, tmp_path)
    expected, buffers = whole(original), buffers_of(original)

    def body(rank: int) -> None:
        model = empty(make, how)
        if how == "meta":
            zeroshard.materialise(model, getattr(model, "_init_weights", _anything))
        assert zeroshard.load_pretrained(model, tmp_path) == ([], [])
        _, sharded = build(3, make_model=lambda: model, make_optimizer=sgd)
        assert same(whole(model), expected), "ties are ties"
        assert all(isinstance(one, nn.Parameter) for one in model.parameters())
        assert same(buffers_of(model), buffers)
        if name in ("tied", "frozen"):
            step(model, sharded, rank, 0)
        sharded.remove()

    on_ranks(body, 2)


def _anything(module: nn.Module) -> None:
    for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        tensor.zero_()


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_model_on_the_meta_device_is_made_module_by_module(rank: int, ranks: int) -> None:
    """torch's own modules draw their numbers in the order in which they are built."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Embedding(7, 5), *[nn.Linear(5, 5) for _ in range(3)], nn.BatchNorm1d(5))
        model[2].weight = model[1].weight
        return model

    with torch.device("meta"):
        model = make()
    torch.manual_seed(3)
    zeroshard.materialise(model)
    assert model[2].weight is model[1].weight
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 5))
    assert torch.equal(model[0].weight.detach(), expected[0].weight)
    assert torch.equal(model[1].bias.detach(), expected[1].bias)
    assert torch.equal(model[4].running_var, torch.ones(5))
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


@pytest.mark.ranks(2)
def test_a_model_that_was_born_sharded_moves_by_parts(rank: int) -> None:
    """module.to and module.half: every rank converts its own part."""
    torch.manual_seed(0)
    expected = Stack().to(torch.bfloat16)
    torch.manual_seed(0)
    with zeroshard.sharded_init():
        model = Stack()
    kinds = {type(p) for p in model.parameters()}
    model.to(torch.bfloat16)
    assert {type(p) for p in model.parameters()} == kinds, "still in parts"
    assert same(whole(model), whole(expected))
    model.to("cpu").float()
    build(3, make_model=lambda: model, make_optimizer=sgd)
    assert same(whole(model), whole(expected.float()))


OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "more": (
        lambda: nn.ModuleDict(dict(Stack().named_children(), more=nn.Linear(1, 1))),
        r"lacks more\.weight, more\.bias",
    ),
    "untied": (MODELS["untied"], r"lacks head\.weight, and Untied lacks nothing"),
    "smaller": (
        lambda: nn.ModuleDict({"embedding": nn.Embedding(4, 4)}),
        r"embedding\.weight has shape \(31, 12\)",
    ),
}


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = save(Stack(), tmp_path / "model")
    for make, message in OTHERS.values():
        with pytest.raises(CheckpointError, match=message):
            zeroshard.load_pretrained(make(), folder)
    assert zeroshard.load_pretrained(MODELS["untied"](), folder, strict=False) == (["head.weight"], [])
    for path, message in ((tmp_path, "neither"), (tmp_path / "no", r"no does not exist\. Name a safetensors file")):
        with pytest.raises(CheckpointError, match=message):
            zeroshard.load_pretrained(Stack(), path)
    with pytest.raises(UsageError, match=r"pass materialise\(initialise"), torch.device("meta"):
        zeroshard.materialise(Stack(), device="cpu")


def test_names_in_files_may_be_others(tmp_path: Path) -> None:
    inner, outer = Stack(), nn.ModuleDict({"model": Stack()})
    zeroshard.load_pretrained(outer, save(inner, tmp_path), rename=lambda fqn: fqn.removeprefix("model."))
    assert torch.equal(outer["model"].head.weight, inner.head.weight)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = save(Stack(), tmp_path / "model") / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])

    def with_header(change: Any) -> bytes:
        changed = json.loads(json.dumps(header))
        change(changed)
        text = json.dumps(changed).encode()
        return len(text).to_bytes(8, "little") + text + whole[8 + length :]

    damaged = [
        b"", whole[:5], whole[: 8 + length - 3], whole[:-1], whole + b"x", b"\xff" * 8 + whole[8:],
        whole[:8] + b"[" + whole[9:],
        with_header(lambda h: h["embedding.weight"].update(dtype="F31")),
        with_header(lambda h: h["embedding.weight"].update(shape=[31, 13])),
        with_header(lambda h: h["embedding.weight"].update(data_offsets=[4, 4 + 31 * 12 * 4])),
        with_header(lambda h: h["embedding.weight"].update(data_offsets=[-4, 31 * 12 * 4 - 4])),
        with_header(lambda h: h["embedding.weight"].pop("shape")),
    ]  # fmt: skip
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            zeroshard.load_pretrained(Stack(), path)
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsReader(path)
    index = path.parent / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="is not an index"):
        zeroshard.load_pretrained(Stack(), path.parent)
