"""Owns the page that shows a run: one HTML file, its pictures inside as SVG, no script, nothing from the network. Called by cli."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from html import escape
from typing import TYPE_CHECKING, Any

from zeroshard.observe.run_log import RunLog, Series
from zeroshard.version import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = 2**20
MAX_POINTS = 1500
"""Of a line: more than there are dots on a screen."""
_MANY = 200
"""Steps from which a loss is smoothed as well."""
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#eeca3b", "#9d755d", "#bab0ac", "#e45756")
_COLOUR_OF = {"parameters": "#4c78a8", "gradients": "#f58518", "optimizer": "#54a24b", "buffers": "#bab0ac"}
_SKIPPED = "#e45756"
_FAR = 4
"""A peak that is so many times as high as what is stacked would leave nothing of it to see."""

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
p { margin: .3rem 0; color: #555; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); gap: .75rem; margin: 1.5rem 0; padding: 0; }
dl div { border: 1px solid #ddd; border-radius: 6px; padding: .5rem .75rem; }
dt { color: #666; font-size: .85rem; } dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
main { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(34rem, 100%), 1fr)); gap: 1.5rem; }
figure { margin: 0; } figcaption { font-weight: 600; } figure svg { width: 100%; height: auto; }
figure p { font-size: .85rem; }
"""


@dataclass(frozen=True)
class Picture:
    """One plot: what it shows, and a sentence on how to read it."""

    title: str
    figure: Figure
    note: str = ""


def page(run: RunLog) -> str:
    """The page."""
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in summary(run))
    notes = "".join(f"<p>{escape(note)}</p>" for note in run.notes)
    shown = "".join(
        f"<figure><figcaption>{escape(one.title)}</figcaption>{_svg(one)}"
        + (f"<p>{escape(one.note)}</p>" if one.note else "")
        + "</figure>\n"
        for one in pictures(run)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(str(run.path))}</title><style>{_STYLE}</style></head>\n<body>'
        f"<h1>{escape(str(run.path))}</h1><p>{escape(_subtitle(run.about))}</p>{notes}<dl>{facts}</dl>\n<main>\n{shown}</main>\n"
        f"<p>Written by zeroshard {__version__}: <code>zeroshard report</code>.</p></body></html>\n"
    )


def _subtitle(about: dict[str, Any]) -> str:
    if not about:
        return ""
    policy, parameters = about.get("policy"), about.get("parameters")
    if not isinstance(policy, dict):  # another version's log
        policy = {}
    sharded = [state for state, one in policy.items() if isinstance(one, dict) and one.get("sharded")]
    parts = [
        f"{_count(parameters)} parameters" if isinstance(parameters, int | float) else "",
        f"{about['world_size']} ranks" if "world_size" in about else "",
        f"sharded: {', '.join(sharded) or 'nothing'}" if policy else "",
        f"rounded on the wire: {about['rounded on the wire']}" if "rounded on the wire" in about else "",
        str(about.get("dtype", "")),
        str(about.get("device", "")),
        f"torch {about['torch']}" if "torch" in about else "",
    ]
    return ", ".join(part for part in parts if part)


def _count(number: float) -> str:
    return f"{number / 1e6:,.1f} M" if number >= 1e6 else f"{number:,}"


# ---------------------------------------------------------------------- numbers


def summary(run: RunLog) -> list[tuple[str, str]]:
    """What one wants to know first, by name."""
    last = max(one.at[-1] for one in run.series.values())
    found = [("steps" if run.axis == "step" else "samples", f"{last:,.0f}")]
    losses = _finite(run.series.get("loss"))
    if losses:
        tail = losses[-max(1, len(losses) // 50) :]
        found.append(("loss, first", f"{losses[0]:.4g}"))
        found.append(
            (f"loss, mean of the last {len(tail)}" if len(tail) > 1 else "loss, last", f"{sum(tail) / len(tail):.4g}")
        )
    broken = [at for at, loss in _points(run.series.get("loss")) if not math.isfinite(loss)]
    if broken:
        found.append(("loss not finite", f"{len(broken)} times, first at {broken[0]:,.0f}"))
    found.append(("skipped steps", str(len(run.skipped))))
    for name, unit in (("samples_per_second", "samples/s"), ("tokens_per_second", "tokens/s")):
        speeds = _finite(run.series.get(name))
        if speeds:
            found.append((f"median {unit}", f"{statistics.median(speeds):,.4g}"))
    peaks = _finite(run.series.get("peak"))
    if peaks:
        found.append(("peak memory of rank 0", f"{max(peaks) / MIB:,.0f} MiB"))
    times = _finite(run.series.get("at"))
    if len(times) > 1:
        found.append(("from first to last", str(timedelta(seconds=round(times[-1] - times[0])))))
    return found


def _points(series: Series | None) -> Iterable[tuple[float, float]]:
    return zip(series.at, series.values, strict=True) if series is not None else ()


def _finite(series: Series | None) -> list[float]:
    return [value for value in series.values if math.isfinite(value)] if series is not None else []


def thinned(series: Series, limit: int = MAX_POINTS) -> Series:
    """At most so many points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(series.at) <= limit:
        return series
    found, size = Series(), -(-2 * len(series.at) // limit)
    for low in range(0, len(series.at), size):
        stretch = [i for i in range(low, min(low + size, len(series.at))) if math.isfinite(series.values[i])]
        if stretch:
            ends = {min(stretch, key=series.values.__getitem__), max(stretch, key=series.values.__getitem__)}
            for i in sorted(ends):
                found.at.append(series.at[i])
                found.values.append(series.values[i])
    return found


def smoothed(series: Series, share: float = 0.02) -> Series:
    """The mean over the steps around each, about that share of all; what is not finite counts in none."""
    import numpy as np

    at, values = np.asarray(series.at), np.asarray(series.values)
    at, values = at[np.isfinite(values)], values[np.isfinite(values)]
    half = max(1, round(share * len(values) / 2))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.maximum(np.arange(len(values)) - half, 0)
    high = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return Series(at.tolist(), ((sums[high] - sums[low]) / (high - low)).tolist())


# ---------------------------------------------------------------------- pictures


def pictures(run: RunLog) -> list[Picture]:
    """What there is to see, in the order of the page."""
    return [one for one in _all(run) if one is not None]


def _all(run: RunLog) -> Iterator[Picture | None]:
    yield _loss(run)
    yield _line(run, "lr", "learning rate")
    yield _norm(run)
    yield _scale(run)
    yield _speed(run)
    yield _stacked(run, "memory", "memory of rank 0 by category, MiB", MIB, "Live bytes after the step. " + _PEAK)
    yield _parts_of_time(run)
    yield _stacked(run, "sent", "sent by rank 0 in a step by collective, MiB", MIB, "")


_PEAK = "The dashed line, where it is near, is the most that the accelerator's allocator, or the process on a CPU, had at once."


def _axes(run: RunLog) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#eee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(run.axis)
    axes.tick_params(labelsize=9)
    return figure, axes


def _mark_skipped(axes: Axes, run: RunLog) -> None:
    if run.skipped:
        marks = run.skipped[:: -(-len(run.skipped) // MAX_POINTS)]
        axes.plot(
            marks, [0.02] * len(marks), "|", transform=axes.get_xaxis_transform(), color=_SKIPPED, markersize=9,
            label=f"{len(run.skipped)} skipped", clip_on=False,
        )  # fmt: skip
        axes.legend(frameon=False, fontsize=9)


def _draw(axes: Axes, series: Series, **options: Any) -> None:
    thin = thinned(series)
    # A point alone is no line.
    axes.plot(thin.at, thin.values, marker="." if len(_finite(thin)) < 3 else "", **options)


def _draw_noisy(axes: Axes, series: Series, colour: str) -> None:
    """As it is; and where there are many steps, smoothed before that."""
    many = len(series.at) > _MANY
    _draw(axes, series, color=colour, linewidth=1, alpha=0.3 if many else 1.0)
    if many:
        _draw(axes, smoothed(series), color=colour, linewidth=1.8, label="smoothed")
        axes.legend(frameon=False, fontsize=9)


def _loss(run: RunLog) -> Picture | None:
    series = run.series.get("loss")
    if not _finite(series) or series is None:
        return None
    figure, axes = _axes(run)
    _draw_noisy(axes, series, COLOURS[0])
    return Picture("loss", figure)


def _line(run: RunLog, name: str, title: str) -> Picture | None:
    series = run.series.get(name)
    if not _finite(series) or series is None:
        return None
    figure, axes = _axes(run)
    _draw(axes, series, color=COLOURS[0], linewidth=1.5)
    axes.set_ylim(bottom=0)
    return Picture(title, figure)


def _norm(run: RunLog) -> Picture | None:
    series = run.series.get("grad_norm")
    found = [value for value in _finite(series) if value > 0]
    if not found or series is None:
        return None
    figure, axes = _axes(run)
    _draw(axes, series, color=COLOURS[2], linewidth=1)
    if max(found) > 50 * statistics.median(found):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    _mark_skipped(axes, run)
    return Picture("norm of the gradients before clipping", figure, "Where it is not finite there is no point.")


def _scale(run: RunLog) -> Picture | None:
    series = run.series.get("loss_scale")
    if series is None or (set(_finite(series)) <= {1.0} and not run.skipped):
        return None
    figure, axes = _axes(run)
    axes.set_yscale("log", base=2)
    _draw(axes, series, color=COLOURS[3], linewidth=1.5, drawstyle="steps-post")
    _mark_skipped(axes, run)
    return Picture("loss scale, and steps that were skipped", figure)


def _speed(run: RunLog) -> Picture | None:
    for name, title in (("tokens_per_second", "tokens a second"), ("samples_per_second", "samples a second")):
        series = run.series.get(name)
        if series is not None and any(_finite(series)):
            figure, axes = _axes(run)
            _draw_noisy(axes, series, COLOURS[5])
            axes.set_ylim(bottom=0)
            return Picture(title, figure, "Of all ranks.")
    return None


def _parts_of_time(run: RunLog) -> Picture | None:
    parts = {name: one for name, one in run.group("seconds").items() if any(_finite(one))}
    if not parts:
        return None
    figure, axes = _axes(run)
    for (name, series), colour in zip(_largest_first(parts), _colours(parts), strict=True):
        shown = smoothed(series) if len(series.at) > _MANY else series
        _draw(axes, Series(shown.at, [1e3 * value for value in shown.values]), color=colour, linewidth=1.3, label=name)
    axes.set_ylim(bottom=0)
    _legend(axes, len(parts))
    return Picture(
        "time of a step by part, ms", figure,
        "Of rank 0. Forward, backward and step follow one another; the others are waits for other ranks inside of these.",
    )  # fmt: skip


def _stacked(run: RunLog, group: str, title: str, unit: float, note: str) -> Picture | None:
    parts = {name: one for name, one in run.group(group).items() if any(_finite(one))}
    if not parts:
        return None
    figure, axes = _axes(run)
    names = [name for name in _COLOUR_OF if name in parts] + [
        name for name, _ in _largest_first(parts) if name not in _COLOUR_OF
    ]
    at = sorted({at for one in parts.values() for at in one.at})
    at = at[:: -(-len(at) // MAX_POINTS)]
    rows = [_values_at(parts[name], at, unit) for name in names]
    if len(at) == 1:
        at, rows = [at[0] - 0.5, at[0] + 0.5], [row * 2 for row in rows]
    axes.stackplot(at, rows, labels=names, colors=_colours(names), linewidth=0)
    peaks = _finite(run.series.get("peak")) if group == "memory" else []
    if peaks and max(peaks) / unit < _FAR * max(map(sum, zip(*rows, strict=True))):
        axes.axhline(max(peaks) / unit, color="black", linestyle="--", linewidth=1, label="peak")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    _legend(axes, len(names) + 1)
    return Picture(title, figure, note)


def _values_at(series: Series, at: Sequence[float], unit: float) -> list[float]:
    """What a log does not say of a part of a group is 0."""
    known = dict(zip(series.at, series.values, strict=True))
    return [value / unit if math.isfinite(value := known.get(moment, 0.0)) else 0.0 for moment in at]


def _largest_first(parts: dict[str, Series]) -> list[tuple[str, Series]]:
    return sorted(parts.items(), key=lambda item: -statistics.fmean(_finite(item[1])))


def _colours(names: Iterable[str]) -> list[str]:
    """The same for one kind of memory in every picture; others in turn."""
    return [_COLOUR_OF.get(name, COLOURS[number % len(COLOURS)]) for number, name in enumerate(names)]


def _legend(axes: Axes, count: int) -> None:
    axes.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5)) if count > 1 else None


def _svg(picture: Picture) -> str:
    """The picture as an element of the page; its text stays text."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        picture.figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": picture.title})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
