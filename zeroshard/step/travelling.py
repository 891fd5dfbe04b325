"""Owns one shard that rests elsewhere, wholly or in part: it passes through a frame while the optimizer updates it.

The optimizer's tensors are views of a frame while their sub-group has its turn, and otherwise of a placeholder, one NaN
expanded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from zeroshard.errors import StorageError, UsageError
from zeroshard.gradients.gradient_bucket import Shard
from zeroshard.step.resident import Resident, ShardView, is_placeholder, placeholder, runs_along
from zeroshard.storage.base import Slot
from zeroshard.storage.transfers import CPU, Transfer, in_pages
from zeroshard.torch_private import is_same_memory

_MASTER = "master weights"
_GRADIENT = "gradients"


class Frame:
    """The memory for one sub-group, where the optimizer steps."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._used = 0
        self._busy: list[Transfer] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Take room for `numel` elements, aligned for direct I/O; new memory if the frame is full, only in the first step."""
        nbytes = numel * dtype.itemsize
        start = self._used
        self._used = self._used + in_pages(nbytes)
        if self._used > self._memory.numel():
            return torch.empty(numel, dtype=dtype, device=self._memory.device)
        return self._memory[start : start + nbytes].view(dtype)

    def hold(self, transfer: Transfer) -> None:
        """Keep the frame from reuse until `transfer` is over."""
        self._busy.append(transfer)

    def empty(self) -> Frame:
        """Wait until no transfer from the frame is in flight, and free its room.

        Raises:
            StorageError: a write failed, and no other caller, such as a reader of the same slot, got this error.
        """
        busy = self._busy
        self._busy = []
        self._used = 0
        failed = None
        for transfer in busy:
            is_known = transfer.has_raised
            try:
                transfer.wait(CPU)
            except StorageError as error:
                failed = failed if is_known else error
        if failed is not None:
            raise failed
        return self

    def forget(self) -> None:
        """Wait for transfers that failed or are no longer needed, and ignore their errors. None may land later."""
        with suppress(StorageError):
            self.empty()

    @property
    def is_idle(self) -> bool:
        """Whether all transfers are reported as done, so that `empty` would not block."""
        return all(transfer.is_done for transfer in self._busy)

    @property
    def nbytes(self) -> int:
        """The frame's size in bytes."""
        return self._memory.numel()


class Travelling(Resident):
    """A shard of which some values rest elsewhere, with all states that the optimizer keeps for it.

    Each step calls `start`, `start_gradient`, `enter` and `leave`, in this order.
    """

    is_in_place = False

    def __init__(self, shard: Shard, views: Sequence[ShardView], optimizer: torch.optim.Optimizer) -> None:
        super().__init__(shard, views, optimizer)
        self._slots: dict[str, Slot] = {}
        """The slots of the optimizer's states, each of the shard's numel, if they are not stored where the optimizer steps."""
        self._away: dict[int, Tensor] = {}
        """The optimizer's tensors whose values are in the slots. Others were set by somebody: the next write takes them up."""
        self._frame: Frame | None = None
        self._memory: dict[str, Tensor] = {}
        self._reading: list[Transfer] = []
        self._master_version = 0

    def expect_new_states(self) -> None:
        self._away.clear()

    @property
    def states(self) -> int:
        """The number of the optimizer's states of this shard that rest elsewhere."""
        return len(self._slots)

    def nbytes(self, states: int) -> int:
        """Return the bytes that the shard needs in a frame, with `states` tensors of optimizer state for each parameter."""
        shard = self.shard
        slots = [slot for slot in (shard.master, shard.gradient) if slot.memory_in(shard.step) is None]
        if shard.home is not shard.step:
            slots += list(self._slots.values()) or [shard.master] * states
        return sum(in_pages(slot.nbytes) for slot in slots)

    # ------------------------------------------------------------------ coming

    def start(self, frame: Frame, *, read: bool = True) -> None:
        """Start to read master weights and states into the frame, except master weights that the user may write (see `enter`).

        Args:
            read: False only takes room, for values that will be overwritten.
        """
        master = self.shard.master
        self._frame = frame
        self._memory = {}
        self._master_version = master.version
        slots = {_MASTER: master} if master.memory_in(self.shard.step) is None else {}
        for name, slot in (slots | self._slots).items():
            self._memory[name] = frame.take(slot.numel, slot.dtype)
            if not read:
                self._memory[name].zero_()
            elif name != _MASTER or not self.shard.is_shown:
                self._reading.append(slot.read(self._memory[name]))

    @property
    def is_stale(self) -> bool:
        """Whether the master weights were, or may have been, set since they were read."""
        return _MASTER in self._memory and (self.shard.is_shown or self._master_version != self.shard.master.version)

    def refresh(self) -> None:
        """Read again the values that may have changed since they were read."""
        if self.is_stale:
            self._read_master()
            self._reading.pop().wait(self.shard.step.device)

    def _read_master(self) -> None:
        self._master_version = self.shard.master.version
        self._reading.append(self.shard.master.read(self._memory[_MASTER]))

    def start_gradient(self) -> None:
        """Start to read the gradient into the frame."""
        slot = self.shard.gradient
        if slot.memory_in(self.shard.step) is None:
            assert self._frame is not None
            self._memory[_GRADIENT] = self._frame.take(slot.numel, slot.dtype)
            self._reading.append(slot.read(self._memory[_GRADIENT]))

    def enter(self) -> None:
        if self.is_stale:
            self._read_master()
        super().enter()
        reading = self._reading
        self._reading = []
        for transfer in reading:
            transfer.wait(self.shard.step.device)
        self._refuse_written_placeholders()
        if _GRADIENT in self._memory:
            self.gradient = self._memory[_GRADIENT]
        if _MASTER in self._memory:
            self._look(self._memory[_MASTER])
        for name in self._slots:
            for view, tensor in self._tensors(name):
                if id(tensor) in self._away:
                    tensor.data = self._part(name, view).view(tensor.shape)

    def _refuse_written_placeholders(self) -> None:
        if self.shard.step.device.type != "cpu":
            return  # a look would make the host wait for the accelerator
        looked_at = [view.value for view in self.views if _MASTER in self._memory] + list(self._away.values())
        written = [tensor for tensor in looked_at if tensor.is_floating_point() and not is_placeholder(tensor)]
        for tensor in written:
            tensor.data = placeholder(tensor)
        if written:
            raise UsageError(
                f"master weights or optimizer states of {self.shard.master.label} were written while they rest "
                "elsewhere, and the write has no effect: use sharded.states.set or set_local."
            )

    def abandon(self) -> None:
        for transfer in self._reading:
            with suppress(StorageError):
                transfer.wait(CPU)
        if self._frame is not None:
            for tensor in self._away.values():
                tensor.data = placeholder(tensor)
            if _MASTER in self._memory:
                self._look(None)
            if _GRADIENT in self._memory:
                self.gradient = None
        self._reading = []
        self._frame = None
        self._memory = {}
        super().abandon()

    def _all_slots(self) -> list[Slot]:
        return [*super()._all_slots(), *self._slots.values()]

    # ------------------------------------------------------------------ going

    def leave(self, *, write: bool, update_rest: bool) -> None:
        shard = self.shard
        if self._frame is None:
            return
        master = self._memory.get(_MASTER, shard.master.memory_in(shard.step))
        assert master is not None
        if update_rest and shard.rest is not shard.master:
            self._hold(shard.rest.write(master))
        if shard.home is not shard.step and write:
            self._adopt()
        if write:
            for name, slot in self._slots.items():
                self._hold(slot.write(self._memory[name]))
            if _MASTER in self._memory:
                self._hold(shard.master.write(master))
        if _MASTER in self._memory:
            self._look(None)
        if _GRADIENT in self._memory:
            self.gradient = None
        kept = [tensor for name in self._slots for _, tensor in self._tensors(name)]
        self._away = {id(tensor): tensor for tensor in kept if write or id(tensor) in self._away}
        for tensor in self._away.values():
            tensor.data = placeholder(tensor)
        self._frame = None
        self._memory = {}

    def _hold(self, transfer: Transfer) -> None:
        assert self._frame is not None
        self._frame.hold(transfer)

    def _adopt(self) -> None:
        """Move states that the optimizer made, or that were set, into the frame, and give each a slot."""
        assert self._frame is not None
        names = [
            name
            for view in self.views
            for name, value in self._optimizer.state.get(view.value, {}).items()
            if runs_along(value, name, view.value)
        ]
        for name in dict.fromkeys(names):
            tensors = self._tensors(name)
            if name not in self._slots:
                dtype = tensors[0][1].dtype
                self._slots[name] = self.shard.home.slot(
                    f"{name} of {self.shard.master.label}", self.shard.numel, dtype
                )
                self._memory[name] = self._frame.take(self.shard.numel, dtype).zero_()
            for view, tensor in tensors:
                part = self._part(name, view)
                if not is_same_memory(part, tensor):
                    part.copy_(tensor.reshape(-1))

    def _tensors(self, name: str) -> list[tuple[ShardView, Tensor]]:
        found = []
        for view in self.views:
            value = self._optimizer.state.get(view.value, {}).get(name)
            if runs_along(value, name, view.value):
                found.append((view, value))
        return found

    def _part(self, name: str, view: ShardView) -> Tensor:
        return self._memory[name][view.start : view.start + view.numel]


def resident_of(shard: Shard, views: Sequence[ShardView], optimizer: torch.optim.Optimizer) -> Resident:
    """Make the object for a shard, by where its values rest. See `Resident`."""
    is_here = shard.home is shard.step
    slots = (shard.master, shard.gradient)
    if is_here and all(slot.memory_in(shard.step) is not None for slot in slots):
        return Resident(shard, views, optimizer)
    return Travelling(shard, views, optimizer)
