"""Owns the saving of a checkpoint: every rank writes its own shards, all agree, then it exists. Called by checkpoints.

Nothing is ever whole on a rank. An asynchronous save writes a copy in CPU memory, behind the training.
"""

from __future__ import annotations

import threading
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.chunks import CHUNK_NBYTES, Lying, write_file
from zeroshard.checkpoint.manifest import FileRecord, Manifest, RangeRecord, StateRecord, TensorRecord
from zeroshard.checkpoint.node_local import Hosts, Move, broadcast, carry, copies, refuse_shared
from zeroshard.checkpoint.snapshot import Outline, Part, Snapshot
from zeroshard.checkpoint.values import Packer
from zeroshard.collectives.base import Collectives
from zeroshard.errors import CheckpointError
from zeroshard.observe.display import Advance, ignore
from zeroshard.storage.raw_memory import memory_of
from zeroshard.version import __version__

_UNSEEN = (
    " Rank 0 made its folder, and this rank does not see it: name a folder that all ranks see, or save with node_local=True "
    "(use_node_local_storage)."
)


@dataclass(frozen=True)
class Where:
    """The folder of all checkpoints, the tag of this one, and what is done when it is whole.

    Attributes:
        hosts: each has the folder for itself; None: all ranks see one folder.
    """

    folder: Path
    tag: str
    save_latest: bool = True
    keep_last: int | None = None
    hosts: Hosts | None = None

    def leads(self, rank: int) -> bool:
        """Whether this rank does what is done once for a folder."""
        return rank == 0 if self.hosts is None else self.hosts.leads(rank)


def write_checkpoint(snapshot: Snapshot, where: Where, control: Collectives, advance: Advance = ignore) -> None:
    """Write this rank's part, agree with the others, and let the checkpoint exist. Every rank must call it.

    Args:
        advance: hears of bytes as they are written.

    Raises:
        CheckpointError: on every rank, if any rank could not write: says which and why. What was there before is as it was.
    """
    folder = where.folder / where.tag
    own_crcs = {name: zlib.crc32(memory_of(_cpu(buffer))) for name, buffer in snapshot.part.buffers.items()}
    hello = control.exchange_json({"save": uuid.uuid4().hex[:12], "buffers": own_crcs}, "the begin of a save")
    save = hello[0]["save"]
    path, leads = folder / _file_name(control.rank, save), where.leads(control.rank)
    prepared = _attempt(lambda: _prepare(where, folder), control.rank) if leads else None
    _raise_errors(control.exchange_json(prepared, "the folder of a checkpoint"))
    # Buffers are the same on all ranks but where each keeps statistics of its own.
    different = [name for name in own_crcs if control.rank == 0 or own_crcs[name] != hello[0]["buffers"].get(name)]
    try:
        report = write_part(snapshot.part, path, where.tag, control.rank, different, advance)
    except Exception as error:  # the others wait for this rank's word
        unseen = where.hosts is None and not folder.is_dir()
        report = {"error": f"rank {control.rank}: {error}{_UNSEEN if unseen else ''}"}
    reports = control.exchange_json(report, "the end of a save")
    errors, written = _errors(reports), [path]
    if where.hosts is not None and not errors:
        moves = copies(
            where.hosts, [_file_name(rank, save) for rank in range(len(reports))], [one["nbytes"] for one in reports]
        )
        written += [folder / move.name for move in moves if move.target == control.rank]
        errors = _copy(control, folder, moves)
    if errors:
        for one in written:
            with suppress(OSError):
                one.unlink(missing_ok=True)
        control.exchange_json(None, "the end of a save that failed")
        if leads:
            with suppress(OSError):
                files.remove_if_empty(folder)
        _raise(errors)
    manifest = _merge(snapshot.outline, where.tag, save, reports) if control.rank == 0 else None
    if where.hosts is not None:  # rank 0's values count, so its manifest does
        text = broadcast(control, manifest.model_dump_json().encode() if manifest is not None else b"", 0)
        manifest = Manifest.model_validate_json(text)
    problem = _attempt(lambda: _finish(where, save, manifest), control.rank) if leads and manifest is not None else None
    _raise_errors(control.exchange_json(problem, "the manifest of a checkpoint"))


def _copy(control: Collectives, folder: Path, moves: Sequence[Move]) -> list[str]:
    """To the next host; what went wrong, on any rank."""
    problem = _attempt(lambda: refuse_shared(control, folder, moves), control.rank)
    errors = _errors(control.exchange_json(problem, "the folders of hosts"))
    if errors:
        return errors
    broken = carry(control, folder, moves)
    problem = None if broken is None else {"error": f"rank {control.rank}: {broken}"}
    return _errors(control.exchange_json(problem, "copies on the next host"))


def write_part(
    part: Part, path: Path, tag: str, rank: int, buffers: Sequence[str], advance: Advance = ignore
) -> dict[str, Any]:
    """Write one rank's file, with those of its buffers; returns what the manifest needs to know of it, as JSON."""
    packer = Packer(f"rank_{rank:05d}/buffers/")
    own = {**part.own, "buffers": {n: packer.pack(part.buffers[n], f"buffers.{n}") for n in buffers}}
    beside = {**part.tensors, **packer.tensors}
    tensors = {**{piece.name: piece for piece in part.pieces}, **{n: Lying(t) for n, t in beside.items()}}
    written = write_file(path, tensors, {"format": "pt", "tag": tag, "rank": str(rank)}, advance)
    return {
        "nbytes": written.nbytes,
        "checksums": written.checksums,
        "pieces": [
            [p.fqn, p.state, _name(p.dtype), p.start, p.start + p.shape[0], written.offsets[p.name]]
            for p in part.pieces
        ],
        "values": part.values,
        "own": own,
        "tensors": {n: [_name(t.dtype), list(t.shape), written.offsets[n]] for n, t in beside.items()},
    }


def _file_name(rank: int, save: str) -> str:
    return f"rank_{rank:05d}.{save}.safetensors"


def _prepare(where: Where, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made: {error.strerror}.") from error
    files.clean(where.folder)
    folder.mkdir(exist_ok=True)


def _attempt(work: Callable[[], None], rank: int) -> dict[str, str] | None:
    try:
        work()
    except Exception as error:  # the others wait for this rank's word
        return {"error": f"rank {rank}: {error}"}
    return None


def _errors(reports: Sequence[dict[str, Any] | None]) -> list[str]:
    return [one["error"] for one in reports if one is not None and "error" in one]


def _raise_errors(reports: Sequence[dict[str, Any] | None]) -> None:
    errors = _errors(reports)
    if errors:
        _raise(errors)


def _raise(errors: Sequence[str]) -> NoReturn:
    raise CheckpointError(
        "the save failed; the checkpoints that were there are as they were.\n  " + "\n  ".join(errors)
    )


def finish_save(outline: Outline, where: Where, save: str, reports: list[dict[str, Any]]) -> None:
    """Every part is written: the manifest, `latest`, and what is not kept any longer."""
    _finish(where, save, _merge(outline, where.tag, save, reports))


def _finish(where: Where, save: str, manifest: Manifest) -> None:
    files.write_manifest(where.folder / where.tag, manifest, save)
    if where.save_latest:
        try:
            files.replace_file(where.folder / files.LATEST, where.tag.encode(), save)
        except CheckpointError as error:
            raise CheckpointError(f"{where.tag} itself is whole, but {error}") from error
    try:
        files.clean(where.folder)
        if where.keep_last is not None:
            files.keep_newest(where.folder, where.keep_last, where.tag, whole=where.hosts is None)
    except (OSError, CheckpointError) as error:
        warnings.warn(f"{where.tag} was saved, but what is old could not be removed: {error}", stacklevel=2)


def _merge(outline: Outline, tag: str, save: str, reports: list[dict[str, Any]]) -> Manifest:
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
        for fqn, record in outline.parameters.items()
    }
    return Manifest(
        tag=tag,
        created=time.time(),
        written_by={"zeroshard": __version__, "torch": torch.__version__},
        world_size=len(reports),
        policy=asdict(outline.policy),
        optimizer=outline.optimizer,
        chunk_nbytes=CHUNK_NBYTES,
        files=[
            FileRecord(name=_file_name(i, save), nbytes=r["nbytes"], checksums=r["checksums"])
            for i, r in enumerate(reports)
        ],
        parameters=parameters,
        excluded=outline.excluded,
        param_groups=outline.param_groups,
        values={
            "shared": outline.shared,
            "ranks": [report["own"] for report in reports],
            "description": outline.description,
        },
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
