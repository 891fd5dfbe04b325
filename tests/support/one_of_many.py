"""One rank of thousands: the real bookkeeping runs on it, and stand-ins give the messages of the other ranks."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.manifest import BucketRecord, FileRecord, ParameterRecord
from zeroshard.checkpoint.places import digest_of, spans_of
from zeroshard.checkpoint.safetensors_file import Source
from zeroshard.checkpoint.saving import Followed, Part, Report, SavedSpan, layout_of, message_of, weight
from zeroshard.core.layout import Span, UnitLayout, lay_out
from zeroshard.core.placement import Placement
from zeroshard.core.transport.base import Collectives, Done, ReceivedRows, SummedRows, Work
from zeroshard.core.transport.grouped import PointToPoint
from zeroshard.core.transport.rounds import Swap
from zeroshard.core.transport.tree import FIRST_NBYTES

STATES = ("parameters", "exp_avg", "exp_avg_sq")
BUCKET_NUMEL = 500_000_000
STEP = {"step": {"$scalar": ["float32", 100.0]}}
REPORTS = "each rank's part of a save"
"""The label of the messages with the ranks' reports."""
Collected = Callable[[int, str], bytes]
"""Returns the message of a rank below this one in the tree: (that rank, the label)."""


class OneOfMany(PointToPoint):
    """The connections for small messages of one rank, which counts its messages.

    Args:
        collected: returns the messages of other ranks.
        spread: the messages that rank 0 sends to all, by number; the others are empty.
    """

    def __init__(self, rank: int, world_size: int, collected: Collected, spread: dict[int, bytes]) -> None:
        Collectives.__init__(self)
        self.rank, self.world_size = rank, world_size
        self.calls: Counter[str] = Counter()
        self.received: Counter[str] = Counter()  # bytes
        self._collected, self._spread = collected, spread
        self._rest: dict[int | str, bytes] = {}
        self._spreads = 0

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Work:
        assert self.rank in (source, target) and source != target
        if self.rank == source:
            self.calls["sent"] += 1
            self.sent["transfer"] += tensor.nbytes
            return Done()
        self.calls["received"] += 1
        self.received["transfer"] += tensor.nbytes
        self._fill(tensor, source, lambda: self._collected(source, label))
        return Done()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        assert source == 0
        self.calls["broadcasts"] += 1
        if self.rank != 0:
            self._fill(tensor, "spread", self._next_spread)

    def _next_spread(self) -> bytes:
        self._spreads += 1
        return self._spread.get(self._spreads - 1, b"")

    def _fill(self, tensor: Tensor, key: int | str, make: Callable[[], bytes]) -> None:
        """Fill a first message, or the one that follows it."""
        rest = self._rest.pop(key, b"")
        if not rest:
            data = make()
            message = len(data).to_bytes(8, "little") + data
            rest, message = message[FIRST_NBYTES:], message[:FIRST_NBYTES].ljust(FIRST_NBYTES)
            if rest:
                self._rest[key] = rest
        else:
            message = rest
        assert len(message) == tensor.nbytes
        tensor.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        raise AssertionError(f"{label} goes from each rank to each other")


class Training(OneOfMany):
    """The transport of one rank that trains. The others give the same answers as this rank, and zeros for tensors."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, lambda *_: b"", {})
        self.partners: set[int | None] = set()
        """The ranks with which messages were swapped."""

    def operation(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def swaps(self, label: str) -> Swap:
        def swap(data: bytes, receiver: int | None, sender: int | None) -> bytes:
            assert receiver != self.rank != sender and {receiver, sender} <= {None, *range(self.world_size)}
            if receiver is not None:
                self.calls["sent"] += 1
                self.sent["exchange"] += len(data)
            self.calls["received"] += sender is not None
            self.partners |= {receiver, sender} - {None}
            if label == "the order of buckets":  # rank 0 completed them in the order of their numbers
                count = len(data) // 2 // 4
                data = 2 * struct.pack(f"<{count}I", *range(count))
            return b"" if sender is None else data

        self.calls["agreements"] += 1
        return swap

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self.calls["broadcasts"] += 1

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Work:
        own = rows[self.rank].clone()
        rows.zero_()
        rows[self.rank] = own
        return Done()

    def workspace_numel(self, rows: Tensor) -> int:
        return 0

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> SummedRows:
        return ReceivedRows((), [rows[self.rank]], divisor)


class Requests:
    """A store in this process that counts its requests. It holds keys that exist from the start."""

    def __init__(self, values: dict[str, str]) -> None:
        self.values = {key: value.encode() for key, value in values.items()}
        self.requests: Counter[str] = Counter()

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: str) -> None:
        self.requests["set"] += 1
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return all(key in self.values for key in keys)

    def append(self, key: str, value: str) -> None:
        self.requests["append"] += 1
        self.values[key] = self.values.get(key, b"") + value.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests["multi_get"] += 1
        return [self.values[key] for key in keys]


def llama_70b() -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of each unit's parameters, by name: the root, and 80 layers."""
    width, hidden, key = 8192, 28672, 1024
    units: list[dict[str, tuple[int, ...]]] = [
        {"model.embed_tokens.weight": (128256, width), "model.norm.weight": (width,), "lm_head.weight": (128256, width)}
    ]
    for number in range(80):
        of_layer = {
            "self_attn.q_proj.weight": (width, width), "self_attn.k_proj.weight": (key, width),
            "self_attn.v_proj.weight": (key, width), "self_attn.o_proj.weight": (width, width),
            "mlp.gate_proj.weight": (hidden, width), "mlp.up_proj.weight": (hidden, width),
            "mlp.down_proj.weight": (width, hidden), "input_layernorm.weight": (width,),
            "post_attention_layernorm.weight": (width,),
        }  # fmt: skip
        units.append({f"model.layers.{number}.{name}": shape for name, shape in of_layer.items()})
    return units


class Model:
    """The parts of a model on many ranks, as a save sees them. Elements have values that tell their places."""

    def __init__(self, shapes: list[dict[str, tuple[int, ...]]], world_size: int) -> None:
        self.world_size = world_size
        self.shapes = {fqn: shape for unit in shapes for fqn, shape in unit.items()}
        units: Any = [
            SimpleNamespace(layout=self._lay_out(unit), named=[SimpleNamespace(fqn=fqn) for fqn in unit])
            for unit in shapes
        ]
        self.layout: list[BucketRecord] = layout_of(units, self.shapes)
        self.records = {
            fqn: ParameterRecord(shape=list(shape), names=[fqn], trained=True, states={})
            for fqn, shape in self.shapes.items()
        }
        self.outline = {
            "mesh": None, "policy": {}, "optimizer": "AdamW", "parameters": self.records, "excluded": [],
            "param_groups": [], "values": {"shared": {}, "description": {}},
        }  # fmt: skip

    def _lay_out(self, unit: dict[str, tuple[int, ...]]) -> UnitLayout:
        return lay_out([prod(shape) for shape in unit.values()], self.world_size, BUCKET_NUMEL)

    def part(self, rank: int) -> Part:
        """Return what a rank saves."""
        spans = []
        values = {}
        for fqn, start, stop in spans_of(self.layout, rank):
            placement = Placement.whole(self.shapes[fqn])
            if start == 0:
                values[fqn] = STEP
            for state in STATES:
                spans.append(SavedSpan(Span(fqn, start, stop), state, _source(state, start, stop), placement))
        return Part(spans, values, [Followed(self.layout, rank, self.world_size, 0, 1)], own={"rank": rank})

    def completed_by(self, own: Part, real: Callable[[], dict[int, Report]] = dict) -> Collected:
        """Return the messages to rank 0, whose part is `own`, of a save that is complete.

        `real` returns the reports of ranks that wrote files. The others have none, but report as if they had.
        """
        reports: dict[int, Report] = {}

        def collected(peer: int, label: str) -> bytes:
            if label != REPORTS:
                return b""
            if not reports:
                reports.update(real())
            merged = self.report_of_others(range(peer, min(2 * peer, self.world_size)), reports)
            if 2 * peer < self.world_size:
                return message_of(merged)
            elsewhere = set(self.shapes) - {one.span.name for one in own.spans if one.span.start == 0}
            for fqn in elsewhere.difference(*(report.states for report in reports.values())):
                merged.states[fqn] = dict.fromkeys(STATES, "float32")
                merged.values[fqn] = STEP
            others = [report.elements for rank, report in reports.items() if rank < peer]
            merged.elements = (self.elements() - elements_of(own) - sum(others)) % (1 << 64)
            return message_of(merged)

        return collected

    def report_of_others(self, ranks: range, real: dict[int, Report]) -> Report:
        """Return the merged reports of some ranks: real ones where they are given, and others of ranks that wrote no files."""
        found = Report()
        digest = digest_of(self.layout)
        for rank in ranks:
            report = real.get(rank)
            if report is None:
                record = FileRecord(
                    name=f"rank_{rank:05d}.0123456789ab.safetensors", nbytes=50_000_000 + rank, checksum=rank
                )
                report = Report(files={rank: record}, followers={digest: [(0, rank, rank, self.world_size)]})
            found = found.merged(report)
        return found

    def elements(self) -> int:
        """Return the sum of weights over all elements of the model."""
        weights = [
            weight(fqn, state, "float32") * prod(shape) for fqn, shape in self.shapes.items() for state in STATES
        ]
        return sum(weights)


def elements_of(part: Part) -> int:
    """Return the sum of weights over the elements of a part."""
    return sum(weight(one.span.name, one.state, "float32") * one.span.numel for one in part.spans)


def values_of(state: str, start: int, stop: int) -> Tensor:
    """Return the values of some elements of a state."""
    return (torch.arange(start, stop) % 10_000_019).float() + STATES.index(state)


def _source(state: str, start: int, stop: int) -> Source:
    @contextmanager
    def opened() -> Iterator[Tensor]:
        yield values_of(state, start, stop)

    return Source(torch.float32, (stop - start,), opened)
