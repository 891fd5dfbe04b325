"""Values from files: each rank reads only its own part, and the model equals the saved one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from memory import allocated_peak
from models import MODELS, Stack, tokens
from ranks import on_ranks
from safetensors.torch import save_file
from torch import nn

import zeroshard
from zeroshard import CheckpointError, Policy, UsageError
from zeroshard.checkpoint.safetensors_file import SafetensorsReader
from zeroshard.testing.gpt import GPT, GPTConfig


def save(model: nn.Module, folder: Path, files: int = 1) -> Path:
    """As transformers saves: ties once, one file or several and an index."""
    seen: set[int] = set()
    tensors = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().clone().contiguous()
    folder.mkdir(exist_ok=True)
    names = sorted(tensors)
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = {name: tensors[name] for name in names[number::files]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
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


@pytest.mark.quick(3)
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("how", ["meta", "born sharded", "whole"])
@pytest.mark.parametrize("name", ["tied", "batch norm", "frozen", "Llama", "T5", "GPT-2", "Mixtral"])
def test_the_model_is_the_one_that_was_saved(name: str, how: str, files: int, tmp_path: Path) -> None:
    make = MODELS[name] if name in MODELS else next(f for key, (f, *_) in FAMILIES.items() if key.startswith(name))
    torch.manual_seed(0)
    original = make()
    folder = save(original, tmp_path / "model", files)
    expected = {fqn: p.detach().clone() for fqn, p in original.named_parameters()}
    buffers = {fqn: b.clone() for fqn, b in original.named_buffers()}

    def body(rank: int) -> None:
        model = empty(make, how)
        if how == "meta":
            initialise = getattr(model, "_init_weights", None)
            zeroshard.materialise(model, initialise or _anything)
        assert zeroshard.load_pretrained(model, folder) == ([], [])
        sharded = zeroshard.shard(
            model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1), Policy.stage(3)
        )
        with zeroshard.unsharded(model):
            got = dict(model.named_parameters())
            assert got.keys() == expected.keys(), "ties are ties"
            for fqn, value in expected.items():
                assert torch.equal(got[fqn], value), fqn
                assert isinstance(got[fqn], nn.Parameter)
        for fqn, buffer in model.named_buffers():
            assert torch.equal(buffer, buffers[fqn]), fqn
        if name in MODELS and name != "batch norm":
            model(*tokens(rank, 0)).backward()
            sharded.optimizer.step()

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
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert one.dtype is torch.bfloat16
        assert torch.equal(one.detach(), other.detach())
    model.to("cpu").float()
    zeroshard.shard(model, torch.optim.SGD(model.parameters()), Policy.stage(3))
    with zeroshard.unsharded(model):
        assert torch.equal(model.head.weight, expected.head.weight.float())


@pytest.mark.full
def test_a_rank_reads_its_part_and_the_whole_never_exists(tmp_path: Path) -> None:
    """24 blocks on 4 ranks, from meta: bytes that the process read, and the peak of tensors: the shards and one unit."""
    config = GPTConfig(layers=24, width=256, heads=4)
    folder = save(GPT(config), tmp_path / "model", 2)
    with torch.device("meta"):
        numel = sum(p.numel() for p in GPT(config).parameters())
    block = 4 * 12 * config.width**2

    def read() -> int:
        return int(
            next(line.split()[1] for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar"))
        )

    def body(rank: int) -> Any:
        with torch.device("meta"):
            model = GPT(config)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = torch.zeros(buffer.shape)
        before = read()
        loaded = allocated_peak(lambda: zeroshard.load_pretrained(model, folder))
        bytes_read = read() - before
        optimizer = torch.optim.SGD(model.parameters())
        return loaded, bytes_read, allocated_peak(lambda: zeroshard.shard(model, optimizer, Policy.stage(3)))

    shard = 4 * numel / 4
    for loaded, bytes_read, laid_out in on_ranks(body, 4):
        assert bytes_read < shard + 200_000, "a quarter, the headers, and what Python reads itself"
        assert shard <= loaded < shard + 2 * block, "its shards, and what it reads of one block"
        assert laid_out < shard + 3 * block, (
            "gradients; one block whole, its copy in the new order, and its earlier shards"
        )


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    folder = save(Stack(), tmp_path / "model")
    for make, message in [
        (
            lambda: nn.ModuleDict(dict(Stack().named_children(), more=nn.Linear(1, 1))),
            r"lacks more\.weight, more\.bias",
        ),
        (MODELS["untied"], r"lacks head\.weight, and Untied lacks nothing"),
        (lambda: nn.ModuleDict({"embedding": nn.Embedding(4, 4)}), r"embedding\.weight has shape \(31, 12\)"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            zeroshard.load_pretrained(make(), folder)
    missing, unexpected = zeroshard.load_pretrained(MODELS["untied"](), folder, strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    inner = Stack()
    outer = nn.ModuleDict({"model": Stack()})
    zeroshard.load_pretrained(outer, save(inner, tmp_path / "inner"), rename=lambda fqn: fqn.removeprefix("model."))
    assert torch.equal(outer["model"].head.weight, inner.head.weight)
    with pytest.raises(CheckpointError, match="neither"):
        zeroshard.load_pretrained(Stack(), tmp_path)
    with pytest.raises(CheckpointError, match=r"nowhere does not exist\. Name a safetensors file"):
        zeroshard.load_pretrained(Stack(), tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"pass materialise\(initialise"), torch.device("meta"):
        model = Stack()
        zeroshard.materialise(model, device="cpu")


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
