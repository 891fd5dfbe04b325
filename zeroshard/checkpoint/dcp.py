"""Owns the support of torch.distributed.checkpoint (DCP), which can write and read zeroshard's shards.

    import torch.distributed.checkpoint as dcp

    state = zeroshard.DistributedState(sharded)
    dcp.save({"train": state}, checkpoint_id=folder)
    dcp.load({"train": state}, checkpoint_id=folder)     # at any world size and ZeRO stage

DCP describes parts of a tensor as boxes. A range of the flattened parameter consists of a few boxes: in each dimension,
the end of a row, whole rows, and the start of a row. So files have the parameters' true shapes, and other users of DCP
(FSDP2, DTensor) can read and write them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful

from zeroshard.checkpoint.checkpoints import Checkpoints
from zeroshard.core.model_states import PARAMETERS, Held
from zeroshard.core.sharded_step import ShardedStep
from zeroshard.errors import CheckpointError, UsageError
from zeroshard.optim.several import optimizers_of
from zeroshard.optim.states import KNOWN
from zeroshard.torch_private import wrapper_tensor


@dataclass(frozen=True)
class Box:
    """A contiguous part of a larger tensor: its offset in each dimension, and the memory that holds it."""

    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def sizes(self) -> torch.Size:
        return self.tensor.shape

    def moved(self, by: Sequence[int]) -> Box:
        """Return this box in the coordinates of a larger tensor, in which its own tensor starts at `by`."""
        offsets = tuple(own + start for own, start in zip(self.offsets, by, strict=True))
        return replace(self, offsets=offsets)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), self.sizes)


def boxes(shape: Sequence[int], start: int, flat: Tensor) -> Iterator[Box]:
    """Yield boxes that together are elements [start, start + flat.numel()) of a flattened tensor, as views of `flat`."""
    if not flat.numel():
        return
    if not shape:
        yield Box((), flat.view(()))
        return
    inner = tuple(shape[1:])
    row = prod(inner)
    done = 0
    while done < flat.numel():
        position = start + done
        within = position % row
        if within or flat.numel() - done < row:  # a part of one row
            numel = min(row - within, flat.numel() - done)
            for box in boxes(inner, within, flat[done : done + numel]):
                yield Box((position // row, *box.offsets), box.tensor.unsqueeze(0))
        else:
            count = (flat.numel() - done) // row
            numel = count * row
            yield Box((position // row, *(0 for _ in inner)), flat[done : done + numel].view(count, *inner))
        done += numel


class Parts(Tensor):
    """This rank's parts of one tensor, in the form that DCP reads.

    DCP reads its shape and dtype, and calls the three methods below. DCP calls them only on tensors, so this is a
    tensor, but without storage or operations.
    """

    _writes: Sequence[Box]
    _reads: dict[torch.Size, Box]

    @staticmethod
    def __new__(cls, shape: torch.Size, writes: Sequence[Box], reads: Sequence[Box], dtype: torch.dtype) -> Parts:
        made: Parts = wrapper_tensor(cls, shape, dtype=dtype)
        made._writes = writes
        made._reads = {torch.Size(box.offsets): box for box in reads}
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            f"{func} is not supported: it stands for parts on several ranks; only torch.distributed.checkpoint reads it."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Parts(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(box.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=box.chunk, properties=properties, size=self.shape),
            )
            for box in self._writes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [box.chunk for box in self._reads.values()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if index.offset is None or index.offset not in self._reads:
            raise CheckpointError(
                f"this rank holds no part of {index.fqn} at {index.offset}. Save and load with the same model, or use "
                "sharded.load."
            )
        return self._reads[index.offset].tensor


class HasCheckpoints(Protocol):
    """The part of `Sharded` that this module needs."""

    @property
    def checkpoints(self) -> Checkpoints: ...


class DistributedState(Stateful):
    """A sharded model's parameters and optimizer states for `dcp.save` and `dcp.load`.

    Keys are `model.<fqn>` and `optim.<fqn>.<state>`. Buffers, the options of param groups (lr), schedulers, counters and
    random state are not included: pass those to DCP yourself.
    """

    def __init__(self, sharded: HasCheckpoints) -> None:
        self._live = sharded.checkpoints.live

    def state_dict(self) -> dict[str, Any]:
        """Return the states in the memory that training uses, without a copy.

        Before the first step, the call creates the optimizer's states, so that `dcp.load` can read into them.

        Raises:
            UsageError: some states are on disk, in 16 or 8 bits, or not on the device that updates them; or, before the first
                step, the optimizer's states cannot be created without a step (Adafactor, ASGD, Rprop, SGD with dampening, classes
                outside torch and zeroshard).
        """
        self._live.schedule.refuse_unseen_changes()
        self._live.step.refuse_inside()
        if not all(held.shard.is_here for held in self._live.states.held()):
            raise UsageError(
                "torch.distributed.checkpoint needs model states in the memory in which the optimizer steps, and this "
                "run stores some elsewhere, in 16 bits or in 8. Use sharded.save and sharded.load."
            )
        self._make_states()
        parts: dict[tuple[str, str], list[Held]] = {}
        model: dict[str, Any] = {}
        optim: dict[str, dict[str, Any]] = {}
        for held in self._live.states.held():
            for name in held.states:
                parts.setdefault((held.named.fqn, name), []).append(held)
            if held.beside:
                optim.setdefault(held.named.fqn, {}).update(held.beside)
        for (fqn, name), helds in parts.items():
            placement = helds[0].named.placement
            shape = torch.Size(placement.shape)
            reads: list[Box] = []
            writes: list[Box] = []
            for held in helds:
                tensor = held.tensor(name)
                assert tensor is not None
                dtype = tensor.dtype
                found = [one.moved(placement.starts) for one in boxes(placement.local_shape, held.span.start, tensor)]
                reads += found
                if self._live.writes(held):
                    writes += found
            made = Parts(shape, writes, reads, dtype)
            if name == PARAMETERS:
                model[fqn] = made
            else:
                optim.setdefault(fqn, {})[name] = made
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Update the model after DCP has read into the memory of `state_dict`. Every rank must call it.

        Raises:
            CheckpointError: a value that the optimizer keeps with its states, such as a step count, has a different type or
                shape. Such values have not changed, but DCP has already overwritten the states.
        """
        optim: Mapping[str, Mapping[str, Any]] = state_dict.get("optim", {})
        for held in self._live.states.held():
            for name, before in held.beside.items():
                value = optim.get(held.named.fqn, {}).get(name, before)
                _refuse_another_type(f"optim.{held.named.fqn}.{name}", before, value)
        for held in self._live.states.held():
            for name, value in optim.get(held.named.fqn, {}).items():
                if not isinstance(value, Parts) and held.view is not None:
                    state = self._live.step.inner.state[held.view.value]
                    state[name] = value
                    if isinstance(value, Tensor):  # spans of one parameter must not share it
                        state[name] = value.clone()
        for unit in self._live.units:
            unit.load_masters()

    def _make_states(self) -> None:
        """Create the optimizer's initial states by a step with zero gradients and learning rate, and reset its step count."""
        step = self._live.step
        if step.inner.state or not step.views:
            return
        names = {type(one).__name__ for one in optimizers_of(step.inner)}
        others = names - {name for name, known in KNOWN.items() if known.starts_at_zero}
        if any(group.get("momentum") and group.get("dampening") for group in step.inner.param_groups):
            others.add("SGD with dampening")  # its first step does not dampen
        if others:
            raise UsageError(
                f"the states of {' and '.join(sorted(others))} cannot be made without a step. Run one step first."
            )
        with _updates_nothing(step):
            for one in optimizers_of(step.inner):
                step.step_inner(one)
        for view in step.views:
            state = step.inner.state[view.value]
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(0)
            if isinstance(state.get("mu_product"), Tensor):
                state["mu_product"].fill_(1)


@contextmanager
def _updates_nothing(step: ShardedStep) -> Iterator[None]:
    """Keep the first step in the block from changing parameters. After an error, remove the states: some may be partial."""
    kept = [dict(group) for group in step.inner.param_groups]
    for group in step.inner.param_groups:
        group["lr"] = group["lr"] * 0.0
        if "weight_decay" in group:  # some optimizers add it to the gradient
            group["weight_decay"] = 0.0
    for view in step.views:
        view.value.grad = torch.zeros_like(view.value)
    try:
        yield
    except BaseException:
        for one in optimizers_of(step.inner):
            one.state.clear()
        raise
    finally:
        for view in step.views:
            view.value.grad = None
        for group, before in zip(step.inner.param_groups, kept, strict=True):
            group.update({name: before[name] for name in ("lr", "weight_decay") if name in before})


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a value of type {type(value).__name__}"


def _refuse_another_type(key: str, before: Any, value: Any) -> None:
    """Raise CheckpointError if a value that was read cannot replace `before`: the optimizer's next step would fail."""
    numbers = (int, float)
    fits = type(value) is type(before) or (isinstance(value, numbers) and isinstance(before, numbers))
    if fits and isinstance(value, Tensor):
        fits = value.shape == before.shape
    if not fits:
        raise CheckpointError(
            f"{key} is {_kind_of(value)} in the checkpoint, and {_kind_of(before)} in the optimizer: the checkpoint is "
            "damaged, or from another optimizer. Load another one."
        )
