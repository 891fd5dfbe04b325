"""Owns how a plan is printed. Called by cli."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from zeroshard.plan.judge import Change
from zeroshard.plan.ledger import CATEGORIES
from zeroshard.plan.result import BOUNDS, Plan

GB = 1e9


def gigabytes(nbytes: float) -> str:
    """For people: 31.4 GB."""
    return f"{nbytes / GB:.2f} GB" if nbytes < 10 * GB else f"{nbytes / GB:.1f} GB"


def duration(seconds: float) -> str:
    """For people: 1.85 s, 637 ms, 0.64 ms."""
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.3g} ms"


def verdict(plan: Plan) -> str:
    """One sentence: whether it fits, and by how much."""
    need, limit = gigabytes(plan.needed_nbytes), gigabytes(plan.limit)
    if plan.fits:
        return f"fits: {need} of {limit} of each accelerator, {gigabytes(-plan.overshoot)} are left."
    if plan.overshoot > 0:
        return f"does not fit: {need} of {limit} of each accelerator, {gigabytes(plan.overshoot)} are missing."
    missing = gigabytes(plan.host_nbytes - plan.host_limit)
    return f"does not fit: {gigabytes(plan.host_nbytes)} of {gigabytes(plan.host_limit)} of CPU memory, {missing} are missing."


def tables(plan: Plan) -> Group:
    """All of a plan, for rich's console."""
    return Group(_memory(plan), _step(plan))


def _memory(plan: Plan) -> Table:
    figures = plan.figures
    where = f"{figures.peak.phase}, {figures.peak.module}" if figures.peak.module else figures.peak.phase
    table = Table(
        "memory of an accelerator", "at the peak", "between steps", title=f"peak: {where}", title_justify="left"
    )
    for category in CATEGORIES:
        now, rest = figures.peak.parts.get(category, 0), figures.rest.get(category, 0)
        if now or rest:
            table.add_row(category, gigabytes(now), gigabytes(rest))
    table.add_section()
    table.add_row("live bytes, training", gigabytes(plan.peak_nbytes), gigabytes(sum(figures.rest.values())))
    if not plan.job.born_sharded:
        table.add_row("live bytes, start-up without sharded_init", gigabytes(figures.start.nbytes), "")
    for name, nbytes in plan.unseen.items():
        table.add_row(name, gigabytes(nbytes), "")
    table.add_section()
    table.add_row("needed", gigabytes(plan.needed_nbytes), "")
    return table


def _step(plan: Plan) -> Table:
    figures, batch = plan.figures, plan.figures.config.batch
    table = Table(show_header=False)
    table.add_row("parameters", f"{figures.numel / GB:.3g} B, of which {figures.trained / GB:.3g} B are trained")
    table.add_row(
        "a step", f"{batch.micro} samples x {batch.accumulation} microbatches x {plan.job.ranks} ranks = {batch.train}"
    )
    table.add_row("CPU memory of a host", gigabytes(plan.host_nbytes))
    if plan.disk_nbytes:
        table.add_row("disk of a host", gigabytes(plan.disk_nbytes))
    table.add_row("sent by a rank in a step", f"{gigabytes(plan.sent_nbytes)} in {plan.collectives:,} collectives")
    table.add_row(
        "a step takes about", f"{duration(plan.seconds)} on {plan.machine.name}, bound by {BOUNDS[plan.bound]}"
    )
    spent = sorted(figures.spent.items(), key=lambda item: -item[1])
    table.add_row("of that", ", ".join(f"{duration(seconds)} {BOUNDS[name]}" for name, seconds in spent if seconds > 0))
    table.add_row(
        "samples a second",
        f"{plan.samples_per_second:.3g}" if plan.samples_per_second < 100 else f"{plan.samples_per_second:,.0f}",
    )
    return table


def changes_table(changes: Sequence[Change]) -> Table:
    """What each single change would gain."""
    table = Table("a single change", "gains", "a step takes", "then it")
    for change in changes:
        longer = f"{'+' if change.slowdown >= 0 else ''}{duration(change.slowdown)}"
        table.add_row(change.what, gigabytes(change.gain), longer, "fits" if change.plan.fits else "does not fit")
    return table
