"""Owns `zeroshard estimate`: what model states take per rank under each stage, by the formulas. Called by main."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zeroshard.cli.options import build_module, dtype_name, input_file, parameters_of
from zeroshard.errors import UsageError


def estimate(
    parameters: Annotated[
        float | None,
        typer.Option(parser=parameters_of, metavar="NUMBER", help="Trainable parameters: 7B, 500M, 7.5e9."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A .safetensors file, or module:function, or file.py:function."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 64,
    dtype: Annotated[
        str, typer.Option(parser=dtype_name, metavar="DTYPE", help="bf16, fp16 or fp32: of parameters and gradients.")
    ] = "bf16",
    optimizer: Annotated[str, typer.Option(help="One of torch's, such as Adam or SGD.")] = "Adam",
) -> None:
    """Print the memory that model states take per rank under each stage (activations and buffers come on top)."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from zeroshard.observe.memory import STATES_PER_PARAMETER, formula
    from zeroshard.policy import Policy, Precision

    if (parameters is None) == (model is None):
        raise UsageError("estimate takes either --parameters N or --model FILE.")
    names = {name.lower(): name for name in STATES_PER_PARAMETER}
    if optimizer.lower() not in names:
        raise UsageError(f"--optimizer is one of {', '.join(STATES_PER_PARAMETER)}, not {optimizer!r}.")
    numel = float(parameters) if parameters is not None else _count(str(model))
    kept: torch.dtype = getattr(torch, dtype)
    resolved = Precision(kept, accumulate_dtype=kept).resolve(kept)
    states = STATES_PER_PARAMETER[names[optimizer.lower()]]
    table = Table(
        title=f"{numel / 1e9:.3g} B parameters, {dtype}, {names[optimizer.lower()]}, {ranks} ranks; GB per rank"
    )
    for column in ("", "parameters", "gradients", "optimizer", "sum", "less by"):
        table.add_column(column, justify="right")
    whole = 0.0
    for stage in range(4):
        parts = formula(Policy.stage(stage), resolved, numel, ranks, states)
        total = sum(parts.values())
        whole = whole or total
        table.add_row(f"stage {stage}", *[f"{v / 1e9:.1f}" for v in (*parts.values(), total)], f"{whole / total:.1f} x")
    Console().print(table)


def _count(model: str) -> float:
    """Parameters of a safetensors file (its header says), or of a module built without memory."""
    from zeroshard.checkpoint.safetensors_file import SafetensorsReader

    if model.endswith(".safetensors"):
        with SafetensorsReader(str(input_file(Path(model), "--model"))) as file:
            numel = sum(entry.numel for entry in file.entries.values())
    else:
        numel = sum(parameter.numel() for parameter in build_module(model).parameters() if parameter.requires_grad)
    if not numel:
        raise UsageError(f"{model} has no trainable parameters.")
    return float(numel)
