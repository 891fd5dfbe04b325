"""Owns the shards that rest elsewhere, wholly or in part: they pass through frames while the optimizer updates them.

A frame is a fixed amount of memory where the optimizer steps. The optimizer's tensors are views of a frame while their sub-group
has its turn, and otherwise of a placeholder, one NaN expanded.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain

import torch
from torch import Tensor

from zeroshard.errors import StorageError, UsageError
from zeroshard.gradients.gradient_bucket import Shard
from zeroshard.policy import Policy
from zeroshard.schedule.unit import Unit
from zeroshard.step.resident import (
    SUB_GROUP_NUMEL,
    Resident,
    ShardView,
    SubGroups,
    numel_of,
    packed,
    placeholder,
    runs_along,
)
from zeroshard.storage.base import Slot, Storage
from zeroshard.storage.storages import STAGING_SHARE, buffers_nbytes
from zeroshard.storage.transfers import CPU, Transfer, in_pages
from zeroshard.torch_private import is_same_memory

_MASTER = "master weights"
_GRADIENT = "gradients"


class Frame:
    """The memory for one sub-group, where the optimizer steps."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._used = 0
        self._busy: list[Transfer] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Take room for `numel` elements, aligned for direct I/O. If the frame is full, as in the first step, take new memory."""
        nbytes = numel * dtype.itemsize
        start = self._used
        self._used += in_pages(nbytes)
        if self._used > self.memory.numel():
            return torch.empty(numel, dtype=dtype, device=self.memory.device)
        return self.memory[start : start + nbytes].view(dtype)

    def hold(self, transfer: Transfer) -> None:
        """Keep the frame from reuse until `transfer` is over."""
        self._busy.append(transfer)

    def empty(self) -> None:
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
                if not is_known:
                    failed = error
        if failed is not None:
            raise failed

    @property
    def is_idle(self) -> bool:
        """Whether all transfers are reported as done, so that `empty` would not block."""
        return all(transfer.is_done for transfer in self._busy)


class Travelling(Resident):
    """A shard of which some values rest elsewhere, with all states that the optimizer keeps for it.

    Each step calls `start`, `start_gradient`, `enter` and `leave`, in this order.
    """

    def __init__(self, shard: Shard, unit: Unit, views: Sequence[ShardView], optimizer: torch.optim.Optimizer) -> None:
        super().__init__(shard, unit, views, optimizer)
        self.slots: dict[str, Slot] = {}
        """The slots of the optimizer's states, each of the shard's numel, if they are not stored where the optimizer steps."""
        self._in_slots: dict[int, Tensor] = {}
        """By `id`, the optimizer's tensors whose values are in the slots. The next write stores others, such as the user's."""
        self._frame: Frame | None = None
        self._memory: dict[str, Tensor] = {}
        self._reading: list[Transfer] = []
        self._master_version = 0

    def expect_new_states(self) -> None:
        """Treat the optimizer's states as new values, as after `load_state_dict`: the next write stores them."""
        self._in_slots.clear()

    def nbytes(self, states: int) -> int:
        """Return the bytes that the shard needs in a frame, with `states` tensors of optimizer state for each parameter."""
        shard = self.shard
        slots = [slot for slot in (shard.master, shard.gradient) if slot.memory_in(shard.step) is None]
        if shard.home is not shard.step:
            slots += list(self.slots.values()) or [shard.master] * states
        return sum(in_pages(slot.nbytes) for slot in slots)

    # ------------------------------------------------------------------ coming

    def start(self, frame: Frame, *, read: bool = True) -> None:
        """Start to read master weights and states into the frame, except master weights that the user may write (see `enter`).

        Args:
            read: whether to read. If not, only take zeroed room, for values that will be overwritten.
        """
        master = self.shard.master
        self._frame = frame
        self._memory = {}
        self._master_version = master.version
        slots = {_MASTER: master} if master.memory_in(self.shard.step) is None else {}
        for name, slot in (slots | self.slots).items():
            self._memory[name] = frame.take(slot.numel, slot.dtype)
            if not read:
                self._memory[name].zero_()
            elif name != _MASTER or not self.shard.is_shown:
                self._reading.append(slot.read(self._memory[name]))

    def refresh(self) -> None:
        """Read the master weights again if they may have changed since they were read."""
        if self._read_stale_master():
            self._reading.pop().wait(self.shard.step.device)

    def _read_stale_master(self) -> bool:
        """Start to read the master weights again if they may have been set since the last read. Return whether they may have."""
        master = self.shard.master
        if _MASTER not in self._memory or not (self.shard.is_shown or self._master_version != master.version):
            return False
        self._master_version = master.version
        self._reading.append(master.read(self._memory[_MASTER]))
        return True

    def start_gradient(self) -> None:
        """Start to read the gradient into the frame."""
        slot = self.shard.gradient
        if slot.memory_in(self.shard.step) is None:
            assert self._frame is not None
            self._memory[_GRADIENT] = self._frame.take(slot.numel, slot.dtype)
            self._reading.append(slot.read(self._memory[_GRADIENT]))

    def enter(self) -> None:
        self._read_stale_master()
        super().enter()
        reading = self._reading
        self._reading = []
        for transfer in reading:
            transfer.wait(self.shard.step.device)
        if self.shard.step.device.type == "cpu":  # elsewhere a look would make the host wait
            looked_at = [view.value for view in self.views if _MASTER in self._memory] + list(self._in_slots.values())
            floats = [tensor for tensor in looked_at if tensor.is_floating_point()]
            written = [tensor for tensor in floats if not tensor.as_strided((1,), (1,)).isnan()]
            for tensor in written:
                tensor.data = placeholder(tensor)
            if written:
                raise UsageError(
                    f"master weights or optimizer states of {self.shard.master.label} were written while they rest "
                    "elsewhere, and the write has no effect: use sharded.states.set or set_local."
                )
        if _GRADIENT in self._memory:
            self.gradient = self._memory[_GRADIENT]
        if _MASTER in self._memory:
            self.look_at(self._memory[_MASTER])
        for name in self.slots:
            for view, tensor in self._tensors(name):
                if id(tensor) in self._in_slots:
                    tensor.data = self._part(name, view).view(tensor.shape)

    def abandon(self) -> None:
        for transfer in self._reading:
            with suppress(StorageError):
                transfer.wait(CPU)
        self._reading = []
        if self._frame is not None:
            self._leave_frame()
        super().abandon()

    # ------------------------------------------------------------------ going

    def leave(self, *, write: bool, update_rest: bool) -> None:
        shard = self.shard
        if self._frame is None:
            return
        master = self._memory.get(_MASTER, shard.master.memory_in(shard.step))
        assert master is not None
        if update_rest and shard.rest is not shard.master:
            self._hold(shard.rest.write(master))
        if write:
            if shard.home is not shard.step:
                self._adopt()
            for name, slot in self.slots.items():
                self._hold(slot.write(self._memory[name]))
            if _MASTER in self._memory:
                self._hold(shard.master.write(master))
        kept = [tensor for name in self.slots for _, tensor in self._tensors(name)]
        self._in_slots = {id(tensor): tensor for tensor in kept if write or id(tensor) in self._in_slots}
        self._leave_frame()

    def _leave_frame(self) -> None:
        if _MASTER in self._memory:
            self.look_at(None)
        if _GRADIENT in self._memory:
            self.gradient = None
        for tensor in self._in_slots.values():
            tensor.data = placeholder(tensor)
        self._frame = None
        self._memory = {}

    def _hold(self, transfer: Transfer) -> None:
        assert self._frame is not None
        self._frame.hold(transfer)

    def _adopt(self) -> None:
        """Move states that the optimizer created, or that were set, into the frame, and give each a slot."""
        assert self._frame is not None
        names = [
            name
            for view in self.views
            for name, value in self._optimizer.state.get(view.value, {}).items()
            if runs_along(value, name, view.value)
        ]
        for name in dict.fromkeys(names):
            tensors = self._tensors(name)
            if name not in self.slots:
                dtype = tensors[0][1].dtype
                slot = self.shard.home.slot(f"{name} of {self.shard.master.label}", self.shard.numel, dtype)
                self.slots[name] = slot
                self._all_slots.append(slot)
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


class SubGroupsInFrames(SubGroups):
    """The groups of a rank that has shards which rest elsewhere, and the frames that these shards pass through.

    While one sub-group is updated, those after it are read and those before it are written:

        frame 0   | read 0 | step 0 | write 0         | read 3 ...
        frame 1   | read 1          | step 1 | write 1 ...
        frame 2   | read 2                   | step 2 | write 2 ...

    Args:
        states: the number of state tensors that the optimizer keeps for each parameter.

    Raises:
        UsageError: the buffers that the policy allows cannot hold the largest shard twice.
    """

    def __init__(self, residents: Sequence[Resident], policy: Policy, states: int) -> None:
        super().__init__([one for one in residents if not isinstance(one, Travelling)], policy)
        self._travelling = [one for one in residents if isinstance(one, Travelling)]
        self._offload = policy.offload_optimizer
        self._is_bounded = policy.uses_disk
        self._most = min(SUB_GROUP_NUMEL, self._offload.sub_group_numel)
        self._states = states
        self._open: tuple[Travelling, Frame] | None = None
        """The shard that `opened` has in memory, and its frame."""
        self._lent: dict[Resident, Frame] = {}
        """The frames of the groups that are in memory, or on their way, by each group's first resident."""
        self._plan_frames()
        if self._largest > self._limit // 2:
            largest = max(self._travelling, key=lambda resident: resident.nbytes(states)).shard
            raise UsageError(
                f"{largest.master.label} needs {self._largest:,} bytes of CPU memory for the step of this rank's "
                f"{largest.numel:,} elements, and as much again beside it; {self._offload.buffer_count} buffers of "
                f"{self._offload.buffer_numel:,} elements leave {self._limit:,}. Allow more (in a config, "
                "offload_optimizer.buffer_size), or cut smaller buckets (bucket_numel; in a config, reduce_bucket_size)."
            )

    def _plan_frames(self) -> None:
        needs = {resident: resident.nbytes(self._states) for resident in self._travelling}
        self._largest = max(needs.values())
        self._limit = buffers_nbytes(self._offload) * (STAGING_SHARE - 1) // STAGING_SHARE
        if not self._is_bounded:
            self._limit = max(self._limit, 2 * self._largest)
        numel = sum(resident.shard.numel for resident in self._travelling)
        typical = math.ceil(sum(needs.values()) / numel * self._most)
        self._frame_nbytes = max(min(typical, self._limit // 4), self._largest)
        self._in_frames = packed(self._travelling, (needs.__getitem__, self._frame_nbytes), (numel_of, self._most))
        steps = dict.fromkeys(resident.shard.step for resident in self._travelling)
        # One frame's worth is left over: for states that the first step creates, and for gradients in 16 bits as they
        # are lent.
        in_flight = 1 + self._offload.read_ahead + self._offload.write_behind
        frames = self._limit // max(self._frame_nbytes, 1) - 1
        if in_flight < 3:
            frames = min(frames, in_flight)
        frames = max(min(frames, len(self._in_frames)), 1)
        self._frames_left = {step: max(frames // len(steps), 1) for step in steps}
        self._free: dict[Storage, deque[Frame]] = {step: deque() for step in steps}

    @property
    def nbytes(self) -> int:
        return sum(frame.memory.nbytes for frame in [*chain.from_iterable(self._free.values()), *self._lent.values()])

    # ------------------------------------------------------------------ the step

    def run(
        self, on_left: Callable[[Sequence[Resident]], None], *, at_once: bool = False
    ) -> Iterator[Sequence[Resident]]:
        assert not at_once, "`shard` refuses optimizers whose step runs once, over shards in frames"
        with self._abandoned_on_error():
            self._close()
            waiting = deque(group for group in self._in_frames if group[0] not in self._lent)
            for group in self._in_frames:
                if group[0] in self._lent:  # read ahead, except its gradients
                    for one in group:
                        one.start_gradient()
            groups: list[Sequence[Resident]] = [*self._in_place, *self._in_frames]
            for residents in groups:
                for group in self._read_ahead(waiting, residents):
                    for one in group:
                        one.start_gradient()
                yield from self._in_memory(residents)
                frame = self._lent.pop(residents[0], None)
                if frame is not None:
                    self._free[residents[0].shard.step].append(frame)
                    if not self._offload.write_behind:
                        frame.empty()
                on_left(residents)
            self._notice_other_states()

    def prefetch(self) -> None:
        if self._open is None:
            with self._abandoned_on_error():
                waiting = deque(group for group in self._in_frames if group[0] not in self._lent)
                for _ in self._read_ahead(waiting):
                    pass

    def _read_ahead(
        self, waiting: deque[list[Travelling]], now: Sequence[Resident] | None = None
    ) -> Iterator[list[Travelling]]:
        """Start to read waiting groups, and yield each: `now` even if that blocks, and the next ones while frames are free."""
        while waiting and (waiting[0] is now or self._offload.read_ahead):
            group = waiting[0]
            frame = self._take_frame(group[0].shard.step, block=group is now)
            if frame is None:
                return
            waiting.popleft()
            self._lent[group[0]] = frame
            for resident in group:
                resident.start(frame)
            yield group

    def _take_frame(self, step: Storage, *, block: bool) -> Frame | None:
        free = self._free[step]
        idle = next((frame for frame in free if frame.is_idle), None)
        if idle is None and self._frames_left[step]:
            self._frames_left[step] -= 1
            return Frame(step.room(self._frame_nbytes, torch.uint8))
        if idle is None and not block:
            return None
        frame = idle or free[0]
        frame.empty()
        free.remove(frame)
        return frame

    def _notice_other_states(self) -> None:
        """Form the sub-groups again if the optimizer keeps a number of states other than assumed."""
        kept = max(len(resident.slots) for resident in self._travelling)
        if kept in (0, self._states):
            return
        self._states = kept
        self.settle()
        self._plan_frames()
        if self._largest > self._limit // 2:
            warnings.warn(
                f"the optimizer keeps {kept} states for each parameter, and the largest shard needs {2 * self._largest:,} bytes "
                f"of CPU memory where the buffers leave {self._limit:,}: allow more (buffer_size), or cut smaller buckets.",
                stacklevel=2,
            )

    # ------------------------------------------------------------------ outside of the step

    @contextmanager
    def opened(self, resident: Resident, *, write: bool = False, read: bool = True) -> Iterator[None]:
        if not isinstance(resident, Travelling):
            with super().opened(resident, write=write, read=read):
                yield
            return
        with self._abandoned_on_error():
            if self._open is not None and self._open[0] is resident and read:
                resident.refresh()
            else:
                self.settle()
                frame = self._take_frame(resident.shard.step, block=True)
                assert frame is not None
                self._open = (resident, frame)
                resident.start(frame, read=read)
                resident.enter()
            try:
                yield
            finally:
                if write:  # otherwise the shard stays in memory: the next use is often of the same shard
                    resident.leave(write=True, update_rest=False)
                    self._close()

    def _close(self) -> None:
        """Close the shard that `opened` has in memory."""
        if self._open is not None:
            resident, frame = self._open
            self._open = None
            resident.leave(write=False, update_rest=False)
            self._free[resident.shard.step].append(frame)

    def settle(self) -> None:
        with self._abandoned_on_error():
            self._close()
            self._take_all_back()
            for frame in chain.from_iterable(self._free.values()):
                frame.empty()

    def abandon(self) -> None:
        self._take_all_back()
        if self._open is not None:
            resident, frame = self._open
            self._free[resident.shard.step].append(frame)
            self._open = None
        super().abandon()
        for one in self._travelling:
            one.abandon()
        for frame in chain.from_iterable(self._free.values()):
            with suppress(StorageError):  # no write may land later
                frame.empty()

    def _take_all_back(self) -> None:
        """Take back the frames of all groups in memory or on their way and drop the values there."""
        for group in self._in_frames:
            if group[0] in self._lent:
                for resident in group:
                    resident.abandon()
                self._free[group[0].shard.step].append(self._lent.pop(group[0]))
