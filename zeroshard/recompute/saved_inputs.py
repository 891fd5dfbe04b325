"""Owns the places of a checkpoint's saved inputs between forward and backward.

torch's checkpointing passes each input that it saves to the hooks for saved tensors around it. A keeper is the first
hook of such a pair: it gets a tensor in the forward and returns a recall. The recall is a function that returns the
tensor in each backward of the graph. It lives as long as the graph.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives
from zeroshard.errors import UsageError
from zeroshard.storage.transfers import Copies, Transfer

Recall = Callable[[], Tensor]
Keeper = Callable[[Tensor], Recall]
"""A keeper of saved inputs (see the module's docstring)."""


def keep(tensor: Tensor) -> Recall:
    """Keep the tensor itself, as torch does."""
    return lambda: tensor


class Partition:
    """A keeper that divides an input over a model-parallel group and gathers it again.

    All ranks of the group have the same input. `inner` keeps this rank's part.
    """

    def __init__(self, collectives: Collectives, inner: Keeper) -> None:
        self._collectives = collectives
        self._inner = inner

    def __call__(self, tensor: Tensor) -> Recall:
        ranks = self._collectives.world_size
        numel = -(-tensor.numel() // ranks)
        start = self._collectives.rank * numel
        own = tensor.new_zeros(numel)
        part = tensor.detach().reshape(-1)[start : start + numel]
        own[: part.numel()].copy_(part)
        recall = self._inner(own)
        shape = tensor.shape

        def gather() -> Tensor:
            rows = tensor_like.new_empty(ranks, numel)
            rows[self._collectives.rank].copy_(recall())
            self._collectives.all_gather(rows, 0, "all-gather of partitioned activations").wait()
            return rows.view(-1)[: shape.numel()].view(shape)

        tensor_like = tensor.new_empty(0)  # without memory: `gather` must not keep the whole input
        return gather


KEPT_COUNT = 2
"""The number of inputs that stay on the device during their copies. With more, the device waits for the oldest copy."""


class HostCopies:
    """A keeper that copies inputs to pinned CPU memory, while computation continues.

    Each copy back to the device starts one input ahead of its use, except the first.

    Args:
        slots: the memory for the copies; None is torch's allocator of pinned memory, which reuses memory.
        copies: the queue of copies.
    """

    def __init__(self, slots: Slots | None, copies: Copies) -> None:
        self._slots = slots
        self._copies = copies
        self._kept: weakref.WeakValueDictionary[int, _HostInput] = weakref.WeakValueDictionary()
        """The inputs that a graph still needs, in the order of the forward."""
        self._leaving: deque[tuple[Transfer, Tensor]] = deque()
        """Inputs whose copies to the CPU may still run."""

    def __call__(self, tensor: Tensor) -> Recall:
        memory = self._host_memory(tensor)
        leaving = self._copies.copy(memory, tensor.detach())
        self._leaving.append((leaving, tensor.detach()))
        while len(self._leaving) > KEPT_COUNT:
            transfer, _tensor = self._leaving.popleft()
            # no test needs this wait: without it the copies keep the input's memory until the host sees that they ended.
            transfer.wait(tensor.device)
        copy = _HostInput(memory, tensor.device, leaving)
        if self._slots is not None:
            self._slots.hold(copy)
        self._kept[id(copy)] = copy
        return partial(self._recall, copy)

    def _host_memory(self, tensor: Tensor) -> Tensor:
        """Return CPU memory for a copy of an input."""
        if self._slots is None:
            return _host_memory(tensor.shape, tensor)
        return self._slots.take(tensor)

    def _device_memory(self, memory: Tensor, device: torch.device) -> Tensor:
        """Return device memory for an input that is copied back."""
        return torch.empty_like(memory, device=device)

    def _start(self, copy: _HostInput) -> tuple[Transfer, Tensor]:
        """Start the copy back to the device, if it has not started. Return the transfer and its destination."""
        if copy.back is None:
            back = self._device_memory(copy.memory, copy.device)
            copy.back = self._copies.copy(back, copy.memory, copy.left), back
        return copy.back

    def _recall(self, copy: _HostInput) -> Tensor:
        """Return an input on its own device and start to copy back the input that the backward needs next."""
        copy.is_recalled = True
        back, tensor = self._start(copy)
        copy.back = None  # another backward of the graph copies it again
        back.wait(copy.device)
        for transfer, _tensor in self._leaving:
            # no test needs this wait: without it the copies keep the inputs' memory until the host sees that they ended.
            transfer.wait(copy.device)
        self._leaving.clear()
        before = None  # the last unused input before this one
        for one in self._kept.values():
            if one is copy:
                break
            if not one.is_recalled:
                before = one
        if before is not None:
            self._start(before)
        return tensor


@dataclass(eq=False)
class _HostInput:
    """An input in CPU memory.

    Attributes:
        left: the copy from the device.
        back: the copy back to the device and its destination, from its start until the input is recalled.
        is_recalled: whether the backward has used the input.
    """

    memory: Tensor
    device: torch.device
    left: Transfer
    back: tuple[Transfer, Tensor] | None = None
    is_recalled: bool = False


def _host_memory(shape: torch.Size, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type != "cpu")


class Slots:
    """Memory for saved inputs that is allocated once.

    Each shape, dtype and position among the inputs of a checkpoint has `count` slots. A new checkpoint reuses them once no
    graph keeps an input, usually after the backward.
    """

    def __init__(self, count: int, on_host: bool = False) -> None:
        self._count = count
        self._on_host = on_host
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._next: dict[tuple[object, ...], int] = {}
        self._kept: set[int] = set()
        self._ordinal = 0

    def begin(self) -> None:
        """Begin a new checkpoint. If no input is kept, free all slots and drop buffers that were unused since the last time."""
        self._ordinal = 0
        if not self._kept:
            self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in self._next}
            self._next.clear()

    def __call__(self, tensor: Tensor) -> Recall:
        slot = self.take(tensor)
        slot.copy_(tensor.detach())
        recall = keep(slot)  # lives as long as the graph
        self.hold(recall)
        return recall

    def take(self, tensor: Tensor) -> Tensor:
        """Return a slot for a copy of `tensor`. Raise UsageError if none is free."""
        key = (self._ordinal, tensor.shape, tensor.dtype)
        self._ordinal += 1
        number = self._next.get(key, 0)
        if number >= self._count:
            raise UsageError(
                f"number_checkpoints is {self._count}, but the forward made more checkpoints before their backward: raise "
                "it, or turn contiguous_memory_optimization off."
            )
        self._next[key] = number + 1
        if key not in self._buffers:
            shape = torch.Size((self._count, *tensor.shape))
            if self._on_host:
                self._buffers[key] = _host_memory(shape, tensor)
            else:
                self._buffers[key] = tensor.new_empty(shape)
        return self._buffers[key][number]

    def hold(self, owner: object) -> None:
        """Mark all slots as in use for as long as `owner` lives."""
        self._kept.add(id(owner))
        weakref.finalize(owner, self._kept.discard, id(owner))

    @property
    def nbytes(self) -> int:
        """The number of bytes of all slots."""
        return sum(buffer.nbytes for buffer in self._buffers.values())
