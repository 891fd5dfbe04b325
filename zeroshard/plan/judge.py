"""Owns what to change first: what each single change of a config would gain, and the largest micro-batch that fits. For cli."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zeroshard.errors import ZeroshardError
from zeroshard.plan.dry_run import Figures, dry_run
from zeroshard.plan.processes import in_processes
from zeroshard.plan.result import Plan

_MOST_TRIES = 6


@dataclass(frozen=True)
class Change:
    """One change of a config.

    Attributes:
        plan: of the config with it.
        gain: bytes of an accelerator's memory that it saves.
        slowdown: seconds of a step that it costs.
    """

    what: str
    plan: Plan
    gain: int
    slowdown: float


def single_changes(plan: Plan) -> dict[str, dict[str, Any]]:
    """What one could do to a config to save memory, and the config that comes of it."""
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
    if config.stage and config.policy.optimizer.place.value == "accelerator":
        change("optimizer on cpu", zero_optimization={"offload_optimizer": {"device": "cpu"}})
    if config.stage == 3 and config.policy.parameters.place.value == "accelerator":
        change("parameters on cpu", zero_optimization={"offload_param": {"device": "cpu"}})
    if not (config.schema.bf16.enabled or config.schema.fp16.enabled):
        change("bf16", bf16={"enabled": True})
    batch = config.batch
    if batch.micro % 2 == 0:
        change("half the micro-batch, twice as often")
        found["half the micro-batch, twice as often"] |= {
            "train_micro_batch_size_per_gpu": batch.micro // 2, "gradient_accumulation_steps": batch.accumulation * 2,
        }  # fmt: skip
    return found


def judge(plan: Plan, told: Callable[[int, int], None] = lambda _done, _of: None) -> list[Change]:
    """What each single change would gain, the most first. What the engine refuses is left out."""
    changes = single_changes(plan)
    found = []
    for done, (number, figures) in enumerate(in_processes(_work(plan, made) for made in changes.values()), start=1):
        told(done, len(changes))
        if not isinstance(figures, ZeroshardError):
            other = Plan(plan.job, figures, plan.limit, plan.host_limit)
            gain, slowdown = plan.needed_nbytes - other.needed_nbytes, other.seconds - plan.seconds
            found.append(Change(list(changes)[number], other, gain, slowdown))
    return sorted(found, key=lambda change: -change.gain)


def _work(plan: Plan, config: dict[str, Any]) -> Callable[[], Figures]:
    return lambda: dry_run(plan.job, config)


def largest_micro_batch(plan: Plan) -> int:
    """The largest micro-batch that fits, the accumulation as it is; 0 where not even one sample does."""
    needs = {plan.figures.config.batch.micro: plan.needed_nbytes}

    def need(micro: int) -> int:
        if micro not in needs:
            config = plan.complete_config() | {"train_micro_batch_size_per_gpu": micro}
            del config["train_batch_size"]
            [(_, figures)] = in_processes([_work(plan, config)])
            if isinstance(figures, ZeroshardError):
                raise figures
            needs[micro] = Plan(plan.job, figures, plan.limit, plan.host_limit).needed_nbytes
        return needs[micro]

    own = plan.figures.config.batch.micro
    per_sample = max(need(2 * own) - need(own), 1) / own
    guess = max(int(own + (plan.limit - need(own)) / per_sample), 1)
    for _ in range(_MOST_TRIES):
        if need(guess) > plan.limit:
            if guess == 1:
                return 0
            guess -= 1
        elif guess + 1 in needs and needs[guess + 1] > plan.limit:
            return guess
        else:
            guess += 1
    return max((micro for micro, nbytes in needs.items() if nbytes <= plan.limit), default=0)
