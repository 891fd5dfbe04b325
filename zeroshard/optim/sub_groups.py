"""Owns the way of shards through the step: which are updated by one call, and how what rests elsewhere comes and goes.

Called by sharded_optimizer. What is memory where the optimizer steps is updated in place, in one call. The rest goes through
frames, a fixed amount of CPU memory: while one sub-group is updated, those after it are read and those before it are written.

    frame 0   | read 0 | step 0 | write 0         | read 3 ...
    frame 1   | read 1          | step 1 | write 1 ...
    frame 2   | read 2                   | step 2 | write 2 ...

[Note: values that are elsewhere]
The optimizer knows the 1-D tensors that it updates, and the state that it keeps for each, by identity. So those tensors stay, and
what they look at is exchanged: a part of a frame while their sub-group has its turn, else a placeholder, one NaN expanded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.bucket import Shard
from zeroshard.errors import UsageError
from zeroshard.optim.shard_view import ShardView, runs_along
from zeroshard.policy import Offload
from zeroshard.storage.base import Slot
from zeroshard.storage.storages import STAGING_SHARE, Storages, buffers_nbytes
from zeroshard.storage.transfers import CPU, Transfer, aligned_bytes, in_pages

SUB_GROUP_NUMEL = 1 << 22
"""Elements of a sub-group, where the policy allows more: large enough for a disk, small enough that several fit in memory."""

State = MutableMapping[Any, dict[str, Any]]


class Frame:
    """Memory for one sub-group, where the optimizer steps."""

    def __init__(self, memory: Tensor) -> None:
        self._memory, self._used = memory, 0
        self._busy: list[Transfer] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Room for `numel` elements, aligned for direct I/O. Beyond the frame, which the first step alone needs, new memory."""
        nbytes = numel * dtype.itemsize
        start, self._used = self._used, self._used + in_pages(nbytes)
        if self._used > self._memory.numel():
            return torch.empty(numel, dtype=dtype, device=self._memory.device)
        return self._memory[start : start + nbytes].view(dtype)

    def hold(self, transfer: Transfer) -> None:
        """The frame is not used again before `transfer` is over."""
        self._busy.append(transfer)

    def empty(self) -> Frame:
        """Wait until nothing is on its way from here, and begin anew."""
        busy, self._busy, self._used = self._busy, [], 0
        for transfer in busy:
            transfer.wait(CPU)
        return self

    @property
    def is_idle(self) -> bool:
        """Whether `empty` would not block, as far as can be told."""
        return all(transfer.is_done for transfer in self._busy)

    @property
    def nbytes(self) -> int:
        """Of its memory."""
        return self._memory.numel()


class Resident:
    """One shard with all that the optimizer keeps of it."""

    def __init__(self, shard: Shard, views: Sequence[ShardView], state: State) -> None:
        self.shard, self.views, self._state = shard, views, state
        self.gradient: Tensor | None = shard.gradient.memory_in(shard.step)
        master = shard.master.memory_in(shard.step)
        lent = self.gradient if shard.gradient.dtype == shard.master.dtype else None
        self.gradient_parts = None if lent is None else [view.part_of(lent) for view in views]
        """Of the gradient, by view, where they are the same in every step."""
        self.is_in_place = master is not None and self.gradient is not None and shard.home is shard.step
        self._slots: dict[str, Slot] = {}
        """Of the optimizer's states, each of the shard's numel, where they do not rest where the optimizer steps."""
        self._away: dict[int, Tensor] = {}
        """The optimizer's tensors whose values are in the slots. Others were set by somebody: the next write takes them up."""
        self._frame: Frame | None = None
        self._memory: dict[str, Tensor] = {}
        self._reading: list[Transfer] = []
        self._look(master)

    def look_in(self, state: State) -> None:
        """The optimizer keeps its states there from now on."""
        self._state = state
        self._away.clear()

    def park(self) -> None:
        """What the optimizer's tensors look at will be elsewhere for a while."""
        self._look(None)

    def unpark(self) -> None:
        """It is where it was."""
        self._look(self.shard.master.memory_in(self.shard.step))

    def nbytes(self, states: int) -> int:
        """What this takes of a frame, with `states` tensors of optimizer state for each parameter."""
        shard = self.shard
        slots = [slot for slot in (shard.master, shard.gradient) if slot.memory_in(shard.step) is None]
        if shard.home is not shard.step:
            slots += list(self._slots.values()) or [shard.master] * states
        return sum(in_pages(slot.nbytes) for slot in slots)

    # ------------------------------------------------------------------ coming

    def start(self, frame: Frame) -> None:
        """Start to bring master weights and states into the frame."""
        self._frame, self._memory = frame, {}
        if self.shard.master.memory_in(self.shard.step) is None:
            self._read(_MASTER, self.shard.master)
        for name, slot in self._slots.items():
            self._read(name, slot)

    def start_gradient(self) -> None:
        """Start to bring the gradient."""
        if self.shard.gradient.memory_in(self.shard.step) is None:
            self._read(_GRADIENT, self.shard.gradient)

    def _read(self, name: str, slot: Slot) -> None:
        assert self._frame is not None
        self._memory[name] = self._frame.take(slot.numel, slot.dtype)
        self._reading.append(slot.read(self._memory[name]))

    def enter(self) -> None:
        """Block until all is here; the optimizer's tensors look at it."""
        for slot in (self.shard.rest, self.shard.master, self.shard.gradient):
            slot.wait()
        reading, self._reading = self._reading, []
        for transfer in reading:
            transfer.wait(CPU)
        if _GRADIENT in self._memory:
            self.gradient = self._memory[_GRADIENT]
        if _MASTER in self._memory:
            self._look(self._memory[_MASTER])
        for name in self._slots:
            for view, tensor in self._tensors(name):
                if id(tensor) in self._away:
                    tensor.data = self._part(name, view).view(tensor.shape)

    # ------------------------------------------------------------------ going

    def leave(self, *, write: bool, update_rest: bool) -> None:
        """Start to bring back what changed; the optimizer's tensors look at nothing.

        Args:
            write: master weights and states may have changed.
            update_rest: the parameters at rest follow the master weights.
        """
        shard = self.shard
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
        self._frame, self._memory = None, {}

    def _hold(self, transfer: Transfer) -> None:
        if self._frame is not None:
            self._frame.hold(transfer)

    def _adopt(self) -> None:
        """States that the optimizer has made, or that were set, move into the frame, and have a slot from now on."""
        assert self._frame is not None
        names = [
            name
            for view in self.views
            for name, value in self._state.get(view.value, {}).items()
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
                if part.data_ptr() != tensor.data_ptr():
                    part.copy_(tensor.reshape(-1))

    def _tensors(self, name: str) -> list[tuple[ShardView, Tensor]]:
        found = []
        for view in self.views:
            value = self._state.get(view.value, {}).get(name)
            if runs_along(value, name, view.value):
                found.append((view, value))
        return found

    def _part(self, name: str, view: ShardView) -> Tensor:
        return self._memory[name][view.start : view.start + view.numel]

    def _look(self, master: Tensor | None) -> None:
        for view in self.views:
            view.value.data = placeholder(view.value) if master is None else view.part_of(master)


_MASTER, _GRADIENT = "master weights", "gradients"


def placeholder(tensor: Tensor) -> Tensor:
    """What a tensor looks at while its values are elsewhere: one NaN (0, where it holds integers), expanded."""
    value = float("nan") if tensor.is_floating_point() else 0
    return tensor.new_full((1,) * tensor.ndim, value).expand(tensor.shape)


class SubGroup:
    """Residents that are updated by one call."""

    def __init__(self, residents: list[Resident]) -> None:
        self.residents = residents
        self.frame: Frame | None = None

    @property
    def travels(self) -> bool:
        """Something of it is not where the optimizer steps."""
        return not all(resident.is_in_place for resident in self.residents)

    def start(self, frame: Frame) -> None:
        """Start to bring what does not wait for the gradients."""
        self.frame = frame
        for resident in self.residents:
            resident.start(frame)

    def start_gradients(self) -> None:
        """Start to bring the gradients: all are there."""
        for resident in self.residents:
            resident.start_gradient()

    def leave(self, *, write: bool) -> Frame | None:
        """Start to bring it back; returns the frame that it was in."""
        frame, self.frame = self.frame, None
        for resident in self.residents:
            resident.leave(write=write, update_rest=write)
        return frame


class SubGroups:
    """All that this rank updates.

    Args:
        states: how many tensors of state the optimizer keeps for each parameter.

    Raises:
        UsageError: a shard does not fit into the buffers that `offload` allows.
    """

    def __init__(self, residents: Sequence[Resident], storages: Storages, offload: Offload, states: int) -> None:
        self._residents = list(residents)
        self._storages, self._offload, self._states = storages, offload, states
        self._open: Resident | None = None
        self._device = self._residents[0].shard.step.device if self._residents else CPU
        self._plan()

    def _plan(self) -> None:
        here = [resident for resident in self._residents if _stays_here(resident)]
        travelling = [resident for resident in self._residents if not _stays_here(resident)]
        self._budget = buffers_nbytes(self._offload) * (STAGING_SHARE - 1) // STAGING_SHARE
        needs = [resident.nbytes(self._states) for resident in travelling]
        largest = max(needs, default=0)
        if largest > self._budget:
            self._refuse(travelling[needs.index(largest)], largest)
        # One frame's worth is left over: for states that the first step makes, and for gradients in 16 bits as they are lent.
        numel = sum(resident.shard.numel for resident in travelling)
        typical = math.ceil(sum(needs) / max(numel, 1) * min(SUB_GROUP_NUMEL, self._offload.sub_group_numel))
        self._frame_nbytes = max(min(typical, self._budget // 4), largest)
        groups = _pack(travelling, needs, self._frame_nbytes, min(SUB_GROUP_NUMEL, self._offload.sub_group_numel))
        self._groups = ([SubGroup(here)] if here or not groups else []) + groups
        in_flight = 1 + self._offload.read_ahead + self._offload.write_behind
        most = self._budget // max(self._frame_nbytes, 1) - 1
        self._frames_left = max(min(most if in_flight == 3 else min(most, in_flight), len(groups)), 1)
        self._free: deque[Frame] = deque()

    def _refuse(self, resident: Resident, nbytes: int) -> None:
        offload, numel = self._offload, resident.shard.numel
        raise UsageError(
            f"{resident.shard.master.label} needs {nbytes:,} bytes of CPU memory for the step of this rank's {numel:,} elements, "
            f"and {offload.buffer_count} buffers of {offload.buffer_numel:,} elements are {self._budget:,}. Allow more (in a "
            "config, offload_optimizer.buffer_size), or cut smaller buckets (bucket_numel; in a config, reduce_bucket_size)."
        )

    @property
    def nbytes(self) -> int:
        """Bytes of frames that were made."""
        lent = [group.frame for group in self._groups if group.frame is not None]
        return sum(frame.nbytes for frame in [*self._free, *lent])

    # ------------------------------------------------------------------ the step

    def run(self, on_left: Callable[[list[Resident]], None]) -> Iterator[list[Resident]]:
        """Each sub-group in its turn, in memory. When the next is asked for, what was changed goes back; `on_left` hears of it."""
        self._close()
        for group in self._groups:
            if group.frame is not None:
                group.start_gradients()
        for number, group in enumerate(self._groups):
            self._read_ahead(number)
            for resident in group.residents:
                resident.enter()
            yield group.residents
            frame = group.leave(write=True)
            if frame is not None:
                self._free.append(frame if self._offload.write_behind else frame.empty())
            on_left(group.residents)
        self._notice_other_states()

    def _read_ahead(self, number: int) -> None:
        """Start what comes now, whatever it takes, and what comes next, as far as frames are free."""
        last = len(self._groups) if self._offload.read_ahead else number + 1
        for ahead in range(number, last):
            group = self._groups[ahead]
            if group.frame is not None or not group.travels:
                continue
            frame = self._take_frame(block=ahead == number)
            if frame is None:
                return
            group.start(frame)
            group.start_gradients()

    def prefetch(self) -> None:
        """The next step will come: start to read for it what does not wait for its gradients."""
        if not self._offload.read_ahead or self._open is not None:
            return
        for group in self._groups:
            if group.frame is not None or not group.travels:
                continue
            frame = self._take_frame(block=False)
            if frame is None:
                return
            group.start(frame)

    def _take_frame(self, *, block: bool) -> Frame | None:
        for frame in self._free:
            if frame.is_idle:
                self._free.remove(frame)
                return frame.empty()
        if self._frames_left:
            self._frames_left -= 1
            return Frame(self._memory(self._frame_nbytes))
        return self._free.popleft().empty() if block else None

    def _memory(self, nbytes: int) -> Tensor:
        device = self._device
        if device.type == "cpu":
            return aligned_bytes(nbytes, pin=self._storages.pin)
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    def _notice_other_states(self) -> None:
        """The optimizer keeps another number of states than was thought: cut the sub-groups anew."""
        kept = max((len(resident._slots) for resident in self._residents), default=0)
        if kept not in (0, self._states):
            self._states = kept
            self.settle()
            self._plan()

    # ------------------------------------------------------------------ outside of the step

    @contextmanager
    def opened(self, resident: Resident, *, write: bool = False) -> Iterator[None]:
        """Inside, master weights and states of one shard are what the optimizer's tensors look at.

        Args:
            write: what is changed inside, or set in the optimizer's state, comes to rest.
        """
        if resident.is_in_place:
            resident.shard.master.wait()
            yield
            return
        if self._open is not resident:
            self.settle()
            frame = self._take_frame(block=True)
            assert frame is not None
            resident.start(frame)
            self._open, self._open_frame = resident, frame
            resident.enter()
        try:
            yield
        finally:
            if write:
                resident.leave(write=True, update_rest=False)
                self._open = None
                self._free.append(self._open_frame)

    def _close(self) -> None:
        """Nobody looks at what `opened` brought any longer."""
        if self._open is not None:
            self._open.leave(write=False, update_rest=False)
            self._open = None
            self._free.append(self._open_frame)

    def settle(self) -> None:
        """Forget what was read ahead, and wait for what is being written; raises what went wrong with it."""
        self._close()
        for group in self._groups:
            if group.frame is not None:
                for resident in group.residents:
                    resident.enter()
                frame = group.leave(write=False)
                assert frame is not None
                self._free.append(frame)
        for frame in self._free:
            frame.empty()


def _stays_here(resident: Resident) -> bool:
    """Nothing of it is copied to another place in a step."""
    return resident.is_in_place and (
        resident.shard.rest is resident.shard.master or resident.shard.rest.memory_in(resident.shard.step) is not None
    )


def _pack(residents: Sequence[Resident], needs: Sequence[int], nbytes: int, numel: int) -> list[SubGroup]:
    groups: list[SubGroup] = []
    room, left = 0, 0
    for resident, need in zip(residents, needs, strict=True):
        if not groups or need > room or resident.shard.numel > left:
            groups.append(SubGroup([]))
            room, left = nbytes, numel
        groups[-1].residents.append(resident)
        room, left = room - need, left - resident.shard.numel
    return groups
