"""Owns checkpoint saving: every rank writes its own shards, all ranks agree, and then the checkpoint exists.

No rank ever holds a complete state. A save writes the stored tensors themselves. An asynchronous save writes a copy in
CPU memory while training continues.
"""

from __future__ import annotations

import json
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import __version__ as torch_version

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.agreement import together
from zeroshard.checkpoint.live_model import LiveModel, describe
from zeroshard.checkpoint.manifest import Manifest, ParameterRecord, RangeRecord, StateRecord, TensorRecord
from zeroshard.checkpoint.node_local import Hosts, Move, broadcast, carry, refuse_shared
from zeroshard.checkpoint.safetensors_file import CHUNK_NBYTES, Source, write_file
from zeroshard.checkpoint.values import Packer, are_plain, random_state, storable
from zeroshard.collectives.base import Collectives, nothing
from zeroshard.errors import CheckpointError
from zeroshard.layout.layout import Span
from zeroshard.layout.placement import Placement
from zeroshard.observe.display import Advance, ignore
from zeroshard.optim.several import class_names
from zeroshard.schedule.unit import UnitState
from zeroshard.step.model_states import Held
from zeroshard.storage.base import CpuStorage
from zeroshard.storage.buffers import memory_of
from zeroshard.storage.transfers import CPU, Copies
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
        return f"{self.state}/{self.span.name}/{self.span.start}"


@dataclass(frozen=True)
class Part:
    """The part of a checkpoint that one rank writes."""

    spans: Sequence[SavedSpan]
    values: dict[str, dict[str, Any]]  # the optimizer's other values for each parameter, packed, by fqn
    own: dict[str, Any] = field(default_factory=dict)  # packed values that differ between ranks
    tensors: dict[str, Tensor] = field(default_factory=dict)  # those that packed values name
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
        buffers = {name: copy(f"buffers/{name}", tensor) for name, tensor in self.buffers.items()}
        arrived = self.arrived
        if device.type != "cpu":
            event = torch.accelerator.current_stream(device).record_event()

            def arrived() -> None:
                event.synchronize()
                self.arrived()

        return replace(self, spans=spans, tensors=tensors, buffers=buffers, arrived=arrived)


def take_snapshot(live: LiveModel, shared: Mapping[str, Any], *, exclude_frozen: bool) -> tuple[dict[str, Any], Part]:
    """Collect all values that this rank saves, without copying them. Only rank 0 saves its `shared` values.

    Returns:
        The outline of a manifest, and this rank's part.
    """
    description = describe(live).model_dump()  # first: every rank takes part in it, even if a later call fails
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
        records[entry.fqn] = ParameterRecord(
            shape=list(entry.placement.shape), names=list(entry.fqns), trained=unit.trainable, states={}
        )
    packer = Packer(f"rank_{live.rank:05d}/", resharded)
    spans: list[SavedSpan] = []
    values: dict[str, dict[str, Any]] = {}  # every rank packs them, since rank 0 may hold no part of some parameters
    for held in live.states.held():
        fqn = held.named.fqn
        if fqn not in records:
            continue
        if live.writes(held):
            placement = held.named.placement
            spans += [SavedSpan(held.span, state, _source(held, state), placement) for state in held.states]
        if held.beside and fqn not in values:
            values[fqn] = {name: packer.pack(value, f"{fqn}.{name}") for name, value in held.beside.items()}
    groups = []
    if live.inner is not None:
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
        "policy": asdict(live.context.policy),
        "optimizer": live.inner and type(live.inner).__qualname__,
        "parameters": records,
        "excluded": sorted(excluded),
        "param_groups": groups,
        "values": {"shared": packed, "ranks": [], "description": description},
    }
    own = {"random": packer.pack(random, "random"), "extra_states": _extra_states(live, packer)}
    buffers = {name: storable(buffer, f"the buffer {name}") for name, buffer in live.buffers.items()}
    return outline, Part(spans, values, own, packer.tensors, buffers, packer.start_numbers())


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
            yield tensor

    dtype = held.state[state].dtype if state in held.state else held.dtype
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
    first = control.exchange_json({"save": uuid.uuid4().hex[:12], "buffers": crcs}, "the start of a save")[0]
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
        report = None
        with together(control, "the end of a save", _FAILED):
            if not hosts.are_several and not to.path.is_dir():
                raise CheckpointError(
                    f"this rank does not see {to.path}, which rank 0 made. Name a folder that all ranks see, or save "
                    "with node_local=True (use_node_local_storage)."
                )
            report = write_part(part, written[0], to.tag, control.rank, buffers, advance)
            refuse()
        reports = control.exchange_json(report, "each rank's part of a save")
        if hosts.are_several:
            moves = []
            for rank, one in enumerate(reports):
                moves.append(Move(rank, hosts.keeper(rank), one["file"]["name"], one["file"]["nbytes"]))
            written += [to.path / move.name for move in moves if move.target == control.rank]
            with together(control, "the folders of hosts", _FAILED):
                refuse_shared(control, to.path, moves)
            with together(control, "copies on the next host", _FAILED):
                carry(control, to.path, moves)
    except CheckpointError:
        for path in written:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        control.exchange_json(None, "the end of a save that failed")  # all files are gone: the folder may be empty
        if leads:
            with suppress(OSError):
                files.remove_if_empty(to.path)
        raise
    manifest = None
    if control.rank == 0:
        manifest = complete(outline, to.tag, files.next_time(to.folder), reports)
    if hosts.are_several:  # only rank 0's values are saved, so all hosts get its manifest
        text = b"" if manifest is None else json.dumps(manifest.model_dump()).encode()  # pydantic's JSON lacks infinity
        manifest = Manifest.model_validate_json(broadcast(control, text, 0))
    with together(control, "the manifest of a checkpoint", _FAILED):
        if leads and manifest is not None:
            _refuse_removed(manifest, to, control.rank)
            finish(manifest, to, save)


def write_part(part: Part, path: Path, tag: str, rank: int, buffers: Sequence[str], advance: Advance) -> dict[str, Any]:
    """Write one rank's file, with the buffers named in `buffers`. Return the rank's part of the manifest, a dict of JSON values."""
    packer = Packer(f"rank_{rank:05d}/buffers/")
    own = {**part.own, "buffers": {name: packer.pack(part.buffers[name], f"buffers.{name}") for name in buffers}}
    packer.start_numbers()()
    beside = {**part.tensors, **packer.tensors}
    sources = {one.name: one.source for one in part.spans}
    sources |= {name: Source.of(tensor) for name, tensor in beside.items()}
    record, offsets = write_file(path, sources, {"format": "pt", "tag": tag, "rank": str(rank)}, advance)
    spans = []
    for one in part.spans:
        dtype = _name(one.source.dtype)
        offset = offsets[one.name]
        for runs in one.placement.runs(one.span.start, one.span.stop):
            place = [runs.start, runs.stop, offset]
            if runs.count > 1 and runs.stride > runs.numel:
                place += [runs.numel, runs.stride]
            spans.append([one.span.name, one.state, dtype, *place])
            offset += runs.numel * runs.count * one.source.dtype.itemsize
    tensors = {name: [_name(tensor.dtype), list(tensor.shape), offsets[name]] for name, tensor in beside.items()}
    return {"file": record.model_dump(), "spans": spans, "values": part.values, "own": own, "tensors": tensors}


def file_name(rank: int, save: str) -> str:
    """Return the name of one rank's file in a save."""
    return f"rank_{rank:05d}.{save}.safetensors"


def complete(outline: Mapping[str, Any], tag: str, created: float, reports: Sequence[dict[str, Any]]) -> Manifest:
    """Create a manifest from rank 0's outline and each rank's report (the result of `write_part`)."""
    states: dict[str, dict[str, StateRecord]] = {}
    values: dict[str, dict[str, Any]] = {}
    tensors: dict[str, TensorRecord] = {}
    for number, report in enumerate(reports):
        for fqn, state, dtype, start, stop, offset, *runs in report["spans"]:
            record = states.setdefault(fqn, {}).setdefault(state, StateRecord(dtype=dtype, ranges=[]))
            pattern = dict(zip(("numel", "stride"), runs, strict=False))
            record.ranges.append(RangeRecord(start=start, stop=stop, file=number, offset=offset, **pattern))
        for fqn, packed in report["values"].items():
            values.setdefault(fqn, packed)
        for name, (dtype, shape, offset) in report["tensors"].items():
            tensors[name] = TensorRecord(dtype=dtype, shape=shape, file=number, offset=offset)
    parameters = {}
    for fqn, parameter in outline["parameters"].items():
        for record in states.get(fqn, {}).values():
            record.ranges.sort(key=lambda part: part.start)
        update = {"states": states.get(fqn, {}), "values": values.get(fqn, {})}
        parameters[fqn] = parameter.model_copy(update=update)
    return Manifest(
        **{
            **outline,
            "version": files.VERSION if outline.get("mesh") is None else files.MESH_VERSION,
            "tag": tag,
            "created": created,
            "written_by": {"zeroshard": __version__, "torch": torch_version},
            "world_size": len(reports),
            "chunk_nbytes": CHUNK_NBYTES,
            "files": [report["file"] for report in reports],
            "parameters": parameters,
            "values": {**outline["values"], "ranks": [report["own"] for report in reports]},
            "tensors": tensors,
        }
    )


def _refuse_removed(manifest: Manifest, to: Destination, rank: int) -> None:
    """Raise if a file of this host's ranks is missing or has the wrong size: another program may have removed it."""
    for record in [manifest.files[one] for one in to.hosts.ranks[to.hosts.host(rank)]]:
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
