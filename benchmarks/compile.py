"""Owns the time of a training step with compiled blocks: DDP, FSDP2 and zeroshard, each eager and with torch.compile (inductor).

The same model, tokens and processes as step.py; each block is compiled before the system takes the model, as FSDP2's users do it. Rounds go over all
rows, so that a row and the ones that it is compared with share the machine's moods. "x eager" is a row over the same system without torch.compile,
"x DDP" over DDP that is compiled as it is, both within a round. What torch.compile took stands beside it, and so do the graphs that the steps after
made: there are to be none.

    python benchmarks/compile.py
    python benchmarks/compile.py --only zs3,fsdp2 --rounds 5 --batch 4
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from figures import RESULTS, Column, Run, load, machine, median_of, number, ratios, save, show, spread
from jobs import read_job, run_job, write_result
from rich.console import Console
from systems import SYSTEMS

from zeroshard.testing.gpt import GPT, GPTConfig
from zeroshard.testing.ranks import run_ranks

CONFIG = GPTConfig(layers=16, width=512, heads=8, context=128)
WARMUP = 3
KINDS = {
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "zs1": "zeroshard stage 1",
    "zs2": "zeroshard stage 2",
    "zs3": "zeroshard stage 3",
}
EAGER, COMPILED = "eager", "compiled"


def train(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """One rank's part of one run."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    if job["compiled"]:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, fullgraph=True)  # type: ignore[assignment]
    step = SYSTEMS[job["system"]](model)
    tokens = torch.Generator().manual_seed(rank)
    times, losses, graphs = [], [], 0
    for i in range(WARMUP + job["steps"]):
        data = torch.randint(0, CONFIG.vocabulary, (job["batch"], CONFIG.context + 1), generator=tokens)
        if i == WARMUP:
            graphs = _graphs()
        dist.barrier()
        start = time.perf_counter()
        losses.append(float(step(data)))
        dist.barrier()
        times.append(time.perf_counter() - start)
    return {"first": times[0], "times": times[WARMUP:], "losses": losses, "graphs": _graphs() - graphs}


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def run_system(job: dict[str, Any]) -> Run:
    """One run of one row: the slowest rank's seconds of each step and of the first one, the mean losses, the graphs that were made late."""
    results = run_ranks(train, job["ranks"], job, timeout=job["limit"], collective_timeout=300)
    return {
        "times": [max(times) for times in zip(*(result["times"] for result in results), strict=True)],
        "first": max(result["first"] for result in results),
        "losses": [statistics.mean(losses) for losses in zip(*(result["losses"] for result in results), strict=True)],
        "graphs": max(result["graphs"] for result in results),
    }


def columns(results: dict[str, Any]) -> list[Column]:
    """The table's columns."""
    rows = results["rows"]

    def over(key: str, base: str) -> str:
        return spread(ratios(rows[key]["runs"], [rows[base]["runs"]])) if base in rows and base != key else ""

    def base_of(key: str) -> str:
        return f"ddp, {key.partition(', ')[2]}"

    def loss(key: str) -> str:
        run = next((run for run in rows[key]["runs"] if run), None)
        return "" if run is None else f"{run['losses'][-1]:.7f}"

    return [
        ("system", lambda key: rows[key]["label"]),
        ("step, ms", lambda key: rows[key]["failure"] or number(median_of(rows[key]["runs"], "times"), 1e3)),
        ("x eager", lambda key: over(key, f"{key.partition(', ')[0]}, {EAGER}")),
        ("x DDP", lambda key: over(key, base_of(key))),
        ("first step, s", lambda key: number(median_of(rows[key]["runs"], "first"), digits=1)),
        ("graphs after", lambda key: number(median_of(rows[key]["runs"], "graphs"))),
        ("last loss", loss),
    ]


def show_results(results: dict[str, Any], *, markdown: bool) -> None:
    """Print the table of a run, of now or before."""
    about = results["about"]
    title = (
        f"GPT of {about['parameters'] / 1e6:.1f} M parameters, fp32, {about['ranks']} ranks on {about['cores']} cores"
    )
    title += f", {about['batch']} x {CONFIG.context} tokens each; {about['rounds']} rounds of {about['steps']} steps"
    title += f"; load {about['load at start']:.1f} when it began"
    show(title, columns(results), list(results["rows"]), markdown=markdown)


def main(
    ranks: Annotated[int, typer.Option(help="Processes, one thread each.")] = 2,
    batch: Annotated[int, typer.Option(help="Sequences of 128 tokens per rank.")] = 1,
    only: Annotated[str, typer.Option(help="Systems by short name: ddp, fsdp2, zs1, zs2, zs3.")] = ",".join(KINDS),
    rounds: Annotated[int, typer.Option(help="How often each row has its turn.")] = 3,
    steps: Annotated[int, typer.Option(help="Timed steps per turn.")] = 6,
    limit: Annotated[float, typer.Option(help="Seconds after which a run is ended and told.")] = 300.0,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table in Markdown.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where all figures go as JSON. [default: benchmarks/results/]")
    ] = None,
    saved: Annotated[Path | None, typer.Option(help="Run nothing: show an earlier run's JSON.")] = None,
    job: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Time a training step with compiled blocks."""
    if job is not None:
        write_result(job, run_system(read_job(job)))
        return
    if saved is not None:
        show_results(load(saved), markdown=markdown)
        return
    chosen = [name for name in KINDS if name in {"ddp", *only.split(",")}]
    about = machine() | {"ranks": ranks, "batch": batch, "rounds": rounds, "steps": steps}
    about["parameters"] = sum(parameter.numel() for parameter in GPT(CONFIG).parameters())
    rows: dict[str, Any] = {
        f"{name}, {kind}": {"label": f"{KINDS[name]}, {kind}", "system": KINDS[name], "runs": [], "failure": None}
        for name in chosen
        for kind in (EAGER, COMPILED)
    }
    results = {"about": about, "rows": rows}
    out = out or RESULTS / f"compile_{ranks}_ranks.json"
    with Console(stderr=True).status("") as line:
        for turn in range(rounds):
            for key, row in rows.items():
                line.update(f"round {turn + 1} of {rounds}: {row['label']}")
                work = {"system": row["system"], "compiled": key.endswith(COMPILED), "ranks": ranks, "batch": batch}
                found = row["failure"] or run_job(__file__, work | {"steps": steps}, limit)
                row["failure"] = found if isinstance(found, str) else None
                row["runs"].append(None if isinstance(found, str) else found)
                save(out, results)
    show_results(results, markdown=markdown)


if __name__ == "__main__":
    typer.run(main)
