"""What grows with the number of ranks, counted on one rank of 16,384: of a start, a step, a wait, a save and a load."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from insides import waits_in_the_store
from models import Stack, tokens
from one_of_many import REPORTS, STATES, Model, OneOfMany, Requests, Training, llama_70b, values_of
from ranks import RankError, run_ranks
from twin import build, step, update, whole

from zeroshard import Policy
from zeroshard.checkpoint.display import ignore
from zeroshard.checkpoint.loading import Reader, plan_for, requests_for
from zeroshard.checkpoint.manifest import MANIFEST, read_manifest
from zeroshard.checkpoint.node_local import Hosts
from zeroshard.checkpoint.places import digest_of, spans_of
from zeroshard.checkpoint.safetensors_file import Contents
from zeroshard.checkpoint.saving import Destination, Report, message_of, write_checkpoint, write_part
from zeroshard.core.layout import Span
from zeroshard.core.placement import Placement, Runs
from zeroshard.core.transport.choose import create_collectives
from zeroshard.core.transport.grouped import PointToPoint
from zeroshard.core.transport.members import Members
from zeroshard.core.transport.rounds import partners_of
from zeroshard.core.transport.tree import collect, spread
from zeroshard.core.transport.watch import Told, Watch
from zeroshard.errors import CollectiveError
from zeroshard.model.shard import Backend, shard_on

RANKS = 16_384
ROUNDS = 14
"""log2(RANKS)"""
REAL = (6, 10_000, 10_001)
"""Ranks whose files are real, beside rank 0's."""


def leaves(value: Any) -> int:
    """Count the numbers, strings and other single values of JSON."""
    if isinstance(value, dict):
        return sum(map(leaves, value.values()))
    return sum(map(leaves, value)) if isinstance(value, list) else 1


@pytest.fixture(scope="module")
def model() -> Model:
    made = Model(llama_70b(), RANKS)
    assert sum(prod(shape) for shape in made.shapes.values()) == 70_553_706_496
    return made


@pytest.fixture(scope="module")
def saved(model: Model, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, OneOfMany]:
    """The checkpoint that rank 0 completes, and its connections."""
    folder = tmp_path_factory.mktemp("many")
    path = folder / "step100"
    own = model.part(0)

    def write_real() -> dict[int, Report]:
        real = {}
        for rank in REAL:
            part = model.part(rank)
            assert part.followed is not None
            report = write_part(part, path / f"rank_{rank:05d}.0123456789ab.safetensors", "step100", rank, [], ignore)
            real[rank] = report.following(part.followed, [digest_of(model.layout)])
        return real

    control = OneOfMany(0, RANKS, model.completed_by(own, write_real), {})
    write_checkpoint(model.outline, own, Destination(folder, "step100", Hosts([list(range(RANKS))])), control)
    return path, control


class Counting(Reader):
    """A reader that keeps the numbers of the files that it opens."""

    def __init__(self, *given: Any) -> None:
        self.opened: set[int] = set()
        super().__init__(*given)

    def contents(self, number: int) -> Contents:
        self.opened.add(number)
        return super().contents(number)


def test_a_manifest_has_entries_for_parameters_and_for_ranks(model: Model, saved: tuple[Path, OneOfMany]) -> None:
    body = json.loads((saved[0] / MANIFEST).read_bytes())
    pieces = sum(len(bucket["pieces"]) for bucket in body["layouts"][0])
    assert pieces < 2 * len(model.shapes)
    assert all("ranges" not in state for one in body["parameters"].values() for state in one["states"].values())
    assert leaves(body) < 4 * RANKS + 20 * len(model.shapes)
    assert len((saved[0] / MANIFEST).read_bytes()) < 150 * RANKS + 800 * len(model.shapes)


def test_rank_0_receives_a_message_of_each_rank_below_it(saved: tuple[Path, OneOfMany]) -> None:
    """In each of a save's agreements, of which one has a record for each rank."""
    control = saved[1]
    assert control.calls["sent"] == 0
    assert control.calls["received"] <= 6 * ROUNDS
    assert control.calls["broadcasts"] <= 7
    assert control.received["transfer"] < 200 * RANKS


@pytest.mark.quick(3)
@pytest.mark.parametrize(("rank", "below"), [(10_001, 0), (10_000, 4), (RANKS // 2, ROUNDS - 1)])
def test_any_other_rank_sends_one_message(rank: int, below: int, model: Model, tmp_path: Path) -> None:
    first = {"save": "0123456789ab", "buffers": {}, "layouts": [digest_of(model.layout)]}

    def collected(peer: int, label: str) -> bytes:
        if label != REPORTS:
            return b""
        return message_of(model.report_of_others(range(peer, peer + (peer & -peer)), {}))

    control = OneOfMany(rank, RANKS, collected, {0: json.dumps(first).encode(), 3: b"true"})
    (tmp_path / "step100").mkdir()
    hosts = Hosts([list(range(RANKS))])
    write_checkpoint(model.outline, model.part(rank), Destination(tmp_path, "step100", hosts), control)
    agreements = 5
    assert control.calls["received"] <= 2 * below * agreements
    assert control.calls["sent"] <= 2 * agreements
    assert control.sent["transfer"] < 200 * (rank & -rank) + 2000, "a record for each rank below it, and its own"
    assert not (tmp_path / "step100" / MANIFEST).exists()


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("ranks", "rank", "opened"), [(RANKS, 10_000, [10_000]), (RANKS // 2, 5_000, [10_000, 10_001]), (RANKS, 6, [6])]
)
def test_a_load_opens_the_files_with_its_shards(
    ranks: int, rank: int, opened: list[int], saved: tuple[Path, OneOfMany]
) -> None:
    model = Model(llama_70b(), ranks)
    reader = Counting(saved[0], read_manifest(saved[0]))
    spans = list(spans_of(model.layout, rank))
    found = 0
    for fqn, start, stop in spans:
        for state in STATES:
            find = reader.find(fqn, state)
            found += len(find(Runs(start, stop - start, stop - start)))
            out = torch.empty(stop - start)
            whole = Placement.whole(model.shapes[fqn])
            if fqn.startswith(("lm_head", "model.norm", "model.layers.7.")):
                reader.read(requests_for(plan_for(find, Span(fqn, start, stop), whole), torch.float32, out))
                assert torch.equal(out, values_of(state, start, stop))
    assert sorted(reader.opened) == opened
    assert found <= 2 * len(opened) * len(STATES) * len(spans)
    assert reader.own(opened[0])["rank"] == opened[0]
    assert sorted(reader.opened) == opened


# ---------------------------------------------------------------------- a start, a step, and a wait


@pytest.mark.quick(3)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("rank", "ranks", "rounds"), [(10_001, RANKS, ROUNDS), (3, 12_000, 14), (11_999, 12_000, 1)])
def test_a_start_and_a_step_send_a_message_in_each_round(rank: int, ranks: int, rounds: int, stage: int) -> None:
    """12,000 ranks are no power of two: some send one message only, and others one more."""
    network = Stack()
    parameters = len(list(network.parameters()))
    transport = Training(rank, ranks)
    adamw = torch.optim.AdamW(network.parameters(), lr=1e-2)
    backend = Backend(lambda *_, **__: transport, join_ranks=lambda _: None)
    sharded = shard_on(backend, network, adamw, Policy.stage(stage), None, 500_000, overlap=True)

    def counted(agreements: int, nbytes: int) -> None:
        """Check what was sent since the last call."""
        assert transport.calls["agreements"] <= agreements
        assert transport.calls["sent"] == transport.calls["received"] == rounds * transport.calls["agreements"]
        assert 0 < transport.sent["exchange"] <= rounds * nbytes
        transport.calls.clear()
        transport.sent.clear()

    counted(2, 500)
    for number in range(3):
        theirs = partial(torch.nn.utils.clip_grad_norm_, network.parameters())
        clip = partial(sharded.clip_grad_norm_ if number < 2 else theirs, 1.0)
        update(network(*tokens(rank % 100, number)), adamw, clip)
        order = 4 * parameters  # the first step agrees on the order of buckets
        counted(3, 2 * 2 * (parameters + 30) + 8 * parameters + 2 * order)
    assert transport.partners <= set(partners_of(rank, ranks))
    assert len(transport.partners) <= ROUNDS


def test_a_wait_reads_no_other_rank_and_a_failure_reads_them_at_once() -> None:
    told = json.dumps(Told("a gather", True, None, "train.py:7", [5]))
    others = [rank for rank in range(RANKS) if rank not in (5, 9)]
    store: Any = Requests(waits_in_the_store(others, told))
    watch = Watch(store, range(RANKS), 9, 30.0)
    watch.enter("a gather")
    time.sleep(0.1)
    watch.leave()
    assert not store.requests
    mine, found, reaches_store = watch.ask("a gather", [5], [5])
    watch.close()
    assert mine.has_failed and reaches_store
    assert found == dict.fromkeys(others, Told("a gather", True, None, "train.py:7", [5]))
    assert store.requests["set"] == store.requests["append"] == 1
    assert store.requests.total() < 50


@pytest.mark.full
def test_64_real_ranks_connect_to_6_for_messages() -> None:
    def body(rank: int) -> tuple[int, int]:
        def sockets() -> int:
            # The folder's own descriptor is closed by now, so its link is broken; `resolve` does not mind.
            return sum(link.resolve().name.startswith("socket:") for link in [*Path("/proc/self/fd").iterdir()])

        assert dist.group.WORLD is not None
        members = Members.of(dist.group.WORLD, torch.device("cpu"))
        watch = Watch(members.root, members.ranks, members.own, math.inf)
        before = sockets()
        messages = PointToPoint(members, torch.device("cpu"), watch, only_messages=True)
        found = [messages.agree(bytes([rank < 63]), "an answer", [1.0 / (1 + rank)]) for _ in range(3)]
        assert all((one.every, one.some) == (b"\0", b"\1") for one in found)
        data = collect(messages, bytes([rank]), lambda one, other: bytes([max(one + other)]), "messages")
        assert spread(messages, data) == bytes([63])
        after = sockets()
        dist.barrier()
        messages.close()
        watch.close()
        return after - before, messages.sent["exchange"]

    answers = run_ranks(body, 64, timeout=300.0)
    for sockets, sent in answers:
        assert sockets <= 6 + 2, "one for each round, the one that listens, and the watchdog's"
        assert sent == 3 * 6 * (8 + 2)


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shared memory", "gloo"], indirect=True)
@pytest.mark.parametrize("over", ["tensors", "messages"])
def test_when_one_of_32_ranks_dies_all_others_name_it_within_2_seconds(
    over: str, transport: str, tmp_path: Path
) -> None:
    victim = 11

    def body(rank: int) -> None:
        torch.set_num_threads(1)
        made = create_collectives(None, torch.device("cpu"))  # it owns the watchdog
        collectives = made.control() if over == "messages" else made
        rows = torch.zeros(32, 8)

        def work() -> None:
            if over == "tensors":
                collectives.all_gather(rows, 0, "rows").wait()
            collectives.agree(b"x", "an answer")

        try:
            for number in itertools.count():
                if number == 3 and rank == victim:
                    (tmp_path / "died").write_text(str(time.time()))
                    os._exit(1)
                work()
        except CollectiveError as error:
            (tmp_path / f"error.{rank}").write_text(f"{time.time()}\n{error}")
            time.sleep(3)  # an error must arrive before a process ends
            os._exit(0)

    with pytest.raises(RankError, match="1 of"):
        run_ranks(body, 32, timeout=120.0)
    died = float((tmp_path / "died").read_text())
    for rank in range(32):
        if rank != victim:
            at, text = (tmp_path / f"error.{rank}").read_text().split("\n", maxsplit=1)
            assert f"rank {victim} closed the connection" in text
            assert float(at) - died < 2


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shared memory", "gloo"], indirect=True)
def test_64_real_ranks_save_and_48_load(transport: str, tmp_path: Path) -> None:
    """And each of them sends, receives and opens as few as one of 16,384."""

    def body(rank: int) -> tuple[int, int]:
        network, sharded = build(3)
        if dist.get_world_size() == 64:
            step(network, sharded, rank % 2, 0)
            control = sharded.checkpoints.control
            before = control.sent["transfer"]
            sharded.save(tmp_path, "a")
            sent = control.sent["transfer"] - before
            assert control.sent["exchange"] == 0
        else:
            sharded.load(tmp_path)
            sent = 0
        total = sum(float(value.double().sum()) for value in whole(network).values())
        return sent, round(total * 1e6)

    saved = run_ranks(body, 64, timeout=300.0)
    assert len({total for _, total in saved}) == 1
    for rank, (sent, _) in enumerate(saved[1:], start=1):
        assert sent < 3500 + 400 * (rank & -rank), "a record for each rank below it, and its own"
    loaded = run_ranks(body, 48, timeout=300.0)
    assert {total for _, total in loaded} == {saved[0][1]}
    body_of = json.loads((tmp_path / "a" / MANIFEST).read_text())
    assert leaves(body_of) < 4 * 64 + 60 * len(body_of["parameters"]) + 200
