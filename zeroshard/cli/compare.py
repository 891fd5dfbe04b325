"""Owns `zeroshard compare`, which trains a model at every ZeRO stage and compares results, memory, bytes and time."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroshard.cli.options import call_factory, load_factory, output_file, picture_file
from zeroshard.errors import UsageError, counted
from zeroshard.observe.plots import save

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, nn

STAGES = (0, 1, 2, 3)
MIB = 2**20
EXAMPLE = "zeroshard.cli.compare:example"
_KINDS = (
    ("parameters", "parameters", "#4c78a8"), ("gradients", "gradients", "#f58518"), ("optimizer", "optimizer", "#54a24b"),
    ("buffers", "communication buffers", "#bab0ac"),
)  # fmt: skip
"""The categories of memory, with their printed names and colours."""


def example() -> tuple[nn.Module, Callable[[int, int], tuple[Any, ...]]]:
    """Return the example's GPT, and a function that returns batches of random bytes."""
    import torch

    from zeroshard.testing.gpt import GPT, GPTConfig

    config = GPTConfig(context=64)

    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(1000 * step + rank))
        return tokens[:, :-1], tokens[:, 1:]

    return GPT(config), batch


def compare(
    model: Annotated[str, typer.Option(help="module:function or file.py:function; see above.")] = EXAMPLE,
    ranks: Annotated[int, typer.Option(min=1, help="The number of processes, joined over gloo.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="The number of optimizer steps at each stage.")] = 5,
    bf16: Annotated[bool, typer.Option("--bf16", help="Train in bfloat16 with fp32 master weights.")] = False,
    within: Annotated[int | None, typer.Option(
        min=1, help="Treat this many neighbouring ranks as a host, for two-level sharding.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw memory, bytes sent and step time to this file (PNG or SVG).")] = None,
    table: Annotated[Path | None, typer.Option(help="Write the table and a line about the run to this text file.")] = None,
) -> None:  # fmt: skip
    """Train a model for a few steps at every ZeRO stage, and compare losses, memory, bytes sent and time.

    The function that --model names returns (module, batch). A call of the module returns the loss, and
    `batch(rank, step)` returns the arguments of that call. The exit status is 1 if results differ.
    """
    from rich.console import Console

    from zeroshard.observe.display import Display
    from zeroshard.testing.ranks import run_ranks

    if plot is not None:
        picture_file(plot, "--plot")
    if table is not None:
        output_file(table, "--table")
    if within is not None and ranks % within:
        raise UsageError(
            f"--within {within} does not divide --ranks {ranks}: all hosts have the same number of ranks. Choose a divisor."
        )
    factory = load_factory(model)
    # In a separate process, since later forks could not use the threads and devices that the model starts.
    problem = run_ranks(lambda _: _problem(model, factory), 1, timeout=3600, initialise=False)[0]
    if problem is not None:
        raise UsageError(problem)
    console = Console()
    with Display(animated=True).task(f"training at stages 0 to 3 on {counted(ranks, 'rank')}", in_bytes=False):
        results = _train(factory, ranks, steps, bf16, within)
    if not results[0]["same"]:
        raise UsageError(
            f"losses or parameters of {model} are NaN at stage 0, so no results can be compared. Check the model and its batches."
        )
    told = _table(results, ranks, steps)
    console.print(told)
    if plot is not None:
        _plot_comparison(results, ranks, plot)
        console.print(f"drawn to {plot}")
    if table is not None:
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(_as_text(told, model, bf16), encoding="utf-8")
        console.print(f"written to {table}")
    if not all(result["same"] for result in results):
        raise typer.Exit(1)


def _problem(name: str, factory: Callable[[], Any]) -> str | None:
    """Return a sentence that describes a fault of the model itself, or None."""
    from torch import Tensor, nn

    try:
        made = call_factory(name, factory)
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
            return f"{name} must return (module, batch), where batch(rank, step) returns the arguments of one call."
        module, batch = made
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return f"the module of {name} has no parameter that requires a gradient. Unfreeze some."
        loss = call_factory(f"{name}'s module on batch(0, 0)", lambda: module(*batch(0, 0)))
    except UsageError as error:
        return str(error)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        return f"the module of {name} must return its loss, a tensor of one element."
    return None


def _train(factory: Callable[[], Any], ranks: int, steps: int, bf16: bool, within: int | None) -> list[dict[str, Any]]:
    """Return rank 0's result at each stage. "same": whether every rank's result is bit-equal to its result at stage 0."""
    import torch

    from zeroshard.policy import Policy, Precision
    from zeroshard.testing.parity import Workload, train
    from zeroshard.testing.ranks import run_ranks

    precision = None
    if bf16:
        precision = Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16)

    def every_stage(rank: int) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        _, batch = factory()
        workload = Workload(lambda: factory()[0], batch, steps=steps)  # type: ignore[no-any-return]
        policies = [Policy.stage(stage, within=within) for stage in STAGES]
        runs = [train(rank, workload, policy, precision=precision) for policy in policies]
        results = []
        for run in runs:
            result = run.as_dict()
            result["same"] = run.equals(runs[0])
            del result["parameters"], result["states"]
            results.append(result)
        return results

    by_rank = run_ranks(every_stage, ranks, timeout=3600, collective_timeout=600)
    for stage in STAGES:
        by_rank[0][stage]["same"] = all(rank[stage]["same"] for rank in by_rank)
    return by_rank[0]  # type: ignore[no-any-return]


def _table(results: list[dict[str, Any]], ranks: int, steps: int) -> Table:
    from rich.table import Table

    sizes = f"{counted(ranks, 'rank')}, {counted(steps, 'step')}"
    table = Table(title=f"{sizes}; MiB per rank, measured / formula", title_justify="left")
    table.add_column("")
    for stage in STAGES:
        table.add_column(f"stage {stage}", justify="right")
    for step in range(steps):
        table.add_row(f"loss, step {step + 1}", *[f"{float(result['losses'][step]):.9f}" for result in results])
    table.add_row("bit-equal to stage 0", *["yes" if result["same"] else "NO" for result in results])
    for kind in ("parameters", "gradients", "optimizer"):
        cells = [f"{result['memory'][kind] / MIB:.1f} / {result['formula'][kind] / MIB:.1f}" for result in results]
        table.add_row(kind, *cells)
    table.add_row("communication buffers", *[f"{result['memory']['buffers'] / MIB:.1f}" for result in results])
    table.add_row("sent per step", *[f"{_sent(result, steps):.1f}" for result in results])
    if any(kind.endswith("across") for result in results for kind in result["sent"]):
        table.add_row("of that, across hosts", *[f"{_sent(result, steps, 'across'):.1f}" for result in results])
    table.add_row("step time, ms", *[f"{_milliseconds(result):.0f}" for result in results])
    return table


def _as_text(table: Table, model: str, bf16: bool) -> str:
    """Return the table as text without colours, and below it a line that describes the run."""
    import os
    from importlib.metadata import version

    from rich.console import Console

    from zeroshard.version import __version__

    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(table)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    if model == EXAMPLE:
        model = "the example's GPT"
    dtype = "bfloat16" if bf16 else "fp32"
    run = f"{model} in {dtype}, all ranks on one machine with {os.cpu_count()} cores"
    return "\n".join([*lines, f"{run}; zeroshard {__version__}, torch {version('torch')}", ""])


def _sent(result: dict[str, Any], steps: int, where: str = "") -> float:
    return float(sum(nbytes for kind, nbytes in result["sent"].items() if kind.endswith(where))) / steps / MIB


def _milliseconds(result: dict[str, Any]) -> float:
    return 1e3 * float(statistics.median(result["times"][1:] or result["times"]))


def _plot_comparison(results: list[dict[str, Any]], ranks: int, path: Path) -> None:
    """Draw the measured memory as bars, with marks for the formulas, then the bytes sent and the step time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    memory, sent, times = figure.subplots(1, 3, width_ratios=[2, 1, 1])
    labels = [str(stage) for stage in STAGES]
    bottom = [0.0] * len(STAGES)
    for kind, label, colour in _KINDS:
        heights = [result["memory"][kind] / MIB for result in results]
        memory.bar(labels, heights, bottom=bottom, label=label, color=colour, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    formulas = [sum(result["formula"].values()) / MIB for result in results]
    memory.scatter(labels, formulas, marker="_", s=1500, color="black", label="formula, model states", zorder=3)
    memory.set_title(f"memory per rank, MiB ({counted(ranks, 'rank')})")
    memory.legend(frameon=False, fontsize=8, markerscale=0.4, loc="center left", bbox_to_anchor=(1, 0.5))
    steps = len(results[0]["times"])
    sent.bar(labels, [_sent(result, steps) for result in results], color="#9d755d", width=0.6)
    sent.set_title("sent per step, MiB")
    times.bar(labels, [_milliseconds(result) for result in results], color="#b279a2", width=0.6)
    times.set_title("step time, ms")
    for axes in (memory, sent, times):
        axes.set_xlabel("ZeRO stage")
        axes.title.set_fontsize(11)
    title = "losses or parameters DIFFER"
    if all(result["same"] for result in results):
        title = "losses and parameters bit-equal at all stages"
    figure.suptitle(title, fontsize=11)
    save(figure, path)
