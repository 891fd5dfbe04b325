"""Owns the HTML page of `zeroshard report`: one file with SVG plots, without scripts or network access."""

from __future__ import annotations

import io
import json
import math
import statistics
from collections.abc import Iterator
from datetime import timedelta
from html import escape
from typing import TYPE_CHECKING, Any

from zeroshard.errors import counted
from zeroshard.observe.monitors import STEPS
from zeroshard.observe.run_log import RunLog, Series
from zeroshard.version import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 2**20
MAX_POINTS = 1500
"""The maximum number of points in a line. A screen cannot show more."""
_LINES = {
    "loss": "loss",
    "lr": "learning rate",
    "grad_norm": "norm of the gradients before clipping",
    "loss_scale": "loss scale, and skipped steps",
    "tokens_per_second": "tokens per second",
    "samples_per_second": "samples per second",
}
_GROUPS = {
    "memory": ("memory of rank 0 by category, MiB", MIB),
    "seconds": ("time of a step by part, ms", 1e-3),
    "sent": ("sent by rank 0 in a step by collective, MiB", MIB),
}
_FAR = 4
"""A peak of at least this many times the height of the stack is not drawn, since it would flatten the stack."""
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } p, dt { color: #555; } dd { margin: 0; font-size: 1.15rem; }
dl, main { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: 1rem; }
main { grid-template-columns: repeat(auto-fill, minmax(min(34rem, 100%), 1fr)); }
figure { margin: 0; } figcaption { font-weight: 600; } figure svg { width: 100%; height: auto; }
"""


def page(run: RunLog) -> str:
    """Return the HTML page of a run. Drawing it needs matplotlib."""
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in summary(run).items()
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in run.notes)
    plots = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{_svg(title, figure)}</figure>\n"
        for title, figure in _plots(run)
    )
    settings = ""
    for name in ("config", "environment"):
        if run.about.get(name):
            text = escape(json.dumps(run.about[name], indent=2))
            settings += f"<details><summary>{name}</summary><pre>{text}</pre></details>\n"
    title = escape(job_name(run))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{_STYLE}</style></head>\n<body>'
        f"<h1>{title}</h1><p>{escape(_subtitle(run.about))}</p>{notes}<dl>{facts}</dl>\n<main>\n{plots}</main>\n"
        f"{settings}<p>The log: {escape(str(run.path))}</p>\n"
        f"<p>Written by zeroshard {__version__}: <code>zeroshard report</code>.</p></body></html>\n"
    )


def job_name(run: RunLog) -> str:
    """Return the name of a run: its log's folder, or the file's name if it is not `steps.jsonl`."""
    path = run.path.resolve()
    if path.name == STEPS:
        return path.parent.name
    return path.stem


def _subtitle(about: dict[str, Any]) -> str:
    parts = []
    if isinstance(about.get("parameters"), int | float):
        parts.append(f"{about['parameters'] / 1e6:,.1f} M parameters")
    if "world_size" in about:
        parts.append(counted(about["world_size"], "rank"))
    policy = about.get("policy")
    if isinstance(policy, dict) and policy:
        sharded = [state for state, one in policy.items() if isinstance(one, dict) and one.get("sharded")]
        parts.append(f"sharded: {', '.join(sharded) or 'nothing'}")
    parts += [str(about[key]) for key in ("dtype", "device") if key in about]
    if "torch" in about:
        parts.append(f"torch {about['torch']}")
    return ", ".join(parts)


def summary(run: RunLog) -> dict[str, str]:
    """Return a run's key figures by name, as strings with units."""
    found = {"steps": f"{max(one.at[-1] for one in run.series.values()):,.0f}"}
    loss = run.get("loss")
    if loss.finite:
        tail = loss.finite[-max(1, len(loss.finite) // 50) :]
        found["loss, first"] = f"{loss.finite[0]:.4g}"
        found[f"loss, mean of the last {len(tail)}"] = f"{statistics.fmean(tail):.4g}"
    broken = [at for at, value in zip(loss.at, loss.values, strict=True) if not math.isfinite(value)]
    if broken:
        found["loss not finite"] = f"{len(broken)} times, first at {broken[0]:,.0f}"
    found["skipped steps"] = str(len(run.skipped))
    for name in ("samples", "tokens"):
        speeds = run.get(f"{name}_per_second").finite
        if speeds:
            found[f"median {name}/s"] = f"{statistics.median(speeds):,.4g}"
    for name, what in (("peak", "peak memory of rank 0"), ("reserved", "reserved for it by the allocator")):
        most = run.get(name).finite
        if most:
            found[what] = f"{max(most) / MIB:,.0f} MiB"
    times = run.get("at").finite
    if len(times) > 1:
        found["from first to last"] = str(timedelta(seconds=round(times[-1] - times[0])))
    return found


def thinned(series: Series, limit: int = MAX_POINTS) -> Series:
    """Return at most `limit` points: the lowest and the highest finite one of each interval, so that no spike is lost."""
    if len(series.at) <= limit:
        return series
    found = Series()
    size = math.ceil(2 * len(series.at) / limit)
    for low in range(0, len(series.at), size):
        stretch = [i for i in range(low, min(low + size, len(series.at))) if math.isfinite(series.values[i])]
        if stretch:
            ends = {min(stretch, key=series.values.__getitem__), max(stretch, key=series.values.__getitem__)}
            found.at += [series.at[i] for i in sorted(ends)]
            found.values += [series.values[i] for i in sorted(ends)]
    return found


def _plots(run: RunLog) -> Iterator[tuple[str, Figure]]:
    """Yield pairs of a title and a plot for the series in the log, in the order of the page."""
    lines = [name for name in _LINES if any(run.get(name).finite)]
    if set(run.get("loss_scale").finite) <= {1.0} and not run.skipped and "loss_scale" in lines:
        lines.remove("loss_scale")
    if "tokens_per_second" in lines and "samples_per_second" in lines:
        lines.remove("samples_per_second")
    for name in lines:
        figure, axes = _axes()
        _draw(axes, run.get(name))
        _scale(axes, name, run.get(name).finite)
        if name in ("grad_norm", "loss_scale") and run.skipped:
            marks = run.skipped[:: math.ceil(len(run.skipped) / MAX_POINTS)]
            label = f"{len(run.skipped)} skipped"
            heights = [0.02] * len(marks)
            axes.plot(marks, heights, "|", transform=axes.get_xaxis_transform(), color="#e45756", label=label)
            axes.legend(frameon=False, fontsize=9)
        yield _LINES[name], figure
    for group, (title, unit) in _GROUPS.items():
        parts = {name: one for name, one in run.group(group).items() if any(one.finite)}
        if not parts:
            continue
        figure, axes = _axes()
        if group == "seconds":  # parts overlap, so a stack of their times would mean nothing
            for name, series in parts.items():
                _draw(axes, Series(series.at, [value / unit for value in series.values]), label=name)
        else:
            top = _stack(axes, parts, unit)
            peak = max(run.get("peak").finite, default=0.0) / unit
            if group == "memory" and 0 < peak < _FAR * top:
                axes.axhline(peak, color="black", linestyle="--", linewidth=1, label="peak")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
        yield title, figure


def _axes() -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True)
    return figure, axes


def _draw(axes: Axes, series: Series, label: str | None = None) -> None:
    thin = thinned(series)
    marker = "." * (len(thin.finite) < 3)  # a single point does not form a line
    axes.plot(thin.at, thin.values, marker=marker, linewidth=1.2, label=label)


def _scale(axes: Axes, name: str, values: list[float]) -> None:
    if name == "loss_scale":
        axes.set_yscale("log", base=2)
    elif name == "grad_norm" and max(values) > 50 * statistics.median(values) > 0:
        axes.set_yscale("log")
    elif name != "loss":
        axes.set_ylim(bottom=0)


def _stack(axes: Axes, parts: dict[str, Series], unit: float) -> float:
    """Stack the areas of the parts and return the height of the stack. A part that a step lacks counts as 0."""
    at = sorted({moment for one in parts.values() for moment in one.at})
    at = at[:: math.ceil(len(at) / MAX_POINTS)]
    rows = []
    for series in parts.values():
        known = {moment: value for moment, value in zip(series.at, series.values, strict=True) if math.isfinite(value)}
        rows.append([known.get(moment, 0.0) / unit for moment in at])
    if len(at) == 1:  # one point has no area
        at = [at[0] - 0.5, at[0] + 0.5]
        rows = [row * 2 for row in rows]
    axes.stackplot(at, rows, labels=list(parts), linewidth=0)
    axes.margins(x=0)
    return max(map(sum, zip(*rows, strict=True)))


def _svg(title: str, figure: Figure) -> str:
    """Return the plot as an SVG element whose text can be selected."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
