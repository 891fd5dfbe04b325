"""Owns the display of a plan: printed tables, and the picture of its memory over one step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Group
from rich.table import Table

from zeroshard.errors import counted
from zeroshard.observe.plots import save
from zeroshard.planning.ledger import CATEGORIES
from zeroshard.planning.planner import BOUNDS, Plan
from zeroshard.planning.search import Change, Found

GB = 1e9
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#eeca3b", "#9d755d", "#bab0ac")


def size(nbytes: float) -> str:
    """Format bytes: 31.4 GB, 12.3 MB, 0 bytes."""
    for unit, name in ((GB, "GB"), (1e6, "MB"), (1e3, "kB")):
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


def duration(seconds: float) -> str:
    """Format seconds: 1.85 s, 637 ms, 0.64 ms."""
    if abs(seconds) >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"


def verdict(plan: Plan) -> str:
    """Return one sentence: whether the plan fits, and the bytes that are left or missing."""
    share = f"{size(plan.needed_nbytes)} of {size(plan.limit)} of each accelerator"
    if plan.fits:
        return f"fits: {share}, {size(-plan.overshoot)} are left."
    if plan.overshoot > 0:
        return f"does not fit: {share}, {size(plan.overshoot)} are missing."
    missing = size(plan.host_nbytes - plan.host_limit)
    return f"does not fit: {size(plan.host_nbytes)} of {size(plan.host_limit)} of CPU memory, {missing} are missing."


def tables(plan: Plan) -> Group:
    """Return the tables of a plan, for rich's console."""
    return Group(_memory(plan), _step(plan))


def _memory(plan: Plan) -> Table:
    figures = plan.figures
    where = figures.peak.phase
    if figures.peak.module:
        where += f", {figures.peak.module}"
    table = Table(
        "memory of an accelerator", "at the peak", "between steps", title=f"peak: {where}", title_justify="left"
    )
    for category in CATEGORIES:
        now = figures.peak.parts.get(category, 0)
        rest = figures.rest.get(category, 0)
        if now or rest:
            table.add_row(category, size(now), size(rest))
    table.add_section()
    table.add_row("live bytes, training", size(plan.peak_nbytes), size(sum(figures.rest.values())))
    if not plan.job.born_sharded:
        table.add_row("live bytes, start-up without sharded_init", size(figures.start.nbytes), "")
    if plan.reserved_nbytes:
        table.add_row("reserved by the allocator for these", size(plan.reserved_nbytes), "")
    table.add_section()
    for name, nbytes in plan.unseen.items():
        table.add_row(name, size(nbytes), "")
    table.add_section()
    table.add_row("needed", size(plan.needed_nbytes), "")
    return table


def _step(plan: Plan) -> Table:
    figures = plan.figures
    batch = figures.config.batch
    table = Table(show_header=False)
    table.add_row("parameters", f"{count(figures.numel)}, of which {count(figures.trained)} are trained")
    together = plan.job.sequences.ranks
    if plan.job.tensor_parallel > 1:
        table.add_row("tensor parallelism", f"{plan.job.tensor_parallel} ranks divide a model; figures are one rank's")
    who = counted(plan.job.data_ranks, "rank")
    if together > 1:
        who = f"{counted(plan.job.ranks // together, 'group')} of {together} ranks"
    samples = counted(batch.micro, "sample")
    microbatches = counted(batch.accumulation, "microbatch", "es")
    table.add_row("a step", f"{samples} x {microbatches} x {who} = {batch.train // together}")
    table.add_row("CPU memory of a host", size(plan.host_nbytes))
    if plan.disk_nbytes:
        table.add_row("disk of a host", size(plan.disk_nbytes))
    table.add_row("sent by a rank in a step", f"{size(plan.sent_nbytes)} in {plan.collectives:,} collectives")
    table.add_row(
        "a step takes about", f"{duration(plan.seconds)} on {plan.machine.name}, bound by {BOUNDS[plan.bound]}"
    )
    spent = sorted(figures.spent.items(), key=lambda item: -item[1])
    table.add_row("of that", ", ".join(f"{duration(seconds)} {BOUNDS[name]}" for name, seconds in spent if seconds > 0))
    speed = plan.samples_per_second
    table.add_row("samples per second", f"{speed:.3g}" if speed < 100 else f"{speed:,.0f}")
    return table


def changes_table(changes: Sequence[Change]) -> Table:
    """Return a table with a row for each single change."""
    table = Table("a single change", "gains", "a step takes", "then it")
    for change in changes:
        sign = "+" * (change.slowdown >= 0)
        fits = "fits" if change.plan.fits else "does not fit"
        table.add_row(change.what, size(change.gain), f"{sign}{duration(change.slowdown)}", fits)
    return table


def others_table(found: Found) -> Table:
    """Return a table with a row for each of the next best choices."""
    table = Table("the next best that fit", "needed", "a step takes")
    for choice, plan in found.others:
        later = plan.seconds - found.plan.seconds
        sign = "+" * (later >= 0)
        table.add_row(str(choice), size(plan.needed_nbytes), f"{duration(plan.seconds)} ({sign}{duration(later)})")
    return table


def draw(plan: Plan, path: Path) -> None:
    """Draw the memory of one step: a stacked area for each category, and a line at the memory available to them.

    Args:
        plan: a plan with its timeline, which a dry run keeps only if it `draws`.
    """
    from matplotlib.figure import Figure

    moments = plan.figures.timeline
    begin = moments[0].at
    times = [1e3 * (moment.at - begin) for moment in moments]
    heights = [[moment.parts.get(category, 0) / 1e9 for moment in moments] for category in CATEGORIES]
    used = [index for index, row in enumerate(heights) if any(row)]
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot(
        times, [heights[index] for index in used], labels=[CATEGORIES[index] for index in used],
        colors=[_COLOURS[index] for index in used], step="post",
    )  # fmt: skip
    free = plan.limit - sum(plan.unseen.values())
    axes.axhline(free / 1e9, color="black", linestyle="--", linewidth=1, label="the limit, less constants")
    for number, (phase, its_moments) in enumerate(groupby(moments, key=lambda moment: moment.phase)):
        at = 1e3 * (next(its_moments).at - begin)
        axes.axvline(at, color="white", linewidth=0.8)
        axes.text(at, axes.get_ylim()[1] * (0.98 - 0.04 * (number % 2)), f" {phase}", fontsize=8, va="top")
    axes.set_xlabel("ms of one step")
    axes.set_ylabel("GB of one accelerator")
    axes.set_title(
        f"ZeRO-{plan.figures.config.stage}, {counted(plan.job.ranks, 'rank')}: {plan.figures.numel / 1e9:.3g} B parameters"
    )
    axes.margins(x=0)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, path)
