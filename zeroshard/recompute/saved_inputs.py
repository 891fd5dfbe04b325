"""Owns the places of a checkpoint's saved inputs between forward and backward.

torch's checkpointing passes each input that it saves to the saved-tensor hooks around it. A keeper is the first of such
a pair of hooks. It takes a tensor in the forward, and returns a function. In the backward that function returns the
tensor, as often as the graph is used. That function lives as long as the graph.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from zeroshard.collectives.base import Collectives
from zeroshard.errors import UsageError

Recall = Callable[[], Tensor]
Keeper = Callable[[Tensor], Recall]
"""A keeper of saved inputs, see the module's docstring."""


def keep(tensor: Tensor) -> Recall:
    """Keep the tensor as it is, as torch does."""
    return lambda: tensor


class Partition:
    """A keeper of this rank's part of an input that all ranks of a model-parallel group have, which it gathers again.

    `inner` keeps the parts.
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

        tensor_like = tensor.new_empty(0)
        return gather


KEPT_COUNT = 2
"""Inputs that stay on the device while they are copied: the computation waits for the copy of the one before these."""


class HostCopies:
    """A keeper of inputs in (pinned) CPU memory. Copies run on a separate stream, and return one checkpoint ahead of
    use.

    All memory of the device belongs to the computing stream, which waits for a copy before the memory is freed. So it
    is used again in that stream's order, however far the host is ahead.

    Args:
        slots: the memory for the copies; default: memory that torch's allocator of pinned memory keeps for reuse.
    """

    def __init__(self, slots: Slots | None = None) -> None:
        self._slots = slots
        self._stream: torch.Stream | None = None
        self._alive: list[weakref.ref[_HostCopy]] = []
        self._leaving: deque[tuple[torch.Event, Tensor]] = deque()
        """Inputs whose copies may still run."""

    def __call__(self, tensor: Tensor) -> Recall:
        stream = self._stream_for(tensor.device)
        self._alive = [copy for copy in self._alive if copy() is not None]
        if self._slots is None:
            memory = _host_memory(tensor.shape, tensor)
        else:
            memory = self._slots.take(tensor)
        copy = _HostCopy(tensor, memory, stream, self._alive, self._leaving)
        if self._slots is not None:
            self._slots.hold(copy)
        self._alive.append(weakref.ref(copy))
        return copy.recall

    def _stream_for(self, device: torch.device) -> torch.Stream | None:
        if device.type != "cpu" and self._stream is None:
            self._stream = torch.Stream(device)
        return self._stream


class _HostCopy:
    """An input in CPU memory.

    Args:
        earlier: the copies before it; the backward needs the last one next. The list grows.
        leaving: see `HostCopies`.
    """

    def __init__(
        self, tensor: Tensor, host: Tensor, stream: torch.Stream | None, earlier: list[weakref.ref[_HostCopy]],
        leaving: deque[tuple[torch.Event, Tensor]],
    ) -> None:  # fmt: skip
        self._host = host
        self._device = tensor.device
        self._stream = stream
        self._earlier = earlier
        self._number = len(earlier)
        self._leaving = leaving
        self._back: Tensor | None = None
        self._is_recalled = False
        if stream is None:
            host.copy_(tensor.detach())
            return
        current = torch.accelerator.current_stream()
        stream.wait_stream(current)  # type: ignore[attr-defined]
        with stream:
            host.copy_(tensor.detach(), non_blocking=True)
            leaving.append((stream.record_event(), tensor.detach()))
        while len(leaving) > KEPT_COUNT:
            event, _kept = leaving.popleft()
            current.wait_event(event)

    def __del__(self) -> None:
        if self._back is not None:  # the value was never used, and its copy may still be under way
            assert self._stream is not None
            # no test can miss this wait: a graph that is dropped in the middle of its backward needs no input any more.
            self._back.record_stream(self._stream)

    def start(self) -> None:
        """Start to copy it back, behind the present computation."""
        if self._back is None and self._stream is not None:
            self._back = torch.empty_like(self._host, device=self._device)
            self._stream.wait_stream(torch.accelerator.current_stream())  # type: ignore[attr-defined]
            with self._stream:
                self._back.copy_(self._host, non_blocking=True)

    def recall(self) -> Tensor:
        """Return the input on its own device."""
        self._is_recalled = True
        if self._stream is None:
            return self._host.to(self._device)
        self.start()
        tensor = self._back
        self._back = None
        assert tensor is not None
        current = torch.accelerator.current_stream()
        current.wait_stream(self._stream)  # type: ignore[attr-defined]
        self._leaving.clear()
        earlier = [reference() for reference in self._earlier[: self._number]]
        before = [copy for copy in earlier if copy is not None and not copy._is_recalled]
        if before:
            before[-1].start()
        return tensor


def _host_memory(shape: torch.Size, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device="cpu", pin_memory=like.device.type != "cpu")


class Slots:
    """The memory for saved inputs, allocated once: `count` slots for each size and position among a checkpoint's
    inputs.

    Slots are used again when no input is kept any more, which is after the backward.
    """

    def __init__(self, count: int, on_host: bool = False) -> None:
        self._count = count
        self._on_host = on_host
        self._buffers: dict[tuple[object, ...], Tensor] = {}
        self._next: dict[tuple[object, ...], int] = {}
        self._kept: set[int] = set()
        self._ordinal = 0

    def begin(self) -> None:
        """Begin another checkpoint."""
        self._ordinal = 0
        if not self._kept:
            self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in self._next}
            self._next.clear()

    def __call__(self, tensor: Tensor) -> Recall:
        slot = self.take(tensor)
        slot.copy_(tensor.detach())
        recall = partial(_same, slot)  # lives as long as the graph
        self.hold(recall)
        return recall

    def take(self, tensor: Tensor) -> Tensor:
        """Return a slot for a copy of `tensor`."""
        key = (self._ordinal, tensor.shape, tensor.dtype)
        self._ordinal += 1
        number = self._next.get(key, 0)
        if number >= self._count:
            raise UsageError(
                f"number_checkpoints is {self._count}, but more checkpoints than that were made before their backward: "
                "raise it, or turn contiguous_memory_optimization off."
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
        """Keep the slots in use as long as `owner` lives."""
        self._kept.add(id(owner))
        weakref.finalize(owner, self._kept.discard, id(owner))

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


def _same(tensor: Tensor) -> Tensor:
    return tensor
