"""The promise: settings change memory, bytes and time, but never the result. Each test covers one row of that promise."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from insides import CONNECT, transport_of
from models import MODELS, OPTIMIZERS, bfloats, two_groups, workload
from oracles import same_on_all_ranks, train_ddp, train_reference
from ranks import on_ranks
from twin import (
    ACCELERATOR,
    CPU,
    DISK,
    LARGE_BUCKETS,
    LOSS_SCALES,
    PRECISIONS,
    SMALL_BUCKETS,
    STAGES,
    TRANSPORTS,
    Setting,
    close,
    expect_equal,
    hosts,
    in_one_memory,
    places,
    run,
    same,
)
from unusual import UNUSUAL, unusual

from zeroshard import Place, Policy, Sharded
from zeroshard.core.transport import members
from zeroshard.core.transport.composed import OverHosts
from zeroshard.testing import Workload, train

PRECISION = pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
MICROBATCHES = pytest.mark.parametrize("microbatches", [1, 3])
FEW_MICROBATCHES = pytest.mark.parametrize("microbatches", [1, 2, pytest.param(3, marks=pytest.mark.full)])
CLIPPING = pytest.mark.parametrize("max_norm", [None, 0.5], ids=["unclipped", "clipped"])
LAYOUTS = {"2x2": (4, 2), "2x1": (2, 1), "1x4": (4, 4)}
"""Hosts x ranks of a host: (ranks in all, within)."""


def few_are_quick(models: list[str], count: int = 1) -> list[Any]:
    """Of models that are all trained elsewhere too, the quick set trains the first."""
    return [*models[:count], *(pytest.param(model, marks=pytest.mark.full) for model in models[count:])]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("state", ["parameters", "exp_avg_sq", "step"])
def test_a_state_counts_that_no_parameter_shows(state: str, stage: int) -> None:
    """Master weights in fp32 below the digits of bf16, and states that only the next step would use."""

    def body(rank: int) -> bool:
        def change(sharded: Sharded) -> None:
            if state == "step":
                for held in sharded.optimizer.state.values():
                    held["step"] += 1
                return
            value = sharded.states.get("head.weight", state)
            assert value is not None
            sharded.states.set("head.weight", state, value * (1 + 2.0**-20))

        runs = [
            train(rank, workload("untied", steps=1), Policy.stage(stage), precision=PRECISIONS["bf16"], inspect=inspect)
            for inspect in (None, change)
        ]
        assert same(runs[0].parameters, runs[1].parameters)
        return runs[0].equals(runs[1])

    assert not all(on_ranks(body, 2))


# ---------------------------------------------------------------------- stages and transports


@pytest.mark.ranks("ranks")
@PRECISION
@CLIPPING
@MICROBATCHES
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [4, 2])  # the quick set prefers the last
def test_stages_and_transports(
    rank: int, ranks: int, optimizer: str, microbatches: int, max_norm: float | None, precision: str
) -> None:
    work = workload(
        "tied", make_optimizer=OPTIMIZERS[optimizer], param_groups=two_groups, steps=3, microbatches=microbatches,
        max_norm=max_norm, loss_scale=LOSS_SCALES[precision],
    )  # fmt: skip
    first = expect_equal(rank, work, STAGES | TRANSPORTS, precision, LARGE_BUCKETS)
    if microbatches > 1 and precision == "fp32":  # sums in another order
        close(first[True].parameters, first[False].parameters)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("model", MODELS)
def test_models(model: str, ranks: int, microbatches: int) -> None:
    work = workload(model, param_groups=two_groups, steps=2, microbatches=microbatches, max_norm=1.0)
    on_ranks(expect_equal, ranks, work, STAGES)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("model", UNUSUAL)
def test_unusual_models(model: str, microbatches: int, ranks: int, precision: str) -> None:
    work = unusual(model, precision, microbatches)
    if model == "spectral_norm" and precision == "bf16":
        precision = "bf16, buffers too"  # it multiplies weights with buffers
    on_ranks(expect_equal, ranks, work, STAGES, precision, LARGE_BUCKETS)


@pytest.mark.parametrize("model", few_are_quick(["skipping", "tied", "called twice", "checkpointed twice reentrant"]))
def test_models_in_bf16(model: str) -> None:
    on_ranks(expect_equal, 2, workload(model, steps=2, max_norm=1.0), STAGES, "bf16")


def test_batch_norm_in_bf16() -> None:
    """torch wants weights and statistics of one dtype."""
    on_ranks(expect_equal, 2, Workload(MODELS["batch norm"], bfloats, steps=3), STAGES, "bf16, buffers too")


# ---------------------------------------------------------------------- plain PyTorch and DDP


@pytest.mark.ranks("ranks")
@pytest.mark.every
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@MICROBATCHES
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", few_are_quick(["skipping", "tied", "frozen", "called twice", "checkpointed"]))
def test_plain_pytorch(rank: int, model: str, ranks: int, microbatches: int, optimizer: str) -> None:
    """Unsharded gradients with an optimizer that is not fused give the bits of a plain loop over all ranks' batches."""
    work = workload(
        model, make_optimizer=OPTIMIZERS[optimizer], param_groups=two_groups, steps=3, microbatches=microbatches
    )
    reference = train_reference(work, ranks, rank)
    for name, setting in STAGES.items():
        done = run(rank, work, setting, bucket_numel=LARGE_BUCKETS)
        if microbatches == 1 or not setting.policy.gradients.sharded:
            assert done.equals(reference), name
        close(done.parameters, reference.parameters)


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp(rank: int, ranks: int, optimizer: str) -> None:
    # At 4 ranks DDP sums in another order, and training amplifies the last bits: a few steps show that it is the same.
    work = workload("tied", make_optimizer=OPTIMIZERS[optimizer], steps=5 if ranks == 2 else 3)
    ddp = train_ddp(rank, work)
    for name, setting in STAGES.items():
        done = run(rank, work, setting, bucket_numel=LARGE_BUCKETS)
        if ranks == 2 and optimizer != "fused AdamW":
            assert done.equals(ddp), name
        close(done.parameters, ddp.parameters, atol=1e-5)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("model", UNUSUAL)
@pytest.mark.parametrize("stage", ["stage 0", "stage 3"])
def test_unusual_models_beside_plain_pytorch(rank: int, model: str, stage: str) -> None:
    work = unusual(model)
    reference = train_reference(work, 1)
    before = work.build()[0].state_dict()
    assert any(not torch.equal(value, before[name]) for name, value in reference.parameters.items())
    done = run(rank, work, STAGES[stage])
    torch.testing.assert_close(done.losses, reference.losses, rtol=1e-5, atol=1e-6)
    close(done.parameters, reference.parameters, rtol=1e-5)
    close(done.buffers, reference.buffers, rtol=1e-5)


@pytest.mark.ranks(2)
def test_clipping_agrees_with_torch(rank: int) -> None:
    work = workload("untied", make_optimizer=OPTIMIZERS["SGD"], steps=6, max_norm=0.1)
    ddp, done = train_ddp(rank, work), run(rank, work, STAGES["stage 2"])
    assert min(done.norms) > 0.1, "the test must clip"
    close(done.parameters, ddp.parameters)


@pytest.mark.ranks(2)
def test_a_parameter_that_no_rank_used_is_left_alone(rank: int) -> None:
    """No decay, no momentum: as plain PyTorch leaves a parameter whose gradient is None."""
    work = workload("skipping", make_optimizer=lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5), steps=4)
    before = {fqn: value.clone() for fqn, value in work.build()[0].named_parameters()}
    for name, setting in STAGES.items():
        done = run(rank, work, setting)
        assert torch.equal(done.parameters["never.weight"], before["never.weight"]), name
        assert not torch.equal(done.parameters["embedding.weight"], before["embedding.weight"]), name


@pytest.mark.ranks(2)
def test_fp16_trains_near_fp32(rank: int) -> None:
    losses = []
    for precision in ("fp16", "fp32"):
        work = workload(param_groups=two_groups, steps=6, max_norm=0.5, loss_scale=LOSS_SCALES[precision])
        losses.append(run(rank, work, STAGES["stage 2"], precision=precision).losses)
    torch.testing.assert_close(*losses, rtol=2e-2, atol=2e-2)


# ---------------------------------------------------------------------- places


@PRECISION
@MICROBATCHES
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", [ACCELERATOR, CPU, DISK])
def test_places(optimizer: Place, stage: int, ranks: int, microbatches: int, precision: str, tmp_path: Path) -> None:
    """Every legal combination of places, with copies between the accelerator's memory and the CPU's."""
    work = workload(
        "tied", param_groups=two_groups, steps=2, microbatches=microbatches, max_norm=0.5,
        loss_scale=LOSS_SCALES[precision],
    )  # fmt: skip
    on_ranks(expect_equal, ranks, work, places(tmp_path, stage, optimizer), precision)
    assert not list(tmp_path.iterdir()), "files with names"


@pytest.mark.every
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", few_are_quick(list(MODELS), 3))
@pytest.mark.parametrize(("stage", "place", "parameters"), [(2, DISK, CPU), (3, DISK, DISK), (3, CPU, CPU)])
def test_models_and_optimizers_that_rest_elsewhere(
    stage: int, place: Place, parameters: Place, model: str, optimizer: str, tmp_path: Path
) -> None:
    work = workload(model, make_optimizer=OPTIMIZERS[optimizer], param_groups=two_groups, steps=2, max_norm=1.0)
    table = places(tmp_path, stage, place)
    wanted = [name for name in table if name.startswith(f"parameters: {parameters.value}, gradients: accelerator")]
    settings = {"here": STAGES["stage 3"], **{name: table[name] for name in wanted}}
    assert len(settings) == 2
    on_ranks(expect_equal, 2, work, settings)


@pytest.mark.parametrize("stage", [2, 3])
def test_places_in_one_memory(stage: int, tmp_path: Path) -> None:
    """On a CPU, the accelerator's memory is CPU memory: states are used in place."""
    work = workload("tied", param_groups=two_groups, steps=2, max_norm=0.5)
    on_ranks(expect_equal, 2, work, in_one_memory(places(tmp_path, stage, CPU)))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("apart", [False, True], ids=["in place", "apart"])
def test_states_that_leave_between_steps(apart: bool, precision: str, stage: int) -> None:
    work = workload("tied", param_groups=two_groups, steps=3, microbatches=2)
    here = Setting(Policy.stage(stage))
    settings = {"here": here, "in CPU memory": Setting(Policy.stage(stage), apart=apart, parks=CPU)}
    on_ranks(expect_equal, 2, work, settings, precision)


# ---------------------------------------------------------------------- hosts


@PRECISION
@CLIPPING
@FEW_MICROBATCHES
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.quick(2)
def test_hosts(layout: str, microbatches: int, max_norm: float | None, precision: str) -> None:
    ranks, within = LAYOUTS[layout]
    work = workload(
        "tied", make_optimizer=OPTIMIZERS["fused AdamW"], param_groups=two_groups, steps=2, microbatches=microbatches,
        max_norm=max_norm, loss_scale=LOSS_SCALES[precision],
    )  # fmt: skip
    on_ranks(expect_equal, ranks, work, hosts(within), precision)


@pytest.mark.parametrize("model", few_are_quick(["skipping", "frozen", "frozen base", "called twice", "checkpointed"]))
def test_models_over_hosts(model: str) -> None:
    on_ranks(expect_equal, 4, workload(model, steps=2, max_norm=1.0), hosts(2))


@PRECISION
@pytest.mark.parametrize("place", [CPU, DISK])
@pytest.mark.parametrize("apart", [False, True], ids=["one memory", "places apart"])
def test_places_over_hosts(apart: bool, place: Place, precision: str, tmp_path: Path) -> None:
    how = places(tmp_path, 3, place)["parameters: cpu, gradients: accelerator, optimizer: " + place.value].policy
    policy = Policy.stage(3, within=2)
    away = policy.offloaded(parameters=CPU, optimizer=place, offload=how.offload_optimizer)
    settings = {"here": Setting(policy), "elsewhere": Setting(away, apart=apart)}
    on_ranks(expect_equal, 4, workload("frozen", steps=2, max_norm=0.5), settings, precision)


@pytest.mark.ranks(2, fresh=True)
def test_the_table_names_the_transport_that_ranks_use(rank: int) -> None:
    """Where memory cannot be shared, "shared memory" is no row that passes."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(*CONNECT, refuse)
        with pytest.raises(AssertionError, match="the setting says shared memory"):
            run(rank, workload(steps=1), STAGES["stage 2"])
        run(rank, workload(steps=1), TRANSPORTS["stage 2 over gloo"])


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [4, 6, 3])
def test_ranks_that_share_memory_in_pairs(rank: int, ranks: int, stage: int) -> None:
    """As on several hosts: ranks 0 and 1 share memory, and so do the others; between the two it is gloo.

    A last host with fewer ranks is not like the others: then all communicate over gloo.
    """
    work = workload("tied", steps=2, microbatches=2, max_norm=1.0)
    runs = []
    for transport in ("0", "1"):

        def talks_over_both(sharded: Sharded, expected: bool = transport == "1" and ranks % 2 == 0) -> None:
            assert isinstance(transport_of(sharded), OverHosts) == expected

        os.environ["ZEROSHARD_SHARED_MEMORY"] = transport
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(members, "host_id", lambda: str(rank // 2))
            runs.append(train(rank, work, Policy.stage(stage), bucket_numel=SMALL_BUCKETS, inspect=talks_over_both))
        assert same_on_all_ranks(runs[-1].parameters)
    assert runs[0].equals(runs[1])
