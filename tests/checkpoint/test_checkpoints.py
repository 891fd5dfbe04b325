"""A checkpoint that was saved at one world size, stage and dtype loads at any other, bit for bit."""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import random
import struct
import time
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from insides import WRITE_BEHIND, sharded_of, write_manifest
from memory import resident
from models import MODELS, Stack, muon_with_adamw, workload
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from twin import build, build_engine, engine_steps, everything, microbatch, same, steps, update, whole

import zeroshard
from zeroshard import CheckpointError, Place, Policy, UsageError, ZeroshardError
from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.consolidated import state_dict_of
from zeroshard.testing.gpt import GPT, GPTConfig


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_load_under_other_names(rank: int, stage: int, tmp_path: Path) -> None:
    """What keeps its tensor keeps its optimizer states; None leaves one out."""

    def make(name: str, seed: int) -> zeroshard.Sharded:
        layers = {"one": nn.Linear(4, 4), name: nn.BatchNorm1d(4), "last": nn.Linear(4, 2)}
        return build(stage, make_model=lambda: nn.Sequential(OrderedDict(layers)), seed=seed)[1]

    old, new = make("old", 0), make("new", 1)
    update(old.model(torch.arange(12.0).view(3, 4)).square().mean(), old.optimizer)
    old.save(tmp_path, "a")
    own = new.states.get("last.weight")
    rename: dict[str, str | None] = {f"old.{name}": f"new.{name}" for name in old.model.old.state_dict()}
    with pytest.raises(CheckpointError, match="of a different model"):
        new.load(tmp_path, "a", rename={"last.weight": None, **rename})
    new.load(tmp_path, "a", rename={"last.weight": None, **rename}, strict=False)
    assert torch.equal(new.states.get("last.weight"), own) and new.states.get("last.weight", "exp_avg") is None
    assert torch.equal(new.model.new.running_mean, old.model.old.running_mean)
    for name in ("one.weight", "old.weight", "last.bias"):
        for state in ("parameters", "exp_avg"):
            value = old.states.get(name, state)
            assert value is not None and torch.equal(value, new.states.get(name.replace("old", "new"), state))


DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def holds(model: nn.Module, sharded: zeroshard.Sharded, whole: dict[str, Tensor]) -> bool:
    """Whether this rank's parts, and what the model shows, are those of `everything`. Quick: two messages, not hundreds."""
    parts = [
        torch.equal(tensor, whole[f"{held.named.fqn} {state}"].reshape(-1)[held.span.within(0)])
        for held in sharded.states.held()
        for state in ("parameters", "exp_avg", "exp_avg_sq")
        if (tensor := held.tensor(state)) is not None
    ]
    steps = [held.state["step"] == whole[f"{held.named.fqn} step"] for held in sharded.states.held() if held.state]
    with zeroshard.unsharded(model):
        shown = [torch.equal(p.detach(), whole[f"{fqn} shown"]) for fqn, p in model.named_parameters()]
    return len(parts) == 3 * len(steps) and all(parts) and all(steps) and all(shown)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, int], Path]:
    """Makes each once: a checkpoint, with every state that was saved beside it."""

    @functools.cache
    def make(dtype: str, size: int, stage: int) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint")

        def body(rank: int) -> None:
            model, sharded = build(stage, precision=DTYPES[dtype])
            steps(model, sharded, rank, range(2))
            sharded.save(folder, "step2")
            whole = everything(sharded)
            if rank == 0:
                torch.save(whole, folder / "whole.pt")

        on_ranks(body, size)
        return folder

    return make


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("saved_stage", range(4))
@pytest.mark.parametrize("saved_size", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_any_world_size_and_stage_to_any_other(
    size: int, saved_size: int, saved_stage: int, dtype: str, checkpoint: Callable[[str, int, int], Path]
) -> None:
    """Saved at 1 to 4 ranks and stages 0 to 3, each loaded at each: 256 ways for a dtype, every state equal to the bit."""
    folder = checkpoint(dtype, saved_size, saved_stage)

    def body(rank: int) -> None:
        for stage in range(4):
            model, sharded = build(stage, precision=DTYPES[dtype], seed=5)
            loaded = sharded.load(folder)
            assert (loaded.tag, loaded.world_size) == ("step2", saved_size)
            assert holds(model, sharded, torch.load(folder / "whole.pt")), stage
            steps(model, sharded, rank, range(2, 3))

    on_ranks(body, size)


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize("source", DTYPES)
def test_dtypes_and_group_order_may_differ(rank: int, source: str, tmp_path: Path) -> None:
    def two_groups(parameters: list[Tensor], reverse: bool, **options: Any) -> torch.optim.Optimizer:
        matrices = {"params": [p for p in parameters if p.ndim >= 2][:: -1 if reverse else 1]}
        rest = {"params": [p for p in parameters if p.ndim < 2], **options}
        return torch.optim.AdamW([rest, matrices] if reverse else [matrices, rest], lr=9.0 if reverse else 1e-2)

    make_optimizer: Any = partial(two_groups, reverse=False, lr=2e-2, weight_decay=0.0)
    model, sharded = build(2, precision=DTYPES[source], make_optimizer=make_optimizer)
    steps(model, sharded, rank, range(2))
    sharded.save(tmp_path, "a")
    before = everything(sharded)
    for target, dtype in DTYPES.items():
        make_optimizer = partial(two_groups, reverse=True, lr=7.0, weight_decay=3.0)
        _, again = build(3, precision=dtype, make_optimizer=make_optimizer, seed=8)
        again.load(tmp_path)
        after = everything(again)
        for key, value in before.items():
            if not key.endswith("shown"):
                assert torch.equal(after[key], value), (target, key)
        assert [g["lr"] for g in again.optimizer.param_groups] == [2e-2, 1e-2]
        assert [g["weight_decay"] for g in again.optimizer.param_groups] == [0.0, 1e-2]


@pytest.mark.parametrize(("saved", "loaded"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_optimizer_states_get_the_dtype_of_the_model(saved: torch.dtype, loaded: torch.dtype, tmp_path: Path) -> None:
    """torch's optimizers step only if a parameter and its states have one dtype."""
    for dtype in (saved, loaded):
        model, sharded = build(3, make_model=lambda: Stack().to(dtype))  # noqa: B023
        if dtype is loaded:
            sharded.load(tmp_path)
        steps(model, sharded, 0, range(1))
        states = [value for name, value in everything(sharded).items() if "exp_avg" in name]
        assert {value.dtype for value in states if value.numel()} == {dtype}
        if dtype is saved:
            sharded.save(tmp_path, "a")


def follows_a_layout(manifest: files.Manifest) -> bool:
    """Tell whether no rank lists its ranges: with thousands of ranks, these would be the largest part."""
    listed = [state for record in manifest.parameters.values() for state in record.states.values() if state.ranges]
    return not listed and all(None not in shards.files for shards in manifest.shards) and bool(manifest.shards)


POLICIES = {
    "stage 0": Policy.stage(0), "stage 1": Policy.stage(1), "stage 2": Policy.stage(2), "stage 3": Policy.stage(3),
    "within": Policy.stage(3, within=2), "within, stage 2": Policy.stage(2, within=2),
    "offloaded": Policy.stage(3).offloaded(optimizer=Place.CPU),
}  # fmt: skip


@pytest.mark.ranks(4)
@pytest.mark.quick(2)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_follows_a_layout(rank: int, policy: str, whole: bool, tmp_path: Path) -> None:
    """Also where ranks own rows in another order than their own, with frozen parameters, and with whole ones (Muon)."""
    make_optimizer = muon_with_adamw if whole else torch.optim.AdamW
    model, sharded = build(POLICIES[policy], make_model=MODELS["frozen"], make_optimizer=make_optimizer)
    steps(model, sharded, rank, range(1))
    sharded.save(tmp_path, "a")
    assert follows_a_layout(files.read_manifest(tmp_path / "a"))
    before = everything(sharded)
    sharded.load(tmp_path)
    assert same(everything(sharded), before)


@pytest.mark.ranks(2)
@pytest.mark.quick(4)
@pytest.mark.parametrize("name", [name for name in MODELS if "checkpointed" not in name])
def test_models_of_every_kind_go_on_as_if_nothing_had_been(rank: int, name: str, tmp_path: Path) -> None:
    """Tied, frozen, uneven, 0 elements, buffers; saved under stage 3, resumed under each, at 2 ranks."""
    make_batch = workload(name).make_batch
    model, sharded = build(3, make_model=MODELS[name])
    steps(model, sharded, rank, range(2), make_batch)
    sharded.save(tmp_path, "a", {"note": [1, "x"]})
    assert follows_a_layout(files.read_manifest(tmp_path / "a"))
    expected = steps(model, sharded, rank, range(2, 4), make_batch)
    final = everything(sharded)
    for stage in range(4):
        other, again = build(stage, make_model=MODELS[name], seed=3)
        assert again.load(tmp_path).values == {"note": [1, "x"]}
        assert all(map(torch.equal, steps(other, again, rank, range(2, 4), make_batch), expected)), stage
        assert same(everything(again), final), stage


class Dropping(Stack):
    def run(self, x: Tensor) -> Tensor:
        return (
            F.dropout(super().run(x), 0.3, self.training)
            * float(np.random.uniform(0.9, 1.1))
            * random.uniform(0.9, 1.1)
        )


def config(stage: int, precision: dict[str, Any], accumulation: int = 2) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 50, "warmup_num_steps": 5}},
        **precision,
    }


class Text(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 31, (6,), generator=torch.Generator().manual_seed(index))


def engine_and_loader(
    settings: dict[str, Any], make_model: Callable[[], nn.Module] = Stack, seed: int = 1
) -> tuple[zeroshard.Engine, Any]:
    torch.manual_seed(seed)
    engine, _, loader, _ = zeroshard.initialize(model=make_model(), config=settings, training_data=Text())
    return engine, loader


def epochs(loader: Any) -> Iterator[Tensor]:
    """Batches, epoch after epoch."""
    while True:
        yield from loader


def run(engine: zeroshard.Engine, batch_of: Iterator[Tensor], steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and batches up to so many steps."""
    losses, batches = [], []
    while engine.global_steps < steps:
        batches.append(next(batch_of))
        losses.append(microbatch(engine, engine(batches[-1])))
    return losses, batches


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 30, "loss_scale_window": 2, "hysteresis": 1}},
}


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_resumes_bit_for_bit(rank: int, stage: int, precision: str, tmp_path: Path) -> None:
    """Dropout, numpy's and Python's random numbers, schedule, loss scale with overflows, epochs of a shuffled dataset."""

    def make(seed: int, rank: int) -> tuple[zeroshard.Engine, Any]:
        engine, loader = engine_and_loader(config(stage, PRECISIONS[precision]), Dropping, seed)
        torch.manual_seed(seed + rank)
        np.random.seed(seed + rank)
        random.seed(seed + rank)
        return engine, loader

    engine, loader = make(1, rank)
    batch_of = epochs(loader)
    run(engine, batch_of, 6)  # 50 samples are 8 batches of 6: in the second epoch
    engine.save_checkpoint(tmp_path, client_state={"best": 0.5, "table": torch.arange(6).view(2, 3)})
    position = loader.state_dict()
    assert position["epoch"] == 1
    assert 0 < position["position"] < 50
    expected, _ = run(engine, batch_of, 14)
    figures = (engine.get_lr(), engine.loss_scaler.scale, engine.skipped_steps, engine.global_samples)
    again, loader = make(99, rank + 7)
    path, client = again.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step6")
    assert client["best"] == 0.5
    assert torch.equal(client["table"], torch.arange(6).view(2, 3))
    assert again.global_steps == 6
    got, _ = run(again, epochs(loader), 14)
    assert all(map(torch.equal, got, expected))
    assert (again.get_lr(), again.loss_scaler.scale, again.skipped_steps, again.global_samples) == figures
    if precision == "fp16":
        assert engine.skipped_steps > 0


def test_at_another_world_size_the_global_batches_are_the_same(tmp_path: Path) -> None:
    """12 samples a step: 2 ranks with 2 microbatches of 3, resumed on 4 ranks with 1, and on 1 rank with 4."""

    def first(rank: int) -> tuple[list[Tensor], list[Tensor]]:
        engine, loader = engine_and_loader(config(2, {}))
        batch_of = epochs(loader)
        run(engine, batch_of, 2)
        engine.save_checkpoint(tmp_path)
        return run(engine, batch_of, 4)

    def later(rank: int, accumulation: int) -> tuple[list[Tensor], list[Tensor]]:
        engine, loader = engine_and_loader(config(2, {}, accumulation=accumulation))
        engine.load_checkpoint(tmp_path)
        return run(engine, epochs(loader), 4)

    def steps(results: list[tuple[list[Tensor], list[Tensor]]]) -> tuple[list[set[tuple[int, ...]]], list[float]]:
        """By step: the samples, and the mean loss."""
        count = len(results[0][0]) // 2
        samples, losses = [], []
        for step in range(2):
            parts = [(ls[i], bs[i]) for ls, bs in results for i in range(step * count, (step + 1) * count)]
            samples.append({tuple(row.tolist()) for _, batch in parts for row in batch})
            losses.append(float(torch.stack([loss for loss, _ in parts]).mean()))
        return samples, losses

    expected = steps(on_ranks(first, 2))
    for ranks, accumulation in ((4, 1), (1, 4), (2, 2)):
        got = steps(on_ranks(later, ranks, accumulation))
        assert got[0] == expected[0], "the same samples in each step"
        assert got[1] == pytest.approx(expected[1], rel=1e-5)


# ---------------------------------------------------------------------- tags, latest, retention


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_load_of_what_may_be_missing(rank: int, stage: int, tmp_path: Path) -> None:
    """As in a job's first run: None on every rank, and nothing changes."""
    folder = tmp_path / "checkpoints"
    model, sharded = build(stage)
    before = everything(sharded)
    assert sharded.load(folder, missing_ok=True) is None
    assert sharded.load(folder, "a", missing_ok=True) is None
    with pytest.raises(CheckpointError):
        sharded.load(folder)
    assert same(everything(sharded), before)
    steps(model, sharded, rank, range(2))
    sharded.save(folder, "a", {"step": 2})
    saved = everything(sharded)
    steps(model, sharded, rank, range(2, 3))
    assert sharded.load(folder, "b", missing_ok=True) is None
    loaded = sharded.load(folder, missing_ok=True)
    assert loaded is not None and loaded.values == {"step": 2} and loaded.tag == "a"
    assert same(everything(sharded), saved)
    if rank == 0:
        (folder / "a" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError):  # damaged, not missing
        sharded.load(folder, missing_ok=True)


def test_tags_latest_and_retention(tmp_path: Path) -> None:
    model, sharded = build(0)
    with pytest.raises(CheckpointError, match="no file 'latest'"):
        sharded.load(tmp_path)
    for number in range(5):
        steps(model, sharded, 0, [number])
        sharded.save(tmp_path, f"step{number}", {"step": number}, keep_last=2, save_latest=number != 4)
    assert files.tags(tmp_path) == ["step4", "step3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step3", "step4"]
    assert sharded.load(tmp_path).values == {"step": 3}
    assert sharded.load(tmp_path, "step4").values == {"step": 4}
    # Again under the same tag: new files, and the old ones are gone.
    before = {path.name for path in (tmp_path / "step4").iterdir()}
    sharded.save(tmp_path, "step4", {"step": "again"})
    after = {path.name for path in (tmp_path / "step4").iterdir()}
    assert before & after == {"manifest.json"}
    assert len(after) == 2
    assert sharded.load(tmp_path).values == {"step": "again"}
    with pytest.raises(CheckpointError, match="step9 is not a checkpoint"):
        sharded.load(tmp_path, "step9")
    for number in range(3):  # what `latest` names stays
        sharded.save(tmp_path, f"aside{number}", save_latest=False, keep_last=1)
    assert files.tags(tmp_path) == ["aside2", "step4"]


def test_leftovers_are_recognised_and_removed(tmp_path: Path) -> None:
    _, sharded = build(0)
    sharded.save(tmp_path, "a")
    strange = tmp_path / "a" / "notes.txt"
    strange.write_text("mine")
    (tmp_path / "a" / "rank_00000.aaaaaaaaaaaa.safetensors").write_bytes(b"cut")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "rank_00003.bbbbbbbbbbbb.safetensors").write_bytes(b"cut")
    (tmp_path / "b" / "manifest.json.bbbbbbbbbbbb.tmp").write_bytes(b"{")
    (tmp_path / "latest.bbbbbbbbbbbb.tmp").write_bytes(b"b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "model.bin").write_bytes(b"another program's")
    sharded.save(tmp_path, "d")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c", "d", "latest"]
    assert strange.exists()
    assert len(list((tmp_path / "a").iterdir())) == 3
    sharded.load(tmp_path, "a")


# ---------------------------------------------------------------------- what is in, and what is refused


def alike(one: Any, other: Any) -> bool:
    """Whether both have the same type, dtype, shape and values."""
    if isinstance(one, dict):
        return (
            type(one) is type(other) and one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
        )
    if isinstance(one, Tensor | np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and bool((one == other).all())
    return type(one) is type(other) and one == other


def test_client_state_is_json_and_tensors(tmp_path: Path) -> None:
    _, sharded = build(0)
    state = {
        "tuple": (1, 2.5, None), "keys": {1: "a", (2, 3): [True]}, "counter": Counter({5: 2}), "$dollar": {"$x": 1},
        "array": np.arange(3, dtype=np.uint32), "number": np.float32(0.1), "bytes": b"\x00\xff", "dtype": torch.bfloat16,
        "scalar": torch.tensor(3, dtype=torch.int16), "bf16": torch.randn(3, 2).bfloat16(), "nan": float("inf"),
        "dotted": {"a": torch.ones(1), "a.b": torch.ones(2)}, "dotted.a": torch.ones(3), "random": {"torch": torch.ones(4)},
        "buffers": {"old": torch.ones(5)}, "deque": deque([1, 2], maxlen=2), "array0": np.array(3),
        "transposed": torch.randn(4, 3).T, "empty": torch.zeros(0, 2), "bool": torch.tensor([True, False]),
    }  # fmt: skip
    values: Any
    for values in (state, {1: 2, "1": 3, None: torch.ones(2)}, {(1, 2): 3}, {"$tuple": [1]}, {"a": {1: 2}}):
        sharded.save(tmp_path, "a", values)
        assert alike(sharded.load(tmp_path).values, values)
    for strange, where in [
        ({"a": [object()]}, r"a\[0\] is a builtins\.object"),
        ({"f": len}, "f is a"),
        ({"m": nn.Linear(1, 1)}, "m is a"),
        ([1], "takes a dict, not a list"),
    ]:
        with pytest.raises(ZeroshardError, match=where):
            sharded.save(tmp_path, "b", strange)
    with torch.inference_mode(), pytest.raises(UsageError, match="inference_mode"):
        sharded.load(tmp_path)
    assert files.tags(tmp_path) == ["a"]


@pytest.mark.ranks(2)
def test_what_one_rank_cannot_save_none_does(rank: int, tmp_path: Path) -> None:
    model, sharded = build(1)
    with pytest.raises(CheckpointError, match="rank 0: bad is a"):
        sharded.save(tmp_path, "a", {"bad": object()})
    model.blocks[0].register_buffer("strange", torch.zeros(3, dtype=torch.complex128 if rank == 1 else torch.float32))
    with pytest.raises(
        CheckpointError, match=r"rank 1: the buffer blocks\.0\.strange is a tensor of torch\.complex128"
    ):
        sharded.save(tmp_path, "a")
    del model.blocks[0].strange
    sharded.save(tmp_path, "a", {"bad": 1})


@pytest.mark.ranks(2)
def test_models_for_evaluation_and_optimizers_of_whole_parameters(rank: int, tmp_path: Path) -> None:
    model, sharded = build(2, make_optimizer=muon_with_adamw)
    steps(model, sharded, rank, range(2))
    sharded.save(tmp_path, "muon")
    saved = whole(model)
    expected = steps(model, sharded, rank, range(2, 4))
    other, again = build(3, make_optimizer=muon_with_adamw, seed=4)
    again.load(tmp_path)
    assert all(map(torch.equal, steps(other, again, rank, range(2, 4)), expected))
    if rank == 0:  # as earlier releases wrote it, which had one class for both
        path = tmp_path / "muon" / "manifest.json"
        body = json.loads(path.read_text())
        del body["checksum"]
        body["optimizer"] = "MuonWithAdamW"
        for group in body["param_groups"]:
            group["optimizer"] = "MuonWithAdamW"
        write_manifest(path, body)
    dist.barrier()
    again.load(tmp_path)
    assert all(map(torch.equal, steps(other, again, rank, range(2, 4)), expected))
    other, evaluated = build(3, make_optimizer=None)
    evaluated.load(tmp_path)
    assert same(whole(other), saved)


def test_a_loss_scale_stays_with_its_precision(tmp_path: Path) -> None:
    """From fp16 with a fixed scale to bf16: gradients are not divided by it."""
    build_engine(0, fp16={"enabled": True, "loss_scale": 128}).save_checkpoint(tmp_path)
    fresh, loaded = (build_engine(0, bf16={"enabled": True}) for _ in range(2))
    loaded.load_checkpoint(tmp_path)
    for one in (fresh, loaded):
        engine_steps(one, 0, [0])
    assert loaded.get_global_grad_norm() == pytest.approx(fresh.get_global_grad_norm(), rel=0.05)


def test_a_loader_begins_its_epoch_anew_unless_it_was_loaded() -> None:
    from zeroshard.engine.loader import StatefulLoader

    loader = StatefulLoader(Text(), 5, 0, 2, drop_last=False)
    assert len(loader) == 5
    first = next(iter(loader))
    before = torch.get_rng_state()
    batches = list(loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert len(batches) == 5
    assert torch.equal(batches[0], first)
    seconds = iter(loader)
    kept = [next(seconds) for _ in range(3)]
    again = StatefulLoader(Text(), 5, 0, 2, drop_last=False)
    again.load_state_dict(loader.state_dict())
    assert torch.equal(next(iter(again)), next(seconds))
    assert not torch.equal(kept[0], first), "another epoch, another order"


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("position", [3, 8, 21])
def test_a_position_of_another_world_size_leaves_each_rank_as_many_samples(position: int, drop_last: bool) -> None:
    from zeroshard.engine.loader import ShardedSampler

    found = []
    for rank in range(4):
        sampler = ShardedSampler(22, rank, 4, drop_last=drop_last)
        sampler.position = position
        found.append(list(sampler))
    assert len({len(one) for one in found}) == 1
    order = torch.randperm(22, generator=torch.Generator().manual_seed(0)).tolist()
    rest = order[position : 20 if drop_last else 22]
    seen = [number for one in found for number in one]
    assert len(seen) == len(set(seen)) if drop_last else {*rest} <= {*seen}
    assert len(seen) > len(rest) - 4


def test_a_save_within_a_step_keeps_the_samples_of_the_step(tmp_path: Path) -> None:
    """A load restarts the step, with the samples of its first microbatch."""

    def train(engine: Any, loader: Any, save_after: int | None, count: int) -> list[list[Any]]:
        seen = []
        for number, batch in zip(range(count), loader, strict=False):
            microbatch(engine, engine(batch))
            seen.append(batch.tolist())
            if number == save_after:
                engine.save_checkpoint(tmp_path, "within")
        return seen

    engine, loader = engine_and_loader(config(0, {}))
    straight = train(engine, loader, 2, 6)
    resumed, loader = engine_and_loader(config(0, {}))
    resumed.load_checkpoint(tmp_path, "within")
    assert train(resumed, loader, None, 4) == straight[2:]
    assert same(whole(engine.module), whole(resumed.module))


def test_a_fall_back_names_what_it_passes_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, narrow = build(2, make_model=lambda: nn.Linear(3, 1))
    _, wide = build(2, make_model=lambda: nn.Linear(4, 1))
    narrow.save(tmp_path, "old", {"tag": "old"})
    wide.save(tmp_path, "new", {"tag": "new"})
    assert narrow.load(tmp_path, fall_back=True).values == {"tag": "old"}
    assert "passes over" in caplog.text
    assert "saved with shape (1, 4)" in caplog.text


def test_states_keep_their_shape_where_they_have_as_many_elements_as_the_parameter(tmp_path: Path) -> None:
    """Those of a head with one output under transformers' Adafactor: a column of as many elements as the weight."""
    from transformers.optimization import Adafactor

    def train(sharded: zeroshard.Sharded, number: int) -> None:
        update(sharded.model(torch.full((2, 8), 1.0 + number)).sum(), sharded.optimizer)

    adafactor = partial(Adafactor, lr=1e-2, relative_step=False, scale_parameter=False)
    made = partial(build, 2, make_model=partial(nn.Linear, 8, 1), make_optimizer=adafactor, elementwise=False)
    (model, sharded), (other, again) = made(), made()
    train(sharded, 0)
    sharded.save(tmp_path, "one")
    again.load(tmp_path, "one")
    train(sharded, 1)
    train(again, 1)
    assert torch.equal(model.weight, other.weight)


# ---------------------------------------------------------------------- asynchronous


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_asynchronous_save_holds_the_moment_it_was_asked_for(rank: int, stage: int, tmp_path: Path) -> None:
    model, sharded = build(stage)
    steps(model, sharded, rank, range(2))
    before = everything(sharded)
    sharded.save(tmp_path, "a", {"x": 1}, asynchronous=True)
    steps(model, sharded, rank, range(2, 6))
    sharded.save(tmp_path, "b", asynchronous=True)  # waits for the first
    assert "a" in files.tags(tmp_path)
    sharded.checkpoints.wait()
    assert sharded.load(tmp_path, "a").values == {"x": 1}
    assert same(everything(sharded), before)
    sharded.remove()


@pytest.mark.ranks(2)
def test_what_goes_wrong_behind_the_training_surfaces(rank: int, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    engine = build_engine(1)
    engine_steps(engine, rank, [0, 0])
    checkpoints = sharded_of(engine).checkpoints
    write_behind = getattr(checkpoints, WRITE_BEHIND)

    def late(*args: Any) -> None:
        try:
            write_behind(*args)
        finally:
            time.sleep(0.5 * rank)  # rank 1's save ends some steps later than rank 0's

    setattr(checkpoints, WRITE_BEHIND, late)
    engine.save_checkpoint(blocked, asynchronous=True)
    with pytest.raises(CheckpointError, match=r"rank 0: .*file"):
        engine_steps(engine, rank, [0] * 2000)
    engine.save_checkpoint(tmp_path / "good")
    engine.load_checkpoint(tmp_path / "good")


# ---------------------------------------------------------------------- memory


@pytest.mark.full
@pytest.mark.ranks(4)
def test_nothing_is_ever_whole(rank: int, tmp_path: Path) -> None:
    """A GPT of 19 M parameters on 4 ranks, 290 MiB of states: save and load take less than a unit beyond what rests."""
    ctypes.CDLL(None).mallopt(-3, 1 << 18)  # what is freed goes back to the system
    with zeroshard.sharded_init():
        model = GPT(GPTConfig(layers=24, width=256, heads=4))
    numel = sum(p.numel() for p in model.parameters())
    sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), fused=True), Policy.stage(3))
    data = torch.randint(0, 256, (1, 33))
    update(model(data[:, :-1], data[:, 1:]), sharded.optimizer)
    sharded.save(tmp_path, "first")  # connections, and what libraries take once
    peaks = []
    for work in (lambda: sharded.save(tmp_path, "a"), lambda: sharded.load(tmp_path, "a")):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        start = resident("VmRSS")
        work()
        peaks.append(resident("VmHWM") - start)
    save, load = peaks
    read = sharded.load(tmp_path, "a").nbytes
    assert read < 12 * numel / 4 + 4 * (8 << 20), "its own states, and the rest of the chunks at their ends"
    assert save < 16 << 20, "a manifest, and nothing of the model"
    assert load < 12 * numel / 4 + (24 << 20), "the new optimizer states, a chunk, the manifest"


def test_the_manifest_says_where_everything_is(tmp_path: Path) -> None:
    """Another program could read it: with JSON and the safetensors library alone."""
    from safetensors import safe_open

    def body(rank: int) -> dict[str, Tensor]:
        model, sharded = build(2)
        steps(model, sharded, rank, range(2))
        sharded.save(tmp_path, "a")
        return everything(sharded)

    expected = on_ranks(body, 2)[0]
    told = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert told["format"] == "zeroshard checkpoint" and told["version"] == 3
    names = [one["name"] for one in told["files"]]
    wholes = {fqn: {state: [] for state in record["states"]} for fqn, record in told["parameters"].items()}
    (shards,) = told["shards"]
    for bucket in told["layouts"][shards["layout"]]:
        size = bucket["shard_numel"]
        for shard, number in enumerate(shards["files"]):
            with safe_open(tmp_path / "a" / names[number], "pt") as file:
                for fqn, first, begin, numel in bucket["pieces"]:
                    start = max(first, first + shard * size - begin)
                    stop = min(first + numel, first + (shard + 1) * size - begin)
                    for state in wholes[fqn]:
                        if start < stop:
                            wholes[fqn][state].append(file.get_tensor(f"{state}/{fqn}/{start}"))
                            assert len(wholes[fqn][state][-1]) == stop - start
    for fqn, record in told["parameters"].items():
        for state, parts in wholes[fqn].items():
            assert torch.equal(torch.cat(parts).view(record["shape"]), expected[f"{fqn} {state}"])
    for record in told["files"]:
        data = (tmp_path / "a" / record["name"]).read_bytes()
        with safe_open(tmp_path / "a" / record["name"], "pt") as file:
            table = file.get_tensor("checksums").numpy().tobytes()
        head = data[: 8 + int.from_bytes(data[:8], "little")]
        assert zlib.crc32(head + table) == record["checksum"]
        assert struct.pack("<I", zlib.crc32(data[: -len(table)])) == table, "one chunk"
    assert told["parameters"]["embedding.weight"]["names"] == ["embedding.weight", "head.weight"]


@pytest.mark.parametrize("is_missing", [False, True])
def test_ranks_that_hold_different_states_list_their_ranges(is_missing: bool, tmp_path: Path) -> None:
    """The layout alone would promise states that are in no file. What all ranks hold still loads."""

    def body(rank: int) -> dict[str, Tensor]:
        model, sharded = build(2)
        steps(model, sharded, rank, range(2))
        for state in sharded.optimizer.state.values():
            if rank == 1 and is_missing:
                del state["exp_avg"]
            elif rank == 1:
                state["odd"] = torch.ones_like(state["exp_avg"])
        sharded.save(tmp_path, "a")
        with pytest.raises(CheckpointError, match=r"the checkpoint holds no elements \d+ to \d+ of "):
            sharded.load(tmp_path)
        sharded.load(tmp_path, optimizer_states=False)
        for state in sharded.optimizer.state.values():
            state["exp_avg"] = torch.ones_like(state["exp_avg_sq"], dtype=torch.float64 if rank else torch.float32)
        with pytest.raises(
            CheckpointError, match=r"exp_avg of \S+ is of float32 on some ranks, and of float64 on others"
        ):
            sharded.save(tmp_path, "b")
        return everything(sharded)

    expected = on_ranks(body, 2)[0]
    manifest = files.read_manifest(tmp_path / "a")
    assert not manifest.shards and not manifest.layouts
    for record in manifest.parameters.values():
        for state in record.states.values():
            assert state.ranges
    for fqn, value in state_dict_of(tmp_path, "a").items():
        assert torch.equal(value, expected.get(f"{fqn} parameters", value))


class Counting(nn.Module):
    """It keeps what no buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen: Any = {"calls": 0, "largest": torch.zeros(2)}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {"calls": self.seen["calls"] + 1, "largest": x.abs().max().expand(2).clone()}
        return self.linear(x) / (1 + self.seen["calls"])


@pytest.mark.parametrize("stage", [0, 3])
def test_extra_states_of_modules_are_restored(stage: int, tmp_path: Path) -> None:
    """Each rank its own; on another number of ranks, rank 0's."""
    made = partial(build, stage, make_model=Counting)

    def body(rank: int) -> None:
        model, sharded = made()
        for _ in range(2):
            update(model(torch.full((2, 4), 1.0 + rank)).sum(), sharded.optimizer)
        sharded.save(tmp_path, "a")
        other, again = made()
        again.load(tmp_path)
        assert other.seen["calls"] == 2 and torch.equal(other.seen["largest"], torch.full((2,), 1.0 + rank))
        other.seen = {"largest": torch.ones(100_000), "calls": lambda: None}
        with pytest.warns(UserWarning, match="the checkpoint has no extra state of the model"):
            again.save(tmp_path, "b")

    on_ranks(body, 2)
    model, sharded = made()
    sharded.load(tmp_path, "a")
    assert model.seen["calls"] == 2 and torch.equal(model.seen["largest"], torch.ones(2))
    sharded.load(tmp_path, "b")
    assert model.seen["calls"] == 2
    assert sum(path.stat().st_size for path in tmp_path.glob("b/*")) < 100_000  # without the part that could be packed
