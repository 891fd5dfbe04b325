"""Models of transformers 5 whose tensors have other names and shapes in files: what is read and written is transformers' own."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from mixtures import MIXTURES, lora_on_experts, peft_knows_experts, qwen3_moe
from models import sgd
from ranks import on_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_pretrained import LIMIT
from torch import Tensor, nn
from twin import build, same

import zeroshard
from zeroshard import CheckpointError, UsageError
from zeroshard.checkpoint import hugging_face
from zeroshard.checkpoint.conversions import ConvertedRow, NotOnlyMoved, Trace, rows_of
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.checkpoint.safetensors_file import SafetensorsReader
from zeroshard.core.blocks import Copy, Target, TensorBlock


def made(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


def contents(folder: Path) -> dict[str, Any]:
    """All that a folder holds: JSON, and each file's tensors with its metadata."""
    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".json":
            found[path.name] = json.loads(path.read_text())
        else:
            with safe_open(path, framework="pt") as file:
                found[path.name] = {"metadata": file.metadata()}
            found[path.name] |= {name: (one.dtype, one.shape, one.tolist()) for name, one in load_file(path).items()}
    return found


# ---------------------------------------------------------------------- folders


@pytest.mark.quick(3)
@pytest.mark.parametrize("limit", [10**9, LIMIT])
@pytest.mark.parametrize("name", MIXTURES)
def test_a_folder_is_that_of_save_pretrained(name: str, limit: int, tmp_path: Path) -> None:
    """And `named_weights` gives what the folder holds."""
    made(MIXTURES[name]).save_pretrained(tmp_path / "theirs", max_shard_size=limit)
    weights = {}
    for path in (tmp_path / "theirs").glob("*.safetensors"):
        weights |= load_file(path)

    def body(rank: int) -> None:
        hugging_face.MAX_SHARD_NBYTES = limit
        model, sharded = build(3, make_model=partial(made, MIXTURES[name]), make_optimizer=sgd, bucket_numel=1000)
        try:
            sharded.export(tmp_path / "exported")
        finally:
            hugging_face.MAX_SHARD_NBYTES = 5_000_000_000
        sharded.save(tmp_path / "ckpt", "1")
        assert same({fqn: tensor.clone() for fqn, tensor in sharded.named_weights()}, weights)
        with zeroshard.unsharded(model):
            own = dict(model.state_dict())
        assert dict(sharded.named_weights(names="model")).keys() == own.keys()

    on_ranks(body, 3)
    reader = open_checkpoint(tmp_path / "ckpt")
    hugging_face.export(reader, tmp_path / "consolidated", max_shard_nbytes=limit)
    expected = contents(tmp_path / "theirs")
    assert (limit == LIMIT) == ("model.safetensors.index.json" in expected)
    for folder in ("exported", "consolidated"):
        got = contents(tmp_path / folder)
        assert got.keys() == expected.keys()
        for file, content in expected.items():
            assert got[file] == content, (folder, file)


def test_files_with_the_names_in_memory_still_load(tmp_path: Path) -> None:
    saved = made(qwen3_moe)
    saved.save_pretrained(tmp_path, save_original_format=False)
    model = qwen3_moe()
    assert zeroshard.load_pretrained(model, tmp_path) == ([], [])
    assert all(torch.equal(one, saved.state_dict()[fqn]) for fqn, one in model.state_dict().items())


def test_a_rank_reads_its_part_of_the_experts(tmp_path: Path) -> None:
    """Without a whole tensor of the model in memory, and each element once."""
    made(qwen3_moe).save_pretrained(tmp_path)

    def body(rank: int) -> None:
        read: list[tuple[str, int]] = []
        original = SafetensorsReader.read_into

        def counted(self: SafetensorsReader, name: str, start: int, out: Tensor) -> None:
            read.append((name, out.numel()))
            original(self, name, start, out)

        with torch.device("meta"):
            model: Any = qwen3_moe()
        zeroshard.materialise(model, initialise=model._init_weights)
        with patch.object(SafetensorsReader, "read_into", counted):
            zeroshard.load_pretrained(model, tmp_path)
        experts = [numel for name, numel in read if ".experts." in name]
        total = sum(p.numel() for fqn, p in model.named_parameters() if ".experts." in fqn)
        assert abs(sum(experts) - total / 2) < total / 20
        assert max(experts) <= 16 * 16  # one projection of one expert

    on_ranks(body, 2)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    made(qwen3_moe).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")

    def load() -> None:
        save_file(tensors, tmp_path / "model.safetensors")
        zeroshard.load_pretrained(qwen3_moe(), tmp_path)

    one = "model.layers.1.mlp.experts.3.down_proj.weight"
    kept = tensors.pop(one)
    with pytest.raises(
        CheckpointError, match=r"experts.0.down_proj.weight and the others of .*experts.down_proj have together"
    ):
        load()
    tensors[one] = kept[:, :-1].contiguous()
    with pytest.raises(
        CheckpointError, match=r"cannot be read range by range: .*experts.down_proj.* Load and save this model"
    ):
        load()
    tensors |= {one: kept, "model.layers.7.mlp.experts.0.down_proj.weight": kept.clone()}
    with pytest.raises(CheckpointError, match=r"Qwen3MoeForCausalLM lacks model.layers.7"):
        load()


def test_a_conversion_that_computes_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers.core_model_loading as loading

    def halved(model: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: one / 2 for name, one in state.items()}

    monkeypatch.setattr(loading, "revert_weight_conversion", halved)
    _, sharded = build(1, make_model=partial(made, qwen3_moe))
    with pytest.raises(CheckpointError, match=r"it computes div\. Load and save this model with its from_pretrained"):
        sharded.export(tmp_path / "out")
    with pytest.raises(UsageError, match=r'it computes div\. Call named_weights\(names="model"\)'):
        sharded.named_weights()
    assert "model.layers.0.mlp.experts.gate_up_proj" in dict(sharded.named_weights(names="model"))


# ---------------------------------------------------------------------- weights that are handed over


def adapted() -> nn.Module:
    model: Any = lora_on_experts()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first
                parameter.normal_()
    return model


@pytest.mark.skipif(not peft_knows_experts(), reason="this PEFT has no adapters of experts")
def test_merged_adapters_have_the_names_of_files(tmp_path: Path) -> None:
    made(adapted).merge_and_unload().save_pretrained(tmp_path)
    theirs = load_file(tmp_path / "model.safetensors")

    def body(rank: int) -> None:
        _, sharded = build(3, make_model=partial(made, adapted), make_optimizer=sgd)
        assert same({fqn: one.clone() for fqn, one in sharded.named_weights(merge_adapters=True)}, theirs)

    on_ranks(body, 2)


# ---------------------------------------------------------------------- blocks


def rebuilt(target: Target, sources: dict[str, Tensor], every: int) -> Tensor:
    """Build a target from ranges of its sources."""
    out = torch.full(target.shape, torch.nan)
    for block in target.blocks:
        flat = sources[block.source].reshape(-1)
        for start in range(0, flat.numel(), every):
            part = flat[start : start + every].clone()
            for copy in Copy.from_source(block, target.shape).within(start, start + part.numel()):
                for place, values in copy.runs(part, start):
                    assert out.view(-1)[place : place + values.numel()].isnan().all()
                    out.view(-1)[place : place + values.numel()] = values.reshape(-1)
    return out


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "experts": lambda a, b: a.chunk(2, dim=1)[1].contiguous().unbind(0)[2],
    "transposed": lambda a, b: a.transpose(1, 2).contiguous()[1],
    "fused": lambda a, b: torch.cat([torch.stack([b, b]), a[:2]], dim=1)[:, 2:9],
    "interleaved": lambda a, b: a.reshape(4, 2, 3, 6).transpose(1, 2).reshape(4, 6, 6),
    "rotary": lambda a, b: b.view(3, 2, 6).transpose(1, 2).reshape(6, 6).t(),
    "flattened": lambda a, b: a.permute(2, 0, 1).reshape(-1)[7:50].unsqueeze(0).reshape(43),
    "cut rows": lambda a, b: a.reshape(-1)[5:29].reshape(2, 3, 4),
    "a column": lambda a, b: a.select(2, -1).squeeze(0).reshape(1, 24),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_moves_of_elements_are_followed(name: str) -> None:
    sources = {"a": torch.arange(144.0).view(4, 6, 6), "b": torch.arange(200.0, 236.0).view(6, 6)}
    expected = OPERATIONS[name](sources["a"], sources["b"])
    with Trace() as trace:
        a, b = (trace.tensor(source, tensor.shape) for source, tensor in sources.items())
        target = trace.target("t", OPERATIONS[name](a, b))
    for every in (1, 5, 36, 144):
        assert torch.equal(rebuilt(target, sources, every), expected), every


def test_what_is_computed_is_not_followed() -> None:
    with Trace() as trace, pytest.raises(NotOnlyMoved, match="computes mul"):
        trace.tensor("a", (4,)) * 2
    with Trace() as trace, pytest.raises(NotOnlyMoved, match="adds values"):
        torch.cat([trace.tensor("a", (4,)), torch.zeros(2, device="meta")])


def test_rows_of_a_manifest_are_as_many_as_tensors() -> None:
    def targets(count: int) -> list[Target]:
        blocks = [(TensorBlock("up", 6 * number, (3, 1), (0, 0), (2, 3)),) for number in range(count)]
        experts = [Target(f"layers.0.experts.{n}.up", (2, 3), one, 5) for n, one in enumerate(blocks)]
        return [Target.whole("norm", "norm", (4,)), *experts]

    shapes = {"up": (200, 2, 3), "norm": (4,)}
    for count in (1, 2, 12, 200):
        rows = rows_of(targets(count))
        assert len(rows) == 2
        read = [
            ConvertedRow.model_validate(json.loads(json.dumps(row.model_dump(exclude_defaults=True)))) for row in rows
        ]
        assert list(itertools.chain.from_iterable(row.targets(shapes) for row in read)) == targets(count)


@pytest.mark.parametrize(
    "row",
    [
        {"name": "x", "source": "unknown"},
        {"name": "x", "shape": (2,), "blocks": [("a", 5, (1,), (0,), (2,))]},
        {"name": "x", "shape": (2,), "blocks": [("a", -1, (1,), (0,), (2,))]},
        {"name": "x", "shape": (2,), "blocks": [("a", 0, (1,), (1,), (2,))]},
        {"name": "x", "shape": (2,), "blocks": [("a", 0, (1, 1), (0,), (2,))]},
        {"name": "x", "shape": (3,), "blocks": [("a", 0, (1,), (0,), (2,))]},
        {"name": "x", "shape": (2,), "blocks": [("a", 0, (1,), (0,), (2,))], "count": 9, "step": 1},
        {"name": "x", "shape": (2,), "blocks": []},
    ],
)
def test_a_manifest_that_lies_is_refused(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"names unknown|outside its tensor|lacks parts"):
        list(ConvertedRow.model_validate(row).targets({"a": (6,)}))
