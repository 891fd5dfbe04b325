"""Owns the picture of a plan: memory over one step, by what it is for. Called by cli."""

from __future__ import annotations

from pathlib import Path

from zeroshard.plan.ledger import CATEGORIES
from zeroshard.plan.result import Plan

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#eeca3b", "#9d755d", "#bab0ac")


def draw(plan: Plan, path: Path) -> None:
    """A stacked area for each category, the limit as a line. The plan was made with `timeline=True`; PNG or SVG by the name."""
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
    axes.axhline(free / 1e9, color="black", linestyle="--", linewidth=1, label="the limit, less what is unseen")
    for number, (at, phase) in enumerate(_phases(plan, begin)):
        axes.axvline(at, color="white", linewidth=0.8)
        axes.text(at, axes.get_ylim()[1] * (0.98 - 0.04 * (number % 2)), f" {phase}", fontsize=8, va="top")
    axes.set_xlabel("ms of one step")
    axes.set_ylabel("GB of one accelerator")
    axes.set_title(
        f"ZeRO-{plan.figures.config.stage}, {plan.job.ranks} ranks: {plan.figures.numel / 1e9:.3g} B parameters"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _phases(plan: Plan, begin: float) -> list[tuple[float, str]]:
    """When each phase begins."""
    found: list[tuple[float, str]] = []
    for moment in plan.figures.timeline:
        if not found or found[-1][1] != moment.phase:
            found.append((1e3 * (moment.at - begin), moment.phase))
    return found
