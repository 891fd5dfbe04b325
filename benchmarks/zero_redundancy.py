"""Times zeroshard's ZeroRedundancyOptimizer and torch's on the 50 M parameter GPT under DDP: part of `make bench`.

Each row of the table is one way to use them: 2 or 4 ranks, Adam plain or fused, and parameters_as_bucket_view or not.
Both classes get the same arguments. In the same processes, torch's class trains one model, zeroshard's another, and
torch's a third. They take turns step by step, so other load on the machine affects all three, and torch's two models
show the noise. Two times are measured, each on the slowest rank:

- the optimizer's part: `optimizer.step()` between two barriers, including its communication;
- the whole training step: forward, backward under DDP (gradient_as_bucket_view), `optimizer.step()`, `zero_grad()`.

"x torch" is the median over rounds (each in new processes) of zeroshard's median step divided by the mean of torch's two
medians. The lowest and highest ratios are in brackets. Bytes are those that a rank's own sockets sent in `optimizer.step()`.

    python benchmarks/zero_redundancy.py [--ranks 2,4] [--gloo] [--markdown]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from figures import MIB, RESULTS, Column, Run, load, machine, median_of, number, ratios, save, show, spread
from jobs import GLOO, read_job, run_job, write_result
from rich.console import Console
from sockets import sent_bytes
from step import CONFIG
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

from zeroshard import ZeroRedundancyOptimizer
from zeroshard.testing.gpt import GPT
from zeroshard.testing.ranks import run_ranks

VARIANTS: dict[str, dict[str, bool]] = {
    "plain": {},
    "bucket view": {"parameters_as_bucket_view": True},
    "fused": {"fused": True},
    "fused, bucket view": {"fused": True, "parameters_as_bucket_view": True},
}
CONSOLIDATED = "plain"
"""The variant whose consolidation is timed, only in the first round, since torch's takes as long as ten rounds."""
CONTESTANTS: dict[str, Callable[..., Any]] = {
    "torch": TorchZero,
    "zeroshard": ZeroRedundancyOptimizer,
    "torch again": TorchZero,
}


class Contestant:
    """A model under DDP with one of the optimizer classes. Every rank has one contestant for each entry of CONTESTANTS."""

    def __init__(self, make: Callable[..., Any], arguments: dict[str, bool]) -> None:
        torch.manual_seed(0)
        model = GPT(CONFIG)
        self._ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = make(model.parameters(), torch.optim.Adam, lr=1e-4, **arguments)
        self.found: Run = {"whole": [], "optimizer": [], "losses": [], "sent": 0}

    def step(self, tokens: torch.Tensor) -> None:
        """Train on tokens of shape [1, length + 1] and measure the times."""
        dist.barrier()
        start = time.perf_counter()
        loss = self._ddp(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        dist.barrier()
        middle, before = time.perf_counter(), sent_bytes()
        self.optimizer.step()
        dist.barrier()
        stepped = time.perf_counter()
        self.optimizer.zero_grad()
        dist.barrier()
        self.found["whole"].append(time.perf_counter() - start)
        self.found["optimizer"].append(stepped - middle)
        self.found["losses"].append(float(loss.detach()))
        self.found["sent"] = sent_bytes() - before

    def finish(self, *, consolidate: bool) -> Run:
        """Return the times without the first step, which makes the optimizer's states."""
        state = self.optimizer.optim.state
        self.found["state"] = sum(value.nbytes for entry in state.values() for value in entry.values())
        if consolidate:
            dist.barrier()
            start = time.perf_counter()
            self.optimizer.consolidate_state_dict()
            dist.barrier()
            self.found["consolidate"] = time.perf_counter() - start
        return self.found | {key: self.found[key][1:] for key in ("whole", "optimizer")}


def measure(rank: int, job: dict[str, Any]) -> dict[str, Run]:
    """Run one rank of one run."""
    contestants = {name: Contestant(make, VARIANTS[job["variant"]]) for name, make in CONTESTANTS.items()}
    generator = torch.Generator().manual_seed(rank)
    for _ in range(1 + job["steps"]):
        tokens = torch.randint(0, CONFIG.vocabulary, (1, CONFIG.context + 1), generator=generator)
        for contestant in contestants.values():
            contestant.step(tokens)
    found = {}
    for name, contestant in contestants.items():
        found[name] = contestant.finish(consolidate=job["consolidate"] and name != "torch again")
    return found


def run(job: dict[str, Any]) -> dict[str, Run]:
    """Run once and return the slowest rank's times of each contestant."""
    by_rank = run_ranks(measure, job["ranks"], job, timeout=job["limit"], collective_timeout=300)
    found: dict[str, Run] = {}
    for name in CONTESTANTS:
        mine = [result[name] for result in by_rank]
        found[name] = {
            key: list(map(max, zip(*(one[key] for one in mine), strict=True))) for key in ("whole", "optimizer")
        }
        found[name]["losses"] = mine[0]["losses"]
        found[name]["sent"] = statistics.mean(one["sent"] for one in mine)
        found[name] |= {
            "state_most": max(one["state"] for one in mine),
            "state_least": min(one["state"] for one in mine),
        }
        if "consolidate" in mine[0]:
            found[name]["consolidate"] = mine[0]["consolidate"]
    return found


def columns(results: dict[str, Any]) -> list[Column]:
    """Return the columns of the table; a row is a key of results["rows"]."""

    def runs(key: str, name: str) -> list[Run | None]:
        return [one and one[name] for one in results["rows"][key]["runs"]]

    def milliseconds(key: str, part: str) -> str:
        return ", ".join(number(median_of(runs(key, name), part), 1e3) for name in ("torch", "torch again"))

    def x_torch(key: str, part: str) -> str:
        bases = [runs(key, "torch"), runs(key, "torch again")]
        return results["rows"][key]["failure"] or spread(ratios(runs(key, "zeroshard"), bases, part))

    def noise(key: str) -> str:
        return spread(ratios(runs(key, "torch again"), [runs(key, "torch")], "optimizer"))

    def both(key: str, field: str, scale: float, digits: int) -> str:
        found = [
            next((one[field] for one in runs(key, name) if one and field in one), None)
            for name in ("torch", "zeroshard")
        ]
        return ", ".join(number(value, scale, digits) for value in found if value is not None)

    def evenness(key: str) -> str:
        ran = {name: next((one for one in runs(key, name) if one), None) for name in ("torch", "zeroshard")}
        return ", ".join(f"{one['state_most'] / one['state_least']:.3f}" for one in ran.values() if one)

    def same(key: str) -> str:
        ran = [one for one in results["rows"][key]["runs"] if one]
        return ("=" if all(one["torch"]["losses"] == one["zeroshard"]["losses"] for one in ran) else "≠") if ran else ""

    return [
        ("", lambda key: key),
        ("optimizer: x torch", lambda key: x_torch(key, "optimizer")),
        ("again / torch", noise),
        ("ms", lambda key: number(median_of(runs(key, "zeroshard"), "optimizer"), 1e3)),
        ("torch, twice", lambda key: milliseconds(key, "optimizer")),
        ("whole step: x torch", lambda key: x_torch(key, "whole")),
        ("ms ", lambda key: number(median_of(runs(key, "zeroshard"), "whole"), 1e3)),
        ("torch, twice ", lambda key: milliseconds(key, "whole")),
        ("sent, MiB: torch, ours", lambda key: both(key, "sent", 1 / MIB, 0)),
        ("state, most / least", evenness),
        ("consolidate, s", lambda key: both(key, "consolidate", 1.0, 2)),
        ("losses", same),
    ]


def show_results(results: dict[str, Any], *, markdown: bool) -> None:
    """Print the table of this run or a saved one."""
    about = results["about"]
    title = f"ZeroRedundancyOptimizer, {about['parameters'] / 1e6:.1f} M parameters, Adam, {about['cores']} cores"
    title += f"; {about['rounds']} rounds of {about['steps']} steps, {about.get('seconds', 0):.0f} s in all"
    title += f"; load {about['load at start']:.1f} when it began"
    show(title, columns(results), list(results["rows"]), markdown=markdown)


def main(
    ranks: Annotated[str, typer.Option(help="The numbers of ranks.")] = "2,4",
    rounds: Annotated[int, typer.Option(help="The number of rounds.")] = 2,
    steps: Annotated[int, typer.Option(help="Timed steps per turn.")] = 5,
    only: Annotated[str, typer.Option(help="Only this variant: plain; bucket view; fused; fused, bucket view.")] = "",
    gloo: Annotated[bool, typer.Option("--gloo", help="Also measure zeroshard over gloo.")] = False,
    limit: Annotated[float, typer.Option(help="Seconds after which a run is killed and reported.")] = 240.0,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    out: Annotated[Path, typer.Option(help="The JSON file for all figures.")] = RESULTS / "zero_redundancy.json",
    saved: Annotated[Path | None, typer.Option(help="Print the table of this JSON file, and run nothing.")] = None,
    job: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Print one table."""
    if job is not None:
        write_result(job, run(read_job(job)))
        return
    if saved is not None:
        show_results(load(saved), markdown=markdown)
        return
    if only and only not in VARIANTS:
        raise typer.BadParameter(f"no variant is named {only}: choose of {'; '.join(VARIANTS)}")
    about = machine() | {"rounds": rounds, "steps": steps}
    about["parameters"] = sum(parameter.numel() for parameter in GPT(CONFIG).parameters())
    rows: dict[str, Any] = {}
    jobs: dict[str, dict[str, Any]] = {}
    began = time.monotonic()
    for count in map(int, ranks.split(",")):
        for variant in [only] if only else VARIANTS:
            for environment in ({}, GLOO) if gloo else ({},):
                key = f"{count} ranks, {variant}" + "; ours over gloo" * bool(environment)
                rows[key] = {"environment": environment, "runs": [], "failure": None}
                jobs[key] = {"ranks": count, "variant": variant, "steps": steps}
    results: dict[str, Any] = {"about": about, "rows": rows}
    with Console(stderr=True).status("") as line:
        for turn in range(rounds):
            for key, row in rows.items():
                line.update(f"round {turn + 1} of {rounds}: {key}")
                consolidate = turn == 0 and jobs[key]["variant"] == CONSOLIDATED and not row["environment"]
                todo = jobs[key] | {"consolidate": consolidate}
                found = None if row["failure"] else run_job(__file__, todo, limit, row["environment"])
                row["failure"] = found if isinstance(found, str) else row["failure"]
                row["runs"].append(found if isinstance(found, dict) else None)
                save(out, results)
    about["seconds"] = time.monotonic() - began
    save(out, results)
    show_results(results, markdown=markdown)


if __name__ == "__main__":
    typer.run(main)
