"""Owns the frames through which offloaded shards pass in a step: a fixed amount of memory where the optimizer steps.

While one sub-group is updated, those after it are read and those before it are written:

    frame 0   | read 0 | step 0 | write 0         | read 3 ...
    frame 1   | read 1          | step 1 | write 1 ...
    frame 2   | read 2                   | step 2 | write 2 ...
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

import torch

from zeroshard.errors import UsageError
from zeroshard.policy import Policy
from zeroshard.step.resident import Resident
from zeroshard.step.travelling import Frame, Travelling
from zeroshard.storage.base import Storage
from zeroshard.storage.storages import STAGING_SHARE, buffers_nbytes

SUB_GROUP_NUMEL = 1 << 22
"""Elements of a sub-group, where the policy allows more: large enough for a disk, small enough that several fit in memory."""


R = TypeVar("R", bound=Resident)


def packed(residents: Iterable[R], *limits: tuple[Callable[[R], int], int]) -> list[list[R]]:
    """Split residents into groups, in their order. With a ratio, some step on the accelerator: those have groups of their own.

    Args:
        limits: pairs of a weight and the most that the residents of one group may weigh together, unless it is a single one.
    """
    by_step: dict[Storage, list[R]] = {}
    for resident in residents:
        by_step.setdefault(resident.shard.step, []).append(resident)
    groups: list[list[R]] = []
    for stepping in by_step.values():
        groups.append([])
        used = [0] * len(limits)
        for resident in stepping:
            weights = [weigh(resident) for weigh, _ in limits]
            sums = [before + weight for before, weight in zip(used, weights, strict=True)]
            if any(before and now > most for before, now, (_, most) in zip(used, sums, limits, strict=True)):
                groups.append([])
                sums = weights
            groups[-1].append(resident)
            used = sums
    return groups


def numel_of(resident: Resident) -> int:
    """Return the number of elements of a resident's shard."""
    return resident.shard.numel


class Frames:
    """The frames of one model, and the sub-groups of shards that pass through them.

    Args:
        residents: the shards that rest elsewhere.
        states: how many tensors of state the optimizer keeps for each parameter.

    Raises:
        UsageError: a shard does not fit into the buffers that the policy allows, twice.
    """

    def __init__(self, residents: Sequence[Travelling], policy: Policy, states: int) -> None:
        self._residents = list(residents)
        self._offload = policy.offload_optimizer
        self._states = states
        self._is_bounded = policy.uses_disk
        self._open: Travelling | None = None
        self._open_frame: Frame
        self._lent: dict[Resident, Frame] = {}
        """The frames of the groups that are in memory, or on their way, by each group's first resident."""
        self._waiting = deque[list[Travelling]]()
        self._plan()
        if self._largest > self._limit // 2:
            self._refuse()

    def _plan(self) -> None:
        needs = {resident: resident.nbytes(self._states) for resident in self._residents}
        self._largest = max(needs.values(), default=0)
        self._limit = buffers_nbytes(self._offload) * (STAGING_SHARE - 1) // STAGING_SHARE
        if not self._is_bounded:
            self._limit = max(self._limit, 2 * self._largest)
        most = min(SUB_GROUP_NUMEL, self._offload.sub_group_numel)
        numel = sum(resident.shard.numel for resident in self._residents)
        typical = math.ceil(sum(needs.values()) / max(numel, 1) * most)
        self._frame_nbytes = max(min(typical, self._limit // 4), self._largest)
        self.groups = packed(self._residents, (needs.__getitem__, self._frame_nbytes), (numel_of, most))
        """In the order of the step."""
        steps = dict.fromkeys(resident.shard.step for resident in self._residents)
        # One frame's worth is left over: for states that the first step makes, and for gradients in 16 bits as they are lent.
        in_flight = 1 + self._offload.read_ahead + self._offload.write_behind
        frames = self._limit // max(self._frame_nbytes, 1) - 1
        if in_flight < 3:
            frames = min(frames, in_flight)
        frames = max(min(frames, len(self.groups)), 1)
        self._frames_left = {step: max(frames // len(steps), 1) for step in steps}
        self._free: dict[Storage, deque[Frame]] = {step: deque() for step in steps}

    def _refuse(self) -> None:
        offload = self._offload
        largest = max(self._residents, key=lambda resident: resident.nbytes(self._states)).shard
        raise UsageError(
            f"{largest.master.label} needs {self._largest:,} bytes of CPU memory for the step of this rank's "
            f"{largest.numel:,} elements, and as much again beside it; {offload.buffer_count} buffers of "
            f"{offload.buffer_numel:,} elements leave {self._limit:,}. Allow more (in a config, "
            "offload_optimizer.buffer_size), or cut smaller buckets (bucket_numel; in a config, reduce_bucket_size)."
        )

    @property
    def nbytes(self) -> int:
        """The bytes of all allocated frames."""
        return sum(frame.nbytes for frame in [*chain.from_iterable(self._free.values()), *self._lent.values()])

    # ------------------------------------------------------------------ the step

    def begin(self) -> None:
        """Begin a step: start to read the gradients of sub-groups that were read ahead."""
        self._close()
        self._waiting = deque(group for group in self.groups if group[0] not in self._lent)
        for group in self.groups:
            if group[0] in self._lent:
                for resident in group:
                    resident.start_gradient()

    def read_on(self, now: Sequence[Resident]) -> None:
        """Start to read the group `now`, if it passes through a frame, and the next ones while frames are free."""
        for group in self._read_ahead(self._waiting, now):
            for resident in group:
                resident.start_gradient()

    def take_back(self, group: Sequence[Resident]) -> None:
        """Take back the frame of a group whose changes are being written, if it has one."""
        frame = self._lent.pop(group[0], None)
        if frame is not None:
            self._free[group[0].shard.step].append(frame if self._offload.write_behind else frame.empty())

    def _read_ahead(
        self, waiting: deque[list[Travelling]], now: Sequence[Resident] | None = None
    ) -> Iterator[list[Travelling]]:
        """Start the first waiting groups: `now` even if that blocks, and the next ones while frames are free."""
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

    def prefetch(self) -> None:
        """Start to read for the next step all values except its gradients, as far as frames are free."""
        if self._open is not None:
            return
        for _ in self._read_ahead(deque(group for group in self.groups if group[0] not in self._lent)):
            pass

    def _take_frame(self, step: Storage, *, block: bool) -> Frame | None:
        free = self._free[step]
        idle = next((frame for frame in free if frame.is_idle), None)
        if idle is None and self._frames_left[step]:
            self._frames_left[step] -= 1
            return Frame(step.room(self._frame_nbytes, torch.uint8))
        if idle is None and not block:
            return None
        frame = (idle or free[0]).empty()
        free.remove(frame)
        return frame

    def notice_other_states(self) -> None:
        """Form the sub-groups again if the optimizer keeps another number of states than assumed."""
        kept = max((resident.states for resident in self._residents), default=0)
        if kept in (0, self._states):
            return
        self._states = kept
        self.settle()
        self._plan()
        if self._largest > self._limit // 2:
            warnings.warn(
                f"the optimizer keeps {kept} states for each parameter, and the largest shard needs {2 * self._largest:,} bytes "
                f"of CPU memory where the buffers leave {self._limit:,}: allow more (buffer_size), or cut smaller buckets.",
                stacklevel=2,
            )

    # ------------------------------------------------------------------ outside of the step

    @contextmanager
    def opened(self, resident: Travelling, *, write: bool, read: bool) -> Iterator[None]:
        """See `SubGroups.opened`."""
        if self._open is resident and read:
            resident.refresh()
        else:
            self.settle()
            frame = self._take_frame(resident.shard.step, block=True)
            assert frame is not None
            self._open = resident
            self._open_frame = frame
            resident.start(frame, read=read)
            resident.enter()
        try:
            yield
        finally:
            if write:
                resident.leave(write=True, update_rest=False)
                self._close()

    def _close(self) -> None:
        """Close the shard that `opened` has in memory."""
        if self._open is not None:
            resident = self._open
            self._open = None
            resident.leave(write=False, update_rest=False)
            self._free[resident.shard.step].append(self._open_frame)

    def settle(self) -> None:
        """Drop values that were read ahead, wait for writes in flight, and raise their errors."""
        self._close()
        self._take_all_back()
        for frame in chain.from_iterable(self._free.values()):
            frame.empty()

    def abandon(self) -> None:
        """Take back the frames after an error. `forget` ends what is in flight to and from them, once shards are abandoned."""
        self._take_all_back()
        if self._open is not None:
            self._open.abandon()
            self._free[self._open.shard.step].append(self._open_frame)
            self._open = None

    def _take_all_back(self) -> None:
        """Take back the frames whose values are no longer needed."""
        for group in self.groups:
            if group[0] in self._lent:
                for resident in group:
                    resident.abandon()
                self._free[group[0].shard.step].append(self._lent.pop(group[0]))

    def forget(self) -> None:
        """Wait for the transfers of all frames, and ignore their errors."""
        for frame in chain.from_iterable(self._free.values()):
            frame.forget()
