"""Owns the saving of a checkpoint: every rank writes its own shards, all agree, then it exists. Called by checkpoints.

Nothing is ever whole on a rank: what is written are the very tensors that are at rest. An asynchronous save copies them to CPU
memory first, and writes behind the training.
"""

from __future__ import annotations

import threading
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.chunks import CHUNK_NBYTES, Lying, write_file
from zeroshard.checkpoint.manifest import FileRecord, Manifest, ParameterRecord, RangeRecord, StateRecord, TensorRecord
from zeroshard.checkpoint.values import Packer, storable
from zeroshard.collectives.base import Collectives
from zeroshard.errors import CheckpointError
from zeroshard.policy import Policy
from zeroshard.schedule.unit import Unit
from zeroshard.step.model_states import PARAMETERS, Held, ModelStates
from zeroshard.storage.raw_memory import memory_of


@dataclass(frozen=True)
class Piece:
    """A range of one model state of one parameter: what this rank writes of it."""

    fqn: str
    state: str
    start: int
    held: Held

    @property
    def name(self) -> str:
        """In the file."""
        return f"{self.state}/{self.fqn}/{self.start}"

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype if self.state == PARAMETERS else self._tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.held.numel,)

    @contextmanager
    def opened(self) -> Iterator[Tensor]:
        """The elements, in memory. Those of one shard follow one another, so that each shard is brought there once."""
        with self.held.shard.opened():
            yield self._tensor

    @property
    def _tensor(self) -> Tensor:
        tensor = self.held.value if self.state == PARAMETERS else self.held.along(self.state)
        assert tensor is not None
        return tensor


@dataclass(frozen=True)
class Copied(Lying):
    """As `Piece`, of elements that training does not touch."""

    fqn: str
    state: str
    start: int

    @property
    def name(self) -> str:
        """In the file."""
        return f"{self.state}/{self.fqn}/{self.start}"


@dataclass(frozen=True)
class Snapshot:
    """What one rank has to say at the moment of a save.

    Attributes:
        pieces: this rank's part of the model states.
        parameters: every parameter's record, without states.
        values: by fqn, what the optimizer keeps beside, packed.
        shared: client state, schedulers, counters, packed; rank 0's counts.
        own: what differs from rank to rank (random state, buffers), packed.
        tensors: those that packed values name.
        buffers: the checksums of this rank's buffers.
    """

    pieces: Sequence[Piece | Copied]
    parameters: dict[str, ParameterRecord]
    excluded: list[str]
    param_groups: list[dict[str, Any]]
    optimizer: str | None
    policy: Policy
    values: dict[str, dict[str, Any]]
    shared: dict[str, Any]
    own: dict[str, Any]
    tensors: dict[str, Tensor]
    buffers: dict[str, Tensor] = field(default_factory=dict)

    def staged(self, memory: dict[str, Tensor]) -> Snapshot:
        """A copy in CPU memory, which training does not touch.

        Args:
            memory: what the copies lie in, by name; kept by the caller, so that the next save need not allocate it anew.
        """

        def copy_piece(piece: Piece | Copied) -> Copied:
            with piece.opened() as tensor:
                return Copied(copy(piece.name, tensor), piece.fqn, piece.state, piece.start)

        def copy(name: str, tensor: Tensor) -> Tensor:
            there = memory.get(name)
            if there is None or there.shape != tensor.shape or there.dtype != tensor.dtype:
                there = memory[name] = torch.empty(tensor.shape, dtype=tensor.dtype)
            return there.copy_(tensor.detach())

        return replace(
            self,
            pieces=[copy_piece(piece) for piece in self.pieces],
            tensors={name: copy(f"beside/{name}", tensor) for name, tensor in self.tensors.items()},
            buffers={name: copy(f"buffers/{name}", tensor) for name, tensor in self.buffers.items()},
        )


@dataclass(frozen=True)
class Where:
    """The folder of all checkpoints, the tag of this one, and what is done when it is whole."""

    folder: Path
    tag: str
    save_latest: bool = True
    keep_last: int | None = None


def take_snapshot(
    model: nn.Module, units: Sequence[Unit], states: ModelStates, optimizer: torch.optim.Optimizer | None, groups: list[list[str]],
    policy: Policy, rank: int, shared: Mapping[str, Any], own: Mapping[str, Any], exclude_frozen: bool,
) -> Snapshot:  # fmt: skip
    """Look at what is there. Nothing is copied.

    Raises:
        CheckpointError: a value is neither JSON nor a tensor.
    """
    packer = Packer(f"rank_{rank:05d}/")
    values: dict[str, dict[str, Any]] = {}
    pieces = []
    excluded = {entry.fqn for unit in units for entry in unit.named if not unit.trainable} if exclude_frozen else set()
    for held in states.held():
        if held.named.fqn in excluded:
            continue
        if held.owner == rank:
            pieces += list(_pieces(held))
        rest = {name: value for name, value in held.state.items() if held.along(name) is None}
        if rest and held.named.fqn not in values:
            values[held.named.fqn] = {name: packer.pack(v, f"{held.named.fqn}.{name}") for name, v in rest.items()}
    parameters = {
        entry.fqn: ParameterRecord(shape=list(entry.shape), names=list(entry.fqns), trained=unit.trainable, states={})
        for unit in units
        for entry in unit.named
        if entry.fqn not in excluded
    }
    param_groups = [
        {
            "names": names,
            "options": packer.pack(
                {key: value for key, value in group.items() if key != "params"}, f"param_groups[{i}]"
            ),
        }
        for i, (group, names) in enumerate(zip(optimizer.param_groups if optimizer else [], groups, strict=False))
    ]
    return Snapshot(
        pieces,
        parameters,
        sorted(excluded),
        param_groups,
        type(optimizer).__qualname__ if optimizer is not None else None,
        policy,
        values,
        {key: packer.pack(value, key) for key, value in shared.items()} if rank == 0 else {},
        {key: packer.pack(value, key) for key, value in own.items()},
        packer.tensors,
        {name: storable(buffer, f"the buffer {name}") for name, buffer in persistent_buffers(model)},
    )


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a state dict holds."""
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer.detach()


def _pieces(held: Held) -> Iterator[Piece]:
    for name in (PARAMETERS, *held.state):
        if name == PARAMETERS or held.along(name) is not None:
            yield Piece(held.named.fqn, name, held.start, held)


# ---------------------------------------------------------------------- writing


def write_checkpoint(snapshot: Snapshot, where: Where, control: Collectives) -> None:
    """Write this rank's part, agree with the others, and let the checkpoint exist. Every rank must call it.

    Raises:
        CheckpointError: on every rank, if any rank could not write: says which and why. What was there before is as it was.
    """
    folder = where.folder / where.tag
    own_crcs = {name: zlib.crc32(memory_of(_cpu(buffer))) for name, buffer in snapshot.buffers.items()}
    hello = control.exchange_json({"save": uuid.uuid4().hex[:12], "buffers": own_crcs}, "the begin of a save")
    save = hello[0]["save"]
    path = folder / f"rank_{control.rank:05d}.{save}.safetensors"
    if control.rank == 0:
        _prepare(where, folder, control)
    else:
        _raise_errors(control.exchange_json(None, "the folder of a checkpoint"))
    # Buffers are the same on all ranks but where each keeps statistics of its own.
    different = [name for name in own_crcs if control.rank == 0 or own_crcs[name] != hello[0]["buffers"].get(name)]
    try:
        report = write_part(snapshot, path, where.tag, control.rank, different)
    except Exception as error:  # the others wait for this rank's word
        report = {"error": f"rank {control.rank}: {error}"}
    reports = control.exchange_json(report, "the end of a save")
    if any("error" in one for one in reports):
        with suppress(OSError):
            path.unlink(missing_ok=True)
        control.exchange_json(None, "the end of a save that failed")
        if control.rank == 0:
            with suppress(OSError):
                files.remove_if_empty(folder)
        _raise_errors(reports)
    if control.rank != 0:
        _raise_errors(control.exchange_json(None, "the manifest of a checkpoint"))
        return
    problem = _attempt(lambda: finish_save(snapshot, where, save, reports))
    _raise_errors(control.exchange_json(problem, "the manifest of a checkpoint"))


def write_part(snapshot: Snapshot, path: Path, tag: str, rank: int, buffers: Sequence[str]) -> dict[str, Any]:
    """Write one rank's file, with those of its buffers; returns what the manifest needs to know of it, as JSON."""
    packer = Packer(f"rank_{rank:05d}/buffers/")
    own = {**snapshot.own, "buffers": {n: packer.pack(snapshot.buffers[n], f"buffers.{n}") for n in buffers}}
    beside = {**snapshot.tensors, **packer.tensors}
    tensors = {**{piece.name: piece for piece in snapshot.pieces}, **{n: Lying(t) for n, t in beside.items()}}
    written = write_file(path, tensors, {"format": "pt", "tag": tag, "rank": str(rank)})
    return {
        "nbytes": written.nbytes,
        "checksums": written.checksums,
        "pieces": [
            [p.fqn, p.state, _name(p.dtype), p.start, p.start + p.shape[0], written.offsets[p.name]]
            for p in snapshot.pieces
        ],
        "values": snapshot.values,
        "own": own,
        "tensors": {n: [_name(t.dtype), list(t.shape), written.offsets[n]] for n, t in beside.items()},
    }


def _prepare(where: Where, folder: Path, control: Collectives) -> None:
    def prepare() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be made: {error.strerror}.") from error
        files.clean(where.folder)
        folder.mkdir(exist_ok=True)

    _raise_errors(control.exchange_json(_attempt(prepare), "the folder of a checkpoint"))


def _attempt(work: Callable[[], None]) -> dict[str, str] | None:
    try:
        work()
    except Exception as error:  # the others wait for rank 0's word
        return {"error": f"rank 0: {error}"}
    return None


def _raise_errors(reports: Sequence[dict[str, Any] | None]) -> None:
    errors = [one["error"] for one in reports if one is not None and "error" in one]
    if errors:
        raise CheckpointError(
            "the save failed; the checkpoints that were there are as they were.\n  " + "\n  ".join(errors)
        )


def finish_save(snapshot: Snapshot, where: Where, save: str, reports: list[dict[str, Any]]) -> None:
    """Every part is written: the manifest, `latest`, and what is not kept any longer."""
    files.write_manifest(where.folder / where.tag, _merge(snapshot, where.tag, save, reports), save)
    if where.save_latest:
        try:
            files.replace_file(where.folder / files.LATEST, where.tag.encode(), save)
        except CheckpointError as error:
            raise CheckpointError(f"{where.tag} itself is whole, but {error}") from error
    try:
        files.clean(where.folder)
        if where.keep_last is not None:
            files.keep_newest(where.folder, where.keep_last, where.tag)
    except (OSError, CheckpointError) as error:
        warnings.warn(f"{where.tag} was saved, but what is old could not be removed: {error}", stacklevel=2)


def _merge(snapshot: Snapshot, tag: str, save: str, reports: list[dict[str, Any]]) -> Manifest:
    from zeroshard import __version__

    ranges: dict[str, dict[str, tuple[str, list[RangeRecord]]]] = {}
    values: dict[str, dict[str, Any]] = {}
    tensors: dict[str, TensorRecord] = {}
    for number, report in enumerate(reports):
        for fqn, state, dtype, start, stop, offset in report["pieces"]:
            told = ranges.setdefault(fqn, {}).setdefault(state, (dtype, []))
            told[1].append(RangeRecord(start=start, stop=stop, file=number, offset=offset))
        for fqn, told_values in report["values"].items():
            values.setdefault(fqn, told_values)
        for name, (dtype, shape, offset) in report["tensors"].items():
            tensors[name] = TensorRecord(dtype=dtype, shape=shape, file=number, offset=offset)
    parameters = {
        fqn: record.model_copy(
            update={
                "states": {
                    state: StateRecord(dtype=dtype, ranges=sorted(parts, key=lambda part: part.start))
                    for state, (dtype, parts) in ranges.get(fqn, {}).items()
                },
                "values": values.get(fqn, {}),
            }
        )
        for fqn, record in snapshot.parameters.items()
    }
    return Manifest(
        tag=tag,
        created=time.time(),
        written_by={"zeroshard": __version__, "torch": torch.__version__},
        world_size=len(reports),
        policy=asdict(snapshot.policy),
        optimizer=snapshot.optimizer,
        chunk_nbytes=CHUNK_NBYTES,
        files=[
            FileRecord(name=f"rank_{i:05d}.{save}.safetensors", nbytes=r["nbytes"], checksums=r["checksums"])
            for i, r in enumerate(reports)
        ],
        parameters=parameters,
        excluded=snapshot.excluded,
        param_groups=snapshot.param_groups,
        values={"shared": snapshot.shared, "ranks": [report["own"] for report in reports]},
        tensors=tensors,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1)


# ---------------------------------------------------------------------- behind the training


class PendingSave:
    """A save that is being written in a thread of its own."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="zeroshard checkpoint", daemon=False)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # it belongs to whoever waits
            self._error = error

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Block until it has ended; raises what went wrong, once."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
