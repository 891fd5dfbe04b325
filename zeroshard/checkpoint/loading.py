"""Owns checkpoint loading: each rank reads the ranges that it needs, from a save at any world size."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.live_model import LiveModel
from zeroshard.checkpoint.manifest import Manifest, ParameterRecord, RangeRecord, StateRecord, dtype_of
from zeroshard.checkpoint.safetensors_file import CHUNK_NBYTES, ReadRequest, read_verified
from zeroshard.checkpoint.values import unpack
from zeroshard.errors import CheckpointError
from zeroshard.layout.layout import Span
from zeroshard.layout.placement import Common, Placement, Runs
from zeroshard.observe.display import Advance, ignore
from zeroshard.optim.several import class_names
from zeroshard.step.model_states import PARAMETERS, Held, Trained

_IMPLEMENTATION = {"params", "fused", "foreach", "capturable", "differentiable"}
"""Options that choose an implementation and not the result. A checkpoint's values for these are ignored."""

# `Sharded.load` and `Engine.load_checkpoint` have different names for this argument.
_SAVED_GROUPS = "Use the saved groups, or pass optimizer_states=False (an engine: load_optimizer_states=False)."


@dataclass(frozen=True)
class StoredTensor:
    """A parameter or buffer of a checkpoint, with all its names. It has several names if it is tied."""

    names: list[str]
    shape: tuple[int, ...]
    state: StateRecord
    trained: bool = True  # false only for frozen parameters
    is_buffer: bool = False
    scalar: Any = None  # the value itself, if the manifest contains it

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.state.dtype)

    @property
    def span(self) -> Span:
        """The span of all elements of the parameter."""
        return Span(self.names[0], 0, math.prod(self.shape))


class Reader:
    """A checkpoint, open for reading."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.nbytes = 0  # read so far, in whole chunks
        self.advance: Advance = ignore  # called with the number of requested bytes that were read

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Read the elements of all requests, file by file."""
        for number, group in groupby(sorted(requests, key=lambda one: one.file), key=lambda one: one.file):
            self.nbytes += read_verified(self.folder, self.manifest.files[number], group, self.advance)

    def model(self) -> Iterator[StoredTensor]:
        """Yield every parameter, then every buffer."""
        manifest = self.manifest
        for parameter in manifest.parameters.values():
            state = parameter.states.get(PARAMETERS)
            if state is None:  # it has no elements
                state = StateRecord(dtype="float32", ranges=[])
            yield StoredTensor(parameter.names, tuple(parameter.shape), state, parameter.trained)
        for name, packed in manifest.buffers().items():
            if "$scalar" in packed:
                dtype, value = packed["$scalar"]
                state = StateRecord(dtype=dtype, ranges=[])
                yield StoredTensor([name], (), state, is_buffer=True, scalar=value)
                continue
            tensor = manifest.tensors[packed["$tensor"]]
            span = RangeRecord(start=0, stop=math.prod(tensor.shape), file=tensor.file, offset=tensor.offset)
            state = StateRecord(dtype=tensor.dtype, ranges=[span])
            yield StoredTensor([name], tuple(tensor.shape), state, is_buffer=True)

    def tensor(self, stored: StoredTensor, span: Span) -> Tensor:
        """Read a span of a parameter or buffer as a 1-D tensor, in the saved dtype."""
        if stored.scalar is not None:
            return torch.tensor([stored.scalar], dtype=stored.dtype)
        tensor = torch.empty(span.numel, dtype=stored.dtype)
        self.read(requests_for(stored.state, span, Placement.whole(stored.shape), tensor))
        return tensor

    def values(self, packed: Any) -> Any:
        """Unpack packed values and read their tensors from the files."""
        requests = []

        def make(name: str) -> Tensor:
            record = self.manifest.tensors[name]
            tensor = torch.empty(record.shape, dtype=dtype_of(record.dtype))
            if tensor.numel():
                requests.append(
                    ReadRequest(record.file, record.offset, tensor.dtype, tensor.view(1, -1), tensor.numel())
                )
            return tensor

        values = unpack(packed, make)
        self.read(requests)  # into these tensors
        return values


def open_checkpoint(folder: str | os.PathLike[str], tag: str | None = None) -> Reader:
    """Open a checkpoint by its own folder, or by the folder of all checkpoints and a tag (default: the one in `latest`)."""
    path = files.folder_of(folder, tag)
    return Reader(path, files.read_manifest(path))


def requests_for(state: StateRecord, span: Span, placement: Placement, out: Tensor) -> list[ReadRequest]:
    """Create the requests that read a span of this rank's part of a parameter into the 1-D tensor `out`.

    `placement` is the position of that part in the whole parameter. Rows of a saved range share a request,
    unless they are far apart.
    """
    dtype = dtype_of(state.dtype)
    requests = []
    place = out.storage_offset()
    for runs in placement.runs(span.start, span.stop):
        for part, common in _shared(state, span.name, runs):
            begin = part.offset + common.there * dtype.itemsize
            # The elements that this saved range and `out` have in common, as equal rows of `out`.
            strides = (common.every * out.stride(0), out.stride(0))
            rows = out.as_strided((common.count, common.numel), strides, place + common.here * out.stride(0))
            if (common.other_every - common.numel) * dtype.itemsize < CHUNK_NBYTES:
                requests.append(ReadRequest(part.file, begin, dtype, rows, common.other_every))
                continue
            # Whole chunks between two rows need not be read.
            for row in rows:
                requests.append(ReadRequest(part.file, begin, dtype, row[None], common.numel))
                begin += common.other_every * dtype.itemsize
        place += runs.numel * runs.count * out.stride(0)
    return requests


def _shared(state: StateRecord, fqn: str, runs: Runs) -> list[tuple[RangeRecord, Common]]:
    """Return the elements of `runs` in each saved range. Raise if the ranges lack some of them or hold some twice."""
    found = []
    for part in state.ranges:
        if part.start < runs.stop and runs.start < part.stop:
            found += [(part, common) for common in runs.common(part.runs)]
    if sum(common.count * common.numel for _, common in found) == runs.count * runs.numel:
        return found
    for start, stop, _ in runs.between(runs.start, runs.stop):
        covered = start
        # Runs of several ranges may interleave.
        for low, high in sorted(run[:2] for part in state.ranges for run in part.runs.between(start, stop)):
            if low > covered:
                break
            covered = max(covered, high)
        if covered < stop:
            raise CheckpointError(f"the checkpoint holds no elements {covered} to {stop} of {fqn}. Load another tag.")
    raise CheckpointError(f"the checkpoint holds elements of {fqn} twice. Load another tag.")


class Loader:
    """The load of one checkpoint into a model's units: call `read`, then `apply`.

    The constructor checks the checkpoint but does not change the model. `nbytes` is the number of bytes of model states
    that `read` reads.

    Raises:
        CheckpointError: the checkpoint is of a different model or optimizer, or lacks elements.
    """

    def __init__(self, reader: Reader, live: LiveModel, *, strict: bool, optimizer_states: bool) -> None:
        self.reader = reader
        self.optimizer_states = optimizer_states
        self.nbytes = 0
        self._live = live
        self._optimizer = live.step.inner
        self._parts: list[tuple[Held, ParameterRecord]] = []
        self._state: list[tuple[Held, dict[str, Any]]] = []  # the optimizer's new states, of each trained part
        self._options: dict[int, dict[str, Any]] = {}
        self._values: dict[str, dict[str, Any]] = {}
        self._buffers: dict[str, Tensor] = {}
        self._refuse_another_model(strict)
        if optimizer_states:
            self._refuse_another_optimizer()
            self._options = self._find_options()
        records = {name: record for record in reader.manifest.parameters.values() for name in record.names}
        for held in live.states.held():
            record = next((records[name] for name in held.named.fqns if name in records), None)
            if record is None or PARAMETERS not in record.states:
                continue
            self._parts.append((held, record))
            for _, saved in self._wanted(held, record):
                for runs in held.named.placement.runs(held.span.start, held.span.stop):
                    _shared(saved, held.named.fqn, runs)
                self.nbytes += held.span.numel * dtype_of(saved.dtype).itemsize

    def _wanted(self, held: Held, record: ParameterRecord) -> Iterator[tuple[str, StateRecord]]:
        for state, saved in record.states.items():
            if state == PARAMETERS or (self.optimizer_states and held.view is not None):
                yield state, saved

    def _refuse_another_model(self, strict: bool) -> None:
        """Raise if a shape differs or, with `strict`, if the checkpoint or the model lacks a parameter or buffer."""
        # The first name and the shape of each tensor, by any of its names and whether it is a buffer.
        own: dict[tuple[str, bool], tuple[str, torch.Size]] = {}
        for unit in self._live.units:
            for entry in unit.named:
                own |= {(fqn, False): (entry.fqn, torch.Size(entry.placement.shape)) for fqn in entry.fqns}
        for name, buffer in self._live.buffers.items():
            own[name, True] = (f"the buffer {name}", buffer.shape)
        missing = dict.fromkeys(first for first, _ in own.values())
        unexpected = []
        trained = {entry.fqn for unit in self._live.units if unit.trainable for entry in unit.named}
        for name in self.reader.manifest.excluded:
            first, _ = own.get((name, False), (name, None))
            if first not in trained:  # its values are those that the model was built with
                missing.pop(first, None)
        stored_as: dict[str, str] = {}
        untied: list[str] = []
        for stored in self.reader.model():
            keys = [(name, stored.is_buffer) for name in stored.names]
            found = [own[key] for key in keys if key in own]
            if not found:
                unexpected.append(stored.names[0])
            for first, shape in found:
                missing.pop(first, None)
                if stored_as.setdefault(first, stored.names[0]) != stored.names[0]:
                    untied = [stored_as[first], stored.names[0]]
                if stored.shape != shape:
                    raise CheckpointError(
                        f"{self.reader.folder}: {first} was saved with shape {stored.shape}, but has "
                        f"{tuple(shape)} in the model. Build the model with the saved shapes."
                    )
        if strict and (missing or unexpected):
            raise CheckpointError(
                f"{self.reader.folder} is of a different model: it lacks {some_of(list(missing))}, and the model lacks "
                f"{some_of(unexpected)}. Pass strict=False (an engine: load_module_strict=False) to load the tensors that both "
                "have."
            )
        if strict and untied:
            raise CheckpointError(
                f"{self.reader.folder} is of a different model: {' and '.join(untied)} were saved as two tensors, and are one in "
                f"this model. Pass strict=False (an engine: load_module_strict=False) to load only {untied[0]}."
            )

    def _refuse_another_optimizer(self) -> None:
        manifest = self.reader.manifest
        name = type(self._optimizer).__qualname__
        saved = ""
        if manifest.optimizer is None and not manifest.param_groups:
            saved = f"without an optimizer, for evaluation: it holds no states for this run's {name}"
        elif manifest.optimizer is not None and not _has_states_of(name, manifest.optimizer):
            saved = f"with {manifest.optimizer}, and this run has {name}"
        classes = class_names(self._optimizer)
        for number, own in enumerate(self._live.group_names):
            for group in manifest.param_groups:
                found = group.get("optimizer", classes[number])  # older checkpoints lack it
                if not saved and not _has_states_of(classes[number], found) and set(own) & set(group["names"]):
                    saved = f"with {found} for {some_of(own)}, and this run has {classes[number]}"
        if saved:
            raise CheckpointError(
                f"{self.reader.folder} was saved {saved}. Pass optimizer_states=False (an engine: "
                "load_optimizer_states=False) to load only the parameters."
            )

    def _find_options(self) -> dict[int, dict[str, Any]]:
        """Find the saved hyperparameters of this run's param groups, by group number.

        Groups are matched by the names of their parameters. Saved groups may be merged if their hyperparameters are equal. A
        saved group may be split if this run's groups have equal hyperparameters.
        """
        saved = []
        for group in self.reader.manifest.param_groups:
            saved.append((set(group["names"]), _options(self.reader.values(group["options"]))))
        names = self._live.group_names
        found: dict[int, dict[str, Any]] = {}
        for number, own in enumerate(names):
            sources = [options for known, options in saved if known & set(own)]
            if _first_that_differs(sources) is not None:
                raise CheckpointError(
                    f"the parameters of param group {number} ({some_of(own)}) were saved in groups with different "
                    f"hyperparameters. {_SAVED_GROUPS}"
                )
            if sources:
                found[number] = sources[0]
        for known, _ in saved:
            mine = [number for number, own in enumerate(names) if known & set(own)]
            other = _first_that_differs([_options(self._optimizer.param_groups[number]) for number in mine])
            if other is not None:
                raise CheckpointError(
                    f"{self.reader.folder}: param groups {mine[0]} ({some_of(names[mine[0]])}) and {mine[other]} "
                    f"({some_of(names[mine[other]])}) have different hyperparameters here, but were saved as one "
                    f"group. {_SAVED_GROUPS}"
                )
        return found

    def read(self) -> None:
        """Read and verify this rank's part. This overwrites the values in memory."""
        requests = []
        for held, record in self._parts:
            if held.shard.is_here:
                requests += self._requests_of(held, record)
        self.reader.read(requests)
        elsewhere = [part for part in self._parts if not part[0].shard.is_here]
        for shard, group in groupby(elsewhere, key=lambda part: part[0].shard):
            parts = list(group)
            # A shard that is overwritten as a whole need not be readable.
            is_whole = isinstance(shard, Trained) and len(parts) == len(shard.resident.views)
            with shard.opened(write=True, read=not (self.optimizer_states and is_whole)):
                requests = []
                for held, record in parts:
                    requests += self._requests_of(held, record)
                    if self.optimizer_states and held.view is not None:
                        # The end of the block writes the states that the optimizer then has.
                        self._optimizer.state[held.view.value] = self._state[-1][1]
                self.reader.read(requests)
        self._values = self.reader.values(self._values)
        manifest = self.reader.manifest
        self._buffers = self.reader.values({**manifest.buffers(), **manifest.buffers(self._live.rank)})

    def _requests_of(self, held: Held, record: ParameterRecord) -> list[ReadRequest]:
        """Create the requests for all states of one part that is in memory, and allocate new optimizer states."""
        requests = []
        state: dict[str, Any] = {}
        for name, saved in self._wanted(held, record):
            if name == PARAMETERS:
                requests += requests_for(saved, held.span, held.named.placement, held.value)
                continue
            assert held.view is not None
            like = held.view.value
            there = held.state.get(name)
            dtype = dtype_of(saved.dtype)
            if saved.dtype == record.states[PARAMETERS].dtype:
                # A state saved in the master weights' dtype takes their dtype in this run: an optimizer computes with both.
                dtype = like.dtype
            if not isinstance(there, Tensor) or there.shape != like.shape or there.dtype != dtype:
                there = torch.empty(like.shape, dtype=dtype, device=like.device)
            state[name] = there
            requests += requests_for(saved, held.span, held.named.placement, there.view(-1))
        if self.optimizer_states and held.view is not None:
            self._state.append((held, state))
            self._values[held.named.fqn] = record.values
        return requests

    def apply(self) -> None:
        """Put the values that were read into the optimizer, the buffers and the parameters. Every rank must call it."""
        on_device: set[int] = set()
        if self.optimizer_states:
            on_device = self._live.step.groups.counting_on_device()
        for held, state in self._state:
            assert held.view is not None
            key = held.view.value
            counts_on = key.device if id(key) in on_device else torch.device("cpu")
            kept = {**self._values.get(held.named.fqn, {}), **state}
            for name in kept.keys() - state.keys():
                if isinstance(kept[name], Tensor):  # spans of one parameter must not share a tensor
                    place = counts_on
                    if kept[name].ndim:
                        place = key.device
                    kept[name] = kept[name].to(place, copy=True)
            self._optimizer.state[key] = kept
            if not kept:
                del self._optimizer.state[key]
        for number, options in self._options.items():
            self._optimizer.param_groups[number].update(options)
        buffers = self._live.buffers
        for name, value in self._buffers.items():
            if name in buffers:
                buffers[name].copy_(value)
        for unit in self._live.units:
            unit.load_masters()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _IMPLEMENTATION}


def _has_states_of(own: str, saved: str) -> bool:
    """Return whether an optimizer of class `own` has the same states as one of class `saved`."""
    # Earlier releases had one class for Muon with AdamW.
    return own == saved or (saved == "MuonWithAdamW" and own in ("Several", "Muon", "AdamW"))


def _first_that_differs(groups: Sequence[Mapping[str, Any]]) -> int | None:
    for number, group in enumerate(groups):
        if group.keys() != groups[0].keys() or not all(bool(value == groups[0][key]) for key, value in group.items()):
            return number
    return None


def some_of(names: Sequence[str]) -> str:
    """Join at most five names and add the number of the others."""
    text = ", ".join(names[:5]) or "nothing"
    if len(names) > 5:
        text += f" and {len(names) - 5} more"
    return text
