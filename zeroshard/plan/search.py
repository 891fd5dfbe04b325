"""Owns the search: which settings fit and are fastest. Called by cli.

Every answer is a dry run. A model that is deep is first run at two small depths, which tell what a block takes; what is chosen is
run at its full depth. What cannot be the answer is not run: see [Note: pruning].

[Note: pruning]
A larger micro-batch is not slower, so each setting is tried from the largest down, and the first that fits is its best; what grows
with the micro-batch tells how far down to go. Checkpointing, and states that rest on the CPU, cost time and gain memory alone: they
are not tried where the same setting without fits as large a micro-batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from zeroshard.errors import UsageError, ZeroshardError
from zeroshard.plan.dry_run import Figures, Job, dry_run
from zeroshard.plan.ledger import ACTIVATIONS, INPUTS, TEMPORARIES, Peak
from zeroshard.plan.processes import in_processes
from zeroshard.plan.result import Plan

Told = Callable[[int, int], None]
"""Hears of the progress: dry runs that are over, and how many there are."""

_SHALLOW = (3, 5)
"""Depths at which a deep model is run first."""

_FINALISTS = 2
"""Choices that are run at full depth at once."""

_DOUBT = 0.03
"""How far off what was not run may be, as a share of the memory: a whole depth told by two shallow ones, a smaller micro-batch by
a larger one."""


BASE: dict[str, Any] = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
"""What all choices of a search share, where the caller has nothing to say."""


@dataclass(frozen=True)
class Choice:
    """One point of the search."""

    stage: int
    micro: int
    checkpointing: bool
    optimizer_on_cpu: bool
    parameters_on_cpu: bool
    within: int | None = None

    def config(self, base: Mapping[str, Any], accumulation: int) -> dict[str, Any]:
        """The base with what was chosen."""
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
        parts = [f"stage {self.stage}", f"micro-batch {self.micro}"]
        parts += ["activation checkpointing"] * self.checkpointing
        parts += ["optimizer on cpu"] * self.optimizer_on_cpu + ["parameters on cpu"] * self.parameters_on_cpu
        parts += [f"within hosts of {self.within} ranks"] * (self.within is not None)
        return ", ".join(parts)

    @property
    def relief(self) -> int:
        """How much of it rests on the CPU."""
        return self.optimizer_on_cpu + self.parameters_on_cpu

    def is_dearer_than(self, other: Choice) -> bool:
        """Whether it is the other one with what costs time and gains memory alone, and no larger a micro-batch."""
        same = (self.stage, self.within) == (other.stage, other.within) and self.micro <= other.micro
        more = self.checkpointing >= other.checkpointing and self.relief >= other.relief
        return same and more and self != other


def micros(per_rank: int) -> list[int]:
    """Micro-batches for so many samples of a step on each rank, the largest first: powers of two that divide them."""
    return [size for size in (64, 32, 16, 8, 4, 2, 1) if per_rank % size == 0]


def settings(job: Job, micro: int) -> Iterator[list[Choice]]:
    """All of them at one micro-batch: first those that cost no time."""
    offloads = [(0, ((False, False),)), (1, ((True, False), (True, True)))]
    per_host, rest = divmod(job.ranks, job.hosts)
    hosts = [None] if job.hosts == 1 or rest or per_host == 1 else [None, per_host]
    for is_offloaded, places in offloads:
        if is_offloaded and job.machine.computes_on_cpu:  # it is one memory
            return
        for checkpointing in (False, True):
            yield [
                Choice(stage, micro, checkpointing, optimizer, parameters, within)
                for optimizer, parameters in places
                for within in hosts
                for stage in ((2, 3) if optimizer else range(4))
                if stage == 3 or not parameters
                if stage or within is None
            ]


@dataclass(frozen=True)
class Estimate:
    """What is known of a choice at the whole depth.

    Attributes:
        needed, host, seconds: as a plan's.
        growing: bytes of those that are needed that grow with the micro-batch.
    """

    needed: float
    host: float
    seconds: float
    growing: float


@dataclass(frozen=True)
class Found:
    """What a search found: the plan of the fastest that fits, or, where none does, of the one that misses least."""

    choice: Choice
    plan: Plan


@dataclass(frozen=True)
class Search:
    """For the fastest choice that fits.

    Attributes:
        base: the config that all choices share.
        per_rank: samples of a step on each rank.
        limit, host_limit: bytes of an accelerator, and of a host.
        depth, shallow: of the model, and the same with fewer blocks.
        told: hears of the progress.
    """

    job: Job
    base: Mapping[str, Any]
    per_rank: int
    limit: int
    host_limit: int
    depth: int | None = None
    shallow: Callable[[int], Callable[[], nn.Module]] | None = None
    told: Told = lambda _done, _of: None
    _done: list[int] = field(default_factory=lambda: [0], init=False)

    def run(self) -> Found:
        """Run what is promising at full depth; shallow models say what is."""
        known: dict[Choice, Estimate] = {}
        plans: dict[Choice, Plan] = {}
        sizes = micros(self.per_rank)
        for wave in settings(self.job, sizes[0]):
            waiting = wave
            while waiting:
                waiting = [one for one in waiting if not self._is_settled(one, known)]
                found = self._estimates(waiting, plans)
                known |= found
                waiting = [smaller for choice in found if (smaller := self._smaller(choice, found[choice], sizes))]
        if self._is_shallow:
            plans |= self._at_full_depth(known)
        if not any(plan.fits for plan in plans.values()):
            self._add_what_misses_least(known, plans, sizes[-1])
        return self._best(plans)

    def _add_what_misses_least(self, known: Mapping[Choice, Estimate], plans: dict[Choice, Plan], micro: int) -> None:
        """It is among the smallest micro-batches."""
        smallest = dict.fromkeys(replace(choice, micro=micro) for choice in known)
        found = {**known, **self._estimates([one for one in smallest if one not in known], plans)}
        if self._is_shallow:
            order = sorted(smallest, key=lambda one: self._missing(found[one]) if one in found else math.inf)
            runs = [(one, None) for one in order[:_FINALISTS] if one not in plans]
            plans |= {choice: plan for choice, _, plan in self._counted(runs) if plan is not None}

    @property
    def _is_shallow(self) -> bool:
        return self.shallow is not None and self.depth is not None and self.depth > 2 * _SHALLOW[-1]

    def _is_settled(self, choice: Choice, known: Mapping[Choice, Estimate]) -> bool:
        """Whether something that fits is never slower."""
        return any(choice.is_dearer_than(one) and self._fits_for_sure(known[one]) for one in known)

    def _smaller(self, choice: Choice, estimate: Estimate, sizes: Sequence[int]) -> Choice | None:
        """The same with the next micro-batch that may fit; None where this one does for sure, or none will."""
        if self._fits_for_sure(estimate):
            return None
        for micro in sizes:
            less = replace(estimate, needed=estimate.needed - estimate.growing * (1 - micro / choice.micro))
            if micro < choice.micro and self._over(less) <= _DOUBT:
                return replace(choice, micro=micro)
        return None

    def _estimates(self, choices: Sequence[Choice], plans: dict[Choice, Plan]) -> dict[Choice, Estimate]:
        """What two shallow runs of each say, or one at full depth, which is kept as a plan."""
        depths = _SHALLOW if self._is_shallow else (None,)
        runs = [(choice, layers) for choice in choices for layers in depths]
        found: dict[Choice, list[tuple[int, Plan]]] = {}
        for choice, layers, plan in self._counted(runs):
            if plan is not None:
                found.setdefault(choice, []).append((layers or 0, plan))
                plans |= {} if layers else {choice: plan}
        if not self._is_shallow:
            return {choice: _exact(one) for choice, [(_, one)] in found.items()}
        assert self.depth is not None
        pairs = {choice: sorted(two, key=lambda one: one[0]) for choice, two in found.items() if len(two) == 2}
        return {choice: _extrapolated(low, high, self.depth) for choice, ((_, low), (_, high)) in pairs.items()}

    def _at_full_depth(self, estimates: Mapping[Choice, Estimate]) -> dict[Choice, Plan]:
        """The fastest that may fit, a few at a time, until one does."""
        tried: dict[Choice, Plan] = {}
        may_fit = [choice for choice in estimates if self._may_fit(estimates[choice])]
        order = sorted(may_fit, key=lambda choice: estimates[choice].seconds)
        for begin in range(0, len(order), _FINALISTS):
            for choice, _, plan in self._counted([(choice, None) for choice in order[begin : begin + _FINALISTS]]):
                tried |= {choice: plan} if plan is not None else {}
            if any(plan.fits for plan in tried.values()):
                break
        return tried

    def _fits_for_sure(self, estimate: Estimate) -> bool:
        return self._over(estimate) <= -self._doubt

    def _may_fit(self, estimate: Estimate) -> bool:
        return self._over(estimate) <= self._doubt

    @property
    def _doubt(self) -> float:
        return _DOUBT if self._is_shallow else 0.0

    def _over(self, estimate: Estimate) -> float:
        """By what share too much is needed, of an accelerator's memory or of the host's; negative where there is room."""
        return max(estimate.needed / max(self.limit, 1), estimate.host / max(self.host_limit, 1)) - 1

    def _missing(self, estimate: Estimate) -> float:
        return max(estimate.needed - self.limit, estimate.host - self.host_limit)

    def _counted(self, runs: Sequence[tuple[Choice, int | None]]) -> Iterator[tuple[Choice, int | None, Plan | None]]:
        """As `_plans`, and told of."""
        before = self._done[0]
        for ended in self._plans(runs):
            self._done[0] += 1
            self.told(self._done[0], before + len(runs) + _FINALISTS * self._is_shallow)
            yield ended

    def _plans(self, runs: Sequence[tuple[Choice, int | None]]) -> Iterator[tuple[Choice, int | None, Plan | None]]:
        """Each run's plan as it ends; None where the engine refuses."""
        work = [self._work(choice, layers) for choice, layers in runs]
        for number, figures in in_processes(work, first_here=not self._done[0]):
            if isinstance(figures, ZeroshardError):
                yield *runs[number], None
            else:
                yield *runs[number], Plan(self.job, figures, self.limit, self.host_limit)

    def _work(self, choice: Choice, layers: int | None) -> Callable[[], Figures]:
        job = self.job if layers is None or self.shallow is None else replace(self.job, factory=self.shallow(layers))
        return lambda: dry_run(job, choice.config(self.base, self.per_rank // choice.micro))

    def _best(self, plans: Mapping[Choice, Plan]) -> Found:
        if not plans:
            raise UsageError("the engine refuses every choice: plan one config, with --config, to see why.")
        fitting = [choice for choice in plans if plans[choice].fits]
        if fitting:
            choice = min(fitting, key=lambda one: plans[one].seconds)
        else:
            choice = min(plans, key=lambda one: max(plans[one].overshoot, plans[one].host_nbytes - self.host_limit))
        return Found(choice, plans[choice])


def _extrapolated(low: Plan, high: Plan, depth: int) -> Estimate:
    """A block takes what two depths differ by. Each figure goes on by itself: which is the largest changes with the depth."""

    def at_depth(one: float, other: float) -> float:
        return one + (other - one) / (_SHALLOW[1] - _SHALLOW[0]) * (depth - _SHALLOW[0])

    def peak(one: Peak, other: Peak) -> Peak:
        parts = {name: round(at_depth(one.parts.get(name, 0), nbytes)) for name, nbytes in other.parts.items()}
        return replace(other, nbytes=round(at_depth(one.nbytes, other.nbytes)), parts=parts)

    below, above = low.figures, high.figures
    figures = replace(
        above,
        peak=peak(below.peak, above.peak),
        host_peak=peak(below.host_peak, above.host_peak),
        start=peak(below.start, above.start),
        model_nbytes=round(at_depth(below.model_nbytes, above.model_nbytes)),
        seconds=at_depth(below.seconds, above.seconds),
    )
    return _exact(replace(high, figures=figures))


def _exact(plan: Plan) -> Estimate:
    """At its own depth."""
    growing = sum(plan.parts.get(category, 0) for category in (ACTIVATIONS, TEMPORARIES, INPUTS))
    with_gaps = growing * (1 + plan.machine.unseen.fragmentation)
    return Estimate(plan.needed_nbytes, plan.host_nbytes, plan.seconds, with_gaps)
