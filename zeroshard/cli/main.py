"""Owns the command-line program: `zeroshard compare | estimate | config | inspect | consolidate | import-deepspeed | doctor`."""

from __future__ import annotations

import importlib
import importlib.util
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from zeroshard.checkpoint.safetensors_file import SafetensorsReader
from zeroshard.cli.checkpoints import consolidate, import_from_deepspeed, inspect
from zeroshard.cli.doctor import doctor
from zeroshard.config.document import pages
from zeroshard.config.load import load_config
from zeroshard.config.table import config_table
from zeroshard.errors import UsageError, ZeroshardError
from zeroshard.observe.memory import STATES_PER_PARAMETER, formula
from zeroshard.policy import Policy, Precision
from zeroshard.testing.gpt import GPT, GPTConfig
from zeroshard.testing.parity import Workload, train
from zeroshard.testing.ranks import run_ranks

app = typer.Typer(add_completion=False, no_args_is_help=True, help="ZeRO for PyTorch.")
config_app = typer.Typer(no_args_is_help=True, help="DeepSpeed configs: what they come to here.")
app.add_typer(config_app, name="config")
app.command()(inspect)
app.command()(consolidate)
app.command("import-deepspeed")(import_from_deepspeed)
app.command()(doctor)
STAGES = (0, 1, 2, 3)
MIB = 2**20


def example() -> tuple[nn.Module, Callable[[int, int], tuple[Any, ...]]]:
    """The example's GPT on random bytes."""
    config = GPTConfig(context=64)

    def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, 256, (2, 65), generator=torch.Generator().manual_seed(1000 * step + rank))
        return tokens[:, :-1], tokens[:, 1:]

    return GPT(config), batch


def load_factory(name: str) -> Callable[[], Any]:
    """The function that `module:function` or `path/to/file.py:function` names."""
    place, _, function = name.rpartition(":")
    if not place:
        raise UsageError(f"--model takes module:function or file.py:function, not {name!r}.")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UsageError(f"no file at {place}.")
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    if not callable(getattr(module, function, None)):
        raise UsageError(f"{place} has no function {function!r}.")
    return getattr(module, function)  # type: ignore[no-any-return]


@app.command()
def compare(
    model: Annotated[
        str, typer.Option(help="module:function or file.py:function; see below.")
    ] = "zeroshard.cli.main:example",
    ranks: Annotated[int, typer.Option(help="Processes, joined over gloo.")] = 2,
    steps: Annotated[int, typer.Option(help="Optimizer steps under each stage.")] = 5,
    bf16: Annotated[bool, typer.Option("--bf16", help="Train in bfloat16 with fp32 master weights.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the table to this file (PNG or SVG).")] = None,
) -> None:
    """Train a model for a few steps under every ZeRO stage: same bits, and what each costs.

    The function that --model names returns (module, batch): the module's call returns the loss, and `batch(rank, step)`
    the arguments of that call.
    """
    factory = load_factory(model)
    precision = Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16) if bf16 else None

    def every_stage(rank: int) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        _, batch = factory()
        workload = Workload(lambda: factory()[0], batch, steps=steps)  # type: ignore[no-any-return]
        runs = [train(rank, workload, Policy.stage(stage), precision=precision) for stage in STAGES]
        results = []
        for run in runs:
            result = run.as_dict()
            result["same"] = run.equals(runs[0])
            del result["parameters"]
            results.append(result)
        return results

    console = Console()
    with console.status(f"training under stages 0 to 3 on {ranks} ranks"):
        by_rank = run_ranks(every_stage, ranks, timeout=3600, collective_timeout=600)
    results = by_rank[0]
    for stage in STAGES:
        results[stage]["same"] = all(rank[stage]["same"] for rank in by_rank)
    _print_comparison(console, results, ranks, steps)
    if plot is not None:
        _plot_comparison(results, ranks, plot)
        console.print(f"drawn to {plot}")
    if not all(result["same"] for result in results):
        raise typer.Exit(1)


def _print_comparison(console: Console, results: list[dict[str, Any]], ranks: int, steps: int) -> None:
    table = Table(title=f"{ranks} ranks, {steps} steps; MiB per rank, measured / formula", title_justify="left")
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
    table.add_row("step time, ms", *[f"{_milliseconds(result):.0f}" for result in results])
    console.print(table)


def _sent(result: dict[str, Any], steps: int) -> float:
    return float(sum(result["sent"].values())) / steps / MIB


def _milliseconds(result: dict[str, Any]) -> float:
    return 1e3 * float(statistics.median(result["times"][1:] or result["times"]))


def _plot_comparison(results: list[dict[str, Any]], ranks: int, path: Path) -> None:
    """Bars of measured bytes with the formulas as marks, and bytes sent and step time beside them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    memory, sent, times = figure.subplots(1, 3, width_ratios=[2, 1, 1])
    labels = [f"ZeRO-{stage}" for stage in STAGES]
    bottom = [0.0] * len(STAGES)
    for kind, colour in (("parameters", "#4c78a8"), ("gradients", "#f58518"), ("optimizer", "#54a24b")):
        heights = [result["memory"][kind] / MIB for result in results]
        memory.bar(labels, heights, bottom=bottom, label=kind, color=colour, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    formulas = [sum(result["formula"].values()) / MIB for result in results]
    memory.scatter(labels, formulas, marker="_", s=1500, color="black", label="ZeRO formula", zorder=3)
    memory.set_title(f"model states per rank at rest, MiB ({ranks} ranks)")
    memory.legend(frameon=False, fontsize=8, markerscale=0.4)
    steps = len(results[0]["times"])
    sent.bar(labels, [_sent(result, steps) for result in results], color="#9d755d", width=0.6)
    sent.set_title("sent per rank and step, MiB")
    times.bar(labels, [_milliseconds(result) for result in results], color="#b279a2", width=0.6)
    times.set_title("step time, ms")
    for axes in (memory, sent, times):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="x", labelsize=8)
    same = all(result["same"] for result in results)
    figure.suptitle(
        "losses and parameters bit-equal under all stages" if same else "losses or parameters DIFFER", fontsize=11
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


@app.command()
def estimate(
    parameters: Annotated[float | None, typer.Option(help="Trainable parameters, e.g. 7.5e9.")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A .safetensors file, or module:function, or file.py:function."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks.")] = 64,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32: of parameters and gradients.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(STATES_PER_PARAMETER)}.")] = "Adam",
) -> None:
    """Print the memory that model states take per rank under each stage (activations and buffers come on top)."""
    if (parameters is None) == (model is None):
        raise UsageError("estimate takes either --parameters N or --model FILE.")
    numel = parameters if parameters is not None else _count(str(model))
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    names = {name.lower(): name for name in STATES_PER_PARAMETER}
    if dtype not in dtypes:
        raise UsageError(f"--dtype is one of {', '.join(dtypes)}, not {dtype!r}.")
    if optimizer.lower() not in names:
        raise UsageError(f"--optimizer is one of {', '.join(STATES_PER_PARAMETER)}, not {optimizer!r}.")
    resolved = Precision(dtypes[dtype], accumulate_dtype=dtypes[dtype]).resolve(dtypes[dtype])
    states = STATES_PER_PARAMETER[names[optimizer.lower()]]
    table = Table(
        title=f"{numel / 1e9:.3g} B parameters, {dtype}, {names[optimizer.lower()]}, {ranks} ranks; GB per rank"
    )
    for column in ("", "parameters", "gradients", "optimizer", "sum", "less by"):
        table.add_column(column, justify="right")
    whole = 0.0
    for stage in STAGES:
        parts = formula(Policy.stage(stage), resolved, numel, ranks, states)
        total = sum(parts.values())
        whole = whole or total
        table.add_row(f"stage {stage}", *[f"{v / 1e9:.1f}" for v in (*parts.values(), total)], f"{whole / total:.1f} x")
    Console().print(table)


def _count(model: str) -> float:
    """Parameters of a safetensors file (its header says), or of a module built without memory."""
    if model.endswith(".safetensors"):
        with SafetensorsReader(model) as file:
            return float(sum(entry.numel for entry in file.entries.values()))
    factory = load_factory(model)
    with torch.device("meta"):
        made = factory()
    module = made[0] if isinstance(made, tuple) else made
    return float(sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad))


@config_app.command()
def check(
    file: Annotated[Path, typer.Argument(help="A DeepSpeed JSON config.")],
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks, for the batch sizes.")] = 1,
    auto: Annotated[list[str] | None, typer.Option(help='KEY=VALUE for a key that is "auto"; may be repeated.')] = None,
    model: Annotated[
        str | None, typer.Option(help='module:function or file.py:function; tells "auto" its hidden size and dtype.')
    ] = None,
    all_keys: Annotated[bool, typer.Option("--all", help="Also the keys that are at their defaults.")] = False,
) -> None:
    """Print the resolved config, key by key: the value, where it came from, and what it does here."""
    supplied = {}
    for item in auto or []:
        key, separator, value = item.partition("=")
        if not separator:
            raise UsageError(f"--auto takes KEY=VALUE, not {item!r}.")
        try:
            supplied[key] = json.loads(value)
        except ValueError:
            supplied[key] = value
    module = None
    if model is not None:
        with torch.device("meta"):
            made = load_factory(model)()
        module = made[0] if isinstance(made, tuple) else made
    config = load_config(file, ranks, module, supplied)
    Console().print(config_table(config, defaults=all_keys))


@config_app.command()
def document(folder: Annotated[Path, typer.Argument(help="Where the pages go.")] = Path("docs/config")) -> None:
    """Write one page for each block of the config, from the schema."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in pages().items():
        (folder / name).write_text(page, encoding="utf-8")


def main() -> None:
    """Run the program; an error of ours is a sentence, not a traceback."""
    try:
        app()
    except ZeroshardError as error:
        Console(stderr=True).print(f"[red]error:[/red] {error}")
        raise SystemExit(2) from None
