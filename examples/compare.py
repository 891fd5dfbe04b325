"""Train a model for a few steps at every ZeRO stage, and compare losses, memory, bytes sent and time: `python examples/compare.py`.

`--model file.py:function` names a function that returns (module, batch). A call of the module returns the loss, and
`batch(rank, step)` returns the arguments of that call. The exit status is 1 if results differ.
"""

import argparse
import os
import runpy
import statistics
from collections.abc import Callable
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import zeroshard
from zeroshard import Policy, Precision
from zeroshard.testing import Workload, run_ranks, train
from zeroshard.testing.gpt import GPT, GPTConfig

STAGES = (0, 1, 2, 3)
MIB = 2**20
KINDS = {
    "parameters": "#4c78a8", "gradients": "#f58518", "optimizer": "#54a24b", "buffers": "#bab0ac",
}  # fmt: skip
"""The kinds of memory, with their colours. Buffers are those of communication."""
Result = dict[str, Any]
Factory = Callable[[], Any]


def example() -> Any:
    """Return the example's GPT, and a function that returns batches of random bytes."""

    def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(1000 * step + rank))
        return tokens[:, :-1], tokens[:, 1:]

    return GPT(GPTConfig(context=64)), batch


def train_at_every_stage(options: argparse.Namespace, factory: Factory) -> list[Result]:
    """Return rank 0's result at each stage. "same": whether every rank's result is bit-equal to its result at stage 0."""
    precision = Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16) if options.bf16 else None

    def every_stage(rank: int) -> list[Result]:
        torch.manual_seed(0)
        _, batch = factory()
        workload = Workload(lambda: factory()[0], batch, steps=options.steps)
        policies = [Policy.stage(stage, within=options.within) for stage in STAGES]
        runs = [train(rank, workload, policy, precision=precision) for policy in policies]
        results = []
        for run in runs:
            result = run.as_dict() | {"same": run.equals(runs[0])}
            del result["parameters"], result["states"]
            results.append(result)
        return results

    by_rank: list[list[Result]] = run_ranks(every_stage, options.ranks, timeout=3600, collective_timeout=600)
    for stage in STAGES:
        by_rank[0][stage]["same"] = all(rank[stage]["same"] for rank in by_rank)
    return by_rank[0]


def sent(result: Result, where: str = "") -> float:
    """Return the MiB that a rank sent in a step."""
    nbytes = sum(nbytes for kind, nbytes in result["sent"].items() if kind.endswith(where))
    return float(nbytes) / len(result["times"]) / MIB


def milliseconds(result: Result) -> float:
    """Return the median time of a step. The first step also allocates buffers, so it does not count."""
    return 1e3 * float(statistics.median(result["times"][1:] or result["times"]))


def table_of(results: list[Result], title: str) -> Table:
    """Return the comparison as a table with a column for each stage."""
    table = Table("", title=f"{title}; MiB per rank, measured / formula", title_justify="left")
    for stage in STAGES:
        table.add_column(f"stage {stage}", justify="right")
    for step, losses in enumerate(zip(*(result["losses"] for result in results), strict=True), 1):
        table.add_row(f"loss, step {step}", *[f"{float(loss):.9f}" for loss in losses])
    table.add_row("bit-equal to stage 0", *["yes" if result["same"] else "NO" for result in results])
    for kind in ("parameters", "gradients", "optimizer"):
        cells = [f"{result['memory'][kind] / MIB:.1f} / {result['formula'][kind] / MIB:.1f}" for result in results]
        table.add_row(kind, *cells)
    table.add_row("communication buffers", *[f"{result['memory']['buffers'] / MIB:.1f}" for result in results])
    table.add_row("sent per step", *[f"{sent(result):.1f}" for result in results])
    if any(kind.endswith("across") for result in results for kind in result["sent"]):
        table.add_row("of that, across hosts", *[f"{sent(result, 'across'):.1f}" for result in results])
    table.add_row("step time, ms", *[f"{milliseconds(result):.0f}" for result in results])
    return table


def draw(results: list[Result], ranks: int, path: Path) -> None:
    """Draw the measured memory as bars, with marks for the formulas, then the bytes sent and the step time."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    memory, bytes_sent, times = figure.subplots(1, 3, width_ratios=[2, 1, 1])
    labels = [str(stage) for stage in STAGES]
    bottom = [0.0] * len(STAGES)
    for kind, colour in KINDS.items():
        heights = [result["memory"][kind] / MIB for result in results]
        name = "communication buffers" if kind == "buffers" else kind
        memory.bar(labels, heights, bottom=bottom, label=name, color=colour, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    formulas = [sum(result["formula"].values()) / MIB for result in results]
    memory.scatter(labels, formulas, marker="_", s=1500, color="black", label="formula, model states", zorder=3)
    memory.set_title(f"memory per rank, MiB ({ranks} ranks)")
    memory.legend(frameon=False, fontsize=8, markerscale=0.4, loc="center left", bbox_to_anchor=(1, 0.5))
    bytes_sent.bar(labels, [sent(result) for result in results], color="#9d755d", width=0.6)
    bytes_sent.set_title("sent per step, MiB")
    times.bar(labels, [milliseconds(result) for result in results], color="#b279a2", width=0.6)
    times.set_title("step time, ms")
    for axes in (memory, bytes_sent, times):
        axes.set_xlabel("ZeRO stage")
        axes.title.set_fontsize(11)
        axes.spines[["top", "right"]].set_visible(False)
    same = all(result["same"] for result in results)
    figure.suptitle(f"losses and parameters {'bit-equal at all stages' if same else 'DIFFER'}", fontsize=11)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Compare, print the table, and write what the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="file.py:function; default: a small GPT")
    parser.add_argument("--ranks", type=int, default=2, help="the number of processes, joined over gloo")
    parser.add_argument("--steps", type=int, default=5, help="the number of optimizer steps at each stage")
    parser.add_argument("--bf16", action="store_true", help="train in bfloat16 with fp32 master weights")
    parser.add_argument("--within", type=int, help="treat this many neighbouring ranks as a host")
    parser.add_argument("--plot", type=Path, help="draw memory, bytes sent and step time to this file")
    parser.add_argument("--table", type=Path, help="write the table and a line about the run to this file")
    options = parser.parse_args()
    factory: Factory = example
    if options.model:
        file, _, function = options.model.rpartition(":")
        factory = runpy.run_path(file)[function]
    results = train_at_every_stage(options, factory)
    if not results[0]["same"]:
        parser.error(
            "losses or parameters are NaN at stage 0, so results cannot be compared: check the model and its batches"
        )
    table = table_of(results, f"{options.ranks} ranks, {options.steps} steps")
    Console().print(table)
    if options.plot:
        draw(results, options.ranks, options.plot)
    if options.table:
        console = Console(file=StringIO(), width=120, color_system=None)
        console.print(table)
        lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
        run = f"{options.model or 'the example GPT'} in {'bfloat16' if options.bf16 else 'fp32'}"
        run += f", all ranks on one machine with {os.cpu_count()} cores"
        lines.append(f"{run}; zeroshard {zeroshard.__version__}, torch {version('torch')}")
        options.table.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return int(not all(result["same"] for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
