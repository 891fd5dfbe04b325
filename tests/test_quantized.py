"""The promise of lossy communication: errors are bounded and equal on all ranks, and nothing hides them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from insides import units
from models import Stack, tokens, workload
from ranks import on_ranks
from torch import Tensor
from twin import build, same, whole

import zeroshard
from zeroshard import ConfigError, Policy, PolicyError, Precision, UsageError, Wire
from zeroshard.collectives.base import sum_into
from zeroshard.collectives.choose import create_collectives
from zeroshard.collectives.members import Members
from zeroshard.collectives.native import Native
from zeroshard.collectives.quantized import BLOCK_NUMEL, Codes, QuantizedGradients
from zeroshard.collectives.watch import Watch
from zeroshard.config.load import load_config
from zeroshard.testing import Run, train

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BUCKETS = 256

INT8, INT4 = Wire(gradients="int8"), Wire(gradients="int4")
PRECISIONS = {"fp32": None, "bf16": Precision(torch.bfloat16), "fp16": Precision(torch.float16)}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of magnitudes that differ from block to block."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return (values * torch.rand(*shape, generator=generator, dtype=torch.float64) ** 4).to(dtype)


def through(row: Tensor, bits: int = 8) -> Tensor:
    """What arrives of a row, in the wide dtype."""
    codes = Codes(bits, row.dtype)
    coded = torch.full((codes.nbytes(row.numel()),), 171, dtype=torch.uint8)
    codes.encode(row, coded)
    return codes.decode(coded, row.numel())


def by_hand(row: Tensor, bits: int = 8) -> Tensor:
    """The same for finite values, element by element."""
    wide, top = Codes(bits, row.dtype).wide, 2 ** (bits - 1) - 1
    found = []
    for block in row.to(wide).split(BLOCK_NUMEL):
        scale = (block.abs().max() / top).clamp(min=torch.finfo(wide).tiny)
        found.append(torch.stack([torch.round(one / scale).clamp(-top, top) * scale for one in block]))
    return torch.cat(found)


# ---------------------------------------------------------------------- codes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("numel", [1, 2, 7, 255, 256, 257, 511, 1000])
def test_codes_are_off_by_half_a_scale(numel: int, bits: int, dtype: torch.dtype) -> None:
    row = draw(numel, dtype=dtype)
    found = through(row, bits)
    assert torch.equal(found, by_hand(row, bits))
    top = 2 ** (bits - 1) - 1
    for there, here in zip(found.split(BLOCK_NUMEL), row.to(found.dtype).split(BLOCK_NUMEL), strict=True):
        assert ((there - here).abs() <= here.abs().max() / top / 2 * (1 + 1e-5)).all()
        assert there.unique().numel() <= 2 * top + 1


def test_rows_longer_than_a_chunk() -> None:
    row = draw((1 << 16) * 2 + 300)
    for bits in (8, 4):
        codes = Codes(bits, row.dtype)
        coded = torch.empty(codes.nbytes(row.numel()), dtype=torch.uint8)
        codes.encode(row, coded)
        parts = [through(part, bits) for part in row.split(1 << 16)]
        assert torch.equal(codes.decode(coded, row.numel()), torch.cat(parts))
        assert torch.equal(codes.decode(coded, row.numel(), 512, 1024), torch.cat(parts)[512:1024])


def test_bytes_of_a_row() -> None:
    for numel, blocks in ((16, 1), (256, 1), (272, 2), (4096, 16)):
        assert Codes(8, torch.bfloat16).nbytes(numel) == numel + 4 * blocks
        assert Codes(4, torch.float32).nbytes(numel) == numel // 2 + 4 * blocks
    assert Codes(4, torch.float32).nbytes(3) == 4 + 4
    assert Codes(8, torch.float64).nbytes(9) == 8 + 16
    assert Codes(8, torch.float32).nbytes(0) == 0


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_arrives_as_such(dtype: torch.dtype, bits: int) -> None:
    for bad in (float("inf"), float("-inf"), float("nan")):
        row = torch.ones(600, dtype=dtype)
        row[300] = bad
        found = through(row, bits)
        assert found[256:512].isnan().all()
        assert torch.equal(found[:256], row[:256].to(found.dtype))
        assert torch.equal(found[512:], row[512:].to(found.dtype))
        assert through(torch.full((300,), bad, dtype=dtype), bits).isnan().all()


@pytest.mark.parametrize("bits", [8, 4])
def test_awkward_blocks(bits: int) -> None:
    zeros = torch.zeros(300)
    zeros[::2] = -0.0
    assert torch.equal(through(zeros, bits), torch.zeros(300))
    top = 2 ** (bits - 1) - 1
    one = torch.ones(300)
    one[3] = 1e30
    found = through(one, bits)
    assert found[3] == pytest.approx(1e30)
    assert (found[:256] != 0).sum() == 1  # what is far smaller than the block's largest is gone
    assert torch.equal(found[256:], one[256:])
    for least in (1e-45, 3e-44, 1e-39, 2e-38):  # the scale would have few bits, or none
        tiny = torch.linspace(-least, least, 256)
        assert ((through(tiny, bits) - tiny).abs() <= max(least / top, 1.2e-38) / 2 * (1 + 1e-5)).all()
    for dtype in DTYPES:
        largest = torch.full((256,), torch.finfo(dtype).max, dtype=dtype)
        found = through(largest, bits)
        assert found.isfinite().all()
        assert found.to(dtype).isfinite().all()
    assert through(torch.tensor([1e300, -1e300, 1e299], dtype=torch.float64), bits)[0] == pytest.approx(1e300)


# ---------------------------------------------------------------------- collectives


def native(rank: int) -> Native:
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    members = Members.of(dist.group.WORLD, CPU)
    return Native(members, CPU, Watch(members.root, members.ranks, members.own, 30.0))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("within", [2, 1])
def test_sums_across_are_of_codes(within: int, dtype: torch.dtype, bits: int, transport: str) -> None:
    """In fp32 at least, over hosts in their order; what the owner adds itself is exact."""
    numel, ranks = 336, 4
    given = [draw(ranks, numel, seed=rank, dtype=dtype) for rank in range(ranks)]
    wide = torch.promote_types(dtype, torch.float32)

    def body(rank: int) -> None:
        collectives = create_collectives(None, CPU, within=within, wire=INT8 if bits == 8 else INT4)
        shard, host = collectives.shard, rank // within
        parts = []
        for other in range(ranks // within):
            inside = torch.empty(numel, dtype=wide if within > 1 else dtype)
            sum_into([given[one][shard] for one in range(other * within, (other + 1) * within)], 1.0, inside, False)
            parts.append(inside.to(wide) if other == host else through(inside, bits))
        expected, out = torch.empty(numel, dtype=wide), torch.full((numel,), 5.0, dtype=wide)
        sum_into(parts, float(ranks), expected, False)
        for accumulate in (False, True):
            rows = given[rank].clone()
            workspace = torch.empty(collectives.workspace_numel(rows), dtype=dtype)
            collectives.sent.clear()
            pending = collectives.reduce_scatter(rows, workspace, 0, "rows", collectives.world_size)
            pending.finish(out, accumulate=accumulate)
            pending.wait_released()
            assert pending.is_released
            assert torch.equal(out, expected + expected if accumulate else expected)
            hosts = ranks // within
            crossed = Codes(bits, wide if within > 1 else dtype).nbytes(numel)
            assert collectives.sent["reduce_scatter across"] == (hosts - 1) * crossed
            assert torch.equal(rows, given[rank])
        collectives.close()

    on_ranks(body, ranks)


def test_over_a_backend_of_its_own() -> None:
    """As NCCL: the codes travel as bytes, each row to its rank."""
    given = [draw(3, 272, seed=rank) for rank in range(3)]

    def body(rank: int) -> None:
        inner = native(rank)
        sums = QuantizedGradients(inner, 4)
        inner.sent.clear()
        out, expected = torch.empty(272), torch.empty(272)
        workspace = torch.empty(sums.workspace_numel(given[rank]))
        sums.reduce_scatter(given[rank], workspace, 1, "rows", inner.world_size).finish(out, accumulate=False)
        parts = [given[one][rank] if one == rank else through(given[one][rank], 4) for one in range(3)]
        sum_into(parts, 3.0, expected, False)
        assert torch.equal(out, expected)
        assert inner.sent == {"reduce_scatter": 2 * Codes(4, torch.float32).nbytes(272)}
        inner.close()

    on_ranks(body, 3)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_gradient_that_is_not_finite_is_seen(bits: int, transport: str) -> None:
    def body(rank: int) -> None:
        wire = INT8 if bits == 8 else INT4
        for precision, bad in ((None, float("inf")), (None, float("nan")), (Precision(torch.float16), float("inf"))):
            model, sharded = build(Policy.stage(3, within=2, wire=wire), precision=precision, make_optimizer=sgd)
            loss = model(*tokens(rank, 0))
            (loss * (bad if rank == 3 else 1.0)).backward()
            assert not math.isfinite(float(sharded.clip_grad_norm_(1.0)))
            sharded.remove()

    on_ranks(body, 4)


# ---------------------------------------------------------------------- trainings


@pytest.mark.quick(1)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_is_the_same(asynchronous: bool, tmp_path: Path, transport: str) -> None:
    def body(rank: int) -> None:
        policy = Policy.stage(3, within=2, wire=INT8)

        def step(model: Stack, sharded: zeroshard.Sharded, number: int) -> None:
            model(*tokens(rank, number)).backward()
            sharded.clip_grad_norm_(0.5)
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()

        model, sharded = build(policy, make_optimizer=sgd)
        for number in range(2):
            step(model, sharded, number)
        sharded.save(tmp_path, "there", asynchronous=asynchronous)
        step(model, sharded, 2)
        expected = whole(model)
        sharded.remove()
        model, sharded = build(policy, make_optimizer=sgd)
        sharded.load(tmp_path, "there")
        step(model, sharded, 2)
        assert same(whole(model), expected)
        sharded.remove()

    on_ranks(body, 4)


# ---------------------------------------------------------------------- bytes


@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_are_what_the_formula_says(precision: str, transport: str) -> None:
    def body(rank: int) -> None:
        how = PRECISIONS[precision]
        shapes: list[list[tuple[int, int]]] = []

        def inspect_rows(sharded: zeroshard.Sharded) -> None:
            shapes.append([tuple(bucket.rows.shape) for unit in units(sharded) for bucket in unit.buckets])  # type: ignore[misc]

        def run(policy: Policy) -> Run:
            return train(
                rank, workload("tied", steps=3), policy, precision=how, bucket_numel=BUCKETS, inspect=inspect_rows
            )

        for wire, bits in ((INT8, 8), (INT4, 4)):
            exact, rounded = run(Policy.stage(3, within=2)), run(Policy.stage(3, within=2, wire=wire))
            # A rank's block is a row for each host; sums cross in fp32 else.
            numels = [numel for _, numel in shapes[-1]]
            assert exact.sent["reduce_scatter across"] == 3 * sum(numels) * 4
            assert rounded.sent["reduce_scatter across"] == 3 * sum(
                Codes(bits, torch.float32).nbytes(n) for n in numels
            )
            assert rounded.sent["all_gather across"] == exact.sent["all_gather across"]

    on_ranks(body, 4)


# ---------------------------------------------------------------------- what users do


def test_one_rank_rounds_nothing() -> None:
    exact = train(0, workload(steps=3), Policy.stage(3, within=1), bucket_numel=BUCKETS)
    assert train(0, workload(steps=3), Policy.stage(3, within=1, wire=INT8), bucket_numel=BUCKETS).equals(exact)


def test_one_host_has_nothing_that_crosses() -> None:
    def body(rank: int) -> None:
        exact = train(rank, workload(steps=3), Policy.stage(3, within="host"), bucket_numel=BUCKETS)
        wired = train(rank, workload(steps=3), Policy.stage(3, within="host", wire=INT4), bucket_numel=BUCKETS)
        assert wired.equals(exact)
        assert not any("across" in kind for kind in wired.sent)

    on_ranks(body, 2)


# ---------------------------------------------------------------------- names


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(PolicyError, match="Give within"):
        Policy.stage(3, wire=INT8)
    for wire in ({"gradients": "fp8"}, {"gradients": True}):
        with pytest.raises(PolicyError, match="Wire"):
            Wire(**wire)  # type: ignore[arg-type]
    assert not Policy.stage(3).wire.is_lossy
    assert str(INT4) == "gradients across hosts int4"


@pytest.mark.parametrize(
    ("block", "wire"),
    [
        ({}, Wire()),
        ({"zero_quantized_weights": False, "zero_quantized_gradients": False}, Wire()),
        ({"zero_quantized_weights": True, "zero_quantized_nontrainable_weights": True}, Wire()),
        ({"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}, INT8),
        ({"zero_hpz_partition_size": 2, "zero_quantized_gradients": "int4"}, INT4),
        ({"mics_shard_size": 1, "zero_quantized_gradients": "int8"}, INT8),
    ],
)
def test_keys_of_configs_mean_it(block: dict[str, Any], wire: Wire) -> None:
    assert load_config({"train_batch_size": 8, "zero_optimization": {"stage": 3, **block}}, 8).policy.wire == wire


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"stage": 3, "zero_quantized_gradients": True}, "zero_hpz_partition_size"),
        ({"stage": 3, "zero_quantized_gradients": "fp8"}, "zero_quantized_gradients"),
    ],
)
def test_keys_that_cannot_be_meant_are_refused(block: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _ = load_config({"train_batch_size": 8, "zero_optimization": block}, 8).policy


@pytest.mark.quick(1)
def test_an_engine_tells_of_it_and_skips_overflows(tmp_path: Path, transport: str) -> None:
    def body(rank: int) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 3,
            "fp16": {"enabled": True, "initial_scale_power": 22, "hysteresis": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "json_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
            "zero_optimization": {
                "stage": 3, "zero_quantized_gradients": "int4", "zero_hpz_partition_size": 2,
            },
        }  # fmt: skip
        torch.manual_seed(0)
        engine, *_ = zeroshard.initialize(model=Stack(), config=config)
        for number in range(24):
            engine.backward(engine(*tokens(rank, number)))
            engine.step()
        assert 0 < engine.skipped_steps < 20
        assert engine.loss_scale() < 2**22
        values = whole(engine.module)
        assert all(one.isfinite().all() for one in values.values())
        engine.destroy()

    on_ranks(body, 4)
    log = next(tmp_path.rglob("steps.jsonl"))
    about = json.loads(log.read_text().splitlines()[0])
    assert "gradients across hosts int4" in json.dumps(about)


def test_the_command_line_says_so(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from zeroshard.cli.main import app

    zero = {"stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}
    (tmp_path / "zero.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": zero}))
    result = CliRunner().invoke(app, ["config", "check", str(tmp_path / "zero.json"), "--ranks", "2"])
    assert result.exit_code == 0
    assert (
        "lossy communication, whose results differ from exact communication: gradients across hosts int8"
        in " ".join(result.output.split())
    )
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    with pytest.raises(UsageError, match="quantised communication"):
        zeroshard.plan(Stack, config, world_size=2, batch=lambda size: tokens(0, 0, batch=size))
