"""Owns what one rank has to say at the moment of a save: its pieces of the model states, and what lies beside. Called by saving.

Nothing is copied but for an asynchronous save: what is looked at are the very tensors that are at rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.chunks import Lying
from zeroshard.checkpoint.description import describe
from zeroshard.checkpoint.live_model import LiveModel
from zeroshard.checkpoint.manifest import ParameterRecord
from zeroshard.checkpoint.values import Packer, storable
from zeroshard.policy import Policy
from zeroshard.schedule.states import State
from zeroshard.schedule.unit import Unit
from zeroshard.step.model_states import PARAMETERS, Held


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
class Outline:
    """What a manifest says of the model as a whole; rank 0's counts.

    Attributes:
        parameters: every parameter's record, without states.
        excluded: fqns of those that are left out.
        param_groups: names and packed hyperparameters of each group.
        optimizer: the name of its class; None where there is nothing to update.
        shared: client state, schedulers, counters, packed.
        description: what the model says of itself, as JSON.
    """

    parameters: dict[str, ParameterRecord]
    excluded: list[str]
    param_groups: list[dict[str, Any]]
    optimizer: str | None
    policy: Policy
    shared: dict[str, Any]
    description: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """What one rank writes.

    Attributes:
        pieces: its part of the model states.
        values: by fqn, what the optimizer keeps beside, packed.
        own: what differs from rank to rank (random state), packed.
        tensors: those that packed values name, the outline's too.
        buffers: the model's, as a file can hold them.
    """

    pieces: Sequence[Piece | Copied]
    values: dict[str, dict[str, Any]]
    own: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of the model states."""
        return sum(math.prod(piece.shape) * piece.dtype.itemsize for piece in self.pieces)

    def staged(self, memory: dict[str, Tensor]) -> Part:
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
class Snapshot:
    """Both."""

    outline: Outline
    part: Part


def take_snapshot(
    live: LiveModel, shared: Mapping[str, Any], own: Mapping[str, Any], *, exclude_frozen: bool
) -> Snapshot:
    """Look at what is there. Nothing is copied.

    Args:
        shared: values of which rank 0's are saved.
        own: values of which each rank's are saved.
        exclude_frozen: leave out parameters that are not trained.

    Raises:
        CheckpointError: a value is neither JSON nor a tensor.
    """
    description, units = (
        describe(live).as_json(),
        live.units,
    )  # first: every rank has its part in it, whatever fails below
    packer = Packer(f"rank_{live.rank:05d}/", _away(units))
    excluded = {entry.fqn for unit in units for entry in unit.named if not unit.trainable} if exclude_frozen else set()
    pieces, values = _model_states(live, excluded, packer)
    outline = Outline(
        {
            entry.fqn: ParameterRecord(
                shape=list(entry.shape), names=list(entry.fqns), trained=unit.trainable, states={}
            )
            for unit in units
            for entry in unit.named
            if entry.fqn not in excluded
        },
        sorted(excluded),
        _param_groups(live, packer),
        type(live.inner).__qualname__ if live.inner is not None else None,
        live.policy,
        {key: packer.pack(value, key) for key, value in shared.items()} if live.rank == 0 else {},
        description,
    )
    packed = {key: packer.pack(value, key) for key, value in own.items()}
    buffers = {name: storable(buffer, f"the buffer {name}") for name, buffer in live.buffers.items()}
    return Snapshot(outline, Part(pieces, values, packed, packer.tensors, buffers))


def _away(units: Sequence[Unit]) -> dict[int, str]:
    """Parameters that are placeholders now, those of classes of the user's own too, which cannot say so themselves."""
    away = [unit for unit in units if unit.sharded_at_rest and unit.state is not State.UNSHARDED]
    return {id(entry.parameter): entry.fqn for unit in away for entry in unit.named}


def _model_states(live: LiveModel, excluded: set[str], packer: Packer) -> tuple[list[Piece], dict[str, dict[str, Any]]]:
    """This rank's pieces; and, packed, what the optimizer keeps of a parameter that does not run along it."""
    pieces: list[Piece] = []
    values: dict[str, dict[str, Any]] = {}
    for held in live.states.held():
        fqn = held.named.fqn
        if fqn in excluded:
            continue
        if held.owner == live.rank:
            pieces += list(_pieces(held))
        rest = {name: value for name, value in held.state.items() if held.along(name) is None}
        if rest and fqn not in values:
            values[fqn] = {name: packer.pack(value, f"{fqn}.{name}") for name, value in rest.items()}
    return pieces, values


def _pieces(held: Held) -> Iterator[Piece]:
    for name in (PARAMETERS, *held.state):
        if name == PARAMETERS or held.along(name) is not None:
            yield Piece(held.named.fqn, name, held.start, held)


def _param_groups(live: LiveModel, packer: Packer) -> list[dict[str, Any]]:
    groups = live.inner.param_groups if live.inner is not None else []
    return [
        {
            "names": names,
            "options": packer.pack({k: v for k, v in group.items() if k != "params"}, f"param_groups[{number}]"),
        }
        for number, (group, names) in enumerate(zip(groups, live.group_names, strict=False))
    ]
