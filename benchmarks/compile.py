"""Owns the benchmark of torch.compile (inductor) with DDP, FSDP2 and zeroshard: eager, compiled blocks, compiled models.

Every row trains the same model on the same tokens. All rows share two processes and take turns of a few steps, so
rows that are compared ran under the same load. Each block, or the model, is compiled before the system gets it, as
users of FSDP2 do. "x eager" is the ratio to the same system without torch.compile. "x DDP" and "x FSDP2" are ratios
to these systems, compiled in the same way. Each ratio compares times from one round. "graphs after" counts graphs
that were compiled after the second step; it should be 0.

    python benchmarks/compile.py
    python benchmarks/compile.py --only zs3,fsdp2 --rounds 9 --batch 4
"""

from __future__ import annotations

import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from figures import RESULTS, Column, load, machine, median_of, number, ratios, save, show, spread
from jobs import read_job, run_job, write_result
from systems import SYSTEMS, TrainStep

from zeroshard.testing.gpt import GPT, GPTConfig
from zeroshard.testing.ranks import run_ranks

CONFIG = GPTConfig(layers=6, width=384, heads=6, context=128)
WARMUP = 2
KINDS = {
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    **{f"zs{stage}": f"zeroshard stage {stage}" for stage in range(4)},
}
EAGER, BLOCKS, WHOLE = "eager", "blocks compiled", "compiled whole"
CHECKPOINTED = ("fsdp2", "zs2", "zs3")
"""The systems that are also timed with activation checkpointing."""


def train(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Run one rank: warm up every row, then time the rows in turns. Return seconds by row and round, and other measurements."""
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = (
        4096  # many rows, one process
    )
    steps, found = dict[str, Any](), dict[str, Any]()
    for key, row in job["rows"].items():
        try:
            steps[key] = _make(row)
            losses = [_step(steps[key], job, rank, number) for number in range(WARMUP)]
            found[key] = {"rounds": [], "losses": [loss for loss, _ in losses], "graphs": 0}
        except Exception as error:
            steps.pop(key, None)
            found[key] = {
                "failure": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
            }
            traceback.print_exc()
    if rank == 0:
        print(f"{len(steps)} rows are warm", file=sys.stderr, flush=True)
    for turn in range(job["rounds"]):
        for key, step in steps.items():
            graphs, number = _graphs(), WARMUP + turn * job["steps"]
            results = [_step(step, job, rank, number + i) for i in range(job["steps"])]
            found[key]["rounds"].append([seconds for _, seconds in results])
            found[key]["losses"] += [loss for loss, _ in results]
            found[key]["graphs"] += _graphs() - graphs
    return found


def _make(row: dict[str, Any]) -> TrainStep:
    torch.manual_seed(0)
    model = GPT(CONFIG)
    if row["how"] == BLOCKS:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, fullgraph=True)  # type: ignore[assignment]
    elif row["how"] == WHOLE:
        model.compile()
    return SYSTEMS[row["system"]](model, checkpointed=row["checkpointed"])


def _step(step: TrainStep, job: dict[str, Any], rank: int, number: int) -> tuple[float, float]:
    """Run one step and return (loss, seconds)."""
    tokens = torch.Generator().manual_seed(2 * number + rank)
    data = torch.randint(0, CONFIG.vocabulary, (job["batch"], CONFIG.context + 1), generator=tokens)
    dist.barrier()
    start = time.perf_counter()
    loss = float(step(data))
    dist.barrier()
    return loss, time.perf_counter() - start


def _graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def run_rows(job: dict[str, Any]) -> dict[str, Any]:
    """Return by row: for each round the slowest rank's seconds of each step, the mean losses, and the number of late graphs."""
    by_rank = run_ranks(train, job["ranks"], job, timeout=job["limit"], collective_timeout=300)
    found = dict[str, Any]()
    for key in job["rows"]:
        own = [one[key] for one in by_rank]
        failure = next((one["failure"] for one in own if "failure" in one), None)
        if failure is not None:
            found[key] = failure
            continue
        rounds = zip(*(one["rounds"] for one in own), strict=True)
        losses = [statistics.mean(each) for each in zip(*(one["losses"] for one in own), strict=True)]
        found[key] = [
            {"times": [max(each) for each in zip(*ranks, strict=True)], "losses": losses, "graphs": max(one["graphs"] for one in own)}
            for ranks in rounds
        ]  # fmt: skip
    return found


def columns(results: dict[str, Any]) -> list[Column]:
    """Return the columns of the table."""
    rows = results["rows"]

    def over(key: str, base: str) -> str:
        return spread(ratios(rows[key]["runs"], [rows[base]["runs"]])) if base in rows and base != key else ""

    def beside(key: str, system: str) -> str:
        return over(key, f"{system}, {key.partition(', ')[2]}")

    def eager(key: str) -> str:
        return over(key, ", ".join(EAGER if part in (BLOCKS, WHOLE) else part for part in key.split(", ")))

    def loss(key: str) -> str:
        run = next((run for run in rows[key]["runs"] if run), None)
        return "" if run is None else f"{run['losses'][-1]:.7f}"

    return [
        ("system", lambda key: rows[key]["label"]),
        ("step, ms", lambda key: rows[key]["failure"] or number(median_of(rows[key]["runs"], "times"), 1e3)),
        ("x eager", eager),
        ("x DDP", lambda key: beside(key, "ddp")),
        ("x FSDP2", lambda key: beside(key, "fsdp2")),
        ("graphs after", lambda key: number(median_of(rows[key]["runs"], "graphs"))),
        ("last loss", loss),
    ]


def show_results(results: dict[str, Any], *, markdown: bool) -> None:
    """Print the table of this run or a saved one."""
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
    only: Annotated[str, typer.Option(help="Systems by short name: ddp, fsdp2, zs0, zs1, zs2, zs3.")] = ",".join(KINDS),
    rounds: Annotated[int, typer.Option(help="The number of rounds.")] = 5,
    steps: Annotated[int, typer.Option(help="Timed steps per turn.")] = 3,
    limit: Annotated[float, typer.Option(help="Seconds after which the run is killed and reported.")] = 1800.0,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table in Markdown.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The JSON file for all figures. [default: benchmarks/results/]")
    ] = None,
    saved: Annotated[Path | None, typer.Option(help="Print the table of this JSON file, and run nothing.")] = None,
    job: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Time a training step under torch.compile."""
    if job is not None:
        write_result(job, run_rows(read_job(job)))
        return
    if saved is not None:
        show_results(load(saved), markdown=markdown)
        return
    chosen = [name for name in KINDS if name in only.split(",")]
    about = machine() | {"ranks": ranks, "batch": batch, "rounds": rounds, "steps": steps}
    about["parameters"] = sum(parameter.numel() for parameter in GPT(CONFIG).parameters())
    rows: dict[str, Any] = {}
    for checkpointed in (False, True):
        for name in chosen if not checkpointed else [name for name in chosen if name in CHECKPOINTED]:
            for how in (EAGER, BLOCKS, WHOLE) if not checkpointed else (EAGER, BLOCKS):
                end = f"{how}{', checkpointed' * checkpointed}"
                row = {
                    "label": f"{KINDS[name]}, {end}",
                    "system": KINDS[name],
                    "how": how,
                    "checkpointed": checkpointed,
                }
                rows[f"{name}, {end}"] = row | {"runs": [], "failure": None}
    results = {"about": about, "rows": rows}
    work = {"rows": rows, "ranks": ranks, "batch": batch, "rounds": rounds, "steps": steps}
    found = run_job(__file__, work, limit)
    if isinstance(found, str):
        raise SystemExit(found)
    for key, row in rows.items():
        row["failure"] = found[key] if isinstance(found[key], str) else None
        row["runs"] = found[key] if row["failure"] is None else []
    save(out or RESULTS / f"compile_{ranks}_ranks.json", results)
    show_results(results, markdown=markdown)


if __name__ == "__main__":
    typer.run(main)
