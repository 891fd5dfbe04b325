"""Owns `zeroshard plan`, which estimates a training run by a dry run, and `zeroshard estimate`, which uses formulas."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroshard.cli.configs import note_superfluous, supplied
from zeroshard.cli.options import (
    build_module,
    call_factory,
    dtype_name,
    input_file,
    load_factory,
    nbytes_of,
    output_file,
    parameters_of,
    picture_file,
)
from zeroshard.errors import UsageError, ZeroshardError, counted

if TYPE_CHECKING:
    from zeroshard.planning.dry_run import Job
    from zeroshard.planning.planner import Plan
    from zeroshard.planning.search import Change, Found
    from zeroshard.planning.transformers_models import Subject


_LOG_SECONDS = 10.0
"""The time between two progress lines if stderr is not a terminal."""


def memory_of(text: str | int) -> int:
    """Read a number of bytes: `80GB`, `40GiB`, `8e10`. Raise `typer.BadParameter` for a bare `80`, and for other text."""
    if str(text).strip().replace("_", "").replace(".", "", 1).isdigit():
        raise typer.BadParameter(f"{text!r} has no unit: write 80GB, or 40GiB.")
    return nbytes_of(text)


def plan(
    model: Annotated[str, typer.Argument(
        metavar="MODEL", help="A transformers config.json, its folder, module:function or file.py:function.")],
    gpus: Annotated[int, typer.Option(min=1, help="The number of ranks, one for each accelerator.")] = 8,
    memory: Annotated[int | None, typer.Option(
        parser=memory_of, metavar="BYTES", help="The memory of one accelerator: 80GB, 40GiB.")] = None,
    batch: Annotated[int | None, typer.Option(min=1,
        help="With --config: the samples of one forward on one rank, if the config names none. In a search: the samples of a "
        "step on each data-parallel rank. Default: 1.")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="The tokens of a sample, for a config.json; default: 2048.")] = None,
    sequence_parallel: Annotated[int, typer.Option(
        min=1, help="The number of ranks that share one sequence (zeroshard.sequence).")] = 1,
    tile_tokens: Annotated[int, typer.Option(
        min=0, help="The tokens of a tile of the loss, of each MLP and of each norm; 0: no tiles.")] = 0,
    tensor_parallel: Annotated[int, typer.Option(
        min=1, help="The number of ranks that divide one model by its tp_plan.")] = 1,
    hosts: Annotated[int | None, typer.Option(min=1, help="The number of hosts.")] = None,
    host_memory: Annotated[int | None, typer.Option(
        parser=memory_of, metavar="BYTES", help="The CPU memory of one host: 512GB.")] = None,
    machine: Annotated[str, typer.Option(help="h100, a100-80gb, ..., or a file of `zeroshard doctor --profile`.")] = "h100",
    config: Annotated[Path | None, typer.Option(help="The DeepSpeed config to plan; default: search for one.")] = None,
    auto: Annotated[list[str] | None, typer.Option(help='KEY=VALUE for an "auto" key of the config; may be repeated.')] = None,
    global_batch: Annotated[int | None, typer.Option(
        min=1, help="The samples of a step over all ranks, for the search; default: --batch on each data-parallel rank.")] = None,
    sharded_init: Annotated[bool, typer.Option(
        "--sharded-init", help="Build the model inside zeroshard.sharded_init.")] = False,
    quick: Annotated[bool, typer.Option(
        "--quick", help="With --config: try no changes to it and no larger microbatches.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    write: Annotated[Path | None, typer.Option(help='Write the complete config, without "auto", to this file.')] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the memory of one step to this file (PNG or SVG).")] = None,
) -> None:  # fmt: skip
    """Estimate the memory, communication and step time of a training run before you queue it.

    The engine itself runs two steps on tensors without values, so a plan needs no weights, accelerator or network. With
    --config, the command plans that config. Otherwise it searches for the fastest config that fits. A function that
    MODEL names returns (module, batch), where `batch(rank, step)` returns the arguments of one call.
    """
    _refuse_unused(config, auto=auto, batch=batch, global_batch=global_batch, quick=quick)
    if write is not None:
        output_file(write, "--write")
    if plot is not None:
        picture_file(plot, "--plot")
    with _uncollected():
        from zeroshard.planning.long_sequences import LongSequences
        from zeroshard.planning.planner import job_of

        subject = subject_of(model, sequence or 2048)
    if sequence is not None and subject.sequence is None:
        raise UsageError(f"{model} makes its own batches, so --sequence has no effect. Leave it out.")
    job = job_of(
        subject.factory, subject.batch, gpus, machine, hosts, sharded_init=sharded_init,
        sequences=LongSequences(sequence_parallel, tile_tokens), tensor_parallel=tensor_parallel, config=config,
        memory=memory, host_memory=host_memory,
    )  # fmt: skip
    if config is None:
        found = _search(subject, job, batch or 1, global_batch)
    else:
        values = supplied(auto or [])
        note_superfluous(config, values)
        found = _judge(job, config, values, batch, quick=quick)
    found = replace(found, sequence=subject.sequence)
    if plot is not None:
        from zeroshard.planning.dry_run import dry_run
        from zeroshard.planning.report import draw

        figures = dry_run(found.plan.job, found.plan.complete_config(), draws=True)
        draw(replace(found.plan, figures=figures), plot)
    if write is not None:
        write.parent.mkdir(parents=True, exist_ok=True)
        write.write_text(json.dumps(found.plan.complete_config(), indent=2) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        found.print()


def _refuse_unused(
    config: Path | None, *, auto: list[str] | None, batch: int | None, global_batch: int | None, quick: bool
) -> None:
    """Raise UsageError for options that would have no effect beside the others."""
    if auto and config is None:
        raise UsageError('--auto supplies values for keys that are "auto" in a config: name the config with --config.')
    if quick and config is None:
        raise UsageError("--quick skips the searches after a config's plan: name the config with --config.")
    if global_batch is not None and config is not None:
        raise UsageError("--global-batch is for a search. With --config, set the config's train_batch_size instead.")
    if global_batch is not None and batch is not None:
        raise UsageError("--batch and --global-batch both set the samples of a step. Pass one of them.")


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


@dataclass(frozen=True)
class _Answer:
    """A plan, with the other results of the command.

    Attributes:
        found: the result of a search; None if --config named a config.
        largest: the largest microbatch size that fits; None if it was not searched for, or is unknown.
        sequence: the tokens of a sample, if the model's batches depend on --sequence.
        why_unknown: the error of a larger microbatch size that cannot be planned.
    """

    plan: Plan
    found: Found | None = None
    changes: Sequence[Change] = ()
    largest: int | None = None
    sequence: int | None = None
    why_unknown: str = ""

    def as_dict(self) -> dict[str, Any]:
        answer = self.plan.as_dict()
        if self.found is not None:
            answer["chosen"] = str(self.found.choice)
            answer["next_best"] = [
                {"what": str(choice), "needed": other.needed_nbytes, "seconds": other.seconds}
                for choice, other in self.found.others
            ]
        if self.largest is not None:
            answer["largest_micro_batch"] = self.largest
        answer["changes"] = [{"what": one.what, "gain": one.gain, "slowdown": one.slowdown} for one in self.changes]
        return answer

    def print(self) -> None:
        from rich.console import Console

        from zeroshard.planning.report import changes_table, others_table, size, tables, verdict
        from zeroshard.planning.search import MOST_SAMPLES

        console = Console(highlight=False)
        job = self.plan.job
        samples = self.plan.figures.config.batch.train // job.sequences.ranks
        assumed = [
            f"machine {job.machine.name} (--machine), {size(self.plan.limit)} each (--memory)",
            f"{counted(job.ranks, 'rank')} (--gpus) on {counted(job.hosts, 'host')} (--hosts)",
            f"{counted(samples, 'sample')} per step",
        ]
        if job.tensor_parallel > 1:
            assumed.append(f"models divided over {job.tensor_parallel} ranks (--tensor-parallel)")
        if self.sequence is not None:
            assumed.append(f"{self.sequence} tokens per sample (--sequence)")
        console.print(f"assumed: {', '.join(assumed)}", markup=False)
        if self.found is not None:
            what = "the fastest config that fits" if self.plan.fits else "no config fits; the closest"
            console.print(f"{what}: {self.found.choice}")
        console.print(tables(self.plan))
        if self.found is not None and self.found.others:
            console.print(others_table(self.found))
        if self.changes:
            console.print(changes_table(self.changes))
        if self.largest is not None:
            known = "not even a microbatch of 1 fits"
            if self.largest:
                known = (
                    f"the largest microbatch that fits: {'at least ' * (self.largest >= MOST_SAMPLES)}{self.largest}"
                )
            console.print(f"{known}.")
        if self.why_unknown:
            console.print(f"the largest microbatch is unknown: {self.why_unknown}", markup=False)
        console.print(verdict(self.plan))


def _judge(job: Job, config: Path, auto: dict[str, Any], batch: int | None, *, quick: bool) -> _Answer:
    from zeroshard.planning.dry_run import dry_run
    from zeroshard.planning.planner import Plan
    from zeroshard.planning.search import in_process, judge, largest_micro_batch

    micro = "train_micro_batch_size_per_gpu"
    if batch is not None or not auto.keys() & {micro, "train_batch_size"}:
        auto = {micro: batch or 1} | auto
    with _progress("simulating two steps") as told:
        told(0, 1)
        figures = in_process(lambda: dry_run(job, config, auto), first_here=True)
        made = Plan(job, figures)
    if batch is not None and made.figures.config.batch.micro != batch:
        raise UsageError(
            f"the config makes the microbatch size {made.figures.config.batch.micro}, so --batch {batch} has no effect. Leave it "
            "out, or change the config."
        )
    if quick:
        return _Answer(made)
    with _progress("trying single changes") as told:
        changes = judge(made, told)
    with _progress("searching for the largest microbatch") as told:
        told(0, 1)
        try:
            return _Answer(made, None, changes, largest_micro_batch(made))
        except ZeroshardError as error:
            return _Answer(made, None, changes, why_unknown=str(error))


def _search(subject: Subject, job: Job, batch: int, global_batch: int | None) -> _Answer:
    from zeroshard.planning.search import BASE, Search, judge

    groups = job.data_ranks // job.sequences.ranks  # ranks that hold a sequence together share its sample
    per_rank, rest = divmod(global_batch or batch * groups, groups)
    if rest:
        raise UsageError(
            f"--global-batch {global_batch} does not divide by {groups} data-parallel ranks. Choose a multiple of them."
        )
    with _progress("searching for the fastest config that fits") as told:
        found = Search(job, BASE, per_rank, depth=subject.depth, shallow=subject.shallow, told=told).run()
    changes: Sequence[Change] = ()
    if not found.plan.fits:
        with _progress("trying single changes") as told:
            changes = judge(found.plan, told)
    return _Answer(found.plan, found, changes)


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr: a line that disappears at the end, or, without a terminal, a line every 10 seconds."""
    from zeroshard.observe.display import SWITCH, Display

    display = Display(animated=True)
    if display.is_on or os.environ.get(SWITCH) == "0":
        with display.task(what, in_bytes=False) as row:
            yield row.at
        return
    began = logged = monotonic()

    def log(done: int, of: int) -> None:
        nonlocal logged
        now = monotonic()
        if now - logged >= _LOG_SECONDS:
            logged = now
            typer.echo(f"{what}: {done} of {of} dry runs, {now - began:.0f} s", err=True)

    yield log


def subject_of(name: str, sequence: int) -> Subject:
    """Return the model that MODEL names. Raise `UsageError` if the file, architecture or function does not exist."""
    from zeroshard.planning.transformers_models import Subject, from_config_file

    if ":" not in name or Path(name).exists():
        return from_config_file(Path(name), sequence)
    factory = load_factory(name)
    batches: list[Any] = []  # the `batch` of the factory's last model

    def build() -> Any:
        made = factory()
        if not (isinstance(made, tuple) and len(made) == 2 and callable(made[1])):
            raise UsageError(
                f"{name} must return (module, batch), where batch(rank, step) returns the arguments of one call."
            )
        batches[:] = made[1:]
        return made[0]

    def batch(samples: int) -> Any:
        return _with_samples(call_factory(f"{name}'s batch(0, 0)", lambda: batches[0](0, 0)), samples)

    return Subject(name, build, batch)


def _with_samples(arguments: Any, samples: int) -> Any:
    """Return a call's arguments with `samples` samples, in each tensor that has as many samples as the first tensor."""
    from torch import Tensor

    from zeroshard.torch_private import tree_leaves, tree_map_only

    sizes = [leaf.shape[0] for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor) and leaf.ndim]

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

    from zeroshard.observe.memory import formula
    from zeroshard.optim.states import KNOWN
    from zeroshard.planning.report import size
    from zeroshard.policy import Policy, Precision

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
