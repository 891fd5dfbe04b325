"""Owns the search for settings: single changes of a config, the largest microbatch, and the fastest settings that fit.

Results come from dry runs. A deep model is first run at two small depths, which show a block's time and memory.
Promising settings are then run at full depth. Settings that cannot be the result are not run (see [Note: pruning]).

[Note: pruning]
With a larger microbatch, a step is not slower, so each setting is tried from the largest down, until one fits. The
memory that grows with the microbatch shows which smaller ones cannot fit. Checkpointing and states on the CPU save
memory and cost time. They are not tried if the same setting without them fits as large a microbatch. If that setting
then does not fit at full depth, the settings that were left out because of it are tried.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, TypeVar, cast

import torch
from torch import nn

from zeroshard.errors import UsageError, ZeroshardError
from zeroshard.planning.dry_run import Job, dry_run
from zeroshard.planning.ledger import ACTIVATIONS, BUFFERS, INPUTS, TEMPORARIES, Peak
from zeroshard.planning.planner import Plan
from zeroshard.policy import Place

T = TypeVar("T")

_FORK = multiprocessing.get_context("fork")

Told = Callable[[int, int], None]
"""A function that gets the progress: the number of dry runs that have ended, and their total number."""

MOST_SAMPLES = 1 << 16
"""The number of samples at which `largest_micro_batch` stops, if they fit."""

_SHALLOW = (3, 5)
"""The depths at which a deep model is run first."""

_FINALISTS = 2
"""The number of choices that are run at full depth at once."""

_OTHERS = 3
"""The maximum number of choices that are shown besides the best."""

_ALIKE = 0.02
"""A step that is slower than the fastest by at most this share counts as equal. Of equals, the lowest stage is chosen."""

_DOUBT = 0.03
"""The largest error of an estimate, as a share of the memory. Estimates are made for the full depth from two shallow
runs, and for a smaller microbatch from a larger one."""


BASE: dict[str, Any] = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
"""The settings that all choices of a search share, unless the caller passes others."""


# ---------------------------------------------------------------------- dry runs in separate processes


def in_processes(
    jobs: Iterable[Callable[[], T]], *, first_here: bool = False
) -> Iterator[tuple[int, T | ZeroshardError]]:
    """Run jobs in separate processes. Yield (number, result) of each as it ends; a `ZeroshardError` is a result.

    Processes are forked, so a job may be any callable. If torch was built for accelerators, and this process has run a
    backward, forked processes cannot run one. Jobs then run in this process, one after another.

    Args:
        first_here: whether to run the first job in this process, so that the others share its imports. This is ignored if
            forked processes could then not run a backward.

    Raises:
        UsageError: a separate process died, or a job raised an error that is not a `ZeroshardError`.
    """
    waiting = list(enumerate(jobs))
    here = int(first_here and torch.accelerator.current_accelerator() is None)
    if not _forks_run_backwards():
        here = len(waiting)
    for number, job in waiting[:here]:
        yield number, _result_of(job)
    del waiting[:here]
    running: dict[Connection, tuple[int, ForkProcess]] = {}
    try:
        while waiting or running:
            # Only this thread forks: libraries with hooks around a fork (filelock) refuse two at once.
            while waiting and len(running) < (os.cpu_count() or 1):
                number, job = waiting.pop(0)
                receive, send = _FORK.Pipe(duplex=False)
                process = _FORK.Process(target=_send_result, args=(send, job))
                process.start()
                send.close()
                running[receive] = (number, process)
            for ended in connection.wait(running):
                receive = cast(Connection, ended)
                number, process = running[receive]
                try:
                    result = receive.recv()
                except EOFError:
                    process.join()
                    if process.exitcode == 1:  # Python has printed the traceback
                        raise UsageError(
                            "a dry run raised the error whose traceback is above. Correct the model or its batches, or report it."
                        ) from None
                    raise UsageError(
                        f"a dry run in a separate process died (exit code {process.exitcode}). Free memory, or plan a "
                        "smaller model."
                    ) from None
                del running[receive]
                process.join()
                yield number, result
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()


def in_process(job: Callable[[], T], *, first_here: bool = False) -> T:
    """Return the result of one job, which `in_processes` runs. Raise the job's error, or UsageError if its process died."""
    [(_, result)] = in_processes([job], first_here=first_here)
    if isinstance(result, ZeroshardError):
        raise result
    return result


def _forks_run_backwards() -> bool:
    """Return whether a forked process can run a backward. If torch was built for accelerators, a forked process tries one."""
    if torch.accelerator.current_accelerator() is None:
        return True
    process = _FORK.Process(target=_run_backward)
    process.start()
    process.join()
    return process.exitcode == 0


def _run_backward() -> None:
    try:
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        os._exit(1)


def _send_result(send: Connection, job: Callable[[], object]) -> None:
    send.send(_result_of(job))


def _result_of(job: Callable[[], T]) -> T | ZeroshardError:
    try:
        return job()
    except ZeroshardError as error:
        return error


# ---------------------------------------------------------------------- single changes


@dataclass(frozen=True)
class Change:
    """A change of a config, and the plan of the changed config.

    Attributes:
        gain: bytes of an accelerator's memory that the change saves; negative if it needs more.
        slowdown: seconds by which the change lengthens a step; negative if a step becomes shorter.
    """

    what: str
    plan: Plan
    gain: int
    slowdown: float


def single_changes(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return complete configs, each with one change that may save memory, by a description of the change."""
    config = plan.figures.config
    found: dict[str, dict[str, Any]] = {}

    def change(what: str, **blocks: Mapping[str, Any]) -> None:
        made = copy.deepcopy(plan.complete_config())
        for name, block in blocks.items():
            made[name] = {**made.get(name, {}), **block}
        found[what] = made

    for stage in range(config.stage + 1, 4):
        change(f"stage {stage}", zero_optimization={"stage": stage})
    if config.schema.activation_checkpointing.checkpoint_units is None:
        change("activation checkpointing", activation_checkpointing={"checkpoint_units": "auto"})
    policy = config.policy
    saves = not plan.machine.computes_on_cpu  # otherwise an offload would stay in the same memory
    if saves and policy.optimizer.sharded and policy.optimizer.place is Place.ACCELERATOR:
        change("optimizer on cpu", zero_optimization={"offload_optimizer": {"device": "cpu"}})
    if saves and policy.parameters.sharded and policy.parameters.place is Place.ACCELERATOR:
        change("parameters on cpu", zero_optimization={"offload_param": {"device": "cpu"}})
    if not (config.schema.bf16.enabled or config.schema.fp16.enabled):
        change("bf16", **{"bfloat16" if "bfloat16" in plan.figures.config.document else "bf16": {"enabled": True}})
    batch = config.batch
    if batch.micro % 2 == 0:
        halved = {
            "train_micro_batch_size_per_gpu": batch.micro // 2,
            "gradient_accumulation_steps": batch.accumulation * 2,
        }
        found["half the microbatch, twice as often"] = copy.deepcopy(plan.complete_config()) | halved
    return found


def judge(plan: Plan, told: Told) -> list[Change]:
    """Dry-run each change on its own and return the valid changes, largest gain first."""
    changes = single_changes(plan)
    found = []
    for done, (number, figures) in enumerate(
        in_processes(partial(dry_run, plan.job, made) for made in changes.values()), start=1
    ):
        told(done, len(changes))
        if not isinstance(figures, ZeroshardError):
            other = Plan(plan.job, figures)
            gain = plan.needed_nbytes - other.needed_nbytes
            found.append(Change(list(changes)[number], other, gain, other.seconds - plan.seconds))
    return sorted(found, key=lambda change: -change.gain)


def largest_micro_batch(plan: Plan) -> int:
    """Return the largest microbatch that accelerators and hosts hold, with the same accumulation; 0 if not even 1 fits.

    Above `MOST_SAMPLES`, the result may be smaller than the largest.
    """
    first = plan.figures.config.batch.micro
    made = {first: plan}

    def planned(micro: int) -> Plan:
        if micro not in made:
            config = plan.complete_config() | {"train_micro_batch_size_per_gpu": micro}
            del config["train_batch_size"]
            figures = in_process(partial(dry_run, plan.job, config))
            made[micro] = Plan(plan.job, figures)
        return made[micro]

    fits = _last_that_fits(lambda micro: planned(micro).needed_nbytes, plan.limit, first)
    if fits and planned(fits).host_nbytes > plan.host_limit:
        fits = _last_that_fits(lambda micro: planned(micro).host_nbytes, plan.host_limit, fits)
    return fits


def _last_that_fits(need: Callable[[int], int], limit: int, first: int) -> int:
    """Return the largest number of samples that need at most `limit`, tried from `first` on; 0 if there is none."""
    fits = 0
    exceeds = first
    while need(exceeds) <= limit:  # the first samples may add nothing, if the peak is in another phase
        fits = exceeds
        exceeds *= 2
        if fits >= MOST_SAMPLES:
            return fits
    halves = not fits
    while exceeds - fits > 1:
        if halves:
            between = fits + (exceeds - fits) // 2
        else:  # where memory grows, it grows linearly
            between = fits + (exceeds - fits) * (limit - need(fits)) // (need(exceeds) - need(fits))
        halves = not (halves and fits)  # in turn, since interpolation alone may approach the limit in small steps
        between = min(max(between, fits + 1), exceeds - 1)
        if need(between) <= limit:
            fits = between
        else:
            exceeds = between
    return fits


# ---------------------------------------------------------------------- the search


@dataclass(frozen=True)
class Choice:
    """The settings of one point of the search."""

    stage: int
    micro: int
    checkpointing: bool
    optimizer_on_cpu: bool
    parameters_on_cpu: bool
    within: int | None = None

    def config(self, base: Mapping[str, Any], accumulation: int) -> dict[str, Any]:
        """Return the base config with these settings."""
        zero: dict[str, Any] = {"stage": self.stage}
        if self.optimizer_on_cpu:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.parameters_on_cpu:
            zero["offload_param"] = {"device": "cpu"}
        if self.within is not None:
            zero["zero_hpz_partition_size"] = self.within
        made = {
            **copy.deepcopy(dict(base)), "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": accumulation, "zero_optimization": zero,
        }  # fmt: skip
        made.pop("train_batch_size", None)
        if self.checkpointing:
            made["activation_checkpointing"] = {"checkpoint_units": "auto"}
        return made

    def __str__(self) -> str:
        parts = [f"stage {self.stage}", f"microbatch {self.micro}"]
        parts += ["activation checkpointing"] * self.checkpointing
        parts += ["optimizer on cpu"] * self.optimizer_on_cpu + ["parameters on cpu"] * self.parameters_on_cpu
        parts += [f"within hosts of {self.within} ranks"] * (self.within is not None)
        return ", ".join(parts)

    def is_dearer_than(self, other: Choice) -> bool:
        """Return whether this choice differs from another only by settings that cost time and save memory.

        A smaller microbatch also costs time and saves memory.
        """
        same = (self.stage, self.within) == (other.stage, other.within) and self.micro <= other.micro
        on_cpu = (self.optimizer_on_cpu, self.parameters_on_cpu)
        others = (other.optimizer_on_cpu, other.parameters_on_cpu)
        # With both on the CPU, a step may be faster than with only the optimizer: an update copies less to the accelerator.
        more = self.checkpointing >= other.checkpointing and (not any(others) or on_cpu == others)
        return same and more and self != other


def micros(per_rank: int) -> list[int]:
    """Return the microbatches to try, largest first: powers of two up to 64 that divide the samples of each rank."""
    return [size for size in (64, 32, 16, 8, 4, 2, 1) if per_rank % size == 0]


def settings(job: Job, micro: int) -> Iterator[list[Choice]]:
    """Yield all settings at one microbatch, in groups. The first group has neither checkpointing nor offloads."""
    offloads = [[(False, False)]]
    if not job.machine.computes_on_cpu:  # otherwise an offload would stay in the same memory
        offloads.append([(True, False), (True, True)])
    per_host, rest = divmod(job.data_ranks, job.hosts)
    hosts: list[int | None] = [None]
    if job.hosts > 1 and not rest and per_host > 1:
        hosts.append(per_host)
    for places in offloads:
        for checkpointing in (False, True):
            yield [
                Choice(stage, micro, checkpointing, optimizer, parameters, within)
                for optimizer, parameters in places
                for within in hosts
                for stage in range(4)
                if (stage >= 2 or not optimizer) and (stage == 3 or not parameters) and (stage or within is None)
            ]


@dataclass(frozen=True)
class Found:
    """The result of a search: the fastest plan that fits, or, if none fits, the plan that lacks the least memory.

    `others` has the next best choices that fit with their plans, fastest first. These plans may be extrapolated.
    """

    choice: Choice
    plan: Plan
    others: Sequence[tuple[Choice, Plan]] = ()


@dataclass
class Search:
    """The search for the fastest choice that fits.

    Attributes:
        base: the config that all choices share.
        per_rank: samples of a step on each rank.
        depth: the number of blocks of the model; 0 if it is unknown.
        shallow: a function that takes a number of blocks and returns a factory of a model with that many blocks; None:
            all runs are at full depth.
        told: a function that is called with the progress.
    """

    job: Job
    base: Mapping[str, Any]
    per_rank: int
    depth: int = 0
    shallow: Callable[[int], Callable[[], nn.Module]] | None = None
    told: Told = lambda _done, _of: None
    _known: dict[Choice, Plan] = field(default_factory=dict, init=False)
    """The plans of all choices that were tried. Those that were run only with shallow models are extrapolated."""
    _plans: dict[Choice, Plan] = field(default_factory=dict, init=False)
    """The choices that were run at full depth."""
    _refusals: list[ZeroshardError] = field(default_factory=list, init=False)
    _done: int = field(default=0, init=False)

    def run(self) -> Found:
        """Estimate choices with shallow models, run the promising ones at full depth, and return the best.

        Raises:
            UsageError: the engine refused all of the first group or all finalists, or a separate process died.
        """
        sizes = micros(self.per_rank)
        self._explore(sizes)
        while self._is_shallow and self._run_promising():
            self._explore(sizes)
        if not any(plan.fits for plan in self._plans.values()):
            self._add_what_misses_least(sizes)
        return self._best()

    def _explore(self, sizes: Sequence[int]) -> None:
        """Estimate choices that may be the result and have no estimate yet."""
        for wave in settings(self.job, sizes[0]):
            waiting = wave
            while waiting:
                waiting = [one for one in waiting if not self._is_settled(one)]
                self._known |= self._estimates(waiting)
                if not self._known:
                    # The first settings enable the fewest features, so the others would be refused too.
                    raise self._refused()
                smaller = [self._smaller(one, sizes) for one in waiting if one in self._known]
                waiting = [one for one in smaller if one is not None]

    def _run_promising(self) -> bool:
        """Run the fastest choices that may fit, a few at a time, until one fits.

        If a choice does not fit although its estimate did, its plan replaces the estimate.

        Returns:
            Whether an estimate was replaced.
        """
        may_fit = {one: each.seconds for one, each in self._known.items() if _over(each) <= self._doubt}
        order = _lower_stages_first(may_fit)
        tried: list[Choice] = []
        while len(tried) < len(order) and not any(one in self._plans and self._plans[one].fits for one in tried):
            tried = order[: len(tried) + _FINALISTS]
            self._run_at_full_depth(tried)
        failed = [one for one in tried if one in self._plans and not self._plans[one].fits]
        mistaken = {one: self._plans[one] for one in failed if self._fits_for_sure(self._known[one])}
        self._known |= mistaken
        return bool(mistaken)

    def _add_what_misses_least(self, sizes: Sequence[int]) -> None:
        """Run the choices that lack the least memory, with the smallest microbatch or the largest.

        With the largest, a step may have only one microbatch and then does not keep gradients between microbatches.
        """
        extremes = dict.fromkeys(replace(one, micro=micro) for one in self._known for micro in (sizes[-1], sizes[0]))
        found = self._known | self._estimates(extremes)
        if self._is_shallow:
            order = sorted((one for one in extremes if one in found), key=lambda one: _missing(found[one]))
            self._run_at_full_depth(order[:_FINALISTS])

    @property
    def _is_shallow(self) -> bool:
        return self.shallow is not None and self.depth > 2 * _SHALLOW[-1]

    def _is_settled(self, choice: Choice) -> bool:
        """Return whether another choice fits and is never slower."""
        return any(choice.is_dearer_than(one) and self._fits_for_sure(each) for one, each in self._known.items())

    def _smaller(self, choice: Choice, sizes: Sequence[int]) -> Choice | None:
        """Return the same choice with the next microbatch that may fit; None if this one surely fits, or no smaller one can."""
        plan = self._known[choice]
        if self._fits_for_sure(plan):
            return None
        growing = sum(plan.parts.get(category, 0) for category in (ACTIVATIONS, TEMPORARIES, INPUTS))
        growing_with_gaps = growing * (1 + plan.machine.unseen.fragmentation)
        for micro in sizes:
            saved = growing_with_gaps * (1 - micro / choice.micro)
            if micro < choice.micro and _over(plan, saved) <= _DOUBT:
                return replace(choice, micro=micro)
        return None

    def _fits_for_sure(self, plan: Plan) -> bool:
        return _over(plan) <= -self._doubt

    @property
    def _doubt(self) -> float:
        return _DOUBT if self._is_shallow else 0.0

    def _estimates(self, choices: Iterable[Choice]) -> dict[Choice, Plan]:
        """Plan the choices that have no plan yet, from two shallow runs or from one at full depth."""
        new = [one for one in choices if one not in self._known]
        if not self._is_shallow:
            self._run_at_full_depth(new)
            return {one: self._plans[one] for one in new if one in self._plans}
        found: dict[Choice, dict[int | None, Plan]] = {}
        for choice, layers, plan in self._dry_runs([(one, layers) for one in new for layers in _SHALLOW]):
            found.setdefault(choice, {})[layers] = plan
        pairs = {choice: [plans[layers] for layers in _SHALLOW] for choice, plans in found.items() if len(plans) == 2}
        return {choice: _extrapolated(low, high, self.depth) for choice, (low, high) in pairs.items()}

    def _run_at_full_depth(self, choices: Sequence[Choice]) -> None:
        runs = [(choice, None) for choice in choices if choice not in self._plans]
        self._plans |= {choice: plan for choice, _, plan in self._dry_runs(runs)}

    def _dry_runs(self, runs: Sequence[tuple[Choice, int | None]]) -> Iterator[tuple[Choice, int | None, Plan]]:
        """Run choices at given depths. Yield the plan of each as it ends, unless the engine refuses it."""
        work = []
        for choice, layers in runs:
            job = self.job
            if layers is not None and self.shallow is not None:
                # The engine takes optional buffers if memory is free. A shallow model leaves too much, so pretend none is free.
                full = job.machine.model_copy(update={"memory": 1})
                job = replace(job, factory=self.shallow(layers), machine=full)
            work.append(partial(dry_run, job, choice.config(self.base, self.per_rank // choice.micro)))
        expected = self._done + len(runs) + _FINALISTS * self._is_shallow
        for number, figures in in_processes(work, first_here=not self._done):
            self._done += 1
            self.told(self._done, expected)
            if isinstance(figures, ZeroshardError):
                self._refusals.append(figures)
            else:
                yield *runs[number], Plan(self.job, figures)

    def _refused(self) -> UsageError:
        return UsageError(f"the engine refused every config; the first refusal: {self._refusals[0]}")

    def _best(self) -> Found:
        plans = self._plans
        if not plans:
            raise self._refused()
        fitting = {choice: plan.seconds for choice, plan in plans.items() if plan.fits}
        if not fitting:
            choice = min(plans, key=lambda one: _missing(plans[one]))
            return Found(choice, plans[choice])
        choice = _lower_stages_first(fitting)[0]
        others = {one: each for one, each in self._known.items() if one not in plans and self._fits_for_sure(each)}
        others |= {one: plans[one] for one in fitting}
        del others[choice]
        order = sorted(others, key=lambda one: others[one].seconds)
        return Found(choice, plans[choice], [(one, others[one]) for one in order[:_OTHERS]])


def _over(plan: Plan, saved: float = 0.0) -> float:
    """Return the missing share of the accelerator's or the host's memory, whichever is larger; negative if there is room.

    Args:
        saved: bytes that the accelerator does not need after all.
    """
    return max((plan.needed_nbytes - saved) / max(plan.limit, 1), plan.host_nbytes / max(plan.host_limit, 1)) - 1


def _missing(plan: Plan) -> int:
    return max(plan.overshoot, plan.host_nbytes - plan.host_limit)


def _lower_stages_first(seconds: Mapping[Choice, float]) -> list[Choice]:
    """Sort choices by time. Choices as good as the fastest come first, sorted by stage."""
    order = sorted(seconds, key=lambda one: seconds[one])
    alike = [one for one in order if seconds[one] <= (1 + _ALIKE) * seconds[order[0]]]
    return sorted(alike, key=lambda one: one.stage) + order[len(alike) :]


def _extrapolated(low: Plan, high: Plan, depth: int) -> Plan:
    """Extrapolate the plans of two depths to a third.

    Each peak is extrapolated separately, since a different one may be the largest at each depth. Communication buffers
    do not grow: a bounded number of them exists at any depth.
    """

    def at_depth(one: float, other: float) -> float:
        return one + (other - one) / (_SHALLOW[1] - _SHALLOW[0]) * (depth - _SHALLOW[0])

    def peak(one: Peak, other: Peak) -> Peak:
        parts = {name: round(at_depth(one.parts.get(name, 0), nbytes)) for name, nbytes in other.parts.items()}
        bounded = other.parts.get(BUFFERS, 0)
        growing = at_depth(one.nbytes - one.parts.get(BUFFERS, 0), other.nbytes - bounded)
        return replace(other, nbytes=round(growing) + bounded, parts={**parts, BUFFERS: bounded})

    below = low.figures
    above = high.figures
    figures = replace(
        above,
        peak=peak(below.peak, above.peak),
        host_peak=peak(below.host_peak, above.host_peak),
        start=peak(below.start, above.start),
        model_nbytes=round(at_depth(below.model_nbytes, above.model_nbytes)),
        seconds=at_depth(below.seconds, above.seconds),
    )
    return replace(high, figures=figures)
