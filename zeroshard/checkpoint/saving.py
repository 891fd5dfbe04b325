"""Owns checkpoint saving: every rank writes its own shards, all ranks agree, and then the checkpoint exists.

No rank ever holds a complete state. A save writes the stored tensors themselves. An asynchronous save writes a copy in
CPU memory while training continues.
"""

from __future__ import annotations

import hashlib
import json
import uuid
import warnings
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch import __version__ as torch_version

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.agreement import of_first, together
from zeroshard.checkpoint.display import Advance, ignore
from zeroshard.checkpoint.live_model import STATE_DTYPE, LiveModel, describe, name_of_state_dtype
from zeroshard.checkpoint.manifest import (
    BucketRecord,
    FileRecord,
    Manifest,
    ParameterRecord,
    RangeRecord,
    ShardsRecord,
    StateRecord,
    TensorRecord,
)
from zeroshard.checkpoint.node_local import Hosts, carry, own_moves, refuse_shared
from zeroshard.checkpoint.places import OWN_VALUES, digest_of, ranges_of, spans_of, tensor_name
from zeroshard.checkpoint.safetensors_file import CHUNK_NBYTES, Source, write_file
from zeroshard.checkpoint.values import Packer, are_plain, random_state, storable
from zeroshard.core.layout import Span
from zeroshard.core.model_states import Held, Trained
from zeroshard.core.placement import Placement
from zeroshard.core.storage.base import CpuStorage
from zeroshard.core.storage.buffers import memory_of
from zeroshard.core.storage.transfers import CPU, Copies
from zeroshard.core.transport.base import Collectives, nothing
from zeroshard.core.transport.tree import collect, spread
from zeroshard.core.unit import Unit, UnitState
from zeroshard.errors import CheckpointError
from zeroshard.optim.several import class_names
from zeroshard.version import __version__

_FAILED = "the save failed; earlier checkpoints have not changed.\n  "


@dataclass(frozen=True)
class Destination:
    """The place of a new checkpoint, and the options of its save; see `Checkpoints.save`."""

    folder: Path
    tag: str
    hosts: Hosts
    save_latest: bool = True
    keep_last: int | None = None

    @property
    def path(self) -> Path:
        return self.folder / self.tag


# ---------------------------------------------------------------------- one rank's part of a save


@dataclass(frozen=True)
class SavedSpan:
    """A span of one model state, counted in elements of this rank's part of the parameter.

    `placement` is the position of that part in the whole parameter.
    """

    span: Span
    state: str
    source: Source
    placement: Placement

    @property
    def name(self) -> str:
        """The tensor's name in the file."""
        return tensor_name(self.state, self.span.name, self.span.start)


@dataclass(frozen=True)
class Followed:
    """A layout that a rank's spans follow; see places.py.

    `shard` is one of `shards`. `part` is the rank's place among the `parts` ranks that divide the model.
    """

    layout: list[BucketRecord]
    shard: int
    shards: int
    part: int
    parts: int

    @classmethod
    def of(cls, layout: list[BucketRecord], shards: Collectives, parts: Collectives) -> Followed:
        return cls(layout, shards.shard, shards.world_size, parts.rank, parts.world_size)

    def spans(self, parameters: Mapping[str, ParameterRecord]) -> dict[tuple[str, int, int], Placement]:
        """Return (parameter, start, stop) of each span of this shard, with the place of its part."""
        found = {}
        for name, start, stop in spans_of(self.layout, self.shard):
            placement = parameters[name].placement(self.part, self.parts)
            if placement is not None:
                found[name, start, stop] = placement
        return found


@dataclass(frozen=True)
class Part:
    """The part of a checkpoint that one rank writes."""

    spans: Sequence[SavedSpan]
    values: dict[str, dict[str, Any]]
    """The optimizer's other values, packed, by fqn, of each parameter whose first element is in this part."""
    followed: Sequence[Followed] = ()  # empty: the manifest lists the spans
    own: dict[str, Any] = field(default_factory=dict)  # packed values that differ between ranks
    tensors: dict[str, Tensor] = field(default_factory=dict)  # those that packed values name
    own_tensors: dict[str, Tensor] = field(default_factory=dict)  # those that `own` names
    buffers: dict[str, Tensor] = field(default_factory=dict)
    arrived: Callable[[], object] = lambda: None  # waits until an accelerator's numbers and copies are in CPU memory

    @property
    def nbytes(self) -> int:
        """Bytes of the model states."""
        return sum(one.span.numel * one.source.dtype.itemsize for one in self.spans)

    def staged(self, memory: dict[str, Tensor], device: torch.device) -> Part:
        """Return a copy of this part in CPU memory, which training does not change.

        Data on an accelerator is copied into pinned memory, after the device's earlier work. The host does not wait. `memory` has
        the tensors of the copy by name; the caller keeps them for the next save.
        """
        pinned = CpuStorage(Copies(CPU), pin=True)

        def copy(name: str, tensor: Tensor) -> Tensor:
            there = memory.get(name)
            is_late = tensor.device.type != "cpu"
            if there is None or there.shape != tensor.shape or there.dtype != tensor.dtype:
                if is_late and tensor.numel():
                    slot = pinned.slot(name, tensor.numel(), tensor.dtype)
                    flat = slot.memory_in(pinned)
                    assert flat is not None
                    there = flat.view(tensor.shape)
                else:
                    there = torch.empty(tensor.shape, dtype=tensor.dtype)
                memory[name] = there
            return there.copy_(tensor.detach(), non_blocking=is_late)

        spans = []
        for one in self.spans:
            with one.source.opened() as tensor:
                spans.append(replace(one, source=Source.of(copy(one.name, tensor))))
        tensors = {name: copy(f"beside/{name}", tensor) for name, tensor in self.tensors.items()}
        own_tensors = {name: copy(f"own/{name}", tensor) for name, tensor in self.own_tensors.items()}
        buffers = {name: copy(f"buffers/{name}", tensor) for name, tensor in self.buffers.items()}
        arrived = self.arrived
        if device.type != "cpu":
            event = torch.accelerator.current_stream(device).record_event()

            def arrived() -> None:
                event.synchronize()
                self.arrived()

        return replace(
            self, spans=spans, tensors=tensors, own_tensors=own_tensors, buffers=buffers, arrived=arrived
        )  # fmt: skip


def take_snapshot(live: LiveModel, shared: Mapping[str, Any], *, exclude_frozen: bool) -> tuple[dict[str, Any], Part]:
    """Collect all values that this rank saves, without copying them. Only rank 0 saves its `shared` values.

    Returns:
        The outline of a manifest, and this rank's part.
    """
    description = describe(live).model_dump(
        exclude_defaults=True
    )  # first: every rank takes part in it, even if a later call fails
    random = random_state()
    # A resharded parameter among the user's values has no values to save. Not every parameter class reveals that.
    resharded = {}
    records = {}
    excluded = []
    for unit, entry in live.entries():
        if unit.sharded_at_rest and unit.state is not UnitState.UNSHARDED:
            resharded[id(entry.parameter)] = entry.fqn
        if exclude_frozen and not unit.trainable:
            excluded.append(entry.fqn)
            continue
        placement = entry.placement
        records[entry.fqn] = ParameterRecord(
            shape=list(placement.shape), names=list(entry.fqns), trained=unit.trainable, states={},
            dim=None if placement.is_whole else placement.dim,
        )  # fmt: skip
    packer = Packer(f"rank_{live.rank:05d}/", resharded)
    spans: list[SavedSpan] = []
    values: dict[str, dict[str, Any]] = {}  # rank 0 may hold no part of some parameters
    for held in live.states.held():
        fqn = held.named.fqn
        if fqn not in records or not live.writes(held):
            continue
        placement = held.named.placement
        spans += [SavedSpan(held.span, state, _source(held, state), placement) for state in held.states]
        if _has_first_element(held.span, placement):
            values[fqn] = {name: packer.pack(value, f"{fqn}.{name}") for name, value in held.beside.items()}
    groups = []
    if live.inner is not None and live.rank == 0:
        classes = class_names(live.inner)
        for number, (group, names) in enumerate(zip(live.inner.param_groups, live.group_names, strict=False)):
            options = packer.pack(
                {key: value for key, value in group.items() if key != "params"}, f"param_groups[{number}]"
            )
            groups.append({"names": names, "options": options, "optimizer": classes[number]})
    packed = {}
    if live.rank == 0:
        if are_plain(shared):
            packed = {key: packer.pack(value, key) for key, value in shared.items()}
        else:
            packed = packer.pack(dict(shared), "values")
    outline = {
        "mesh": live.mesh,
        "policy": {**asdict(live.context.policy), STATE_DTYPE: name_of_state_dtype(live)},
        "optimizer": live.inner and type(live.inner).__qualname__,
        "parameters": records,
        "excluded": sorted(excluded),
        "param_groups": groups,
        "values": {"shared": packed, "description": description},
    }
    own_packer = Packer(f"rank_{live.rank:05d}/own/", resharded)
    own = {"random": own_packer.pack(random, "random"), "extra_states": _extra_states(live, own_packer)}
    buffers = {name: storable(buffer, f"the buffer {name}") for name, buffer in live.buffers.items()}
    followed = _followed(live, records)
    arrivals = [packer.start_numbers(), own_packer.start_numbers()]

    def arrived() -> None:
        for arrive in arrivals:
            arrive()

    expected: dict[tuple[str, int, int], Placement] = {}
    for one in followed:
        expected |= one.spans(records)
    follows = expected == {(one.span.name, one.span.start, one.span.stop): one.placement for one in spans}
    return outline, Part(
        spans, values, followed if follows else (), own, packer.tensors, own_packer.tensors, buffers, arrived
    )


def _followed(live: LiveModel, saved: Container[str]) -> list[Followed]:
    """Return the layout of all units or, if experts have a data-parallel group of their own, that of the others and theirs."""
    context = live.context
    experts = context.experts
    apart = [unit for unit in live.units if experts is not None and unit.is_cut]
    rest = [unit for unit in live.units if unit not in apart]
    found = [Followed.of(layout_of(rest, saved), context.collectives, context.others)]
    if experts is not None:
        found.append(Followed.of(layout_of(apart, saved), experts.collectives, experts.others))
    return found


def _has_first_element(span: Span, placement: Placement) -> bool:
    return span.start == 0 and next(placement.runs(span.start, span.stop)).start == 0


def layout_of(units: Iterable[Unit], saved: Container[str]) -> list[BucketRecord]:
    """Return the buckets of all units, with the parameters that are saved."""
    found = []
    for unit in units:
        for bucket in unit.layout.buckets:
            pieces = []
            for piece in bucket.pieces:
                fqn = unit.named[piece.index].fqn
                if fqn in saved:
                    pieces.append((fqn, piece.parameter_start, piece.start, piece.numel))
            if pieces:
                found.append(BucketRecord(shard_numel=bucket.shard_numel, pieces=pieces))
    return found


def _extra_states(live: LiveModel, packer: Packer) -> dict[str, Any]:
    """Pack the modules' extra states by the modules' names, with a warning for each that cannot be packed."""
    packed = {}
    for name, module in live.modules_with_extra_states.items():
        before = dict(packer.tensors)
        try:
            packed[name] = packer.pack(module.get_extra_state(), f"get_extra_state() of {name or 'the model'}")
        except CheckpointError as error:
            packer.tensors = before
            warnings.warn(f"the checkpoint has no extra state of {name or 'the model'}: {error}", stacklevel=2)
    return packed


def _source(held: Held, state: str) -> Source:
    """Create a source for one state. It opens the whole shard, which stays in memory for the spans that follow."""

    @contextmanager
    def opened() -> Iterator[Tensor]:
        with held.shard.opened():
            tensor = held.tensor(state)
            assert tensor is not None
            yield tensor.to(dtype)

    dtype = held.state[state].dtype if state in held.state else held.dtype
    if state in held.state and isinstance(held.shard, Trained):
        dtype = held.shard.dtype_at_rest(state, dtype)
    return Source(dtype, (held.span.numel,), opened)


# ---------------------------------------------------------------------- one save


def write_checkpoint(
    outline: dict[str, Any], part: Part, to: Destination, control: Collectives, advance: Advance = ignore,
    refuse: Callable[[], None] = nothing,
) -> None:  # fmt: skip
    """Write this rank's part, agree with the other ranks, and write the manifest. Every rank must call it.

    `advance` is called with the number of bytes written. `refuse` is called after the part is written and raises if the
    values changed meanwhile.

    Raises:
        CheckpointError: some rank could not write. Every rank raises it, and the message has the reason. Earlier
            checkpoints do not change.
    """
    crcs = {name: zlib.crc32(memory_of(one.cpu().contiguous().view(-1))) for name, one in part.buffers.items()}
    digests = [digest_of(one.layout) for one in part.followed]
    first = of_first(control, {"save": uuid.uuid4().hex[:12], "buffers": crcs, "layouts": digests})
    save = first["save"]
    hosts = to.hosts
    leads = hosts.leads(control.rank)
    with together(control, "the folder of a checkpoint", _FAILED):
        if leads:
            files.clean(to.folder)
            to.path.mkdir(parents=True, exist_ok=True)
    # Buffers are the same on all ranks, except where each rank keeps its own statistics.
    buffers = [name for name in crcs if control.rank == 0 or crcs[name] != first["buffers"].get(name)]
    written = [to.path / file_name(control.rank, save)]
    try:
        report = Report()
        with together(control, "the end of a save", _FAILED):
            if not hosts.are_several and not to.path.is_dir():
                raise CheckpointError(
                    f"this rank does not see {to.path}, which rank 0 made. Name a folder that all ranks see, or save "
                    "with node_local=True (use_node_local_storage)."
                )
            report = write_part(part, written[0], to.tag, control.rank, buffers, advance)
            refuse()
        if hosts.are_several:
            moves = own_moves(control, hosts, partial(file_name, save=save), report.files[control.rank].nbytes)
            written += [to.path / move.name for move in moves if move.target == control.rank]
            with together(control, "the folders of hosts", _FAILED):
                refuse_shared(control, to.path, moves)
            with together(control, "copies on the next host", _FAILED):
                carry(control, to.path, moves)
        everyone = collect_reports(control, report, part.followed, first["layouts"], outline["parameters"])
    except CheckpointError:
        _take_back(written, to, control)
        raise
    manifest = None
    with together(control, "the contents of a checkpoint", _FAILED):
        _refuse_removed(report.files[control.rank], to)
        if everyone is not None:
            manifest = complete(outline, to.tag, files.next_time(to.folder), everyone)
    manifest = _on_each_host(manifest, hosts, control)
    with together(control, "the manifest of a checkpoint", _FAILED):
        if manifest is not None:
            finish(manifest, to, save)


def _take_back(written: Sequence[Path], to: Destination, control: Collectives) -> None:
    """Remove the files of a save that failed, and the folder if it is then empty. Every rank must call it."""
    for path in written:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    with together(control, "the end of a save that failed"):  # all files are gone: the folder may be empty
        pass
    if to.hosts.leads(control.rank):
        with suppress(OSError):
            files.remove_if_empty(to.path)


def _on_each_host(manifest: Manifest | None, hosts: Hosts, control: Collectives) -> Manifest | None:
    """Return rank 0's manifest on one rank of each host, and None on the others. Every rank must call it."""
    if not hosts.are_several:
        return manifest
    text = None if manifest is None else json.dumps(manifest.model_dump())  # pydantic's JSON lacks infinity
    data = spread(control, None if text is None else text.encode())
    return Manifest.model_validate_json(data) if hosts.leads(control.rank) else None


# ---------------------------------------------------------------------- what ranks report to rank 0


@dataclass
class Report:
    """What one rank, or several, contribute to a manifest. Reports are merged on their way to rank 0.

    A rank whose spans follow a layout adds its file and a sum. Parameters are reported by the rank with their first element.
    """

    files: dict[int, FileRecord] = field(default_factory=dict)
    """By rank."""
    states: dict[str, dict[str, str]] = field(default_factory=dict)
    """The dtype of each state, by fqn."""
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The optimizer's other values, packed, by fqn."""
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    """Those that the packed values name."""
    ranges: dict[str, dict[str, list[RangeRecord]]] = field(default_factory=dict)
    """The ranges of ranks that follow no layout, by fqn and state."""
    layouts: dict[str, list[BucketRecord]] = field(default_factory=dict)
    """Layouts that differ from rank 0's, by digest."""
    followers: dict[str, list[tuple[int, int, int, int]]] = field(default_factory=dict)
    """The ranks that follow each layout: (part, shard, rank, number of shards), by the layout's digest."""
    buffers: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rank 0's packed buffers; for other ranks with buffers, an empty dict."""
    mixed: str = ""
    """A state whose dtype differs between ranks."""
    elements: int = 0
    """The sum of `weight` for every element that was written, modulo 2^64."""

    def merged(self, other: Report) -> Report:
        """Return the report of the ranks of both. Both must no longer be used."""
        self.files |= other.files
        self.layouts |= other.layouts
        self.tensors |= other.tensors
        self.buffers |= other.buffers
        for fqn, states in other.states.items():
            own = self.states.setdefault(fqn, {})
            for state, dtype in states.items():
                if own.setdefault(state, dtype) != dtype:
                    self.mixed = (
                        self.mixed or f"{state} of {fqn} is of {own[state]} on some ranks, and of {dtype} on others"
                    )
        self.mixed = self.mixed or other.mixed
        for fqn, values in other.values.items():
            self.values.setdefault(fqn, values)
        for fqn, by_state in other.ranges.items():
            for state, ranges in by_state.items():
                self.ranges.setdefault(fqn, {}).setdefault(state, []).extend(ranges)
        for digest, ranks in other.followers.items():
            self.followers.setdefault(digest, []).extend(ranks)
        self.elements = (self.elements + other.elements) % _MODULUS
        return self

    def following(self, followed: Sequence[Followed], digests: Sequence[str]) -> Report:
        """Return this rank's report without its ranges, which follow layouts. `digests` are those of rank 0's layouts."""
        (rank,) = self.files
        states = {}
        for fqn, by_state in self.ranges.items():
            if any(one.start == 0 for ranges in by_state.values() for one in ranges):
                states[fqn] = self.states[fqn]
        own = {digest_of(one.layout): one for one in followed}
        layouts = {digest: one.layout for digest, one in own.items() if digest not in digests or rank == 0}
        followers = {digest: [(one.part, one.shard, rank, one.shards)] for digest, one in own.items()}
        return replace(self, states=states, ranges={}, layouts=layouts, followers=followers)

    def is_complete(self, parameters: Mapping[str, ParameterRecord]) -> bool:
        """Return whether the ranks wrote every element of the reported states once."""
        total = 0
        for fqn, states in self.states.items():
            numel = prod(parameters[fqn].shape) if fqn in parameters else 0
            total += sum(weight(fqn, state, dtype) for state, dtype in states.items()) * numel
        return total % _MODULUS == self.elements


_REPORTS = TypeAdapter(Report)
_MODULUS = 1 << 64


def weight(fqn: str, state: str, dtype: str) -> int:
    """Return a number for each element of a state.

    A sum of these is right if every element was written once. Otherwise it is wrong, except by a chance of 2^-64.
    """
    return int.from_bytes(hashlib.sha256(f"{state}/{fqn}:{dtype}".encode()).digest()[:8], "little")


def collect_reports(
    control: Collectives, report: Report, followed: Sequence[Followed], digests: Sequence[str],
    parameters: Mapping[str, ParameterRecord],
) -> Report | None:  # fmt: skip
    """Return the merged reports of all ranks on rank 0, and None on the others. Every rank must call it.

    `digests` are those of rank 0's layouts. If ranks do not hold the same states of a parameter, all list their ranges.
    """

    def merge(own: bytes, other: bytes) -> bytes:
        return message_of(report_of(own).merged(report_of(other)))

    everyone = None
    for own in (report.following(followed, digests) if followed else report, report):
        found = collect(control, message_of(own), merge, "each rank's part of a save")
        everyone = None if found is None else report_of(found)
        if of_first(control, everyone is None or everyone.is_complete(parameters)):
            break
    return everyone


def message_of(report: Report) -> bytes:
    """Return a report as ranks send it."""
    return json.dumps(_REPORTS.dump_python(report)).encode()  # pydantic's JSON lacks infinity


def report_of(message: bytes) -> Report:
    """Return the report in a message."""
    return _REPORTS.validate_python(json.loads(message))


def write_part(part: Part, path: Path, tag: str, rank: int, buffers: Sequence[str], advance: Advance) -> Report:
    """Write one rank's file, with the buffers named in `buffers`. Return the rank's report, in which all ranges are listed."""
    packer = Packer(f"rank_{rank:05d}/buffers/")
    packed = {name: packer.pack(part.buffers[name], f"buffers.{name}") for name in buffers}
    packer.start_numbers()()
    listed, own_tensors = dict(part.tensors), dict(part.own_tensors)
    own = dict(part.own)
    if rank == 0:  # every reader needs these
        listed |= packer.tensors
    else:
        own_tensors |= packer.tensors
        own["buffers"] = packed
    text = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    sources = {one.name: one.source for one in part.spans}
    for name, tensor in {**listed, **own_tensors, OWN_VALUES: text}.items():
        sources[name] = Source.of(tensor)
    record, offsets = write_file(path, sources, {"format": "pt", "tag": tag, "rank": str(rank)}, advance)
    report = Report(files={rank: record}, values=part.values)
    if packed or rank == 0:
        report.buffers[rank] = packed if rank == 0 else {}
    for one in part.spans:
        fqn = one.span.name
        dtype = _name(one.source.dtype)
        report.states.setdefault(fqn, {})[one.state] = dtype
        ranges = report.ranges.setdefault(fqn, {}).setdefault(one.state, [])
        ranges += ranges_of(one.placement, one.span.start, one.span.stop, rank, offsets[one.name], dtype)
        report.elements = (report.elements + weight(fqn, one.state, dtype) * one.span.numel) % _MODULUS
    for name, tensor in listed.items():
        report.tensors[name] = TensorRecord(
            dtype=_name(tensor.dtype), shape=list(tensor.shape), file=rank, offset=offsets[name]
        )
    return report


def file_name(rank: int, save: str) -> str:
    """Return the name of one rank's file in a save."""
    return f"rank_{rank:05d}.{save}.safetensors"


def complete(outline: Mapping[str, Any], tag: str, created: float, report: Report) -> Manifest:
    """Create a manifest from rank 0's outline and the merged reports of all ranks (the results of `write_part`)."""
    if report.mixed:
        raise CheckpointError(f"{report.mixed}, so no program could read it. Give it the same dtype on every rank.")
    parameters = {}
    for fqn, parameter in outline["parameters"].items():
        states = {}
        for state, dtype in report.states.get(fqn, {}).items():
            ranges = sorted(report.ranges.get(fqn, {}).get(state, []), key=lambda part: part.start)
            states[state] = StateRecord(dtype=dtype, ranges=ranges)
        update = {"states": states, "values": report.values.get(fqn, {})}
        parameters[fqn] = parameter.model_copy(update=update)
    world_size = len(report.files)
    shards: dict[tuple[str, int], list[int | None]] = {}
    for digest, ranks in sorted(report.followers.items()):
        for part, shard, rank, count in sorted(ranks):
            shards.setdefault((digest, part), [None] * count)[shard] = rank
    digests = list(dict.fromkeys(digest for digest, _ in shards))
    buffers = dict(report.buffers)
    values = {"buffers": buffers.pop(0, {}), "ranks_with_buffers": sorted(buffers)}
    return Manifest(
        **{
            **outline,
            "tag": tag,
            "created": created,
            "written_by": {"zeroshard": __version__, "torch": torch_version},
            "world_size": world_size,
            "chunk_nbytes": CHUNK_NBYTES,
            "files": [report.files[rank] for rank in range(world_size)],
            "layouts": [report.layouts[digest] for digest in digests],
            "shards": [
                ShardsRecord(layout=digests.index(digest), part=part, files=ranks)
                for (digest, part), ranks in shards.items()
            ],
            "parameters": parameters,
            "values": {**outline["values"], **values},
            "tensors": report.tensors,
        }
    )


def _refuse_removed(record: FileRecord, to: Destination) -> None:
    """Raise if a rank's file is missing or has the wrong size: another program may have removed it."""
    if not record.has_its_size(to.path):
        raise CheckpointError(
            f"{to.path / record.name} was removed or changed after this job wrote it, by another program or by "
            f"another job that saves to {to.folder}. Give each job a separate folder."
        )


def finish(manifest: Manifest, to: Destination, save: str) -> None:
    """Write the manifest after all files, then `latest` if the save sets it, and remove checkpoints that are not kept."""
    files.write_manifest(to.path, manifest, save)
    if to.save_latest:
        try:
            files.replace_file(to.folder / files.LATEST, to.tag.encode(), save)
        except CheckpointError as error:
            raise CheckpointError(f"{to.tag} itself is whole, but {error}") from error
    try:
        files.clean(to.folder)
        if to.keep_last is not None:
            files.keep_newest(to.folder, to.keep_last, to.tag, whole=not to.hosts.are_several)
    except (OSError, CheckpointError) as error:
        warnings.warn(f"{to.tag} was saved, but older checkpoints could not be removed: {error}", stacklevel=2)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
