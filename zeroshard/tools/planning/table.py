"""Owns the result of a plan: a row for each dry run, and the text of the table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from textwrap import wrap
from typing import Any

from zeroshard.errors import counted
from zeroshard.tools.planning.dry_run import Figures, Job
from zeroshard.tools.planning.ledger import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS, Peak

MICRO = "train_micro_batch_size_per_gpu"


# ---------------------------------------------------------------------- one row


@dataclass(frozen=True)
class Row:
    """The memory of an accelerator, host and disk in one dry run, in bytes. All ranks are assumed to be alike.

    Attributes:
        name: the config, or the preset, such as "stage 3, optimizer on CPU".
        job: the training run and its machine.
        figures: the results of the dry run.
    """

    name: str
    job: Job
    figures: Figures

    @property
    def limit(self) -> int:
        """The bytes of an accelerator's memory."""
        return self.job.machine.memory

    @property
    def host_limit(self) -> int:
        """The bytes of a host's CPU memory."""
        return self.job.machine.host_memory

    @property
    def peak(self) -> Peak:
        """The peak of live bytes on an accelerator, start-up included unless the model is built inside `sharded_init`."""
        figures = self.figures
        if not self.job.born_sharded and figures.start.nbytes > figures.peak.nbytes:
            return figures.start
        return figures.peak

    @property
    def parts(self) -> dict[str, int]:
        """The bytes at this peak, by category."""
        return dict(self.peak.parts)

    @property
    def reserved_nbytes(self) -> int:
        """The bytes that an accelerator's allocator reserves from the driver, start-up included; 0 on a CPU.

        If memory runs out, the allocator returns unused segments, so less memory may suffice, down to the peak.
        """
        return self.figures.reserved

    @cached_property
    def unseen(self) -> dict[str, int]:
        """The bytes that an accelerator needs on top of live bytes, by cause. A dry run does not allocate them."""
        unseen = self.job.machine.unseen
        return {
            "driver's context": unseen.context,
            "collectives' library": unseen.collectives if self.job.ranks > 1 else 0,
            "workspaces": unseen.workspaces,
            "fragmentation": round(unseen.fragmentation * self.peak.nbytes),
        }

    @property
    def needed_nbytes(self) -> int:
        """The total bytes of an accelerator's memory that the job needs."""
        return self.peak.nbytes + sum(self.unseen.values())

    @property
    def host_nbytes(self) -> int:
        """The bytes of CPU memory that a host needs: the peak of its ranks in training, or their models at start-up if larger.

        On a machine that computes on CPUs, this is all memory of its ranks.
        """
        built = self.figures.model_nbytes
        if self.job.machine.computes_on_cpu:
            start = 0 if self.job.born_sharded else self.figures.start.nbytes
            return (max(self.figures.peak_together, start) + sum(self.unseen.values())) * self.job.ranks_per_host
        if self.job.born_sharded:
            built = -(-built // self.job.ranks)
        return max(self.figures.host_peak.nbytes, built) * self.job.ranks_per_host

    @property
    def disk_nbytes(self) -> int:
        """The bytes on a host's disk."""
        return self.figures.disk * self.job.ranks_per_host

    @property
    def left_nbytes(self) -> int:
        """The bytes of an accelerator's memory that remain free; if negative, the bytes that are missing."""
        return self.limit - self.needed_nbytes

    @property
    def host_left_nbytes(self) -> int:
        """The bytes of a host's CPU memory that remain free; if negative, the bytes that are missing."""
        return self.host_limit - self.host_nbytes

    @property
    def fits(self) -> bool:
        """Whether the memory suffices, on accelerators and hosts."""
        return self.left_nbytes >= 0 and self.host_left_nbytes >= 0

    @property
    def sent_nbytes(self) -> int:
        """The bytes that a rank sends in a step."""
        return sum(self.figures.sent.values())

    def complete_config(self) -> dict[str, Any]:
        """Return the config with values instead of "auto", and all three batch sizes, for `initialize` or DeepSpeed."""
        batch = self.figures.config.batch
        sizes = {"train_batch_size": batch.train, MICRO: batch.micro, "gradient_accumulation_steps": batch.accumulation}
        document = dict(self.figures.config.document)
        if document.get("steps_per_print") == math.inf:  # accelerate writes it, but JSON lacks it
            document["steps_per_print"] = 10**9
        return document | sizes

    def as_dict(self) -> dict[str, Any]:
        """Return the row as a dict for JSON, in bytes."""
        figures = self.figures
        return {
            "name": self.name,
            "fits": self.fits,
            "needed": self.needed_nbytes,
            "left": self.left_nbytes,
            "unseen": self.unseen,
            "peak": {
                "bytes": figures.peak.nbytes, "phase": figures.peak.phase, "module": figures.peak.module,
                "parts": figures.peak.parts, "by_phase": figures.peaks, "reserved": figures.reserved,
            },
            "start": {"bytes": figures.start.nbytes, "parts": figures.start.parts, "counts": not self.job.born_sharded},
            "rest": figures.rest,
            "host": {"bytes": self.host_nbytes, "left": self.host_left_nbytes, "rank": figures.host_peak.parts},
            "disk": self.disk_nbytes,
            "step": {"sent": figures.sent, "collectives": figures.calls},
            "config": self.complete_config(),
        }  # fmt: skip


# ---------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Plan:
    """A row for each dry run: the given config first, then each preset. `print(plan)` prints the table.

    Attributes:
        job: the training run and its machine.
        rows: the rows, in order.
        has_config: whether the first row is the config that the caller gave.
        refused: the presets that the engine refuses for this job, with its reason.
        assumed: what the plan assumes because the caller did not say it.
        sent_by_ranks_of_experts: the bytes that a rank sends in a step, by the number of ranks that divide the experts of a
            layer; empty if the plan divides none.
    """

    job: Job
    rows: tuple[Row, ...]
    has_config: bool
    refused: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    sent_by_ranks_of_experts: Mapping[int, int] = field(default_factory=dict)

    @property
    def best(self) -> Row | None:
        """The row that the answer is about: the given config, or else the first preset that fits; None if none fits."""
        if self.has_config:
            return self.rows[0]
        return self.first_that_fits

    @property
    def first_that_fits(self) -> Row | None:
        """The first row that fits; None if none does."""
        return next((row for row in self.rows if row.fits), None)

    @property
    def fits(self) -> bool:
        """Whether the given config fits; without a config, whether any preset does."""
        return self.best is not None and self.best.fits

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as a dict for JSON, in bytes."""
        first = self.rows[0].figures
        batch = first.config.batch
        return {
            "fits": self.fits,
            "ranks": self.job.ranks,
            "hosts": self.job.hosts,
            "machine": self.job.machine.name,
            "limit": self.job.machine.memory,
            "host_limit": self.job.machine.host_memory,
            "parameters": first.numel,
            "trained": first.trained,
            "batch": {"micro": batch.micro, "accumulation": batch.accumulation, "train": batch.train},
            "assumed": list(self.assumed),
            "has_config": self.has_config,
            "rows": [row.as_dict() for row in self.rows],
            "refused": dict(self.refused),
            "sent_by_ranks_of_experts": dict(self.sent_by_ranks_of_experts),
        }

    def __str__(self) -> str:
        return text(self)


# ---------------------------------------------------------------------- text

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_KINDS = ((PARAMETERS, "params"), (GRADIENTS, "grads"), (OPTIMIZER, "optim"), (ACTIVATIONS, "activ"))
"""The kinds of memory that have a column."""


WIDTH = 100
"""The number of columns of the text."""


def size(nbytes: float) -> str:
    """Format bytes: 31.4 GB, 12.3 MB, 0 bytes."""
    for unit, name in _UNITS:
        if abs(nbytes) >= unit / 10:
            digits = 2 if abs(nbytes) < 10 * unit else 1
            return f"{nbytes / unit:.{digits}f} {name}"
    return f"{nbytes:.0f} bytes"


def count(number: float) -> str:
    """Format a number of parameters: 8.03 B, 124 M, 4,225."""
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if number >= unit / 10:
            return f"{number / unit:.3g} {name}"
    return f"{number:,.0f}"


def text(plan: Plan) -> str:
    """Return the answer in the first line, then what was assumed, and the table."""
    job = plan.job
    figures = plan.rows[0].figures
    lines = [answer(plan)]
    samples = counted(figures.config.batch.micro, "sample")
    microbatches = counted(figures.config.batch.accumulation, "microbatch", "es")
    lines.append(
        f"{count(figures.numel)} parameters, {count(figures.trained)} trained; {samples} x {microbatches} x "
        f"{counted(job.ranks, 'rank')} = {figures.config.batch.train} per step; {counted(job.hosts, 'host')}, "
        f"{job.machine.name}"
    )
    lines += [f"assumed: {one}" for one in plan.assumed]
    lines += ["", *table(plan), ""]
    if any(row.peak is row.figures.start for row in plan.rows):
        lines.append(
            "*: at start-up, when each rank has the complete model. To avoid it: sharded_init (--sharded-init)."
        )
    if plan.sent_by_ranks_of_experts:
        lines += wrap(_least_sent(plan.sent_by_ranks_of_experts), WIDTH)
    lines += [f"not possible here: {name}: {why}" for name, why in plan.refused.items()]
    return "\n".join(lines)


def _least_sent(sent: Mapping[int, int]) -> str:
    """Return one line: over how many ranks experts send least, if routers choose experts evenly."""
    least = min(sent, key=lambda ranks: (sent[ranks], ranks))
    others = ", ".join(f"{size(nbytes)} over {ranks}" for ranks, nbytes in sorted(sent.items()) if ranks != least)
    return f"experts over {counted(least, 'rank')} send least: {size(sent[least])} of a rank in a step ({others or 'no other'})"


def answer(plan: Plan) -> str:
    """Return one line: whether the config fits, or the first preset that does, and the bytes that are left or missing."""
    best = plan.best
    if best is None:
        best = max(plan.rows, key=lambda row: min(row.left_nbytes, row.host_left_nbytes))
        return f"no preset fits; the closest is {best.name}: {_verdict(best)}"
    if not plan.has_config:
        return f"fits with {best.name}: {_verdict(best)}"
    if best.fits:
        return f"fits: {_verdict(best)}"
    other = plan.first_that_fits
    instead = "" if other is None else f"; this fits: {other.name}"
    return f"does not fit: {_verdict(best)}{instead}"


def _verdict(row: Row) -> str:
    if row.left_nbytes < 0 or row.host_left_nbytes >= 0:
        left = f"{size(row.left_nbytes)} left" if row.left_nbytes >= 0 else f"{size(-row.left_nbytes)} missing"
        return f"{size(row.needed_nbytes)} of {size(row.limit)}, {left}"
    return f"{size(row.host_nbytes)} of {size(row.host_limit)} of CPU memory, {size(-row.host_left_nbytes)} missing"


def table(plan: Plan) -> Iterable[str]:
    """Return the lines of the table: a row for each dry run, at most 100 columns wide."""
    unit, name = next((one for one in _UNITS if max(row.needed_nbytes for row in plan.rows) >= one[0]), _UNITS[-1])
    has_disk = any(row.disk_nbytes for row in plan.rows)

    def number(nbytes: float) -> str:
        if not nbytes:
            return "-"
        value = nbytes / unit
        return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}" if abs(value) < 999.95 else f"{value:,.0f}"

    def cells(row: Row) -> list[str]:
        parts = [row.parts.get(kind, 0) for kind, _ in _KINDS]
        fits = "yes" if row.fits else "NO"
        made = [row.name + "*" * (row.peak is row.figures.start)]
        made += [number(part) for part in (*parts, row.needed_nbytes - sum(parts), row.needed_nbytes)]
        made += [fits, f"{'+' if row.left_nbytes >= 0 else '-'}{number(abs(row.left_nbytes))}", number(row.host_nbytes)]
        made += [number(row.disk_nbytes)] * has_disk
        return [*made, number(row.sent_nbytes)]

    title = f"{name} per rank, at its peak"
    heads = [
        title,
        *(head for _, head in _KINDS),
        "other",
        "total",
        "fits",
        "left",
        "CPU",
        *["disk"] * has_disk,
        "sent",
    ]
    yield from _aligned([heads, *(cells(row) for row in plan.rows)])
    constant = sum(nbytes for cause, nbytes in plan.rows[0].unseen.items() if cause != "fragmentation")
    note = (
        f"other: buffers, temporaries, inputs, {size(constant)} of driver and libraries, and "
        f"{plan.job.machine.unseen.fragmentation:.0%} for fragmentation; CPU, disk: of a host; sent: by a rank in a step"
    )
    yield from wrap(note, WIDTH)


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first, *others = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join([first, *others]).rstrip()
