"""Owns `zeroshard plan`: whether a training fits, where its memory goes, and with which settings it is fastest. Called by main."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroshard.cli.configs import supplied
from zeroshard.cli.options import call_factory, load_factory, nbytes_of, output_file, picture_file
from zeroshard.errors import UsageError

if TYPE_CHECKING:
    from zeroshard.plan.dry_run import Job
    from zeroshard.plan.judge import Change
    from zeroshard.plan.result import Plan
    from zeroshard.plan.transformers_models import Subject


def memory_of(text: str | int) -> int:
    """Read a number of bytes that says its unit: `80GB`, `40GiB`.

    Raises:
        typer.BadParameter: it is none, or has no unit: 80 would be 80 bytes.
    """
    if str(text).strip().replace("_", "").replace(".", "", 1).isdigit():
        raise typer.BadParameter(f"{text!r} has no unit: say 80GB, or 40GiB.")
    return nbytes_of(text)


def plan(
    model: Annotated[str, typer.Argument(help="A transformers config.json, its folder, or module:function.")],
    gpus: Annotated[int, typer.Option(min=1, help="Data-parallel ranks, one for each accelerator.")] = 8,
    memory: Annotated[
        int | None, typer.Option(parser=memory_of, metavar="BYTES", help="Of one accelerator: 80GB, 40GiB.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples of one forward on one rank.")] = 1,
    sequence: Annotated[int, typer.Option(min=1, help="Tokens of a sample.")] = 2048,
    hosts: Annotated[int | None, typer.Option(min=1, help="Over which the ranks are spread.")] = None,
    host_memory: Annotated[
        int | None, typer.Option(parser=memory_of, metavar="BYTES", help="CPU memory of one host: 512GB.")
    ] = None,
    machine: Annotated[str, typer.Option(help="h100, a100-80gb, ..., or a file of doctor --profile.")] = "h100",
    config: Annotated[Path | None, typer.Option(help="The DeepSpeed config to judge.")] = None,
    auto: Annotated[
        list[str] | None, typer.Option(help='KEY=VALUE for a key of it that is "auto"; may be repeated.')
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of a step over all ranks, for the search; left out, --batch x --gpus."),
    ] = None,
    sharded_init: Annotated[
        bool, typer.Option("--sharded-init", help="The model is built inside of zeroshard.sharded_init.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not look for what to change, nor for the largest batch.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    write: Annotated[Path | None, typer.Option(help='Write the config here, complete, with nothing "auto".')] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the memory of one step to this file (PNG or SVG).")] = None,
) -> None:
    """Say, before anything is queued, what a training takes: memory by what it is for, bytes sent, the time of a step.

    The engine itself runs two steps on tensors without values: no weights, no accelerator, no network. With --config, that config
    is judged; without, the fastest that fits is looked for. A function named by MODEL returns a module, or (module, batch), where
    `batch(rank, step)` gives the arguments of one call.
    """
    if auto and config is None:
        raise UsageError('--auto is for what a config leaves "auto": name one by --config.')
    if write is not None:
        output_file(write, "--write")
    if plot is not None:
        picture_file(plot, "--plot")
    with _uncollected():
        from zeroshard.config.auto import supply
        from zeroshard.config.keys import KEYS
        from zeroshard.config.load import read
        from zeroshard.plan.planner import job_of
        from zeroshard.plan.result import limits

        subject = subject_of(model, sequence)
    job = job_of(subject.factory, subject.batch, gpus, machine, hosts, sharded_init=sharded_init)
    bounds = limits(job.machine, memory, host_memory)
    if config is None:
        found = _search(subject, job, bounds, batch, global_batch)
    else:
        found = _judge(job, bounds, supply(read(config), supplied(auto or []), KEYS), batch, quick=quick)
    if plot is not None:
        from zeroshard.plan.plot import draw

        draw(_drawn(found.plan), plot)
    if write is not None:
        write.parent.mkdir(parents=True, exist_ok=True)
        write.write_text(json.dumps(found.plan.complete_config(), indent=2) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        found.print()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside are imports, whose objects all stay: looking for garbage among them would take as long as the imports."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class _Answer:
    """What is told: a plan, and what else is known of it."""

    plan: Plan
    chosen: str = ""
    changes: Sequence[Change] = ()
    largest: int | None = None

    def as_dict(self) -> dict[str, Any]:
        told = self.plan.as_dict()
        if self.chosen:
            told["chosen"] = self.chosen
        if self.largest is not None:
            told["largest_micro_batch"] = self.largest
        told["changes"] = [{"what": one.what, "gain": one.gain, "slowdown": one.slowdown} for one in self.changes]
        return told

    def print(self) -> None:
        from rich.console import Console

        from zeroshard.plan.report import changes_table, tables, verdict

        console = Console(highlight=False)
        if self.chosen:
            what = "the fastest that fits" if self.plan.fits else "nothing fits; what misses least"
            console.print(f"{what}: {self.chosen}")
        console.print(tables(self.plan))
        if self.changes:
            console.print(changes_table(self.changes))
        if self.largest is not None:
            known = f"the largest micro-batch that fits: {self.largest}" if self.largest else "not even one sample fits"
            console.print(f"{known}.")
        console.print(verdict(self.plan))


def _judge(job: Job, bounds: Mapping[str, int], config: Mapping[str, Any], batch: int, *, quick: bool) -> _Answer:
    from zeroshard.plan.dry_run import dry_run, parted
    from zeroshard.plan.judge import judge, largest_micro_batch
    from zeroshard.plan.result import Plan

    with _progress("running two steps dry") as told:
        told(0, 1)
        made = Plan(job, dry_run(job, config, batch), **bounds, told=parted(config)[1])
    if quick:
        return _Answer(made)
    with _progress("trying single changes") as told:
        changes = judge(made, told)
    with _progress("looking for the largest micro-batch") as told:
        told(0, 1)
        return _Answer(made, "", changes, largest_micro_batch(made))


def _search(subject: Subject, job: Job, bounds: Mapping[str, int], batch: int, global_batch: int | None) -> _Answer:
    from zeroshard.plan.judge import judge
    from zeroshard.plan.search import BASE, Search

    per_rank, rest = divmod(global_batch or batch * job.ranks, job.ranks)
    if rest:
        raise UsageError(f"--global-batch {global_batch} does not divide by {job.ranks} ranks.")
    with _progress("looking for the fastest that fits") as told:
        found = Search(job, BASE, per_rank, **bounds, depth=subject.depth, shallow=subject.shallow, told=told).run()
    changes: Sequence[Change] = ()
    if not found.plan.fits:
        with _progress("trying single changes") as told:
            changes = judge(found.plan, told)
    return _Answer(found.plan, str(found.choice), changes)


def _drawn(plan: Plan) -> Plan:
    """The same with its timeline."""
    from zeroshard.plan.dry_run import dry_run

    return replace(plan, figures=dry_run(plan.job, plan.complete_config(), draws=True))


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A line on stderr, gone when it is done."""
    from zeroshard.observe.display import Display

    with Display(animated=True).task(what, in_bytes=False) as row:
        yield row.at


def subject_of(name: str, sequence: int) -> Subject:
    """What MODEL names.

    Raises:
        UsageError: there is no such file, architecture or function.
    """
    from zeroshard.plan.transformers_models import Subject, from_config_file

    if ":" not in name or Path(name).exists():
        return from_config_file(Path(name), sequence)
    factory = load_factory(name)
    batches: list[Any] = []  # of the factory's last model

    def build() -> Any:
        made = factory()
        if not isinstance(made, tuple):
            raise UsageError(
                f"{name} must return (module, batch), where batch(rank, step) gives the arguments of one call."
            )
        batches[:] = made[1:]
        return made[0]

    def batch(_: int) -> Any:
        if len(batches) != 1 or not callable(batches[0]):
            raise UsageError(
                f"{name} must return (module, batch), where batch(rank, step) gives the arguments of one call."
            )
        return call_factory(f"{name}'s batch(0, 0)", lambda: batches[0](0, 0))

    return Subject(name, build, batch)
