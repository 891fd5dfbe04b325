"""Owns the report of underflow: the gradients that vanish in fp16, at the current loss scale and at others.

Each scale has a backward of its own. An element underflows at a scale if it is zero there, but not at the largest scale whose
gradients are all finite. An element that is zero at that scale too counts as truly zero, so the shares are lower bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from zeroshard.observe.plots import require_matplotlib, save

SCALES = tuple(2.0**power for power in range(0, 25, 4))
_LOWEST, _HIGHEST = -64, 16
"""The exponents of two between which the histogram distinguishes gradients."""


class GradientCount:
    """The counts of one backward at one scale.

    Attributes:
        zeros, numels: by parameter, the number of gradient elements that are zero, and the number of all elements.
        not_finite: the number of elements that are infinite or NaN.
        histogram: the number of finite nonzero elements by their exponent of two, without the scale: `_LOWEST` or less first,
            `_HIGHEST - 1` or more last; [_HIGHEST - _LOWEST], int64.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.zeros: dict[str, int] = {}
        self.numels: dict[str, int] = {}
        self.not_finite = 0
        self.histogram = torch.zeros(_HIGHEST - _LOWEST, dtype=torch.int64)

    def add(self, fqn: str, gradient: Tensor) -> None:
        """Count the elements of one parameter's gradient, as the backward computed it."""
        self.zeros[fqn] = int((gradient == 0).sum())
        self.numels[fqn] = gradient.numel()
        self.not_finite += int((~gradient.isfinite()).sum())
        values = gradient[gradient.isfinite() & (gradient != 0)].float()
        powers = torch.frexp(values).exponent.long() - 1 - round(math.log2(self.scale))
        places = (powers - _LOWEST).clamp(0, len(self.histogram) - 1).flatten().cpu()
        self.histogram += torch.bincount(places, minlength=len(self.histogram))


@dataclass(frozen=True)
class UnderflowReport:
    """The share of each parameter's gradient elements that underflow to zero, by loss scale.

    Attributes:
        scale: the current loss scale.
        shares: by scale and parameter, the share of elements that underflow; a lower bound.
        total: by scale, the same share over all parameters.
        overflows: the scales at which some gradient is infinite or NaN.
        histogram: by exponent of two, the number of gradient elements from this power up to the next.
    """

    scale: float
    shares: Mapping[float, Mapping[str, float]]
    total: Mapping[float, float]
    overflows: frozenset[float]
    histogram: Mapping[int, int]

    def table(self) -> Table:
        """Return a table with a row for each parameter and a column for each scale, in percent."""
        table = Table(title="gradient elements that vanish in fp16, %", title_justify="left")
        table.add_column("loss scale")
        for scale in self.shares:
            mark = ""
            if scale == self.scale:
                mark = " (now)"
            elif scale in self.overflows:
                mark = " (overflows)"
            name = f"{scale:,.0f}" if scale >= 1 else f"{scale:g}"
            table.add_column(name + mark, justify="right")
        for fqn in next(iter(self.shares.values())):
            table.add_row(fqn, *[f"{100 * shares[fqn]:.2f}" for shares in self.shares.values()])
        table.add_section()
        table.add_row("all", *[f"{100 * share:.2f}" for share in self.total.values()])
        return table

    def plot(self, path: str | Path) -> None:
        """Write a PNG or SVG file of the histogram, with fp16's limit at the current scale, and of the vanishing share by scale.

        Raises:
            UsageError: matplotlib is not installed.
        """
        require_matplotlib("UnderflowReport.plot")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 3.8), layout="constrained")
        sizes, lost = figure.subplots(1, 2, width_ratios=[3, 2])
        powers = sorted(power for power, count in self.histogram.items() if count)
        everything = max(1, sum(self.histogram.values()))
        sizes.bar(powers, [self.histogram[power] / everything for power in powers], width=0.9, color="#4c78a8")
        edge = -24 - math.log2(self.scale)
        sizes.axvspan(min([*powers, edge]) - 1, edge, color="#e45756", alpha=0.15, linewidth=0)
        sizes.axvline(edge, color="#e45756", label=f"fp16's smallest number at scale {self.scale:g}")
        sizes.axvline(-24, color="grey", linestyle=":", label="the same without scaling")
        sizes.set(xlabel="log2 |gradient|", ylabel="share of elements", title="gradients, unscaled")
        sizes.legend(frameon=False, fontsize=8, loc="upper left")
        scales = list(self.total)
        finite = [scale for scale in scales if scale not in self.overflows]
        lost.plot(finite, [100 * self.total[scale] for scale in finite], marker="o", color="#4c78a8")
        for scale in self.overflows:
            lost.axvline(scale, color="#e45756", alpha=0.4)
        lost.axvline(self.scale, color="grey", linestyle=":")
        lost.set_xscale("log", base=2)
        lost.set(xlabel="loss scale (red: overflows)", title="elements that vanish, %")
        save(figure, Path(path))


def summarise(
    counts: Sequence[GradientCount], names: Sequence[str], scale: float, sum_over_ranks: Callable[[Tensor], Tensor]
) -> UnderflowReport:
    """Sum the counts over all ranks into a report. Every rank must call it, with the same names and order of scales.

    Args:
        names: the parameters with gradients on any rank.
        sum_over_ranks: returns the sum of an int64 tensor of shape [n] over all ranks.
    """
    rows = []
    for count in counts:
        zeros = [count.zeros.get(fqn, 0) for fqn in names]
        numels = [count.numels.get(fqn, 0) for fqn in names]
        rows.append(torch.cat([torch.tensor([count.not_finite, *zeros, *numels]), count.histogram]))
    totals = [sum_over_ranks(row) for row in rows]
    size = len(names)
    overflows = frozenset(count.scale for count, row in zip(counts, totals, strict=True) if row[0])
    clean = [index for index, count in enumerate(counts) if count.scale not in overflows]
    reference = totals[max(clean, key=lambda index: counts[index].scale, default=0)]
    shares = {}
    total = {}
    for count, row in zip(counts, totals, strict=True):
        lost = (row[1 : 1 + size] - reference[1 : 1 + size]).clamp(min=0)
        elements = row[1 + size : 1 + 2 * size].clamp(min=1)
        shares[count.scale] = dict(zip(names, (lost / elements).tolist(), strict=True))
        total[count.scale] = float(lost.sum() / elements.sum())
    histogram = {_LOWEST + index: int(count) for index, count in enumerate(reference[1 + 2 * size :].tolist())}
    return UnderflowReport(scale, shares, total, overflows, histogram)
