"""Owns the shards that rest elsewhere, wholly or in part: they pass through frames while the optimizer updates them.

A frame is a fixed amount of memory where the optimizer steps. The optimizer's tensors are views of a frame while their sub-group
has its turn, and otherwise of a placeholder, one NaN expanded. States that rest in 16 or 8 bits pass through frames wherever they
rest: there they are opened, in the optimizer's own dtype, and they are rounded when they leave.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.eight_bits import CODES, EightBits, is_coded
from zeroshard.core.gradient_bucket import Shard
from zeroshard.core.resident import (
    SUB_GROUP_NUMEL,
    Resident,
    ShardView,
    SubGroups,
    numel_of,
    packed,
    placeholder,
    runs_along,
)
from zeroshard.core.rounding import key_of, round_
from zeroshard.core.storage.base import Slot, Storage
from zeroshard.core.storage.storages import STAGING_SHARE, buffers_nbytes
from zeroshard.core.storage.transfers import CPU, Transfer, in_pages
from zeroshard.core.unit import Unit
from zeroshard.errors import StorageError, UsageError
from zeroshard.policy import Policy, Precision
from zeroshard.torch_private import is_same_memory

_MASTER = "master weights"
_GRADIENT = "gradients"
_COUNT = "rounding_step"
"""The optimizer's state that counts steps for the rounding of its other states, if it has no `step`."""


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
    """A shard of which some values rest elsewhere or in fewer bits, with all states that the optimizer keeps for it.

    Each step calls `start`, `start_gradient`, `enter` and `leave`, in this order.

    Args:
        precision: says in which dtype wider states rest, and how they are rounded.
    """

    def __init__(
        self, shard: Shard, unit: Unit, views: Sequence[ShardView], optimizer: torch.optim.Optimizer, precision: Precision
    ) -> None:  # fmt: skip
        super().__init__(shard, unit, views, optimizer)
        self._state_dtype = precision.state_dtype
        self._is_random = precision.state_rounding == "stochastic"
        self._code: EightBits | None = None
        """What encodes the states, if they rest in 8 bits."""
        if self._state_dtype == CODES:
            kept = [(view.start, view.numel) for view in views if not is_coded(view.named.placement.shape)]
            self._state_dtype = None
            if len(kept) < len(views):
                self._state_dtype = CODES
                self._code = EightBits(shard.numel, kept)
        self._is_home = shard.home is shard.step
        self.keeps_slots = not self._is_home or self._state_dtype is not None
        self.slots: dict[str, Slot] = {}
        """The slots of the optimizer's states, if the optimizer's tensors are not stored there: each has the shard's numel, or, in
        8 bits, the bytes of `EightBits`."""
        self._dtypes: dict[str, torch.dtype] = {}
        """The dtypes of the states in a frame."""
        self._closed: dict[str, Tensor] = {}
        """The states of the frame in the dtype in which they rest, if a transfer does not convert them; codes at home: slots."""
        self._is_read = True
        """Whether the frame gets the values at rest. Otherwise it begins with zeros."""
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
        dtypes = [slot.dtype for slot in (shard.master, shard.gradient) if slot.memory_in(shard.step) is None]
        closed = 0
        if self.keeps_slots:
            of_states = list(self._dtypes.values()) or [shard.master.dtype] * states
            dtypes += of_states
            if not self._is_home:
                at_rest = [(dtype, *self._at_rest(dtype)) for dtype in of_states]
                closed = sum(in_pages(numel * rest.itemsize) for dtype, numel, rest in at_rest if rest != dtype)
        return closed + sum(in_pages(shard.numel * dtype.itemsize) for dtype in dtypes)

    @property
    def is_away(self) -> bool:
        """Whether master weights or states rest elsewhere, so that a step may start to read them before it begins."""
        return not self._is_home or self.shard.master.memory_in(self.shard.step) is None

    def _at_rest(self, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Return the numel and the dtype of the slot in which a state of the optimizer rests."""
        narrow = self._state_dtype
        if narrow is None or not dtype.is_floating_point or dtype.itemsize <= narrow.itemsize:
            return self.shard.numel, dtype
        return self.shard.numel if self._code is None else self._code.nbytes(dtype), narrow

    def dtype_to_save(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype that holds exactly what rests of a state, whose tensor has `dtype`."""
        slot = self.slots.get(name)
        return dtype if slot is None or slot.dtype == CODES else slot.dtype

    def _take(self, name: str) -> Tensor:
        """Take room in the frame for a state. A file does not convert, so a narrow state takes room for both dtypes."""
        assert self._frame is not None
        slot = self.slots[name]
        memory = self._memory[name] = self._frame.take(self.shard.numel, self._dtypes[name])
        if slot.dtype != memory.dtype:
            here = slot.memory_in(self.shard.step)
            if not self._is_home:
                self._closed[name] = self._frame.take(slot.numel, slot.dtype)
            elif self._code is not None and here is not None:
                self._closed[name] = here
        return memory

    # ------------------------------------------------------------------ coming

    def start(self, frame: Frame, *, read: bool = True) -> None:
        """Start to read master weights and states into the frame, except master weights that the user may write (see `enter`).

        Args:
            read: whether to read. If not, only take zeroed room, for values that will be overwritten.
        """
        master = self.shard.master
        self._frame = frame
        self._memory = {}
        self._closed = {}
        self._is_read = read
        self._master_version = master.version
        if master.memory_in(self.shard.step) is None:
            memory = self._memory[_MASTER] = frame.take(master.numel, master.dtype)
            if not read:
                memory.zero_()
            elif not self.shard.is_shown:
                self._reading.append(master.read(memory))
        for name, slot in self.slots.items():
            memory = self._take(name)
            if not read:
                memory.zero_()
            elif name not in self._closed:
                self._reading.append(slot.read(memory))
            elif not self._is_home:
                self._reading.append(slot.read(self._closed[name]))

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
        for name, closed in self._closed.items() if self._is_read else ():
            if self._code is None:
                self._memory[name].copy_(closed)
            else:
                self._code.open(closed, self._memory[name], [view.start + view.numel for view in self.views])
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
            if self.keeps_slots:
                self._adopt()
            # Outside of a step, a write rounds to the nearest.
            is_random = update_rest and self._state_dtype is not None and self._is_random
            if is_random:
                self._count()
            for name, slot in self.slots.items():
                self._close(name, slot, is_random=is_random)
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
        self._closed = {}

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
                dtype = self._dtypes[name] = tensors[0][1].dtype
                label = f"{name} of {self.shard.master.label}"
                slot = self.shard.home.slot(label, *self._at_rest(dtype))
                self.slots[name] = slot
                self._all_slots.append(slot)
                self._take(name).zero_()
            for view, tensor in tensors:
                part = self._part(name, view)
                if not is_same_memory(part, tensor):
                    part.copy_(tensor.reshape(-1))

    def _close(self, name: str, slot: Slot, *, is_random: bool) -> None:
        """Round a state to values of the dtype in which it rests, and start to write these to the slot."""
        memory = self._memory[name]
        closed = self._closed.get(name)
        parts = self._random_parts(name) if is_random and slot.dtype != memory.dtype else None
        if closed is not None and self._code is not None:
            self._code.close(memory, closed, parts)
        else:
            if parts is not None:
                round_(memory, slot.dtype, parts)
            if closed is not None:
                closed.copy_(memory)
        if slot.memory_in(self.shard.step) is not closed or closed is None:  # otherwise it is there already
            self._hold(slot.write(memory if closed is None else closed))

    def _is_rounded(self, view: ShardView) -> bool:
        return self._code is None or is_coded(view.named.placement.shape)

    def _count(self) -> None:
        """Count a step for the random bits, which depend on the parameter's step count.

        Most optimizers keep it. For the others (SGD, Lion), it is kept here, among their states.
        """
        for view in filter(self._is_rounded, self.views):
            state = self._optimizer.state.get(view.value, {})
            if _COUNT in state or (state and "step" not in state):
                state[_COUNT] = state.get(_COUNT, 0) + 1

    def _random_parts(self, name: str) -> list[tuple[int, int, int, Any]]:
        """Return what the random bits of a state depend on, as `round_` takes it."""
        parts = []
        for view in (view for view, _ in self._tensors(name) if self._is_rounded(view)):
            state = self._optimizer.state[view.value]
            key = key_of(f"{view.named.fqn}/{name}", state.get(_COUNT, state.get("step")))
            first, placement = view.parameter_start, view.named.placement
            if not placement.is_whole and placement.dim == 0:  # experts, or rows: the place in the whole parameter
                first = next(placement.runs(first, first + 1)).start
            parts.append((view.start, view.numel, first, key))
        return parts

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
        total = sum(needs.values())
        typical = min(math.ceil(total / numel * self._most), total)
        self._frame_nbytes = max(min(typical, self._limit // 4), self._largest)
        self._in_frames = packed(self._travelling, (needs.__getitem__, self._frame_nbytes), (numel_of, self._most))
        steps = dict.fromkeys(resident.shard.step for resident in self._travelling)
        # One frame's worth is left over: for states that the first step creates, and for gradients in 16 bits as they
        # are lent.
        in_flight = 1 + self._offload.read_ahead + self._offload.write_behind
        frames = self._limit // max(self._frame_nbytes, 1) - 1
        if in_flight < 3:
            frames = min(frames, in_flight)
        if not any(one.is_away or one.shard.gradient.memory_in(one.shard.step) is None for one in self._travelling):
            frames = 1  # nothing is on its way while a sub-group is updated
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
            self._free_memory()

    def prefetch(self) -> None:
        # A read ahead of states that are here would only take memory from the forward.
        if self._open is None and all(one.is_away for one in self._travelling):
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

    def _free_memory(self) -> None:
        """Free an accelerator's idle frames until the next step: its allocator has them back at once, for activations."""
        for step, frames in self._free.items():
            while step.device.type != "cpu" and frames and frames[0].is_idle:
                frames.popleft().empty()
                self._frames_left[step] += 1

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
