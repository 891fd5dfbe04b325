"""Owns the tests' access to zeroshard's private names, with the reason why no public name is enough.

Other tests use only public names, and tests/project/test_architecture.py checks this. So a private rename changes a line only here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from zeroshard import Engine, Sharded, launch
from zeroshard.checkpoint import deepspeed, manifest, node_local
from zeroshard.checkpoint.display import Display
from zeroshard.core import parameter_bucket
from zeroshard.core.schedule import Schedule
from zeroshard.core.storage.disk import DirectFile
from zeroshard.core.storage.transfers import LANDED, Copies
from zeroshard.core.transport import choose, shared_memory
from zeroshard.core.transport import watch as watchdog
from zeroshard.core.transport.base import Collectives, SummedRows
from zeroshard.core.transport.grouped import PointToPoint
from zeroshard.core.transport.shared_memory import SharedMemory
from zeroshard.core.transport.watch import Watch
from zeroshard.core.travelling import SubGroupsInFrames
from zeroshard.core.unit import Unit
from zeroshard.engine import monitors
from zeroshard.engine.config.load import load_monitors
from zeroshard.engine.monitors import StepFigures
from zeroshard.engine.training_progress import TrainingProgress
from zeroshard.sequence.attention import CutAttention, Slice
from zeroshard.tools import checkpoints, doctor, run
from zeroshard.tools.planning import fakes, simulated

# ---------------------------------------------------------------------- a sharded model


def sharded_of(engine: Engine) -> Sharded:
    """Return the engine's `Sharded`. DeepSpeed's engine has no name for it, so zeroshard's engine has none."""
    return engine._sharded


def transport_of(sharded: Sharded) -> Collectives:
    """Return the ranks' transport. It changes no result, so it has no public name."""
    return sharded._context.collectives


def across_model(sharded: Sharded) -> Collectives:
    """Return the transport between ranks that divide the model. No report includes its bytes."""
    return sharded._context.others


def schedule(sharded: Sharded) -> Schedule:
    """Return the schedule, for tests of its table of moves."""
    return sharded._schedule


def units(sharded: Sharded) -> list[Unit]:
    """Return the units, for exact sizes with padding and for tests of a unit's lifetime."""
    return list(sharded._schedule.units)


def live_numel(sharded: Sharded) -> int:
    """Return the number of elements that count as unsharded, against `max_live_numel`."""
    return sharded._schedule.live.numels.total()


def padded_numel(sharded: Sharded) -> int:
    """Return the number of elements of all flat buffers."""
    return sum(unit.layout.numel for unit in units(sharded))


def settle(sharded: Sharded) -> None:
    """Wait for background transfers, before bytes are counted or a process forks."""
    sharded._schedule.settle()


def frames_between_steps(sharded: Sharded) -> tuple[int, int]:
    """Return the number of frames that keep memory between steps, and of those that values are read into."""
    groups = sharded.sharded_step.sub_groups
    assert isinstance(groups, SubGroupsInFrames)
    return sum(map(len, groups._free.values())), len(groups._lent)


def scratch_nbytes(sharded: Sharded) -> int:
    """Return the bytes of reductions' scratch memory, without memory that is kept for the next unit."""
    return sharded._context.pool.nbytes


def has_noticed_the_end(sharded: Sharded) -> bool:
    """Return whether the schedule noticed the end of the last backward without a further call."""
    return sharded._schedule._backward_ended


@contextmanager
def counted_looks() -> Iterator[list[int]]:
    """Count comparisons of parameters with master weights, which send no bytes. Tests assert no seconds."""
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
    """Set the positions for the next mask. A forward sets them too, but its masks are not accessible."""
    attention._slice = positions


def columns_of_a_bar(
    model: nn.Module, *, ranks: int, samples_per_second: float, flops: float, peak_flops: float
) -> list[str]:
    """Return the texts behind a bar at a given speed. Tests assert no seconds of a real run."""
    context = SimpleNamespace(everyone=SimpleNamespace(world_size=ranks))
    sharded: Any = SimpleNamespace(
        model=model, _context=context, display=Display(speaks=False), comm_report=lambda clear: {}
    )
    shown = TrainingProgress(sharded, None, 0, None, None, flops, peak_flops, None, load_monitors({}))
    shown._show(StepFigures(1, 5, None, 0.1, 1.0, 0.5, True, samples_per_second))
    return shown._row.columns


# ---------------------------------------------------------------------- processes

GRACE_SECONDS_OF_RANKS = "zeroshard.testing.ranks._GRACE_SECONDS"
"""The seconds that other ranks have after one rank failed. Users have no reason to change them."""
LAUNCH = (run, "_launch")
"""The start of processes, one for each accelerator, for machines without accelerators."""
WRITE_BEHIND = "_write_behind"
"""The method of `Sharded.checkpoints` that runs in a save's thread."""
meeting_point = launch._meeting_point
"""Only a run on two hosts shows it."""
print_machine = doctor._print_machine
"""`doctor` takes its console from the terminal."""


def _never_known(*_: object, **__: object) -> bool:
    return False  # not a mock, which would keep all tensors


EVERY_OPERATION = (fakes.Repeats, "_describes", _never_known)
"""A change with which a dry run asks torch at each operation, since no public name shows a repetition."""

# ---------------------------------------------------------------------- transports

STAGED = (PointToPoint, "_is_staged")
"""Whether tensors are not in CPU memory, which needs an accelerator over gloo."""
CONNECT = (shared_memory, "_connect")
"""The connection of ranks, which a container may forbid."""
LISTENER = (shared_memory, "_listener")
"""The socket to which foreign processes may connect."""
BEST = (choose, "_best")
"""The choice of the transport, which depends on the machine."""


def kept_messages(collectives: SharedMemory) -> int:
    """Return the number of early messages and lent rooms, which are too small for a count of bytes."""
    inbox = collectives._here.neighbours._inbox
    return len(collectives._here.file._lent) + sum(len(one) for one in inbox.values())


def is_posted(watch: Watch) -> bool:
    """Return whether this rank's wait is in the store, for other ranks to read."""
    return watch._is_posted


def read_others(watch: Watch) -> dict[int, Any]:
    """Return the other ranks' entries in the store."""
    return watch._read_others()  # type: ignore[return-value]


# ---------------------------------------------------------------------- storage and files


def staged_copy(copies: Copies, target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy through the buffers of casts, which copies on a CPU do not need."""
    copies._staged(target, source, LANDED)


@contextmanager
def around_requests(
    *, read: Callable[..., Any] | None = None, write: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Replace a file's requests by `read(work, *arguments)` or `write(work, *arguments)`, such as for a late disk."""
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


# ---------------------------------------------------------------------- checkpoints and other formats


print_checkpoint = checkpoints._print
"""Thousands of commands, one for each damaged folder, would be slow."""


def checksum(body: dict[str, Any]) -> str:
    """Return a manifest's checksum. Readers refuse a wrong checksum before they reach the test's change."""
    return manifest._digest(body)


def write_manifest(path: Path, body: dict[str, Any]) -> None:
    """Write a manifest that a test changed, with a correct checksum."""
    path.write_text(json.dumps({**body, "checksum": checksum(body)}))


@contextmanager
def every_row_summed() -> Iterator[None]:
    """Make plans sum every chunk of a reduction's rows, as a real rank does, instead of counting chunks."""
    with (
        mock.patch.object(simulated, "_ROWS_SUMMED", sys.maxsize),
        mock.patch.object(simulated._Rows, "finish", SummedRows.finish),
    ):
        yield


LossScaler, Fragment, STAND_INS = deepspeed._LossScaler, deepspeed._Fragment, deepspeed._STAND_INS
"""The classes that stand in for DeepSpeed's in its files, which tests damage."""
load_of_deepspeed = deepspeed._load
list_of_host = node_local._list


def waits_in_the_store(ranks: Sequence[int], told: str) -> dict[str, str]:
    """Return the store's keys and values if these ranks have posted this message: the keys are the watchdog's own."""
    found = {Watch._key(rank): told for rank in ranks}
    return {**found, watchdog._POSTED: "".join(f"{rank} " for rank in ranks)}


def replace_monitor(monkeypatch: pytest.MonkeyPatch, key: str, kind: Callable[[Any], Any]) -> None:
    """Make `kind(block)` the monitor of a config's block."""
    monkeypatch.setitem(monitors._MAKERS, key, lambda block, _: kind(block))
