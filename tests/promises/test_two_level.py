"""The promise: with hosts, the place of parameters never changes the result, and every policy sums host by host."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from insides import padded_numel
from ranks import on_ranks
from twin import build, close, everything, gpt_batch, same, step, steps, whole

import zeroshard
from zeroshard import CollectiveError, ConfigError, Place, Policy, PolicyError, Precision, Residency, UsageError
from zeroshard.core.transport.base import Alone, Done, Work, sum_into
from zeroshard.core.transport.choose import create_collectives
from zeroshard.core.transport.composed import ComposedGather, OverHosts, TwoLevel, cut
from zeroshard.core.transport.grouped import PointToPoint
from zeroshard.core.transport.members import Members
from zeroshard.core.transport.shared_memory import SharedMemory
from zeroshard.core.transport.watch import Watch
from zeroshard.engine.config.load import load_config
from zeroshard.testing import run_ranks, train
from zeroshard.testing.gpt import GPT, GPTConfig

CPU = torch.device("cpu")


def test_the_sum_is_the_topologys() -> None:
    """(g0 + g1) + (g2 + g3), in fp32 at least, divided last: other bits than in the order of ranks."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(4, 64, generator=generator).to(torch.bfloat16) for _ in range(4)]

    def body(rank: int) -> bool:
        two = create_collectives(None, CPU, within=2)
        flat = create_collectives(None, CPU)
        assert two.shard == [0, 2, 1, 3][rank]
        assert two.owner(two.shard) == rank
        out, plain = torch.empty(64), torch.empty(64)
        for collectives, into in ((two, out), (flat, plain)):
            rows = given[rank].clone()
            workspace = torch.empty(collectives.workspace_numel(rows), dtype=rows.dtype)
            collectives.reduce_scatter(rows, workspace, 0, "reduce", collectives.world_size).finish(
                into, accumulate=False
            )
        parts = [torch.empty(64), torch.empty(64)]
        own = [one[two.shard] for one in given]
        sum_into(own[:2], 1.0, parts[0], False)
        sum_into(own[2:], 1.0, parts[1], False)
        expected = torch.empty(64)
        sum_into(parts, 4.0, expected, False)
        assert torch.equal(out, expected)
        return torch.equal(out, plain) and two.shard == flat.shard

    assert not all(on_ranks(body, 4))


@pytest.mark.ranks(4)
def test_every_operation(rank: int, transport: str) -> None:
    collectives = create_collectives(None, CPU, within=2)
    assert isinstance(collectives, TwoLevel)
    kind = SharedMemory if transport == "shared memory" else PointToPoint
    assert isinstance(collectives.inside, kind)
    assert collectives.exchange(bytes([rank]), "ranks") == [bytes([other]) for other in range(4)]
    assert collectives.exchange_json({"n": "x" * rank}, "json") == [{"n": "x" * other} for other in range(4)]
    assert [collectives.owner(shard) for shard in range(4)] == [0, 2, 1, 3]
    rows = torch.zeros(4, 16)
    rows[collectives.shard] = rank
    for _ in range(2):
        collectives.all_gather(rows, 0, "gather").wait()
        assert rows[:, 0].tolist() == [0.0, 2.0, 1.0, 3.0]
    for source in range(4):
        value = torch.full((3,), float(rank))
        collectives.broadcast(value, source)
        assert value.tolist() == [source] * 3
        for target in range(4):
            value = torch.full((5,), float(rank))
            collectives.transfer(value if rank in (source, target) else torch.empty(1), source, target, "one").wait()
            assert value.tolist() == [source if rank == target else rank] * 5
    control = collectives.control()
    assert control.exchange(bytes([rank]), "ranks") == [bytes([other]) for other in range(4)]
    control.close()
    collectives.close()


@pytest.mark.ranks(4)
def test_bytes_count_where_ranks_at_one_place_are_on_several_machines(rank: int) -> None:
    """The transport across is then made of two transports, and both count."""
    assert dist.group.WORLD is not None
    members = Members.of(dist.group.WORLD, CPU)
    watch = Watch(members.root, members.ranks, members.own, 30.0)
    machines = [[0, 1], [2, 3]]
    collectives = TwoLevel(members, CPU, watch, 1, lambda *given: OverHosts(*given, machines, SharedMemory))
    collectives.all_gather(torch.zeros(4, 16), 0, "gather").wait()
    # The own row to the neighbour and to the other machine, and the row that came from there to the neighbour.
    assert collectives.sent == {"all_gather across": 3 * 64}
    collectives.exchange(b"x", "the end")
    collectives.close()
    watch.close()


@pytest.mark.ranks(2)
def test_hosts_that_make_no_difference_cost_nothing(rank: int) -> None:
    """One host, and no word of hosts: the collectives are those of one level."""
    for within in (None, 2, "host"):
        collectives = create_collectives(None, CPU, within=within)  # type: ignore[arg-type]
        assert not isinstance(collectives, TwoLevel)
        assert collectives.inside is collectives
        assert collectives.across is None
        collectives.close()


def test_what_makes_no_sense_is_refused() -> None:
    for within in (0, -1, True, "machine", 1.5):
        with pytest.raises(PolicyError, match="within takes a number of ranks"):
            Policy.stage(3, within=within)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="per_host needs sharded parameters"):
        replace(Policy.stage(3), parameters=Residency(sharded=True, per_host=True))
    with pytest.raises(PolicyError, match="for parameters"):
        replace(Policy.stage(3, within=2), optimizer=Residency(sharded=True, per_host=True))
    with pytest.raises(PolicyError, match="every host would write"):
        Policy.stage(3, within=2).offloaded(parameters=Place.DISK, path="/tmp")
    with pytest.raises(UsageError, match="does not divide the 4 ranks"):
        cut(4, 3)
    with pytest.raises(UsageError, match="does not divide the 1 ranks"):
        create_collectives(None, CPU, within=2)
    assert isinstance(create_collectives(None, CPU, within=1), Alone)
    assert isinstance(create_collectives(None, CPU, within="host"), Alone)
    for block, words in (
        ({"zero_hpz_partition_size": 3}, "does not divide the 8 ranks"),
        ({"mics_shard_size": 4, "zero_hpz_partition_size": 2}, "two numbers of ranks"),
    ):
        with pytest.raises(ConfigError, match=words):
            _ = load_config({"train_batch_size": 8, "zero_optimization": {"stage": 3, **block}}, 8).policy


@pytest.mark.parametrize(
    ("block", "within"),
    [
        ({}, None),
        ({"zero_hpz_partition_size": 1}, None),
        ({"zero_hpz_partition_size": 2}, 2),
        ({"mics_shard_size": 4, "mics_hierarchical_params_gather": True}, 4),
        ({"mics_shard_size": -1, "zero_hpz_partition_size": "2"}, 2),
        ({"mics_shard_size": 2, "zero_hpz_partition_size": 2}, 2),
    ],
)
def test_keys_of_configs_mean_it(block: dict[str, Any], within: int | None) -> None:
    policy = load_config({"train_batch_size": 8, "zero_optimization": {"stage": 3, **block}}, 8).policy
    assert policy == replace(policy, within=within, parameters=Residency(sharded=True, per_host=within is not None))


@pytest.mark.parametrize("value", [True, "int8", "int4"])
def test_quantised_gradients_have_no_effect(value: bool | str) -> None:
    def policy(**block: Any) -> Policy:
        zero = {"stage": 3, "zero_hpz_partition_size": 2, **block}
        return load_config({"train_batch_size": 8, "zero_optimization": zero}, 8).policy

    with pytest.warns(UserWarning, match="zero_quantized_gradients has no effect"):
        assert policy(zero_quantized_gradients=value) == policy(zero_quantized_gradients=False)
    for made in (lambda: Policy.stage(3, within=2, wire="int8"), lambda: zeroshard.Wire):
        with pytest.raises(UsageError, match="reduce_dtype"):
            made()


# ---------------------------------------------------------------------- memory and bytes


@pytest.mark.ranks(4)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_and_memory_are_what_the_formulas_say(rank: int, precision: str, transport: str) -> None:
    """Across: (H - 1) / H of the partial sums in fp32, and of the updated parameters, over the ranks of a host."""
    config = GPTConfig(layers=4, width=96, heads=4, context=16)
    how = None if precision == "fp32" else Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16)
    sizes: list[int] = []

    def inspect(sharded: zeroshard.Sharded) -> None:
        sizes.append(padded_numel(sharded))

    work = zeroshard.testing.Workload(lambda: GPT(config), gpt_batch, steps=3)
    run = train(rank, work, Policy.stage(3, within=2), precision=how, inspect=inspect)
    for kind, expected in run.formula.items():
        assert run.memory[kind] == pytest.approx(expected, rel=0.02), kind
    numel, itemsize = sizes[0], 4 if how is None else 2
    # Of 2 hosts of 2, each rank sends a half of its half.
    assert run.sent["reduce_scatter across"] == 3 * numel // 4 * 4
    assert run.sent["all_gather across"] == 3 * numel // 4 * itemsize
    assert run.sent["reduce_scatter"] == 3 * numel // 2 * itemsize
    assert run.sent["all_gather"] <= 3 * 2 * numel // 2 * itemsize


# ---------------------------------------------------------------------- what users do


LOADS = {
    "two-level": (Policy.stage(3, within=2), Policy.stage(3, within=2)),
    "one level under hosts": (Policy.stage(2), Policy.stage(3, within=2)),
    "flat": (Policy.stage(3, within=2), Policy.stage(3)),
    "stage 1": (Policy.stage(3, within=2), Policy.stage(1, within=2)),
    "one host": (Policy.stage(3, within=2), Policy.stage(3, within=1)),
}
"""The policies of a save, and of the load."""


@pytest.mark.ranks(4)
@pytest.mark.quick(2)
@pytest.mark.parametrize("case", LOADS)
def test_checkpoints_load_under_any_hosts(rank: int, case: str, tmp_path: Path, transport: str) -> None:
    first, second = LOADS[case]
    model, sharded = build(first)
    steps(model, sharded, rank, range(2))
    sharded.save(tmp_path, "there")
    assert json.loads((tmp_path / "there" / "manifest.json").read_text())["policy"]["within"] == first.within
    saved = everything(sharded)
    step(model, sharded, rank, 2)
    expected = whole(model)
    sharded.remove()
    model, sharded = build(second)
    sharded.load(tmp_path, "there")
    assert same(everything(sharded), saved)
    step(model, sharded, rank, 2)
    if first.within == second.within:
        assert same(whole(model), expected)
    else:
        close(whole(model), expected, rtol=1e-3, atol=1e-4)
    sharded.remove()


@pytest.mark.ranks(4)
def test_states_are_set_and_changes_kept_on_every_host(rank: int, transport: str) -> None:
    """What one rank writes, or all set, is everywhere: in what rests for other hosts too."""
    model, sharded = build(Policy.stage(3, within=2))
    step(model, sharded, rank, 0)
    with zeroshard.unsharded(model, modifier_rank=3), torch.no_grad():
        if rank == 3:
            model.embedding.weight.fill_(0.25)
    assert bool((whole(model)["embedding.weight"] == 0.25).all())
    shape = model.blocks[0].up.weight.shape
    new = torch.arange(float(shape.numel())).view(shape)
    sharded.states.set("blocks.0.up.weight", "parameters", new)
    assert torch.equal(whole(model)["blocks.0.up.weight"], new)
    with pytest.raises(UsageError, match="without a modifier rank"):  # noqa: SIM117
        with zeroshard.unsharded(model), torch.no_grad():
            model.embedding.weight.mul_(2)
    assert bool((whole(model)["embedding.weight"] == 0.25).all())
    before = whole(model)
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    sharded.update_trainable()
    assert same(whole(model), before)
    step(model, sharded, rank, 1)
    after = whole(model)
    assert torch.equal(after["blocks.1.up.weight"], before["blocks.1.up.weight"])
    assert not torch.equal(after["blocks.2.up.weight"], before["blocks.2.up.weight"])
    sharded.remove()
    assert same({name: value.detach() for name, value in model.named_parameters()}, after)


def test_a_lone_reader_needs_nobody(transport: str) -> None:
    """Between steps a rank may read an unsharded parameter, and no other needs to come."""

    def body(rank: int) -> float:
        model, sharded = build(Policy.stage(2, within=2))
        step(model, sharded, rank, 0)
        seen = float(model.embedding.weight.sum()) if rank == 1 else 0.0
        dist.barrier()
        return seen if rank == 1 else float(model.embedding.weight.sum())

    assert len(set(run_ranks(body, 4, collective_timeout=10))) == 1


# ---------------------------------------------------------------------- who is missing


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("shares", ["1", pytest.param("0", marks=pytest.mark.full)], ids=["shared memory", "gloo"])
def test_a_dead_rank_is_named_on_every_host(
    shares: str, victim: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ZEROSHARD_SHARED_MEMORY", shares)

    def body(rank: int) -> None:
        model, sharded = build(Policy.stage(3, within=2))
        step(model, sharded, rank, 0)
        if rank == victim:
            os._exit(0)
        with pytest.raises(CollectiveError) as caught:
            steps(model, sharded, rank, range(1, 4))
        (tmp_path / str(rank)).write_text(str(caught.value))
        os._exit(0)

    with pytest.raises(FileNotFoundError, match="result"):  # of all that ends so
        run_ranks(body, 4, collective_timeout=30.0)
    told = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert set(told) == set(range(4)) - {victim}
    assert any(f"rank {victim} closed" in text for text in told.values()), told


@pytest.mark.ranks(4, fresh=True, collective_timeout=4.0)
def test_ranks_that_diverge_are_named(rank: int, transport: str) -> None:
    model, sharded = build(Policy.stage(3, within=2))
    step(model, sharded, rank, 0)
    if rank == 2:
        sharded.optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
    with pytest.raises(CollectiveError, match="no longer do the same thing"):
        steps(model, sharded, rank, range(1, 4))


def test_a_gather_that_was_not_passed_on_fails_again() -> None:
    """A reader that caught the first error must not take rows that never came for values."""

    def pass_on() -> list[Work]:
        raise CollectiveError("a rank of this host is gone")

    gather = ComposedGather(Done(), pass_on)
    for _ in range(2):
        with pytest.raises(CollectiveError, match="is gone"):
            gather.wait()
