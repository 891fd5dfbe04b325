"""Compares the search of `zeroshard plan` with an exhaustive sweep over all settings.

python benchmarks/plan_search.py --machine PROFILE [--rounds 4] [--only TEXT]

PROFILE is a file written by `zeroshard doctor --profile`. Real ranks train every setting of a case for a few steps: stage,
checkpointing, microbatch and accumulation. Settings take turns in rounds. A setting's time is the lowest of its rounds'
medians, since other load on the machine only adds to it. On one rank all stages do the same work, so the differences
between them show the noise.

`--clock cpu` measures the CPU time of the slowest rank instead of wall time, for a machine that has other work. CPU time does
not include waits. A setting fits if its plan fits; `benchmarks/plan_fits.py` measures how reliable that is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from plan_cases import config_of
from torch import Tensor, nn

import zeroshard
from zeroshard.planning.planner import job_of
from zeroshard.planning.search import Choice, Search, micros
from zeroshard.testing import run_ranks
from zeroshard.testing.gpt import GPT, GPTConfig

STEPS = 15
NEAR = 0.10


@dataclass(frozen=True)
class Case:
    """A model, its ranks, samples per rank and step, and memory: 0 fits the smallest setting, 1 the largest."""

    kind: str
    layers: int
    width: int
    context: int
    ranks: int
    per_rank: int
    share: float

    def model(self) -> nn.Module:
        if self.kind == "GPT":
            return GPT(GPTConfig(layers=self.layers, width=self.width, heads=self.width // 32, context=self.context))
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=512, hidden_size=self.width, intermediate_size=2 * self.width, num_hidden_layers=self.layers,
                num_attention_heads=self.width // 32, max_position_embeddings=self.context, use_cache=False,
            )
        )  # fmt: skip

    def batch(self, samples: int) -> Any:
        tokens = torch.randint(0, 256, (samples, self.context + 1))
        if self.kind == "GPT":
            return tokens[:, :-1], tokens[:, 1:]
        return {"input_ids": tokens[:, 1:], "labels": tokens[:, 1:]}

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.layers} x {self.width}, {self.context} tokens, {self.ranks} ranks x {self.per_rank}, "
            f"memory at {self.share:.0%}"
        )


CASES = [
    Case("GPT", 2, 128, 64, 2, 2, 1.0),
    Case("GPT", 2, 128, 128, 1, 2, 0.5),
    Case("Llama", 2, 128, 64, 2, 2, 1.0),
    Case("GPT", 2, 256, 64, 2, 2, 0.3),
    Case("Llama", 2, 128, 128, 1, 4, 0.2),
    Case("GPT", 4, 128, 64, 1, 4, 0.0),
    Case("Llama", 2, 192, 64, 2, 4, 0.1),
    Case("GPT", 3, 192, 128, 2, 2, 0.6),
    Case("Llama", 3, 192, 64, 1, 2, 0.4),
    Case("GPT", 2, 192, 64, 2, 4, 0.2),
]

BASE = {"optimizer": config_of(0)["optimizer"]}


def sweep(case: Case) -> list[Choice]:
    """Return every combination of stage, checkpointing and microbatch."""
    return [
        Choice(stage, micro, checkpointing, False, False)
        for stage in range(4)
        for checkpointing in (False, True)
        for micro in micros(case.per_rank)
    ]


def _loss(output: Any) -> Tensor:
    loss: Tensor = getattr(output, "loss", output)
    return loss


CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


def trained(rank: int, case: Case, configs: list[dict[str, Any]], rounds: int, clock: str) -> list[list[float]]:
    """Return, for each config, the median step of each round, in seconds."""
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    taken: list[list[float]] = [[] for _ in configs]
    for _ in range(rounds):
        for number, config in enumerate(configs):
            engine, *_ = zeroshard.initialize(model=case.model(), config=config)
            taken[number].append(statistics.median([_step(engine, case, CLOCKS[clock]) for _ in range(STEPS + 1)][1:]))
            engine.destroy()
    return taken


def _step(engine: zeroshard.Engine, case: Case, clock: Callable[[], float]) -> float:
    begin = clock()
    for _ in range(engine.gradient_accumulation_steps()):
        batch = case.batch(engine.train_micro_batch_size_per_gpu())
        engine.backward(_loss(engine(**batch) if isinstance(batch, dict) else engine(*batch)))
        engine.step()
    return clock() - begin


@dataclass(frozen=True)
class Outcome:
    """The choice of the search, the fastest setting that fits, and the slowdown of the choice."""

    chosen: Choice
    fastest: Choice
    slower: float
    predicted: dict[Choice, float]
    seconds: dict[Choice, float]


def compared(case: Case, machine: str, rounds: int, clock: str) -> Outcome:
    job = job_of(case.model, case.batch, case.ranks, machine, memory=1 << 50, host_memory=1 << 50)
    everything = sweep(case)
    configs = {one: one.config(BASE, case.per_rank // one.micro) for one in everything}
    plain = Search(job, BASE, case.per_rank)
    plans = {one: plan for one, _, plan in plain._dry_runs([(one, None) for one in everything])}
    least, most = (choose(plan.needed_nbytes for plan in plans.values()) for choose in (min, max))
    limit = least + int(case.share * (most - least))
    limited = job_of(case.model, case.batch, case.ranks, machine, memory=limit, host_memory=1 << 50)
    found = Search(limited, BASE, case.per_rank).run()
    fitting = [one for one, plan in plans.items() if plan.needed_nbytes <= limit]
    of_ranks = run_ranks(trained, case.ranks, case, [configs[one] for one in fitting], rounds, clock, timeout=900)
    slowest = [[max(times) for times in zip(*of_one, strict=True)] for of_one in zip(*of_ranks, strict=True)]
    seconds = {one: min(times) for one, times in zip(fitting, slowest, strict=True)}
    fastest = min(seconds, key=lambda one: seconds[one])
    slower = seconds[found.choice] / seconds[fastest] - 1
    return Outcome(found.choice, fastest, slower, {one: plans[one].seconds for one in fitting}, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--machine", required=True, type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--only", default="", help="only cases whose name contains this text")
    parser.add_argument("--all", action="store_true", help="print the planned and the measured time of every setting")
    options = parser.parse_args()
    torch.set_num_threads(1)
    near, count = 0, 0
    for case in CASES:
        if options.only not in str(case):
            continue
        one = compared(case, str(options.machine), options.rounds, options.clock)
        near, count = near + (one.slower <= NEAR), count + 1
        print(
            f"{case!s:56} {len(one.seconds):2} fit; chosen: {one.chosen}: {one.seconds[one.chosen] * 1e3:.1f} ms "
            f"(planned {one.predicted[one.chosen] * 1e3:.1f}); fastest: {one.fastest}: "
            f"{one.seconds[one.fastest] * 1e3:.1f} ms; {one.slower:+.1%}",
            flush=True,
        )
        for setting in sorted(one.seconds, key=lambda each: one.seconds[each]) if options.all else ():
            print(f"    {one.seconds[setting] * 1e3:8.1f} ms, planned {one.predicted[setting] * 1e3:8.1f}  {setting}")
    print(f"the choice is within {NEAR:.0%} of the fastest in {near} of {count} cases")


if __name__ == "__main__":
    main()
