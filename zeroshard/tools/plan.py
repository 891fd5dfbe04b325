"""Owns `zeroshard plan`, which plans a training run by dry runs, and `zeroshard estimate`, which uses formulas."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroshard.errors import UsageError, counted
from zeroshard.tools.configs import note_superfluous, supplied
from zeroshard.tools.options import (
    build_module,
    call_factory,
    dtype_name,
    input_file,
    load_factory,
    nbytes_of,
    parameters_of,
)

if TYPE_CHECKING:
    from zeroshard.tools.planning.transformers_models import Subject


def memory_of(text: str | int) -> int:
    """Read a number of bytes: `80GB`, `40GiB`, `8e10`. Raise `typer.BadParameter` for a bare `80`, and for other text."""
    if str(text).strip().replace("_", "").replace(".", "", 1).isdigit():
        raise typer.BadParameter(f"{text!r} has no unit: write 80GB, or 40GiB.")
    return nbytes_of(text)


_REMOVED = {
    "--sequence-parallel": "a plan does not count sequence parallelism. Plan one rank's slice: a shorter --sequence.",
    "--tile-tokens": "a plan does not count tiles by itself. Name a factory that calls zeroshard.sequence.tile.",
    "--tensor-parallel": "a plan does not count tensor parallelism. Plan as many data-parallel ranks, which need more memory.",
    "--global-batch": "a plan has no search. Pass the samples of one forward on one rank as --batch.",
    "--write": "read the complete config of each row from --json.",
    "--plot": "read the peak of each row in the table, and that of each phase from --json.",
}
"""Options of earlier releases, with the remedy."""

_Removed = Annotated[str | None, typer.Option(hidden=True)]


def plan(
    model: Annotated[str, typer.Argument(
        metavar="MODEL", help="A transformers config.json, its folder, module:function or file.py:function.")],
    gpus: Annotated[int, typer.Option(min=1, help="The number of ranks, one for each accelerator.")] = 8,
    memory: Annotated[int | None, typer.Option(
        parser=memory_of, metavar="BYTES", help="The memory of one accelerator: 80GB, 40GiB.")] = None,
    batch: Annotated[int | None, typer.Option(min=1,
        help="The samples of one forward on one rank, if the config names none; default: 1.")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="The tokens of a sample, for a config.json; default: 2048.")] = None,
    hosts: Annotated[int | None, typer.Option(min=1, help="The number of hosts.")] = None,
    host_memory: Annotated[int | None, typer.Option(
        parser=memory_of, metavar="BYTES", help="The CPU memory of one host: 512GB.")] = None,
    machine: Annotated[str, typer.Option(help="h100, a100-80gb, ...: the memory of an accelerator and of a host.")] = "h100",
    config: Annotated[Path | None, typer.Option(help="The DeepSpeed config of the first row; default: only presets.")] = None,
    auto: Annotated[list[str] | None, typer.Option(help='KEY=VALUE for an "auto" key of the config; may be repeated.')] = None,
    sharded_init: Annotated[bool, typer.Option(
        "--sharded-init", help="Build the model inside zeroshard.sharded_init.")] = False,
    expert_parallel: Annotated[int | None, typer.Option(min=1,
        help="The ranks that divide the experts of a layer; compared with the other possible numbers.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Plan only the config, and no presets.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, in bytes, with the config of each row.")] = False,
    sequence_parallel: _Removed = None, tile_tokens: _Removed = None, tensor_parallel: _Removed = None,
    global_batch: _Removed = None, write: _Removed = None, plot: _Removed = None,
) -> None:  # fmt: skip
    """Print whether a training run fits, and where its memory goes, before you queue it: a row for each preset of ZeRO.

    The engine itself runs two steps of each row on tensors without values, so a plan needs no weights, accelerator or
    network. A function that MODEL names returns (module, batch), where `batch(rank, step)` returns the arguments of one
    call.
    """
    removed = (sequence_parallel, tile_tokens, tensor_parallel, global_batch, write, plot)
    for (option, remedy), value in zip(_REMOVED.items(), removed, strict=True):
        if value is not None:
            raise UsageError(f"zeroshard plan has no {option}: {remedy}")
    if config is None and auto:
        raise UsageError('--auto supplies values for keys that are "auto" in a config: name the config with --config.')
    if config is None and quick:
        raise UsageError("--quick leaves out the presets: name the config to plan with --config.")
    with _uncollected():
        from zeroshard.tools.planning.planner import job_of, plan_of
        from zeroshard.tools.planning.table import MICRO

        subject = subject_of(model, sequence or 2048)
    if sequence is not None and subject.sequence is None:
        raise UsageError(f"{model} makes its own batches, so --sequence has no effect. Leave it out.")
    job = job_of(
        subject.factory, subject.batch, gpus, machine, hosts, sharded_init=sharded_init, memory=memory,
        host_memory=host_memory,
    )  # fmt: skip
    values = supplied(auto or [])
    if config is not None:
        note_superfluous(config, values)
    if batch is not None or not values.keys() & {MICRO, "train_batch_size"}:
        values = {MICRO: batch or 1} | values
    with _progress() as told:
        made = plan_of(job, config, values, presets=not quick, name=config.name if config else "", told=told,
            ranks_of_experts=expert_parallel,
        )  # fmt: skip
    micro = made.rows[0].figures.config.batch.micro
    if batch is not None and micro != batch:
        raise UsageError(
            f"the config makes the microbatch size {micro}, so --batch {batch} has no effect. Leave it out, or change the config."
        )
    assumed = []
    if batch is None and micro == 1:
        assumed.append("1 sample in a forward on one rank (--batch)")
    if subject.own_samples and subject.own_samples[-1] != micro:
        assumed.append(f"the factory's batch of {counted(subject.own_samples[-1], 'sample')} is resized to {micro}")
    if sequence is None and subject.sequence is not None:
        assumed.append(f"{subject.sequence} tokens in a sample (--sequence)")
    if config is None:
        assumed.append("bf16 and AdamW (--config)")
    made = replace(made, assumed=tuple(assumed))
    print(json.dumps(made.as_dict(), indent=2) if as_json else made)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector during imports, since it would take as long as they do without freeing memory."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr, if it is a terminal, in a line that disappears at the end."""
    from rich.console import Console

    with Console(stderr=True).status("planning") as status:
        yield lambda done, of: status.update(f"dry run {done + 1} of {of}")


def subject_of(name: str, sequence: int) -> Subject:
    """Return the model that MODEL names. Raise `UsageError` if the file, architecture or function does not exist."""
    from zeroshard.tools.planning.transformers_models import Subject, from_config_file

    if ":" not in name or Path(name).exists():
        return from_config_file(Path(name), sequence)
    factory = load_factory(name)
    batches: list[Any] = []  # the `batch` of the factory's last model
    own_samples: list[int] = []

    def build() -> Any:
        made = factory()
        if not (isinstance(made, tuple) and len(made) == 2 and callable(made[1])):
            raise UsageError(
                f"{name} must return (module, batch), where batch(rank, step) returns the arguments of one call."
            )
        batches[:] = made[1:]
        return made[0]

    def batch(samples: int) -> Any:
        made = call_factory(f"{name}'s batch(0, 0)", lambda: batches[0](0, 0))
        return _with_samples(made, samples, own_samples)

    return Subject(build, batch, own_samples=own_samples)


def _with_samples(arguments: Any, samples: int, own: list[int]) -> Any:
    """Return a call's arguments with `samples` samples, in each tensor that has as many samples as the first tensor.

    Args:
        own: gets the number of samples that the first tensor has.
    """
    from torch import Tensor

    from zeroshard.torch_private import tree_leaves, tree_map_only

    sizes = [leaf.shape[0] for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.ndim]

    own[:] = sizes[:1]

    def resized(tensor: Tensor) -> Tensor:
        if not tensor.ndim or tensor.shape[0] != sizes[0]:
            return tensor
        return tensor.new_zeros(samples, *tensor.shape[1:])

    return tree_map_only(Tensor, resized, arguments) if sizes else arguments


def estimate(
    parameters: Annotated[float | None, typer.Option(
        parser=parameters_of, metavar="NUMBER", help="The number of trainable parameters: 7B, 500M, 7.5e9.")] = None,
    model: Annotated[str | None, typer.Option(help="A .safetensors file, or module:function, or file.py:function.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="The number of data-parallel ranks.")] = 64,
    dtype: Annotated[str, typer.Option(
        parser=dtype_name, metavar="DTYPE", help="The dtype of parameters and gradients: bf16, fp16 or fp32.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="An optimizer of torch or zeroshard, such as Adam, SGD or Lion.")] = "Adam",
) -> None:  # fmt: skip
    """Print the memory of model states per rank at each stage, without activations and buffers."""
    import torch
    from rich.console import Console
    from rich.table import Table

    from zeroshard.model.memory import formula
    from zeroshard.optim.states import KNOWN
    from zeroshard.policy import Policy, Precision
    from zeroshard.tools.planning.table import size

    if (parameters is None) == (model is None):
        raise UsageError("estimate takes either --parameters N or --model FILE. Pass one of them.")
    names = {name.lower(): name for name in KNOWN}
    if optimizer.lower() not in names:
        raise UsageError(f"there is no --optimizer {optimizer!r}. Choose one of {', '.join(KNOWN)}.")
    if parameters is None:
        parameters = _count(str(model))
    kept: torch.dtype = getattr(torch, dtype)
    resolved = Precision(kept, accumulate_dtype=kept).resolve(kept)
    states = KNOWN[names[optimizer.lower()]].states
    table = Table(
        title=f"{parameters / 1e9:.3g} B parameters, {dtype}, {names[optimizer.lower()]}, {counted(ranks, 'rank')}; "
        "bytes per rank"
    )
    for column in ("", "parameters", "gradients", "optimizer", "sum", "less by"):
        table.add_column(column, justify="right")
    whole = sum(formula(Policy.stage(0), resolved, parameters, ranks, states).values())
    for stage in range(4):
        parts = formula(Policy.stage(stage), resolved, parameters, ranks, states)
        total = sum(parts.values())
        table.add_row(f"stage {stage}", *[size(value) for value in (*parts.values(), total)], f"{whole / total:.1f} x")
    Console().print(table)


def _count(model: str) -> float:
    """Count the parameters in a safetensors file's header, or the trained parameters of a module built without memory."""
    from zeroshard.checkpoint.safetensors_file import SafetensorsReader

    if model.endswith(".safetensors"):
        with SafetensorsReader(str(input_file(Path(model), "--model"))) as file:
            numel = sum(entry.numel for entry in file.entries.values())
    else:
        numel = sum(parameter.numel() for parameter in build_module(model).parameters() if parameter.requires_grad)
    if not numel:
        raise UsageError(f"{model} has no trainable parameters. Unfreeze some, or pass their number as --parameters.")
    return float(numel)
