"""What accelerators' backends are asked for: a launch for a unit, no wait of the host, and the bits of the other collectives.

The class for such backends runs here over gloo, which has the same collectives; on an accelerator nothing else of it changes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Stack, Untied, tokens, workload

import zeroshard
from zeroshard import CollectiveError, Policy, Precision
from zeroshard.collectives import choose
from zeroshard.collectives.alone import Alone
from zeroshard.collectives.base import Collectives
from zeroshard.collectives.grouped import Grouped
from zeroshard.collectives.members import Members
from zeroshard.collectives.native import Native
from zeroshard.collectives.watch import NOTICE_VARIABLE, Watch
from zeroshard.gradients.norm import coefficient_of, norm_of, scale_, sums_of_squares
from zeroshard.testing import Workload, run_ranks, train

CPU = torch.device("cpu")
SMALL_BUCKETS = 256
"""Elements: several buckets in each unit of the test models."""


class Once:
    """A coalesced reduction's work. gloo's puts the sums where they go at every wait, also when that memory is somebody else's."""

    def __init__(self, work: dist.Work) -> None:
        self._work, self._is_over = work, False

    def wait(self) -> None:
        if not self._is_over:
            self._work.wait()
            self._is_over = True


@contextmanager
def native(monkeypatch: pytest.MonkeyPatch, *, together: bool) -> Iterator[Counter[str]]:
    """Models sharded inside talk over `Native`. Gives the launches and their sizes: how many collectives each was."""
    launches: Counter[str] = Counter()

    class OverGloo(Native):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.launches_together = together

        def _launch(self, kind: str, begun: list[Any]) -> None:
            launches[kind] += 1
            launches[f"{kind} parts"] += len(begun)
            super()._launch(kind, begun)
            if len(begun) > 1:
                work: Any = Once(begun[0].transfer._works[0][0])
                for one in begun:
                    one.transfer.begin([(work, None)])

    with monkeypatch.context() as patched:
        patched.setattr(choose, "_best", OverGloo)
        yield launches


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", ["untied", "called twice", "frozen"])
def test_a_launch_for_a_unit_changes_no_bits(
    name: str, overlap: bool, microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks a sum has one order, so that even the other collectives' bits are these."""

    def body(rank: int) -> None:
        work = workload(name, steps=3, microbatches=microbatches, max_norm=0.5)
        for stage in range(4):

            def run() -> Any:
                return train(rank, work, Policy.stage(stage), overlap=overlap, bucket_numel=SMALL_BUCKETS)  # noqa: B023

            expected = run()
            for together in (False, True):
                with native(monkeypatch, together=together) as launches:
                    assert run().equals(expected), f"other bits at stage {stage}, {together=}"
                for kind in ("gather", "reduce"):
                    parts, launched = launches[f"{kind} parts"], launches[kind]
                    assert (0 < launched < parts) if together else (launched == parts > 0)

    run_ranks(body, 2)


def test_the_buckets_of_a_unit_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of stage 2: a reduction and a gather for each unit, and one gather for the norm."""

    def body(rank: int) -> None:
        with native(monkeypatch, together=True) as launches:
            torch.manual_seed(0)
            model = Stack()
            adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
            sharded = zeroshard.shard(model, adamw, Policy.stage(2), bucket_numel=SMALL_BUCKETS)
            units = len(model.blocks) + 1
            for step in range(3):
                launches.clear()
                model(*tokens(rank, step)).backward()
                sharded.clip_grad_norm_(0.5)
                sharded.optimizer.step()
                sharded.optimizer.zero_grad()
                assert launches["reduce"] == units
                assert launches["gather"] == units + 1
                assert launches["reduce parts"] > 2 * units

    run_ranks(body, 2)


def test_what_has_begun_is_launched_after_an_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks, and this one, wait for it."""

    def body(rank: int) -> None:
        with native(monkeypatch, together=True):
            collectives = choose.create_collectives(None, CPU)
        rows = torch.zeros(2, 4)
        rows[rank] = rank + 1
        with pytest.raises(KeyError), collectives.together():
            pending = collectives.all_gather(rows, 0, "rows")
            raise KeyError
        pending.wait()
        assert rows[:, 0].tolist() == [1, 2]
        collectives.close()

    run_ranks(body, 2)


@pytest.mark.parametrize("together", [True, False])
def test_transfers_are_started_at_once(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each to each other rank, and one that a rank sits out."""

    def body(rank: int) -> None:
        started: list[int] = []
        batch = dist.batch_isend_irecv
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda moves: started.append(len(moves)) or batch(moves))  # type: ignore[func-returns-value]
        with native(monkeypatch, together=together):
            collectives = choose.create_collectives(None, CPU)
        pairs = [(source, target) for source in range(3) for target in range(3) if source != target]
        values = [torch.full((5,), 10.0 * source + rank) for source, _ in pairs]
        with collectives.together():
            pending = [
                collectives.transfer(value, source, target, "a transfer")
                for value, (source, target) in zip(values, pairs, strict=True)
            ]
        for one in pending:
            one.wait()
        for value, (source, target) in zip(values, pairs, strict=True):
            assert value[0] == 10.0 * source + (source if rank == target else rank)
        assert started == ([4] if together else [1] * 4)
        collectives.close()

    run_ranks(body, 3)


class HeadOnRankZero(Untied):
    """Of the root's buckets one is complete early on rank 0, and at the end of the backward on others."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) if dist.get_rank() == 0 else self.run(self.embedding(tokens)).square().mean()


@pytest.mark.parametrize("transport", ["shared memory", "gloo"], indirect=True)
@pytest.mark.parametrize("together", [True, False])
def test_gathers_and_reductions_start_in_one_order_on_all_ranks(
    together: bool, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a rank takes another path, its gradients come later, and its launches must not: others wait for them.

    Backends have two communicators, whose kernels wait for each other's place on the device; without one, ranks wait inside of the
    backward.
    """

    def body(rank: int) -> list[str]:
        work = Workload(HeadOnRankZero, tokens, steps=4)
        order: list[str] = []
        launch = Native._launch

        def note(self: Native, kind: str, begun: list[Any]) -> None:
            order.append(f"{kind} {begun[0].transfer._label}")
            launch(self, kind, begun)

        expected = train(rank, work, Policy.stage(2), bucket_numel=SMALL_BUCKETS)  # gathers nothing in a backward
        assert train(rank, work, Policy.stage(3), bucket_numel=SMALL_BUCKETS).equals(expected)
        monkeypatch.setattr(Native, "_launch", note)
        with native(monkeypatch, together=together):
            assert train(rank, work, Policy.stage(3), bucket_numel=SMALL_BUCKETS).equals(expected)
        return order

    first, second = run_ranks(body, 2)
    assert len(first) > 40
    assert first == second


def of_kind(kind: str) -> Collectives:
    if kind == "native":
        assert dist.group.WORLD is not None
        members = Members.of(dist.group.WORLD, CPU)
        return Native(members, CPU, 1.0, Watch(members.root, members.ranks, members.own, 30.0))
    return choose.create_collectives(None, CPU)


@pytest.mark.parametrize("kind", ["native", "chosen"])
def test_values_and_messages_of_all_ranks(kind: str) -> None:
    def body(rank: int) -> None:
        collectives = of_kind(kind)
        own = torch.tensor(rank + 0.1, dtype=torch.float64)
        values, messages = collectives.exchange_values(own, bytes([rank]), "values")
        assert values.tolist() == [0.1, 1.1, 2.1]
        assert messages == [b"\0", b"\1", b"\2"]
        assert collectives.exchange_values(None, b"x", "no values")[1] == [b"x"] * 3
        with pytest.raises(CollectiveError, match=r"ask(ed)? for the norm.*the opposite"):
            collectives.exchange_values(own if rank == 1 else None, b"x", "the norm")

    run_ranks(body, 3)


def test_one_rank_has_its_value_alone() -> None:
    value = torch.tensor(0.1, dtype=torch.float64)
    assert Alone().exchange_values(value, b"x", "values") == (value.reshape(1), [b"x"])


def test_a_model_that_is_born_sharded_makes_no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Communicators are dear, and nothing says when the last such parameter is gone: they use the user's own group."""

    def body(rank: int) -> None:
        def over_gloo(members: Members, device: torch.device, *arguments: Any, lasting: bool = True) -> Native:
            return Native(members, device, *arguments, lasting=lasting)

        made = list[Members]()
        registered = Members.registered
        monkeypatch.setattr(Members, "registered", lambda self: made.append(self) or registered(self))  # type: ignore[func-returns-value]
        monkeypatch.setattr(choose, "_best", over_gloo)
        for _ in range(2):
            torch.manual_seed(0)
            with zeroshard.sharded_init():
                model = Stack()
            assert torch.isfinite(model.head.weight.norm())  # brings the whole together
        assert not made
        torch.manual_seed(0)
        whole = Stack()
        sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters()), Policy.stage(3))
        assert len(made) == 2
        with zeroshard.unsharded(model):
            for one, other in zip(model.parameters(), whole.parameters(), strict=True):
                assert torch.equal(one, other)
        sharded.remove()

    run_ranks(body, 2)


class Lines(logging.Handler):
    """What was said on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("zeroshard").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_what_a_device_waits_for_in_vain_is_told_before_its_backend_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has gone on; the rank whose device is not late says nothing."""
    monkeypatch.setenv(NOTICE_VARIABLE, "0.5")

    def body(rank: int) -> None:
        said, collectives = Lines(), choose.create_collectives(None, CPU)
        assert isinstance(collectives, Grouped)
        watch, late = collectives.watch, threading.Event()
        watch.follow("all-gather of h.1", lambda: True)
        if rank == 0:
            watch.follow("all-gather of h.2", late.is_set)
            watch.follow("all-gather of h.3", late.is_set)
            while not said.lines:
                time.sleep(0.02)
            assert said.lines[0].startswith("rank 0 has waited ")
            assert "for all-gather of h.2; rank 1 is not waiting for any rank" in said.lines[0]
            late.set()
            while watch._is_posted:
                time.sleep(0.02)
        dist.barrier()
        assert len(said.lines) == (rank == 0)
        collectives.close()

    run_ranks(body, 2)


# ---------------------------------------------------------------------- sums


@pytest.mark.parametrize("said", [None, torch.bfloat16])
def test_narrow_gradients_travel_in_fp32_where_each_sum_is_rounded(
    said: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user says otherwise; and not where sums are made in fp32 in any case."""

    def body(rank: int) -> None:
        precision = Precision(torch.bfloat16, reduce_dtype=said)
        for wide in (False, True):
            travelled = set[torch.dtype]()

            class Noting(Native):
                rounds_each_sum = wide

                def reduce_scatter(self, rows: torch.Tensor, *arguments: Any) -> Any:
                    travelled.add(rows.dtype)  # noqa: B023
                    return super().reduce_scatter(rows, *arguments)

            with monkeypatch.context() as patched:
                patched.setattr(choose, "_best", Noting)
                model = Stack()
                sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters()), precision=precision)
            model(*tokens(rank, 0)).backward()
            sharded.optimizer.step()
            expected = torch.float32 if wide and said is None else torch.bfloat16
            assert travelled == {expected}
            assert sharded.dtypes.reduce == expected
            sharded.remove()

    run_ranks(body, 2)


def test_doubles_stay_doubles() -> None:
    for own, wire in ((torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float16, torch.float32)):
        assert Precision().resolve(own, rounds_each_sum=True).reduce == wire
        assert Precision().resolve(own).reduce == own


# ---------------------------------------------------------------------- the norm


@pytest.mark.parametrize("norm", [3.0, 0.25, float("inf"), float("nan")])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_coefficient_is_the_same_number_wherever_it_is_computed(norm: float, max_norm: float | None) -> None:
    there = coefficient_of(torch.tensor(norm, dtype=torch.float64), max_norm, 8.0)
    assert isinstance(there, torch.Tensor)
    assert there.item() == coefficient_of(norm, max_norm, 8.0)


@pytest.mark.accelerator
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_coefficients_stay_on_the_accelerator(dtype: torch.dtype) -> None:
    device = torch.accelerator.current_accelerator()
    flats = [torch.randn(numel, device=device).to(dtype) for numel in (1, 1000, 70_001)]
    sums = sums_of_squares(flats)
    for flat, squares in zip(flats, sums, strict=True):
        torch.testing.assert_close(squares.cpu(), flat.cpu().double().square().sum(), rtol=1e-4, atol=0)
    norm = norm_of(torch.stack(sums))
    assert isinstance(norm, torch.Tensor)
    assert norm.device == flats[0].device
    expected = [flat.cpu() * 0.5 for flat in flats]
    scale_(flats, torch.full((), 0.5, dtype=torch.float64, device=device))
    assert all(torch.equal(flat.cpu(), half) for flat, half in zip(flats, expected, strict=True))


@pytest.mark.accelerator
@pytest.mark.parametrize("stage", range(4))
def test_clipping_gives_what_is_read_when_it_is_asked_for(stage: int) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch.manual_seed(0)
    model = Stack().to(device)
    sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=1e-2), Policy.stage(stage))
    model(tokens(0, 0)[0].to(device)).backward()
    before = sharded.optimizer.grad_norm()
    norm = sharded.clip_grad_norm_(before / 2)
    assert isinstance(norm, torch.Tensor)
    assert float(norm) == before
    assert not sharded.optimizer.overflow
    assert sharded.optimizer.grad_norm() == pytest.approx(before / 2, rel=1e-5)
    sharded.remove()


@pytest.mark.accelerator
def test_gradients_that_are_not_finite_are_left_and_named() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch.manual_seed(0)
    model = Stack().to(device)
    sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=1e-2), Policy.stage(2))
    (model(tokens(0, 0)[0].to(device)) * float("inf")).backward()
    sharded.clip_grad_norm_(1.0)
    assert sharded.optimizer.overflow
    assert sharded.optimizer.not_finite()
    sharded.remove()
