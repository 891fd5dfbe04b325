"""Owns the way to torch.distributed.checkpoint (DCP): it writes and reads our shards as it does its own. Called by users.

    import torch.distributed.checkpoint as dcp

    state = zeroshard.DistributedState(sharded)
    dcp.save({"train": state}, checkpoint_id=folder)
    dcp.load({"train": state}, checkpoint_id=folder)     # at any world size and policy, from whatever wrote it

DCP knows parts of a tensor as boxes. A range of the flattened parameter is a few of them: the rest of a row, whole rows, the
begin of a row, in each dimension. So what is written has the parameters' true shapes, and other readers and writers of DCP (FSDP2,
DTensor) understand it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful

from zeroshard.errors import CheckpointError, UsageError
from zeroshard.step.model_states import PARAMETERS, Held, ModelStates
from zeroshard.step.sharded_optimizer import ShardedOptimizer

_MADE = {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "RMSprop", "SGD", "Lion", "MuonWithAdamW"}
"""Optimizers whose first states are zeros, whatever the learning rate."""


@dataclass(frozen=True)
class Box:
    """A contiguous part of a tensor, [offset, offset + size) in each dimension, and the memory that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


def boxes(shape: Sequence[int], start: int, flat: Tensor) -> Iterator[Box]:
    """The boxes that elements [start, start + flat.numel()) of a flattened tensor are, in order. Views of `flat`."""
    if not flat.numel():
        return
    if len(shape) <= 1:
        yield Box(
            (start,) if shape else (), (flat.numel(),) if shape else (), flat.view(-1) if shape else flat.view(())
        )
        return
    row, inner = prod(shape[1:]), tuple(shape[1:])
    done = 0
    while done < flat.numel():
        position = start + done
        within = position % row
        if within or flat.numel() - done < row:  # a part of one row
            numel = min(row - within, flat.numel() - done)
            for box in boxes(inner, within, flat[done : done + numel]):
                yield Box((position // row, *box.offsets), (1, *box.sizes), box.tensor.unsqueeze(0))
        else:
            count = (flat.numel() - done) // row
            numel = count * row
            whole = flat[done : done + numel].view(count, *inner)
            yield Box((position // row, *(0 for _ in inner)), (count, *inner), whole)
        done += numel


class Parts(Tensor):
    """What this rank holds of one tensor, as DCP asks for it (torch.distributed._checkpointable).

    DCP looks at its shape and dtype and asks the three questions below. It is a tensor since DCP asks nothing else, has no
    storage, and takes no operation.
    """

    _writes: Sequence[Box]
    _reads: dict[torch.Size, Box]

    @staticmethod
    def __new__(cls, shape: torch.Size, writes: Sequence[Box], reads: Sequence[Box], dtype: torch.dtype) -> Parts:
        made: Parts = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)  # type: ignore[attr-defined]
        made._writes, made._reads = writes, {torch.Size(box.offsets): box for box in reads}
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(
            f"{func} of a tensor whose parts are on several ranks: it is for torch.distributed.checkpoint."
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
            raise CheckpointError(f"this rank holds no part of {index.fqn} at {index.offset}.")
        return self._reads[index.offset].tensor


class HasStates(Protocol):
    """What `shard` returns, as far as it is needed here."""

    @property
    def optimizer(self) -> ShardedOptimizer: ...

    @property
    def states(self) -> ModelStates: ...

    @property
    def rank(self) -> int: ...

    def take_masters(self) -> None:
        """The parameters follow master weights that were written to."""


class DistributedState(Stateful):
    """A sharded model's parameters and optimizer states for `dcp.save` and `dcp.load`.

    Keys are `model.<fqn>` and `optim.<fqn>.<state>`. Schedulers, counters and random state are not in it: give DCP those yourself.
    """

    def __init__(self, sharded: HasStates) -> None:
        self._sharded = sharded

    def state_dict(self) -> dict[str, Any]:
        """Live memory. Before the first step the optimizer's states are made, so that a load has where to read to.

        Raises:
            UsageError: states rest on disk, and there is no memory to show.
        """
        if not all(held.shard.is_here for held in self._sharded.states.held()):
            raise UsageError(
                "torch.distributed.checkpoint reads and writes memory, and under this policy model states rest elsewhere: use "
                "sharded.save and sharded.load."
            )
        self._make_states()
        parts: dict[tuple[str, str], list[Held]] = {}
        scalars: dict[str, dict[str, Any]] = {}
        shapes: dict[str, torch.Size] = {}
        for held in self._sharded.states.held():
            fqn = held.named.fqn
            shapes[fqn] = held.named.shape
            for name in (PARAMETERS, *held.state):
                if name == PARAMETERS or held.along(name) is not None:
                    parts.setdefault((fqn, name), []).append(held)
                else:
                    scalars.setdefault(fqn, {})[name] = held.state[name]
        result: dict[str, Any] = {"model": {}, "optim": {}}
        for (fqn, name), helds in parts.items():
            tensors = [(held, held.value if name == PARAMETERS else held.along(name)) for held in helds]
            reads = [box for held, t in tensors if t is not None for box in boxes(shapes[fqn], held.start, t)]
            rank = self._sharded.rank
            writes = [
                box
                for held, t in tensors
                if t is not None and held.owner == rank
                for box in boxes(shapes[fqn], held.start, t)
            ]
            made = Parts(
                shapes[fqn], writes, reads, helds[0].value.dtype if name == PARAMETERS else reads[0].tensor.dtype
            )
            if name == PARAMETERS:
                result["model"][fqn] = made
            else:
                result["optim"].setdefault(fqn, {})[name] = made
        for fqn, values in scalars.items():
            result["optim"].setdefault(fqn, {}).update(values)
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """DCP has read into the memory that `state_dict` showed: the model takes it. Every rank must call it."""
        optim: Mapping[str, Mapping[str, Any]] = state_dict.get("optim", {})
        for held in self._sharded.states.held():
            for name, value in optim.get(held.named.fqn, {}).items():
                if not isinstance(value, Parts) and held.view is not None:
                    state = self._sharded.optimizer.state[held.view.value]
                    state[name] = value.clone() if isinstance(value, Tensor) else value
        self._sharded.take_masters()

    def _make_states(self) -> None:
        """A step with gradients of zero and a rate of zero, counted as none: the states are those before the first step."""
        optimizer = self._sharded.optimizer
        if optimizer.state or not optimizer.views:
            return
        if type(optimizer.inner).__name__ not in _MADE:
            raise UsageError(
                f"the states of {type(optimizer.inner).__name__} cannot be made without a step: take one before."
            )
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for view in optimizer.views:
            view.value.grad = torch.zeros_like(view.value)
        optimizer.step_inner()
        for view in optimizer.views:
            view.value.grad = None
            state = optimizer.state[view.value]
            for name, start in (("step", 0), ("mu_product", 1)):
                if isinstance(state.get(name), Tensor):
                    state[name].fill_(start)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
