"""Owns the loading of a checkpoint: each rank reads the ranges that it needs, whatever the world size they were saved at.

Called by checkpoints, by export and by the command line.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.chunks import Task, read_tasks
from zeroshard.checkpoint.live_model import LiveModel
from zeroshard.checkpoint.manifest import Manifest, ParameterRecord, StateRecord, dtype_of
from zeroshard.checkpoint.values import unpack
from zeroshard.errors import CheckpointError
from zeroshard.layout.bucketing import NamedParameter
from zeroshard.observe.display import Advance, ignore
from zeroshard.step.model_states import PARAMETERS, Held, counting_on_device

_IMPLEMENTATION = {"params", "fused", "foreach", "capturable", "differentiable"}
"""How this run computes is its own affair."""


@dataclass(frozen=True)
class Located:
    """A task and the file that it is for."""

    file: int
    task: Task


class Reader:
    """Reads from one checkpoint. `nbytes` counts what was read, whole chunks; `advance` hears of what was wanted of them."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest, self.nbytes = folder, manifest, 0
        self.advance: Advance = ignore
        self._by_name = {name: record for record in manifest.parameters.values() for name in record.names}

    def parameter(self, names: Sequence[str]) -> ParameterRecord | None:
        """The record of the parameter that has one of these names."""
        return next((self._by_name[name] for name in names if name in self._by_name), None)

    def read(self, located: Sequence[Located]) -> None:
        """Carry out tasks, file by file, in the order of bytes."""
        by_file: dict[int, list[Task]] = defaultdict(list)
        for one in located:
            by_file[one.file].append(one.task)
        for number, tasks in sorted(by_file.items()):
            record = self.manifest.files[number]
            path = self.folder / record.name
            self.nbytes += read_tasks(path, record.nbytes, record.checksums, tasks, self.advance)

    def values(self, packed: Any) -> Any:
        """Unpack values, with the tensors that they name."""
        wanted: dict[str, Tensor] = {}

        def make(name: str) -> Tensor:
            record = self.manifest.tensors[name]
            wanted[name] = torch.empty(record.shape, dtype=dtype_of(record.dtype))
            return wanted[name]

        unpack(packed, make)
        tasks = []
        for name, tensor in wanted.items():
            record = self.manifest.tensors[name]
            if tensor.numel():
                tasks.append(Located(record.file, Task(record.offset, tensor.dtype, tensor.view(-1))))
        self.read(tasks)
        return unpack(packed, wanted.__getitem__)


def open_checkpoint(folder: str | os.PathLike[str], tag: str | None = None) -> Reader:
    """A checkpoint by its own folder, or by the folder of all (then the tag, or what `latest` names).

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """
    path = Path(folder)
    if tag is not None or not (path / files.MANIFEST).is_file():
        path = path / (tag if tag is not None else files.latest_tag(path))
    return Reader(path, files.read_manifest(path))


def tasks_for(state: StateRecord, start: int, out: Tensor, what: str) -> Iterator[Located]:
    """Where elements [start, start + out.numel()) of one model state lie. `out` is 1-D.

    Raises:
        CheckpointError: the ranges of the manifest do not cover them.
    """
    dtype, stop, covered = dtype_of(state.dtype), start + out.numel(), start
    for part in state.ranges:
        low, high = max(part.start, start), min(part.stop, stop)
        if low >= high:
            continue
        if low != covered:
            break
        offset = part.offset + (low - part.start) * dtype.itemsize
        yield Located(part.file, Task(offset, dtype, out[low - start : high - start]))
        covered = high
    if covered != stop:
        raise CheckpointError(f"the checkpoint holds no elements {covered} to {stop} of {what}.")


class Loader:
    """Brings one checkpoint into the units of a model. `prepare` first, then `read`, then `apply`."""

    def __init__(self, reader: Reader, live: LiveModel) -> None:
        self.reader, self._live, self._optimizer = reader, live, live.optimizer.inner
        self._tasks: list[Located] = []
        self._state: list[tuple[Held, dict[str, Any]]] = []
        self._elsewhere: list[tuple[Held, ParameterRecord]] = []
        self._takes_states = False
        self._options: dict[int, dict[str, Any]] = {}
        self._values: dict[str, dict[str, Any]] = {}
        self._buffers: dict[str, Tensor] = {}

    def prepare(self, *, strict: bool, optimizer_states: bool) -> None:
        """Find out what to read; nothing is changed yet.

        Raises:
            CheckpointError: the checkpoint is of another model or optimizer; names the difference.
        """
        self._takes_states = optimizer_states
        entries = [entry for unit in self._live.units for entry in unit.named]
        self._refuse_another_model(entries, strict)
        if optimizer_states:
            self._refuse_another_optimizer()
            self._options = self._find_options()
        self._refuse_other_buffers(strict)
        for held in self._live.states.held():
            record = self.reader.parameter(held.named.fqns)
            if record is None or PARAMETERS not in record.states:
                continue
            if held.shard.is_here:
                self._tasks += self._tasks_of(held, record)
            else:
                self._elsewhere.append((held, record))
                for name, saved in record.states.items():
                    list(
                        tasks_for(
                            saved, held.start, torch.empty(held.numel, device="meta"), f"{name} of {held.named.fqn}"
                        )
                    )

    @property
    def nbytes(self) -> int:
        """Bytes of the model states that `read` brings."""
        here = sum(one.task.stop - one.task.offset for one in self._tasks)
        return here + sum(
            held.numel * dtype_of(saved.dtype).itemsize
            for held, record in self._elsewhere
            for saved in record.states.values()
        )

    def _tasks_of(self, held: Held, record: ParameterRecord) -> list[Located]:
        """What to read for one part of a parameter, which is in memory."""
        tasks = list(tasks_for(record.states[PARAMETERS], held.start, held.value, held.named.fqn))
        if self._takes_states and held.view is not None:
            state: dict[str, Any] = {}
            self._state.append((held, state))
            tasks += self._new_state(held, record, state)
        return tasks

    def _refuse_another_model(self, entries: Sequence[NamedParameter], strict: bool) -> None:
        manifest, known = self.reader.manifest, {name for entry in entries for name in entry.fqns}
        missing = [
            entry.fqn
            for entry in entries
            if self.reader.parameter(entry.fqns) is None and not set(entry.fqns) & set(manifest.excluded)
        ]
        unexpected = [fqn for fqn, record in manifest.parameters.items() if not set(record.names) & known]
        for entry in entries:
            record = self.reader.parameter(entry.fqns)
            if record is not None and tuple(record.shape) != tuple(entry.shape):
                raise CheckpointError(
                    f"{self.reader.folder}: {entry.fqn} was saved with shape {tuple(record.shape)}, and the model's has "
                    f"{tuple(entry.shape)}."
                )
        if strict and (missing or unexpected):
            raise CheckpointError(
                f"{self.reader.folder} is of another model: it lacks {_some(missing)}, and the model lacks {_some(unexpected)}. "
                "load_module_strict=False loads what both have."
            )

    def _refuse_another_optimizer(self) -> None:
        manifest, name = self.reader.manifest, type(self._optimizer).__qualname__
        if manifest.optimizer is None and not manifest.param_groups:
            raise CheckpointError(
                f"{self.reader.folder} was saved without an optimizer, for evaluation: it holds no states for this run's {name}. "
                "load_optimizer_states=False takes the parameters alone."
            )
        if manifest.optimizer not in (None, name):
            raise CheckpointError(
                f"{self.reader.folder} was saved with {manifest.optimizer}, and this run has {name}: "
                "load_optimizer_states=False takes the parameters alone."
            )

    def _find_options(self) -> dict[int, dict[str, Any]]:
        """The saved hyperparameters of each of this run's param groups, by its number. They go by the parameters' names.

        Raises:
            CheckpointError: one of this run's groups was several that differ, or one that was saved is several here.
        """
        saved = [(set(g["names"]), self.reader.values(g["options"])) for g in self.reader.manifest.param_groups]
        names, found = self._live.group_names, dict[int, dict[str, Any]]()
        for number, own in enumerate(names):
            sources = [_options(options) for known, options in saved if known & set(own)]
            if any(not _equal(source, sources[0]) for source in sources):
                raise CheckpointError(
                    f"the parameters of param group {number} ({_some(own)}) were saved in groups with different "
                    "hyperparameters: use the groups that were saved, or load_optimizer_states=False."
                )
            if sources:
                found[number] = sources[0]
        for known, _ in saved:
            mine = [number for number, own in enumerate(names) if known & set(own)]
            groups = [_options(self._optimizer.param_groups[number]) for number in mine]
            different = next((i for i, group in enumerate(groups) if not _equal(group, groups[0])), None)
            if different is not None:
                raise CheckpointError(
                    f"{self.reader.folder}: what are param groups {mine[0]} ({_some(names[mine[0]])}) and {mine[different]} "
                    f"({_some(names[mine[different]])}) here, with hyperparameters of their own, was saved as one group: use "
                    "the groups that were saved, or load_optimizer_states=False."
                )
        return found

    def _refuse_other_buffers(self, strict: bool) -> None:
        ranks = self.reader.manifest.values.get("ranks", [])
        packed = ranks[0].get("buffers") if ranks else None
        if packed is None:
            return
        saved = {
            name: tuple(self.reader.manifest.tensors[one["$tensor"]].shape) if "$tensor" in one else ()
            for name, one in packed.items()
        }
        own = {name: tuple(buffer.shape) for name, buffer in self._live.buffers.items()}
        for name in saved.keys() & own.keys():
            if saved[name] != own[name]:
                raise CheckpointError(
                    f"{self.reader.folder}: the buffer {name} was saved with shape {saved[name]}, and the model's has {own[name]}."
                )
        if strict and saved.keys() != own.keys():
            raise CheckpointError(
                f"{self.reader.folder} is of another model: it lacks the buffers {_some(sorted(own.keys() - saved.keys()))}, "
                f"and the model lacks {_some(sorted(saved.keys() - own.keys()))}. load_module_strict=False loads what both have."
            )

    def _new_state(self, held: Held, record: ParameterRecord, state: dict[str, Any]) -> Iterator[Located]:
        assert held.view is not None
        self._values[held.named.fqn] = record.values
        for name, saved in record.states.items():
            if name != PARAMETERS:
                there, dtype = held.state.get(name), dtype_of(saved.dtype)
                if not isinstance(there, Tensor) or there.shape != held.view.value.shape or there.dtype != dtype:
                    there = torch.empty(held.view.value.shape, dtype=dtype, device=held.value.device)
                state[name] = there
                yield from tasks_for(saved, held.start, there.view(-1), f"{name} of {held.named.fqn}")

    def read(self) -> None:
        """Read this rank's part, and verify it. What is there is overwritten as it comes."""
        self.reader.read(self._tasks)
        for shard, group in groupby(self._elsewhere, key=lambda part: part[0].shard):
            parts = list(group)
            # What is overwritten as a whole need not be readable.
            covered = self._takes_states and shard.is_all_of([held for held, _ in parts])
            with shard.opened(write=True, read=not covered):
                tasks = []
                for held, record in parts:
                    tasks += self._tasks_of(held, record)
                    if self._takes_states and held.view is not None:
                        self._optimizer.state[held.view.value] = self._state[-1][1]
                self.reader.read(tasks)
        self._values = self.reader.values(self._values)
        ranks = self.reader.manifest.values.get("ranks", [])
        common = ranks[0].get("buffers", {}) if ranks else {}
        own = ranks[self._live.rank].get("buffers", {}) if self._live.rank < len(ranks) else {}
        self._buffers = self.reader.values({**common, **own})

    def apply(self, *, optimizer_states: bool) -> None:
        """Everything was read on every rank: optimizer, buffers, and parameters take it. Every rank must call it."""
        if optimizer_states:
            on_device = counting_on_device(self._optimizer)
            for held, state in self._state:
                assert held.view is not None
                device = held.value.device if id(held.view.value) in on_device else torch.device("cpu")
                beside = {name: _fresh(value, device) for name, value in self._values.get(held.named.fqn, {}).items()}
                self._optimizer.state[held.view.value] = {**beside, **state}
                if not state and not beside:
                    del self._optimizer.state[held.view.value]
            for number, options in self._options.items():
                self._optimizer.param_groups[number].update(options)
        buffers = self._live.buffers
        for name, value in self._buffers.items():
            if name in buffers:
                buffers[name].copy_(value)
        for unit in self._live.units:
            unit.take_masters()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _IMPLEMENTATION}


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool(value == other[key]) for key, value in one.items())


def _fresh(value: Any, device: torch.device) -> Any:
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


def _some(names: Sequence[str]) -> str:
    return (", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")) or "nothing"
