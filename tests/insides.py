"""Owns each look of the tests at what zeroshard keeps to itself, with the reason why no public name will do.

Other tests use public names. A rename inside of zeroshard changes a line here; tests/test_architecture.py checks that.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.distributed_c10d import Store

from zeroshard import Engine, Sharded, launch
from zeroshard.checkpoint import manifest
from zeroshard.cli import checkpoints, doctor, plan, run
from zeroshard.collectives import choose, meeting
from zeroshard.collectives.base import Collectives, SummedRows
from zeroshard.collectives.grouped import PointToPoint
from zeroshard.collectives.shared_memory import SharedMemory
from zeroshard.collectives.waits import Pairing
from zeroshard.collectives.watch import Watch
from zeroshard.formats import deepspeed
from zeroshard.parameters import parameter_bucket
from zeroshard.planning import search, simulated
from zeroshard.recompute.saved_inputs import Slots
from zeroshard.schedule.schedule import Schedule
from zeroshard.schedule.unit import Unit
from zeroshard.sequence.attention import CutAttention, Slice
from zeroshard.storage.disk import DirectFile
from zeroshard.storage.transfers import LANDED, Copies
from zeroshard.training_progress import TrainingRow

# ---------------------------------------------------------------------- a sharded model


def sharded_of(engine: Engine) -> Sharded:
    """What `shard` returned to the engine: DeepSpeed's engine has no name for it, and so ours has none."""
    return engine._sharded


def transport_of(sharded: Sharded) -> Collectives:
    """Which transport the ranks use changes no result, so no public name has it."""
    return sharded._context.collectives


def across_model(sharded: Sharded) -> Collectives:
    """The transport between ranks that divide the model, whose bytes no report has."""
    return sharded._context.others


def schedule(sharded: Sharded) -> Schedule:
    """For tests of its table of moves."""
    return sharded._schedule


def units(sharded: Sharded) -> list[Unit]:
    """For exact sizes with padding, and for the life of a unit."""
    return list(sharded._schedule.units)


def padded_numel(sharded: Sharded) -> int:
    """Elements of all flat buffers."""
    return sum(unit.layout.numel for unit in units(sharded))


def settle(sharded: Sharded) -> None:
    """Wait for what travels behind the training, before bytes are counted or a process forks."""
    sharded._schedule.settle()


def scratch_nbytes(sharded: Sharded) -> int:
    """Bytes of scratch of reductions, without the memory that waits for the next unit."""
    return sharded._context.pool.nbytes


def has_noticed_the_end(sharded: Sharded) -> bool:
    """Whether the end of the last backward was noticed by itself."""
    return sharded._schedule._backward_ended


@contextmanager
def counted_looks() -> Iterator[list[int]]:
    """The comparisons of parameters with master weights: bytes are not sent for them, and seconds are not asserted."""
    found: list[int] = []
    compare = parameter_bucket._shows

    def counting(*args: Any) -> bool:
        found.append(1)
        return compare(*args)

    parameter_bucket._shows = counting
    try:
        yield found
    finally:
        parameter_bucket._shows = compare


def set_slice(attention: CutAttention, positions: Slice) -> None:
    """Set the positions whose masks are made next: a forward sets them, and makes no mask that can be looked at."""
    attention._slice = positions


def throughput(row: TrainingRow, samples: Iterable[tuple[float, int]]) -> list[str]:
    """The words for a rate, from (seconds, samples): seconds of a real run are not asserted."""
    row._sampled = deque(samples)
    return row._throughput()


# ---------------------------------------------------------------------- processes

GRACE_SECONDS_OF_RANKS = "zeroshard.testing.ranks._GRACE_SECONDS"
"""Users have no reason to wait longer."""
LAUNCH = (run, "_launch")
"""The start of processes, one for each accelerator: there is none."""
WRITE_BEHIND = "_write_behind"
"""The thread of a save: of `Sharded.checkpoints`."""
meeting_point = launch._meeting_point
"""It is otherwise seen by two hosts only."""
print_machine = doctor._print_machine
"""The other parts of `doctor` take seconds."""
progress_of_plan = plan._progress
"""A plan of 25 dry runs takes a minute."""
last_that_fits = search._last_that_fits
"""A property of integers: no model shows each of them."""
FORKS_RUN_BACKWARDS = "zeroshard.planning.search._forks_run_backwards"
"""Only builds of torch for accelerators say no."""

# ---------------------------------------------------------------------- transports

STAGED = (PointToPoint, "_is_staged")
"""Where tensors are not in CPU memory; that needs an accelerator over gloo."""
CONNECT = (meeting, "_connect")
"""Where a container may forbid it."""
LISTENER = (meeting, "_listener")
"""Where strangers call."""
BEST = (choose, "_best")
"""The choice of the transport, which is by the machine."""


def kept_messages(collectives: SharedMemory) -> int:
    """Messages that came before somebody waited for them, and memory that is lent: too small for a count of bytes."""
    inbox = collectives._here.neighbours._inbox
    return len(collectives._lending._lent) + sum(len(one) for one in inbox.values())


def is_posted(watch: Watch) -> bool:
    """Whether this rank's wait is in the store, for others to read."""
    return watch._is_posted


message_key = Watch._key
"""Where a rank's message lies in the store: a test posts for a rank that is not there."""


def interrupt_in_vain(watch: Watch, store: Store, pairing: Pairing) -> None:
    """One look of its thread, at a moment that the test chooses."""
    watch._store = store
    watch._interrupt_in_vain(pairing)


def read_others(watch: Watch) -> dict[int, Any]:
    """What the others have in the store."""
    return watch._read_others()  # type: ignore[return-value]


# ---------------------------------------------------------------------- storage and files


def staged_copy(copies: Copies, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy through the buffers of casts, which a CPU needs for no copy of its own."""
    copies._staged(target, source, LANDED)


@contextmanager
def around_requests(
    *, read: Callable[..., Any] | None = None, write: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Inside, requests of a file are `read(work, *arguments)` or `write(work, *arguments)`: disks are not late on demand."""
    before = {"_read": DirectFile._read, "_write": DirectFile._write}

    def changed(work: Callable[..., None], change: Callable[..., Any]) -> Callable[..., None]:
        return lambda *arguments: change(work, *arguments)

    for name, change in (("_read", read), ("_write", write)):
        if change is not None:
            setattr(DirectFile, name, changed(before[name], change))
    try:
        yield
    finally:
        for name, work in before.items():
            setattr(DirectFile, name, work)


def slots_of(keeper: Any) -> Slots | None:
    """The contiguous memory of a checkpointer, whose addresses stay."""
    slots: Slots | None = keeper if isinstance(keeper, Slots) else keeper._slots
    return slots


def addresses(slots: Slots) -> dict[Any, int]:
    """Where its buffers are."""
    return {key: buffer.data_ptr() for key, buffer in slots._buffers.items()}


# ---------------------------------------------------------------------- checkpoints and other formats


print_checkpoint = checkpoints._print
"""A command for each of thousands of damaged folders is slow."""


def checksum(body: dict[str, Any]) -> str:
    """Of a manifest: readers refuse another one before they look at what a test has changed."""
    return manifest._digest(body)


def write_manifest(path: Path, body: dict[str, Any]) -> None:
    """Write what a test made of a manifest, with its checksum."""
    path.write_text(json.dumps({**body, "checksum": checksum(body)}))


@contextmanager
def every_row_summed() -> Iterator[None]:
    """Inside, plans sum each chunk of each row of a reduction, as a real rank does, and count none."""
    with (
        mock.patch.object(simulated, "_ROWS_SUMMED", sys.maxsize),
        mock.patch.object(simulated._CountedRows, "finish", SummedRows.finish),
    ):
        yield


LossScaler, Fragment, STAND_INS = deepspeed._LossScaler, deepspeed._Fragment, deepspeed._STAND_INS
"""The classes that stand in for DeepSpeed's in its files, which tests damage."""
load_of_deepspeed = deepspeed._load
