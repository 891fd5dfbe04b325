"""The promise: the policy never changes the result, to the last bit."""

from __future__ import annotations

import os

import pytest
import torch
from models import MODELS, OPTIMIZERS, bfloats, two_groups, workload

from zeroshard import Policy, Precision, Sharded
from zeroshard.collectives import meeting
from zeroshard.collectives.meeting import VARIABLE
from zeroshard.collectives.shared_memory import SharedMemory
from zeroshard.testing import Run, Workload, ranks_agree, run_ranks, train, train_ddp, train_reference

BF16 = Precision(param_dtype=torch.bfloat16)
POLICIES = [
    Policy.stage(0),
    Policy.stage(1),
    Policy.stage(2),
    Policy.stage(3),
    Policy.stage(3, reshard_after_forward=False),
]
SHARED, GLOO = "1", "0"
RUNS = {
    "overlapped": [*((policy, True, SHARED) for policy in POLICIES), (POLICIES[1], True, GLOO), (POLICIES[3], True, GLOO)],
    "one after another": [
        (POLICIES[0], True, GLOO), (POLICIES[1], False, SHARED), (POLICIES[2], True, GLOO), (POLICIES[3], False, SHARED),
        (POLICIES[4], False, GLOO),
    ],
}  # fmt: skip
"""(policy, overlap, transport), with one of each kind to compare with: what overlaps under stage 0 and 2 does under 1 and 3 too."""
SMALL_BUCKETS = 256
"""Elements: the larger parameters of the test models span several buckets."""
LARGE_BUCKETS = 10**6
"""A bucket is a unit."""


def check(
    rank: int, work: Workload, runs: str, precision: Precision | None = None, bucket_numel: int = SMALL_BUCKETS
) -> None:
    """Every run is bit-equal to the first of its kind; with several microbatches there are two kinds (docs/design.md)."""
    first: dict[bool, Run] = {}
    for policy, overlap, transport in RUNS[runs]:
        os.environ[VARIABLE] = transport
        run = train(rank, work, policy, precision=precision, overlap=overlap, bucket_numel=bucket_numel)
        assert torch.isfinite(run.losses).all()
        assert ranks_agree(run), f"ranks ended with different parameters under {policy}"
        kind = work.microbatches > 1 and policy.gradients.sharded
        assert run.equals(first.setdefault(kind, run)), f"other bits under {policy}, {overlap=}, {transport=}"
    if True in first and precision is None:
        for fqn, value in first[False].parameters.items():
            torch.testing.assert_close(first[True].parameters[fqn], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("max_norm", [None, 0.5], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("runs", RUNS)
def test_stages_are_bit_equal(
    runs: str,
    ranks: int,
    optimizer: str,
    microbatches: int,
    max_norm: float | None,
    precision: Precision | None,
    steps: int,
) -> None:
    work = workload(
        "tied", make_optimizer=OPTIMIZERS[optimizer], param_groups=two_groups, steps=steps, microbatches=microbatches,
        max_norm=max_norm,
    )  # fmt: skip
    run_ranks(check, ranks, work, runs, precision, LARGE_BUCKETS)


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("runs", RUNS)
def test_models_are_bit_equal(runs: str, model: str, ranks: int, microbatches: int) -> None:
    work = workload(model, param_groups=two_groups, steps=3, microbatches=microbatches, max_norm=1.0)
    run_ranks(check, ranks, work, runs)


@pytest.mark.parametrize("model", ["tied", "frozen base", "called twice", "checkpointed twice reentrant", "skipping"])
@pytest.mark.parametrize("runs", RUNS)
def test_models_are_bit_equal_in_bf16(runs: str, model: str) -> None:
    run_ranks(check, 2, workload(model, steps=3, max_norm=1.0), runs, BF16)


@pytest.mark.parametrize("runs", RUNS)
def test_batch_norm_in_bf16(runs: str) -> None:
    run_ranks(check, 2, Workload(MODELS["batch norm"], bfloats, steps=4), runs, BF16)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("model", ["tied", "frozen", "called twice", "checkpointed", "skipping"])
def test_equals_a_plain_loop(model: str, ranks: int, microbatches: int, optimizer: str, steps: int) -> None:
    """The oracle knows nothing of shards: unsharded gradients with an optimizer that is not fused give its very bits."""
    work = workload(
        model, make_optimizer=OPTIMIZERS[optimizer], param_groups=two_groups, steps=steps, microbatches=microbatches
    )

    def body(rank: int) -> None:
        reference = train_reference(work, ranks, rank)
        for policy in POLICIES:
            run = train(rank, work, policy)
            if microbatches == 1 or not policy.gradients.sharded:
                assert run.equals(reference)
            for fqn, value in run.parameters.items():
                torch.testing.assert_close(value, reference.parameters[fqn], rtol=1e-4, atol=1e-6)

    run_ranks(body, ranks)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_ddp(ranks: int, optimizer: str, steps: int) -> None:
    # At 4 ranks DDP sums in another order, and training amplifies the last bits: a few steps show that it is the same.
    work = workload("tied", make_optimizer=OPTIMIZERS[optimizer], steps=steps if ranks == 2 else 3)

    def body(rank: int) -> None:
        ddp = train_ddp(rank, work)
        for policy in POLICIES:
            run = train(rank, work, policy)
            if ranks == 2 and optimizer != "fused AdamW":
                assert run.equals(ddp)
            for fqn, value in run.parameters.items():
                torch.testing.assert_close(value, ddp.parameters[fqn], rtol=1e-4, atol=1e-5)

    run_ranks(body, ranks)


def test_clipping_agrees_with_torch() -> None:
    work = workload("untied", make_optimizer=OPTIMIZERS["SGD"], steps=10, max_norm=0.1)

    def body(rank: int) -> None:
        ddp, run = train_ddp(rank, work), train(rank, work, Policy.stage(2))
        assert min(run.norms) > 0.1, "the test must clip"
        for fqn, value in run.parameters.items():
            torch.testing.assert_close(value, ddp.parameters[fqn], rtol=1e-4, atol=1e-6)

    run_ranks(body, 2)


def test_a_parameter_that_no_rank_used_is_left_alone() -> None:
    """No decay, no momentum: as plain PyTorch leaves a parameter whose gradient is None."""
    work = workload("skipping", make_optimizer=lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5), steps=5)

    def body(rank: int) -> None:
        before = {fqn: value.clone() for fqn, value in work.build()[0].named_parameters()}
        for policy in POLICIES:
            run = train(rank, work, policy)
            assert torch.equal(run.parameters["never.weight"], before["never.weight"])
            assert not torch.equal(run.parameters["embedding.weight"], before["embedding.weight"])

    run_ranks(body, 2)


def talks_over_both(sharded: Sharded, expected: bool) -> None:
    collectives = sharded._context.collectives
    assert (isinstance(collectives, SharedMemory) and collectives.over_gloo is not None) == expected


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [3, 4])
def test_ranks_that_share_memory_in_pairs_are_bit_equal(
    ranks: int, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on several hosts: ranks 0 and 1 share memory, and so do the others; between the two it is gloo."""

    def body(rank: int) -> None:
        runs = []
        for transport in (GLOO, SHARED):
            os.environ[VARIABLE] = transport
            meeting.host_id = lambda: str(rank // 2)
            runs.append(
                train(
                    rank,
                    workload("tied", steps=3, microbatches=2, max_norm=1.0),
                    Policy.stage(stage),
                    bucket_numel=SMALL_BUCKETS,
                    inspect=lambda sharded, transport=transport: talks_over_both(sharded, transport == SHARED),
                )
            )
            assert ranks_agree(runs[-1])
        assert runs[0].equals(runs[1])

    run_ranks(body, ranks)
