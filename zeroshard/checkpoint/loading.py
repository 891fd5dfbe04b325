"""Owns checkpoint loading: each rank reads the ranges that it needs, from a save at any world size."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.display import Advance, ignore
from zeroshard.checkpoint.live_model import STATE_DTYPE, LiveModel, name_of_state_dtype
from zeroshard.checkpoint.manifest import Manifest, ParameterRecord, RangeRecord, StateRecord, TensorRecord, dtype_of
from zeroshard.checkpoint.places import OWN_VALUES, Places
from zeroshard.checkpoint.safetensors_file import CHUNK_NBYTES, Contents, ReadRequest, contents_of, read_verified
from zeroshard.checkpoint.values import unpack
from zeroshard.core.layout import Span
from zeroshard.core.model_states import PARAMETERS, Held, Trained
from zeroshard.core.placement import Common, Placement, Runs
from zeroshard.errors import CheckpointError
from zeroshard.optim.several import class_names

_IMPLEMENTATION = {"params", "param_names", "fused", "foreach", "capturable", "differentiable"}
"""Keys that name the group's parameters, or choose an implementation and not the result. A checkpoint's values are ignored."""

# `Sharded.load` and `Engine.load_checkpoint` have different names for this argument.
_SAVED_GROUPS = "Use the saved groups, or pass optimizer_states=False (an engine: load_optimizer_states=False)."


_NO_ELEMENTS = StateRecord(dtype="float32")
Find = Callable[[Runs], list[RangeRecord]]
"""Returns the ranges of a state that may have some of these elements of the flattened parameter."""


@dataclass(frozen=True)
class StoredTensor:
    """A parameter or buffer of a checkpoint, with all its names. It has several names if it is tied."""

    names: list[str]
    shape: tuple[int, ...]
    dtype: torch.dtype
    find: Find
    trained: bool = True  # false only for frozen parameters
    is_buffer: bool = False
    scalar: Any = None  # the value itself, if the manifest contains it

    @property
    def span(self) -> Span:
        """The span of all elements of the parameter."""
        return Span(self.names[0], 0, math.prod(self.shape))


class Reader:
    """A checkpoint, open for reading."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.places = Places(manifest, self._offset_of)
        self._contents: dict[int, Contents] = {}  # of the files that were opened, by number
        self.nbytes = 0  # read so far, in whole chunks
        self.advance: Advance = ignore  # called with the number of requested bytes that were read

    def read(self, requests: Sequence[ReadRequest]) -> None:
        """Read the elements of all requests, file by file."""
        for number, group in groupby(sorted(requests, key=lambda one: one.file), key=lambda one: one.file):
            record = self.manifest.files[number]
            self.nbytes += read_verified(self.folder, record, self.contents(number), group, self.advance)

    def contents(self, number: int) -> Contents:
        """Return the verified tables of a file, which is opened at the first use."""
        if number not in self._contents:
            self._contents[number] = contents_of(self.folder, self.manifest.files[number])
        return self._contents[number]

    def _offset_of(self, file: int, name: str, dtype: str, numel: int) -> int:
        entry = self.contents(file).entries.get(name)
        if entry is None or entry.dtype != dtype_of(dtype) or entry.numel != numel:
            raise CheckpointError(
                f"{self.folder / self.manifest.files[file].name} holds no {name} of {numel} elements of {dtype}, which its "
                f"manifest promises. {files.ANOTHER}"
            )
        return entry.offset

    def find(self, fqn: str, state: str) -> Find:
        """Return the function that finds the ranges of a parameter's state. `fqn` is the parameter's first name."""
        return partial(self.places.over, fqn, state)

    def own(self, rank: int) -> dict[str, Any]:
        """Return a rank's own packed values: "random", "extra_states" and "buffers"."""
        if self.manifest.ranks:
            return self.manifest.ranks[rank]
        entry = self.contents(rank).entries.get(OWN_VALUES)
        path = self.folder / self.manifest.files[rank].name
        if entry is None or entry.dtype != torch.uint8:
            raise CheckpointError(f"{path} has no values of its rank. {files.ANOTHER}")
        text = torch.empty(1, entry.numel, dtype=torch.uint8)
        self.read([ReadRequest(rank, entry.offset, text.dtype, text, entry.numel)])
        try:
            own: dict[str, Any] = json.loads(text.numpy().tobytes())
            files.refuse_wrong_buffers(own, self.contents(rank).entries)
        except (ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is damaged: the values of its rank are wrong ({error}). {files.ANOTHER}"
            ) from None
        return own

    def buffers(self, rank: int) -> dict[str, Tensor]:
        """Read the buffers of a rank, by name. Those that the rank did not save are rank 0's."""
        found: dict[str, Tensor] = self.values(self.manifest.buffers)
        if rank in self.manifest.ranks_with_buffers:
            found |= self.values(self.manifest.by_new_name(self.own(rank).get("buffers", {})), rank)
        return found

    def model(self) -> Iterator[StoredTensor]:
        """Yield every parameter, then every buffer."""
        manifest = self.manifest
        for fqn, parameter in manifest.parameters.items():
            dtype = torch.float32
            find: Find = _NO_ELEMENTS.over
            if PARAMETERS in parameter.states:
                dtype = dtype_of(parameter.states[PARAMETERS].dtype)
                find = self.find(fqn, PARAMETERS)
            yield StoredTensor(parameter.names, tuple(parameter.shape), dtype, find, parameter.trained)
        for name, packed in manifest.buffers.items():
            if "$scalar" in packed:
                kind, value = packed["$scalar"]
                yield StoredTensor([name], (), dtype_of(kind), _NO_ELEMENTS.over, is_buffer=True, scalar=value)
                continue
            tensor = manifest.tensors[packed["$tensor"]]
            span = RangeRecord(start=0, stop=math.prod(tensor.shape), file=tensor.file, offset=tensor.offset)
            whole = StateRecord(dtype=tensor.dtype, ranges=[span])
            yield StoredTensor([name], tuple(tensor.shape), dtype_of(tensor.dtype), whole.over, is_buffer=True)

    def tensor(self, stored: StoredTensor, span: Span) -> Tensor:
        """Read a span of a parameter or buffer as a 1-D tensor, in the saved dtype."""
        if stored.scalar is not None:
            return torch.tensor([stored.scalar], dtype=stored.dtype)
        tensor = torch.empty(span.numel, dtype=stored.dtype)
        plan = plan_for(stored.find, span, Placement.whole(stored.shape))
        self.read(requests_for(plan, stored.dtype, tensor))
        return tensor

    def values(self, packed: Any, rank: int | None = None) -> Any:
        """Unpack packed values and read their tensors: those that the manifest lists or, of a rank's own, those in its file."""
        requests = []

        def make(name: str) -> Tensor:
            record = self.manifest.tensors.get(name)
            if record is None and rank is not None and not self.manifest.ranks:
                entry = self.contents(rank).entries[name]
                dtype = str(entry.dtype).removeprefix("torch.")
                record = TensorRecord(dtype=dtype, shape=list(entry.shape), file=rank, offset=entry.offset)
            if record is None:
                raise KeyError(name)
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


Plan = list[tuple[Runs, list[tuple[RangeRecord, Common]]]]
"""The parts of a span, in order, with the saved ranges of each."""


def plan_for(find: Find, span: Span, placement: Placement) -> Plan:
    """Find the saved ranges of a span of this rank's part of a parameter. `placement` is the position of that part in the whole.

    Raises:
        CheckpointError: the checkpoint lacks some of the elements, or holds some twice.
    """
    return [(runs, _shared(find, span.name, runs)) for runs in placement.runs(span.start, span.stop)]


def requests_for(plan: Plan, dtype: torch.dtype, out: Tensor) -> list[ReadRequest]:
    """Create the requests that read a planned span into the 1-D tensor `out`. `dtype` is the dtype in the files.

    Rows of a saved range share a request, unless they are far apart.
    """
    requests = []
    place = out.storage_offset()
    for runs, found in plan:
        for part, common in found:
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


def _shared(find: Find, fqn: str, runs: Runs) -> list[tuple[RangeRecord, Common]]:
    """Return the elements of `runs` in each saved range. Raise if the ranges lack some of them or hold some twice."""
    found = []
    parts = find(runs)
    for part in parts:
        found += [(part, common) for common in runs.common(part.runs)]
    if sum(common.count * common.numel for _, common in found) == runs.count * runs.numel:
        return found
    for start, stop, _ in runs.between(runs.start, runs.stop):
        covered = start
        # Runs of several ranges may interleave.
        for low, high in sorted(run[:2] for part in parts for run in part.runs.between(start, stop)):
            if low > covered:
                break
            covered = max(covered, high)
        if covered < stop:
            raise CheckpointError(f"the checkpoint holds no elements {covered} to {stop} of {fqn}. Load another tag.")
    raise CheckpointError(f"the checkpoint holds elements of {fqn} twice. Load another tag.")


def files_for(manifest: Manifest, live: LiveModel) -> set[int]:
    """Return the numbers of the files that a load on this rank may open."""
    if manifest.ranks:  # all files have tensors that any rank may read
        return set(range(len(manifest.files)))
    reader = Reader(Path(), manifest)
    found = {tensor.file for tensor in manifest.tensors.values()}
    if manifest.world_size == live.collectives.world_size or live.rank in manifest.ranks_with_buffers:
        found.add(live.rank)
    elif live.modules_with_extra_states:
        found.add(0)
    for held, fqn in _held_and_saved(manifest, live):
        for runs in held.named.placement.runs(held.span.start, held.span.stop):
            found |= reader.places.files_over(fqn, runs)
    return found


def _held_and_saved(manifest: Manifest, live: LiveModel) -> Iterator[tuple[Held, str]]:
    """Yield each span of this rank that a checkpoint has, with the name of the saved parameter."""
    saved_as = {name: fqn for fqn, record in manifest.parameters.items() for name in record.names}
    for held in live.states.held():
        fqn = next((saved_as[name] for name in held.named.fqns if name in saved_as), None)
        if fqn is not None and PARAMETERS in manifest.parameters[fqn].states:
            yield held, fqn


class CheckpointLoader:
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
        self._parts: list[tuple[Held, ParameterRecord, dict[str, Plan]]] = []  # with the plan for each state
        self._state: list[tuple[Held, dict[str, Any]]] = []  # the optimizer's new states, of each trained part
        self._options: dict[int, dict[str, Any]] = {}
        self._values: dict[str, dict[str, Any]] = {}
        self._buffers: dict[str, Tensor] = {}
        self._refuse_another_model(strict)
        if optimizer_states:
            self._tell_of_another_dtype()
            self._refuse_another_optimizer()
            self._options = self._find_options()
        for held, fqn in _held_and_saved(reader.manifest, live):
            record = reader.manifest.parameters[fqn]
            plans: dict[str, Plan] = {}
            self._parts.append((held, record, plans))
            for state, saved in self._wanted(held, record):
                plans[state] = plan_for(reader.find(fqn, state), held.span, held.named.placement)
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

    def _tell_of_another_dtype(self) -> None:
        """Log on rank 0 if the checkpoint's optimizer states rested in another dtype than those of this run do."""
        own, saved = name_of_state_dtype(self._live), self.reader.manifest.policy.get(STATE_DTYPE)
        if own != saved and self._live.rank == 0:
            logging.getLogger("zeroshard").warning(
                "%s has optimizer states in %s, and this run continues with %s.",
                self.reader.folder, saved or "their own dtype", own or "their own dtype",
            )  # fmt: skip

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
        for part in self._parts:
            if part[0].shard.is_here:
                requests += self._requests_of(*part)
        self.reader.read(requests)
        elsewhere = [part for part in self._parts if not part[0].shard.is_here]
        for shard, group in groupby(elsewhere, key=lambda part: part[0].shard):
            parts = list(group)
            # A shard that is overwritten as a whole need not be readable.
            is_whole = isinstance(shard, Trained) and len(parts) == len(shard.resident.views)
            with shard.opened(write=True, read=not (self.optimizer_states and is_whole)):
                requests = []
                for held, record, plans in parts:
                    requests += self._requests_of(held, record, plans)
                    if self.optimizer_states and held.view is not None:
                        # The end of the block writes the states that the optimizer then has.
                        self._optimizer.state[held.view.value] = self._state[-1][1]
                self.reader.read(requests)
        self._values = self.reader.values(self._values)
        if self._live.buffers:
            self._buffers = self.reader.buffers(self._live.rank)

    def _requests_of(self, held: Held, record: ParameterRecord, plans: dict[str, Plan]) -> list[ReadRequest]:
        """Create the requests for all states of one part that is in memory, and allocate new optimizer states."""
        requests = []
        state: dict[str, Any] = {}
        for name, saved in self._wanted(held, record):
            if name == PARAMETERS:
                requests += requests_for(plans[name], dtype_of(saved.dtype), held.value)
                continue
            assert held.view is not None
            like = held.view.value
            there = held.state.get(name)
            dtype = dtype_of(saved.dtype)
            if saved.dtype in (record.states[PARAMETERS].dtype, self.reader.manifest.policy.get(STATE_DTYPE)):
                # A state that steps computed with in the master weights' dtype takes their dtype in this run.
                dtype = like.dtype
            if not isinstance(there, Tensor) or there.shape != like.shape or there.dtype != dtype:
                there = torch.empty(like.shape, dtype=dtype, device=like.device)
            state[name] = there
            requests += requests_for(plans[name], dtype_of(saved.dtype), there.view(-1))
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
