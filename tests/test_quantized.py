"""The promise of lossy wires: what travels is off by a bound, on all ranks alike; what rests is exact, and nothing is hidden."""

from __future__ import annotations

import inspect
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Stack, tokens, workload
from torch import Tensor, nn

import zeroshard
from zeroshard import ConfigError, Place, Policy, PolicyError, Precision, Residency, Units, UsageError, Wire
from zeroshard.collectives.base import Collectives
from zeroshard.collectives.choose import create_collectives, create_control
from zeroshard.collectives.codes import BLOCK_NUMEL, Codes
from zeroshard.collectives.members import Members
from zeroshard.collectives.native import Native
from zeroshard.collectives.quantized import QuantizedGradients, QuantizedWeights, Wrapped
from zeroshard.collectives.reduction import sum_into
from zeroshard.collectives.watch import Watch
from zeroshard.config.load import load_config
from zeroshard.shim_path import put_on_path
from zeroshard.testing import Run, run_ranks, train
from zeroshard.testing.parity import ranks_agree

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BUCKETS = 256
WEIGHTS, INT8, INT4 = Wire(weights="int8"), Wire(gradients="int8"), Wire(gradients="int4")
BOTH = Wire("int8", "int8")
PRECISIONS = {"fp32": None, "bf16": Precision(torch.bfloat16), "fp16": Precision(torch.float16)}


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
        into = torch.empty_like(row, dtype=torch.bfloat16)
        codes.decode_into(coded, into)
        assert torch.equal(into, torch.cat(parts).to(torch.bfloat16))


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
    return Native(members, CPU, 1.0, Watch(members.root, members.ranks, members.own, 30.0))


@pytest.mark.parametrize("within", [None, 2, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathers_bring_the_same_everywhere(dtype: torch.dtype, within: int | None, transport: str) -> None:
    whole = draw(4, 336, dtype=dtype)

    def body(rank: int) -> None:
        collectives = create_collectives(None, CPU, within=within, wire=WEIGHTS)
        assert collectives.rounds_parameters
        for one in (collectives, collectives.inside):
            for rests in (False, True):
                rows = torch.full((one.world_size, 336), 7.0, dtype=dtype)
                numbers = [other for other in range(4) if one is collectives or other // within == rank // within]  # type: ignore[operator]
                ranks = [one.owner(number) for number in range(len(numbers))] if one is collectives else numbers
                expected = torch.stack([whole[other] for other in ranks])
                own = whole[rank].clone()
                rows[one.shard] = 3.0 if rests else own
                one.sent.clear()
                pending = one.gather_to_compute(rows, 0, "rows", own if rests else None)
                pending.wait()
                rounded = torch.stack([through(row).to(dtype) for row in expected])
                assert torch.equal(rows, rounded)
                assert torch.equal(own, whole[rank])
                pending.wait()
                nbytes = Codes(8, dtype).nbytes(336)
                if within is None:
                    assert one.sent == {"all_gather": 3 * nbytes}
                again = expected.clone()
                one.round_to_compute(again)
                assert torch.equal(again, rounded)
                rows[one.shard] = own
                one.all_gather(rows, 0, "rows").wait()
                assert torch.equal(rows, expected)
        assert collectives.buffers_nbytes >= 0
        assert create_control(collectives).exchange(bytes([rank]), "ranks") == [bytes([one]) for one in range(4)]
        collectives.close()

    run_ranks(body, 4)


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
        assert not collectives.rounds_parameters
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
            pending = collectives.reduce_scatter(rows, workspace, 0, "rows")
            pending.finish(out, accumulate=accumulate)
            pending.wait_readers()
            assert not pending.has_readers
            assert torch.equal(out, expected + expected if accumulate else expected)
            hosts = ranks // within
            crossed = Codes(bits, wide if within > 1 else dtype).nbytes(numel)
            assert collectives.sent["reduce_scatter across"] == (hosts - 1) * crossed
            assert torch.equal(rows, given[rank])
        collectives.close()

    run_ranks(body, ranks)


def test_over_a_backend_of_its_own() -> None:
    """As NCCL: the codes travel as bytes, each row to its rank."""
    given = [draw(3, 272, seed=rank) for rank in range(3)]

    def body(rank: int) -> None:
        inner = native(rank)
        gathers, sums = QuantizedWeights(inner, 8), QuantizedGradients(inner, 4)
        rows = torch.zeros(3, 272)
        rows[rank] = given[rank][rank]
        gathers.gather_to_compute(rows, 0, "rows").wait()
        assert torch.equal(rows, torch.stack([through(given[one][one]) for one in range(3)]))
        inner.sent.clear()
        out, expected = torch.empty(272), torch.empty(272)
        workspace = torch.empty(sums.workspace_numel(rows))
        sums.reduce_scatter(given[rank], workspace, 1, "rows").finish(out, accumulate=False)
        parts = [given[one][rank] if one == rank else through(given[one][rank], 4) for one in range(3)]
        sum_into(parts, 3.0, expected, False)
        assert torch.equal(out, expected)
        assert inner.sent == {"reduce_scatter": 2 * Codes(4, torch.float32).nbytes(272)}
        inner.close()

    run_ranks(body, 3)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_gradient_that_is_not_finite_is_seen(bits: int, transport: str) -> None:
    def body(rank: int) -> None:
        wire = INT8 if bits == 8 else INT4
        for precision, bad in ((None, float("inf")), (None, float("nan")), (Precision(torch.float16), float("inf"))):
            model, sharded = build(Policy.stage(3, within=2, wire=wire), precision=precision)
            loss = model(*tokens(rank, 0))
            (loss * (bad if rank == 3 else 1.0)).backward()
            assert not math.isfinite(float(sharded.clip_grad_norm_(1.0)))
            sharded.remove()

    run_ranks(body, 4, timeout=120)


def test_wrapped_collectives_pass_everything_on() -> None:
    """Whatever the interface has, and what others are asked for, reaches those that send."""
    own = {"gather_to_compute", "round_to_compute", "scatter_rows"}
    given = {"exchange_json", "agreed", "rank", "world_size"}
    public = {name for name, _ in inspect.getmembers(Collectives, callable) if not name.startswith("_")}
    assert public - given - own <= set(vars(Wrapped))
    properties = {name for name, one in vars(Collectives).items() if isinstance(one, property) and name[0] != "_"}
    assert properties <= set(vars(Wrapped))
    made = set(inspect.getsource(Wrapped.__init__).replace("self.", " ").replace(",", " ").split())
    flags = {name for name, one in vars(Collectives).items() if isinstance(one, bool)}
    assert flags - {"rounds_parameters"} <= made


# ---------------------------------------------------------------------- trainings


def build(policy: Policy, precision: Precision | None = None, lr: float = 0.1) -> tuple[Stack, zeroshard.Sharded]:
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return model, zeroshard.shard(model, optimizer, policy, precision=precision, bucket_numel=BUCKETS)


def whole(model: nn.Module) -> dict[str, Tensor]:
    with zeroshard.unsharded(model):
        return {name: value.detach().clone() for name, value in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def seen(model: Stack) -> dict[str, Tensor]:
    """What forwards will have computed with, filled as they run."""
    found: dict[str, Tensor] = {}

    def note(name: str, module: nn.Module) -> None:
        for part, value in module.named_parameters(recurse=False):
            found[f"{name}.{part}"] = value.detach().clone()

    for name, module in model.named_modules():
        if name and next(module.parameters(recurse=False), None) is not None:
            module.register_forward_pre_hook(lambda one, _, name=name: note(name, one))
    return found


@pytest.mark.parametrize("within", [None, 2])
@pytest.mark.parametrize("kept", [False, True])
def test_what_rests_is_exact(within: int | None, kept: bool, tmp_path: Path, transport: str) -> None:
    """The optimizer updates exact values by gradients of rounded ones: as a plain loop does that is written so."""

    def body(rank: int) -> None:
        wire = WEIGHTS if within is None else Wire("int8", None)
        policy = Policy.stage(3, within=within, reshard_after_forward=not kept, wire=wire)
        model, sharded = build(policy)
        found = seen(model)
        torch.manual_seed(0)
        plain, before = Stack(), whole(model)
        assert same(before, {name: one.detach() for name, one in plain.named_parameters()})
        for step in range(2):
            model(*tokens(rank, step)).backward()
            rounded = {name: found[name] for name in before if name in found}
            assert {"embedding.weight", "blocks.1.up.weight"} <= rounded.keys()
            for name in ("embedding.weight", "blocks.1.up.weight"):
                off = (rounded[name] - before[name]).abs().max()
                assert 0 < off < before[name].abs().max() / 50 + 0.01  # a block may hold a LayerNorm's ones, too
            told = sharded.exchange_json({name: float(one.double().sum()) for name, one in rounded.items()}, "sums")
            assert all(other == told[0] for other in told)
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
            expected = dict(before)
            gradients = [gradients_of(plain, {**before, **rounded}, other, step) for other in range(4)]
            for name, value in before.items():
                mean = torch.empty_like(value)
                groups = [[0, 1], [2, 3]] if within else [[0], [1], [2], [3]]
                sums = [sum((gradients[one][name] for one in group[1:]), gradients[group[0]][name]) for group in groups]
                torch.div(sum(sums[1:], sums[0]), 4.0, out=mean)
                expected[name] = value.add(mean, alpha=-0.1)
            before = whole(model)
            for name, value in before.items():
                assert torch.equal(value, expected[name]), name
        state = model.state_dict()
        assert same({name: state[name] for name in before}, before)
        assert all(torch.equal(sharded.states.get(name, "parameters"), value) for name, value in before.items())  # type: ignore[arg-type]
        sharded.save(tmp_path, "there")
        sharded.remove()
        assert same({name: one.detach() for name, one in model.named_parameters()}, before)
        model, sharded = build(Policy.stage(2))
        sharded.load(tmp_path, "there")
        assert same(whole(model), before)
        sharded.remove()

    run_ranks(body, 4, timeout=120)
    policy_of = json.loads((tmp_path / "there" / "manifest.json").read_text())["policy"]
    assert policy_of["wire"] == {"weights": "int8", "gradients": None}


def gradients_of(plain: nn.Module, values: dict[str, Tensor], rank: int, step: int) -> dict[str, Tensor]:
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(values[name])
            parameter.grad = None
    plain(*tokens(rank, step)).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}


def lossy(within: int) -> dict[str, Policy]:
    stages = {f"stage {stage}": Policy.stage(stage, within=within, wire=INT8) for stage in range(4)}
    flat = replace(Policy.stage(3, within=within, wire=INT8), parameters=Residency(sharded=True))
    return {**stages, "over all ranks": flat}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_rounded_sums_are_the_same_under_all_stages(
    microbatches: int, precision: str, overlap: bool, transport: str
) -> None:
    """The codes are the topology's, as the order of sums is: stages of one `within` and one wire give the same bits."""

    def body(rank: int) -> None:
        work = workload("tied", steps=3, microbatches=microbatches, max_norm=0.5)
        first: dict[bool, Run] = {}
        for name, policy in lossy(2).items():
            run = train(rank, work, policy, precision=PRECISIONS[precision], overlap=overlap, bucket_numel=BUCKETS)
            kind = microbatches > 1 and policy.gradients.sharded
            assert run.equals(first.setdefault(kind, run)), f"other bits under {name}"
            assert run.norms == first[kind].norms
            assert ranks_agree(run)
        exact = train(rank, work, Policy.stage(2, within=2), precision=PRECISIONS[precision], bucket_numel=BUCKETS)
        assert not exact.equals(first[microbatches > 1])
        torch.testing.assert_close(first[microbatches > 1].losses, exact.losses, rtol=0.05, atol=0.05)

    run_ranks(body, 4, timeout=240)


@pytest.mark.parametrize("within", [None, 2])
@pytest.mark.parametrize("model", ["frozen", "frozen base", "called twice", "checkpointed", "skipping", "tiny"])
def test_rounded_weights_are_the_same_however_they_come(model: str, within: int | None, transport: str) -> None:
    """Kept or not, prefetched or not, overlapped or not, from wherever they rest."""

    def body(rank: int) -> None:
        work = workload(model, steps=3, max_norm=0.5)
        wire = WEIGHTS if within is None else BOTH
        policy = Policy.stage(3, within=within, wire=wire)
        first = train(rank, work, policy, bucket_numel=BUCKETS)
        assert torch.isfinite(first.losses).all()
        assert ranks_agree(first)
        for other in (
            replace(policy, reshard_after_forward=False), replace(policy, prefetch_numel=1000),
            policy.offloaded(optimizer=Place.CPU, parameters=Place.CPU),
        ):  # fmt: skip
            assert train(rank, work, other, bucket_numel=BUCKETS).equals(first)
        assert train(rank, work, policy, bucket_numel=BUCKETS, overlap=False).equals(first)
        exact = train(rank, work, Policy.stage(3, within=within), bucket_numel=BUCKETS)
        assert not exact.equals(first) or model == "tiny"  # a block of one element is exact
        torch.testing.assert_close(first.losses, exact.losses, rtol=0.1, atol=0.1)

    run_ranks(body, 4, timeout=240)


@pytest.mark.parametrize("apart", [False, True], ids=["one memory", "places apart"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("place", [Place.CPU, Place.DISK])
def test_offload_gives_the_same_bits(
    place: Place, precision: str, apart: bool, tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = zeroshard.Offload(str(tmp_path), buffer_numel=4096, block_nbytes=4096)

    def body(rank: int) -> None:
        work = workload("frozen", steps=3, max_norm=0.5)
        here = train(rank, work, Policy.stage(3, wire=WEIGHTS), precision=PRECISIONS[precision], bucket_numel=BUCKETS)
        if apart:
            from zeroshard.storage import storages

            storages.is_cpu_memory = lambda device: False
        policy = Policy.stage(3, wire=WEIGHTS).offloaded(parameters=place, optimizer=place, offload=how)
        away = train(rank, work, policy, precision=PRECISIONS[precision], bucket_numel=BUCKETS)
        assert away.equals(here)

    run_ranks(body, 2, timeout=120)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_transports_give_the_same_bits(precision: str) -> None:
    def body(rank: int) -> None:
        runs = []
        for shared in ("0", "1"):
            os.environ["ZEROSHARD_SHARED_MEMORY"] = shared
            for wire in (BOTH, Wire("int8", "int4")):
                policy = Policy.stage(3, within=2, wire=wire)
                work = workload("tied", steps=3, max_norm=0.5)
                runs.append(train(rank, work, policy, precision=PRECISIONS[precision], bucket_numel=BUCKETS))
        assert runs[0].equals(runs[2])
        assert runs[1].equals(runs[3])
        assert not runs[0].equals(runs[1])

    run_ranks(body, 4, timeout=120)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_is_the_same(asynchronous: bool, tmp_path: Path, transport: str) -> None:
    def body(rank: int) -> None:
        policy = Policy.stage(3, within=2, wire=BOTH)

        def step(model: Stack, sharded: zeroshard.Sharded, number: int) -> None:
            model(*tokens(rank, number)).backward()
            sharded.clip_grad_norm_(0.5)
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()

        model, sharded = build(policy)
        for number in range(2):
            step(model, sharded, number)
        sharded.save(tmp_path, "there", asynchronous=asynchronous)
        step(model, sharded, 2)
        expected = whole(model)
        sharded.remove()
        model, sharded = build(policy)
        sharded.load(tmp_path, "there")
        step(model, sharded, 2)
        assert same(whole(model), expected)
        sharded.remove()

    run_ranks(body, 4, timeout=120)


# ---------------------------------------------------------------------- bytes


def noting(gather: Any, gathered: list[tuple[torch.dtype, int]]) -> Any:
    """As it is, with the rows noted."""

    def noted(self: Collectives, rows: Tensor, *rest: Any) -> Any:
        gathered.append((rows.dtype, rows.shape[1]))
        return gather(self, rows, *rest)

    return noted


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_are_what_the_formula_says(precision: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> None:
        how = PRECISIONS[precision]
        shapes: list[list[tuple[int, int]]] = []

        def inspect_rows(sharded: zeroshard.Sharded) -> None:
            shapes.append([tuple(bucket.rows.shape) for unit in sharded._schedule.units for bucket in unit.buckets])  # type: ignore[misc]

        def run(policy: Policy) -> Run:
            return train(
                rank, workload("tied", steps=3), policy, precision=how, bucket_numel=BUCKETS, inspect=inspect_rows
            )

        gathered: list[tuple[torch.dtype, int]] = []
        for kind in (Collectives, QuantizedWeights):
            monkeypatch.setattr(kind, "gather_to_compute", noting(kind.gather_to_compute, gathered))
        exact, plain = run(Policy.stage(3)), gathered[:]
        gathered.clear()
        rounded = run(Policy.stage(3, wire=WEIGHTS))
        assert gathered == plain
        assert len(plain) > 20
        assert exact.sent["all_gather"] == 3 * sum(numel * dtype.itemsize for dtype, numel in plain)
        assert rounded.sent["all_gather"] == 3 * sum(Codes(8, dtype).nbytes(numel) for dtype, numel in plain)
        assert {**rounded.sent, "all_gather": 0} == {**exact.sent, "all_gather": 0}
        for wire, bits in ((INT8, 8), (INT4, 4)):
            exact, rounded = run(Policy.stage(3, within=2)), run(Policy.stage(3, within=2, wire=wire))
            # A rank's block is a row for each host; sums cross in fp32 else.
            numels = [numel for _, numel in shapes[-1]]
            assert exact.sent["reduce_scatter across"] == 3 * sum(numels) * 4
            assert rounded.sent["reduce_scatter across"] == 3 * sum(
                Codes(bits, torch.float32).nbytes(n) for n in numels
            )
            assert rounded.sent["all_gather across"] == exact.sent["all_gather across"]

    run_ranks(body, 4, timeout=120)


# ---------------------------------------------------------------------- what users do


def test_looking_changes_nothing(transport: str) -> None:
    """Between a forward and its backward somebody looks at exact values; the backward sees rounded ones as ever."""

    def body(rank: int) -> None:
        ends = []
        for looks in (False, True):
            for kept in (False, True):
                model, sharded = build(Policy.stage(3, reshard_after_forward=not kept, wire=WEIGHTS))
                for number in range(2):
                    exact = whole(model)
                    loss = model(*tokens(rank, number))
                    if looks:
                        assert same(whole(model), exact)
                        with zeroshard.unsharded(model.blocks[1]):
                            state = model.blocks[1].state_dict()
                        assert torch.equal(state["up.weight"], exact["blocks.1.up.weight"])
                        state = model.state_dict()
                        assert torch.equal(state["embedding.weight"], exact["embedding.weight"])
                        import copy

                        copied = dict(copy.deepcopy(model).named_parameters())
                        assert all(torch.equal(value, exact[name]) for name, value in copied.items())
                    loss.backward()
                    sharded.optimizer.step()
                    sharded.optimizer.zero_grad()
                ends.append(whole(model))
                sharded.remove()
        assert all(same(one, ends[0]) for one in ends)

    run_ranks(body, 2, timeout=120)


def test_changes_in_unsharded_are_exact(transport: str) -> None:
    def body(rank: int) -> None:
        for kept in (False, True):
            model, sharded = build(Policy.stage(3, reshard_after_forward=not kept, wire=WEIGHTS))
            before = whole(model)
            model(*tokens(rank, 0))
            with zeroshard.unsharded(model, modifier_rank=1), torch.no_grad():
                model.blocks[0].up.weight[0, 0] += 1.5
                value = model.blocks[0].up.weight[0, 0].clone()
            after = whole(model)
            told = sharded.exchange_json(float(value), "values")
            assert float(after["blocks.0.up.weight"][0, 0]) == told[1]
            before["blocks.0.up.weight"][0, 0] = told[1]
            assert same(after, before)
            state = {name: torch.full_like(one, 0.1) for name, one in model.state_dict().items()}
            model.load_state_dict(state)
            assert all((one == 0.1).all() for one in whole(model).values())
            sharded.remove()

    run_ranks(body, 2, timeout=120)


class Writes(Stack):
    def forward(self, tokens: Tensor) -> Tensor:
        loss = super().forward(tokens)
        with torch.no_grad():
            self.head.weight.mul_(0.5)
        return loss


class WritesInBlock(Stack):
    def run(self, x: Tensor) -> Tensor:
        self.blocks[1].register_forward_hook(lambda block, *_: block.up.weight.data.mul_(0.5))
        self.blocks[1].register_forward_hook(lambda block, *_: block.up.bias.detach().mul_(0.5))
        return super().run(x)


def test_writes_to_rounded_values_are_refused(transport: str) -> None:
    """They would make everything that was rounded what rests."""

    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = Writes()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sharded = zeroshard.shard(model, optimizer, Policy.stage(3, wire=WEIGHTS), bucket_numel=BUCKETS)
        before = whole(model)
        with torch.no_grad(), pytest.raises(UsageError, match=r"embedding.weight was written to while .* rounded"):
            model(*tokens(rank, 0))
        assert same(whole(model), before)
        model.forward = lambda tokens: Stack.forward(model, tokens)  # type: ignore[method-assign]
        model(*tokens(rank, 0)).backward()
        sharded.optimizer.step()
        sharded.remove()

    run_ranks(body, 2)


def test_one_rank_rounds_nothing() -> None:
    for within in (None, 1):
        exact = train(0, workload(steps=3), Policy.stage(3, within=within), bucket_numel=BUCKETS)
        wire = WEIGHTS if within is None else BOTH
        assert train(0, workload(steps=3), Policy.stage(3, within=within, wire=wire), bucket_numel=BUCKETS).equals(
            exact
        )


def test_one_host_has_nothing_that_crosses() -> None:
    def body(rank: int) -> None:
        exact = train(rank, workload(steps=3), Policy.stage(3, within="host"), bucket_numel=BUCKETS)
        wired = train(rank, workload(steps=3), Policy.stage(3, within="host", wire=INT4), bucket_numel=BUCKETS)
        assert wired.equals(exact)
        assert not any("across" in kind for kind in wired.sent)

    run_ranks(body, 2)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[int(x.sum() > 0)](x)


def test_a_mixture_of_experts_that_are_units() -> None:
    def body(rank: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), Expert(), nn.Linear(6, 1))
        units = Units(leaf_classes=("Expert",))
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sharded = zeroshard.shard(model, adamw, Policy.stage(3, wire=WEIGHTS), units=units, bucket_numel=64)
        losses = []
        for number in range(6):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))
            loss = model(x).square().mean()
            loss.backward()
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
            losses.append(float(loss))
        sums = sharded.exchange_json({name: float(one.double().sum()) for name, one in whole(model).items()}, "sums")
        assert sums[0] == sums[1]
        sharded.remove()
        return losses

    for losses in run_ranks(body, 2):
        assert all(0 < loss < 10 for loss in losses)


def test_small_parameters_that_stay_whole_are_exact() -> None:
    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = Stack()
        units = Units(persistent_numel=100)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sharded = zeroshard.shard(model, optimizer, Policy.stage(3, wire=WEIGHTS), units=units, bucket_numel=BUCKETS)
        found, before = seen(model), whole(model)
        model(*tokens(rank, 0)).backward()
        assert torch.equal(found["blocks.0.norm.weight"], before["blocks.0.norm.weight"])
        assert torch.equal(found["blocks.0.up.bias"], before["blocks.0.up.bias"])
        assert not torch.equal(found["blocks.1.up.weight"], before["blocks.1.up.weight"])
        sharded.optimizer.step()
        sharded.remove()

    run_ranks(body, 2)


def test_models_that_are_born_sharded(transport: str) -> None:
    def body(rank: int) -> None:
        ends = []
        for born in (False, True):
            torch.manual_seed(0)
            if born:
                with zeroshard.sharded_init():
                    model = Stack()
            else:
                model = Stack()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            sharded = zeroshard.shard(model, optimizer, Policy.stage(3, wire=WEIGHTS), bucket_numel=BUCKETS)
            for number in range(2):
                model(*tokens(rank, number)).backward()
                sharded.optimizer.step()
                sharded.optimizer.zero_grad()
            ends.append(whole(model))
            sharded.remove()
        assert same(*ends)

    run_ranks(body, 2, timeout=120)


def test_parameters_are_frozen_and_freed_exactly() -> None:
    def body(rank: int) -> None:
        model, sharded = build(Policy.stage(3, wire=WEIGHTS))
        for number in range(3):
            model(*tokens(rank, number)).backward()
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
            before = whole(model)
            model.blocks[1].requires_grad_(number == 1)
            sharded.update_trainable()
            assert same(whole(model), before)
        sharded.remove()

    run_ranks(body, 2)


# ---------------------------------------------------------------------- names


def test_what_makes_no_sense_is_refused() -> None:
    for stage in (0, 1, 2):
        with pytest.raises(PolicyError, match=r"not sharded at rest.*stage\(3\)"):
            Policy.stage(stage, wire=WEIGHTS)
    with pytest.raises(PolicyError, match="give within"):
        Policy.stage(3, wire=INT8)
    for wire in ({"weights": "int4"}, {"weights": True}, {"gradients": "fp8"}, {"gradients": True}):
        with pytest.raises(PolicyError, match="Wire"):
            Wire(**wire)  # type: ignore[arg-type]
    assert not Policy.stage(3).wire.is_lossy
    assert str(Wire("int8", "int4")) == "weights int8, gradients across hosts int4"


@pytest.mark.parametrize(
    ("block", "wire"),
    [
        ({}, Wire()),
        ({"zero_quantized_weights": False, "zero_quantized_gradients": False}, Wire()),
        ({"zero_quantized_weights": True}, WEIGHTS),
        ({"zero_quantized_weights": True, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}, BOTH),
        ({"zero_hpz_partition_size": 2, "zero_quantized_gradients": "int4"}, INT4),
        ({"mics_shard_size": 1, "zero_quantized_gradients": "int8"}, INT8),
    ],
)
def test_keys_of_configs_mean_it(block: dict[str, Any], wire: Wire) -> None:
    assert load_config({"train_batch_size": 8, "zero_optimization": {"stage": 3, **block}}, 8).policy.wire == wire


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"stage": 2, "zero_quantized_weights": True}, "zero_quantized_weights"),
        ({"stage": 3, "zero_quantized_gradients": True}, "zero_hpz_partition_size"),
        ({"stage": 3, "zero_quantized_gradients": "fp8"}, "zero_quantized_gradients"),
        ({"stage": 3, "zero_quantized_nontrainable_weights": True}, "zero_quantized_nontrainable_weights"),
    ],
)
def test_keys_that_cannot_be_meant_are_refused(block: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _ = load_config({"train_batch_size": 8, "zero_optimization": block}, 8).policy


def test_an_engine_tells_of_it_and_skips_overflows(tmp_path: Path, transport: str) -> None:
    def body(rank: int) -> None:
        config = {
            "train_micro_batch_size_per_gpu": 3,
            "fp16": {"enabled": True, "initial_scale_power": 22, "hysteresis": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "json_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"},
            "zero_optimization": {
                "stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": "int4", "zero_hpz_partition_size": 2,
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

    run_ranks(body, 4, timeout=120)
    log = next(tmp_path.rglob("steps.jsonl"))
    about = json.loads(log.read_text().splitlines()[0])
    assert "weights int8, gradients across hosts int4" in json.dumps(about)


def test_the_command_line_says_so(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from zeroshard.cli.main import app

    zero = {"stage": 3, "zero_quantized_weights": True}
    (tmp_path / "zero.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": zero}))
    result = CliRunner().invoke(app, ["config", "check", str(tmp_path / "zero.json"), "--ranks", "2"])
    assert result.exit_code == 0
    assert "rounded on the wire, to other bits than of exact wires: weights int8" in " ".join(result.output.split())
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    with pytest.raises(UsageError, match="no plan is made of wires that round"):
        zeroshard.plan(Stack, config, world_size=2, batch=lambda size: tokens(0, 0, batch=size))


def test_parameters_are_born_exact() -> None:
    def body(rank: int) -> None:
        put_on_path()
        import deepspeed

        for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
            with pytest.raises(UsageError, match=rf"Init\({name}=...\): .* exact"):
                deepspeed.zero.Init(**{name: True})

    run_ranks(body, 1)


def test_a_compiled_model(transport: str) -> None:
    def body(rank: int) -> None:
        ends = []
        for compiles in (False, True):
            model, sharded = build(Policy.stage(3, wire=WEIGHTS))
            run = torch.compile(model, backend="eager") if compiles else model
            for number in range(2):
                run(*tokens(rank, number)).backward()
                sharded.optimizer.step()
                sharded.optimizer.zero_grad()
            ends.append(whole(model))
            sharded.remove()
        assert same(*ends)

    run_ranks(body, 2, timeout=240)
