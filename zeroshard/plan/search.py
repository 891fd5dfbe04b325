"""Owns the search: which settings fit and are fastest, and what a single change of a config would gain. Called by cli.

Every answer is a dry run. A model that is deep is first run at two small depths, which tell what a block takes; what is chosen is
run at its full depth.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from zeroshard.errors import UsageError, ZeroshardError
from zeroshard.plan.dry_run import Figures, Job, dry_run
from zeroshard.plan.processes import in_processes
from zeroshard.plan.result import Plan

Told = Callable[[int, int], None]
"""Hears of the progress: dry runs that are over, and how many there are."""

_SHALLOW = (2, 4)
"""Depths at which a deep model is run first."""

_FINALISTS = 3
"""Choices that are run at full depth at once."""

_DOUBT = 0.05
"""What shallow runs say too much, at most, as a share of the memory."""


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

    def config(self, base: Mapping[str, Any], accumulation: int) -> dict[str, Any]:
        """The base with what was chosen."""
        zero: dict[str, Any] = {"stage": self.stage}
        if self.optimizer_on_cpu:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.parameters_on_cpu:
            zero["offload_param"] = {"device": "cpu"}
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
        return ", ".join(parts)


def choices(per_rank: int) -> list[Choice]:
    """All of them, for so many samples of a step on each rank: micro-batches are powers of two that divide them, and themselves."""
    micros = [size for size in (1, 2, 4, 8, 16, 32, 64) if per_rank % size == 0 and size <= per_rank]
    return [
        Choice(stage, micro, checkpointing, optimizer, parameters)
        for stage, optimizer, parameters in (
            (0, False, False), (1, False, False), (2, False, False), (3, False, False), (2, True, False), (3, True, False),
            (3, True, True),
        )
        for micro in micros[-3:]
        for checkpointing in (False, True)
    ]  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """What two shallow runs say of the whole depth."""

    needed: float
    host: float
    seconds: float


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

    def run(self) -> Found:
        """Run what is promising at full depth; shallow models say what is."""
        candidates = choices(self.per_rank)
        if self.shallow is None or self.depth is None or self.depth <= 2 * _SHALLOW[-1]:
            plans: dict[Choice, Plan] = {}
            for done, (choice, _, plan) in enumerate(self._plans([(choice, None) for choice in candidates]), start=1):
                self.told(done, len(candidates))
                plans |= {choice: plan} if plan is not None else {}
            return self._best(plans)
        estimates = self._estimates(candidates, self.depth)
        return self._best(self._at_full_depth(estimates))

    def _estimates(self, candidates: Sequence[Choice], depth: int) -> dict[Choice, Estimate]:
        runs = [(choice, layers) for choice in candidates for layers in _SHALLOW]
        found: dict[tuple[Choice, int | None], Plan] = {}
        for done, (choice, layers, plan) in enumerate(self._plans(runs), start=1):
            self.told(done, len(runs) + _FINALISTS)
            found |= {(choice, layers): plan} if plan is not None else {}
        pairs = {choice: [found.get((choice, layers)) for layers in _SHALLOW] for choice in candidates}
        return {choice: _extrapolated(low, high, depth) for choice, (low, high) in pairs.items() if low and high}

    def _at_full_depth(self, estimates: Mapping[Choice, Estimate]) -> dict[Choice, Plan]:
        """The fastest that may fit, a few at a time, until one does. Where none may, those that miss least."""
        tried: dict[Choice, Plan] = {}
        may_fit = [choice for choice in estimates if self._missing(estimates[choice]) < _DOUBT * self.limit]
        order = sorted(may_fit, key=lambda choice: estimates[choice].seconds)
        order = order or sorted(estimates, key=lambda choice: self._missing(estimates[choice]))[:_FINALISTS]
        for begin in range(0, len(order), _FINALISTS):
            for choice, _, plan in self._plans([(choice, None) for choice in order[begin : begin + _FINALISTS]]):
                tried |= {choice: plan} if plan is not None else {}
            if any(plan.fits for plan in tried.values()):
                break
        return tried

    def _missing(self, estimate: Estimate) -> float:
        return max(estimate.needed - self.limit, estimate.host - self.host_limit)

    def _plans(self, runs: Sequence[tuple[Choice, int | None]]) -> Iterator[tuple[Choice, int | None, Plan | None]]:
        """Each run's plan as it ends; None where the engine refuses."""
        for number, figures in in_processes(self._work(choice, layers) for choice, layers in runs):
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
    """A block takes what two depths differ by."""

    def at_depth(one: float, other: float) -> float:
        return one + (other - one) / (_SHALLOW[1] - _SHALLOW[0]) * (depth - _SHALLOW[0])

    return Estimate(
        at_depth(low.needed_nbytes, high.needed_nbytes),
        at_depth(low.host_nbytes, high.host_nbytes),
        at_depth(low.seconds, high.seconds),
    )
