"""Owns the first part of `make bench`: a training step of a 50 M parameter GPT, under zeroshard and other systems.

Each system trains the same model on the same tokens in new processes, one system after another, for several rounds. A
round begins and ends with DDP. The time of a step is the slowest rank's. "x DDP" is the median over rounds of a ratio
within the round: the median of the system's steps, divided by the mean of the two DDP runs' medians. The lowest and
highest ratios are in brackets. DDP's own two rows therefore show the noise. "x FSDP2" is the same ratio to FSDP2 that
reshards its units.

CPU time (user and system), minor page faults, and bytes sent over TCP are for one step and one rank: means over the
steps and ranks of a run, and medians over runs. System time is also shown as a share of the step.

Peak memory comes from a separate run. It is the peak of all the run's processes together, less their memory right
before the model was made, divided by the number of ranks. A page that ranks share counts once (host_memory.py). In
that run malloc returns every freed block to the system, so that the peak counts live memory. Rows that are about
malloc's settings keep these settings.

    python benchmarks/step.py                                    # the README's table
    python benchmarks/step.py --only 'zs3*,fsdp2' --ranks 4      # some rows; DDP is always among them
    python benchmarks/step.py --batch 4 --checkpointing          # activation checkpointing in every system
    python benchmarks/step.py --saved benchmarks/results/step_2_ranks.json --markdown     # the table of an earlier run
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from figures import MIB, RESULTS, Column, Run, load, machine, median_of, number, ratios, save, show, spread
from host_memory import status, used_now
from jobs import RETURNS_PAGES, read_job, run_job, write_result
from rich.console import Console
from rows import DEEPSPEED, FIRST, LAST, RIVAL, Row, chosen
from sockets import sent_bytes
from systems import SYSTEMS

from zeroshard.testing.gpt import GPT, GPTConfig
from zeroshard.testing.ranks import run_ranks

CONFIG = GPTConfig(layers=16, width=512, heads=8, context=128)
WARMUP = 2
MEMORY_STEPS = 2
"""The steps after one warm-up step. All later steps have the peak of the second."""


def train(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Run one rank of one run."""
    torch.manual_seed(0)
    start_rss, start_host = status("VmRSS"), 0
    if "group" in job:
        dist.barrier()
        start_host = used_now(job["group"]) if rank == 0 else 0
        dist.barrier()
    model = GPT(CONFIG)
    step = SYSTEMS[job["system"]](model, checkpointed=job["checkpointed"])
    tokens = torch.Generator().manual_seed(rank)
    times, losses, steps = [], [], job["steps"]
    sent, used = 0, resource.getrusage(resource.RUSAGE_SELF)
    for i in range(job["warmup"] + steps):
        data = torch.randint(0, CONFIG.vocabulary, (job["batch"], CONFIG.context + 1), generator=tokens)
        dist.barrier()
        if i == job["warmup"]:
            sent = sent_bytes()
            dist.barrier()
            used = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        losses.append(float(step(data)))
        dist.barrier()
        if i >= job["warmup"]:
            times.append(time.perf_counter() - start)
    now = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "times": times,
        "losses": losses,
        "user": (now.ru_utime - used.ru_utime) / steps,
        "system": (now.ru_stime - used.ru_stime) / steps,
        "faults": (now.ru_minflt - used.ru_minflt) / steps,
        "sent": (sent_bytes() - sent) / steps,
        "peak": status("VmHWM") - start_rss,
        "start_host": start_host,
    }


def run_system(job: dict[str, Any]) -> Run:
    """Run one system. Return the seconds and mean loss of each step, and means over ranks of bytes and CPU seconds per step.

    Args:
        job: "system", "ranks", "batch", "checkpointed", "warmup" and "steps"; "limit" in seconds, and "group", come from jobs.py.
    """
    results = run_ranks(train, job["ranks"], job, timeout=job.get("limit", 3600.0), collective_timeout=300)
    run: Run = {
        "times": [max(times) for times in zip(*(result["times"] for result in results), strict=True)],
        "losses": [statistics.mean(losses) for losses in zip(*(result["losses"] for result in results), strict=True)],
        "peak_of_one": max(result["peak"] for result in results),
        "start_host": results[0]["start_host"],
    }
    return run | {
        key: statistics.mean(result[key] for result in results) for key in ("user", "system", "faults", "sent")
    }


class Comparison:
    """The rows and the results of their runs, which a table shows and a file stores."""

    def __init__(self, rows: dict[str, Row], about: dict[str, Any], deepspeed_path: Path | None, limit: float) -> None:
        self.rows, self._deepspeed_path, self._limit = rows, deepspeed_path, limit
        self.results: dict[str, Any] = {"about": about, "rows": {}}
        for key, row in rows.items():
            entry = {"label": row.label, "environment": row.environment, "is_training": row.is_training}
            self.results["rows"][key] = {**entry, "runs": [], "memory": {}, "failure": None}

    def run(self, key: str, warmup: int, steps: int, checkpointed: bool, *, memory: bool = False) -> Run | None:
        """Run a row once. Return None if it fails or has failed before."""
        entry, row, about = self.results["rows"][key], self.rows[key], self.results["about"]
        if entry["failure"]:
            return None
        job = {"system": row.system, "checkpointed": checkpointed, "warmup": warmup, "steps": steps}
        environment = (RETURNS_PAGES if memory else {}) | row.environment
        if key.startswith(DEEPSPEED) and self._deepspeed_path:
            paths = [str(self._deepspeed_path), os.environ.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        job |= {"ranks": about["ranks"], "batch": about["batch"]}
        found = run_job(__file__, job, self._limit, environment, memory=memory)
        if isinstance(found, str):
            entry["failure"] = found
            return None
        return found

    def measure_memory(self, key: str, checkpointed: bool) -> None:
        """Measure the peak of a row, in a separate run."""
        run = self.run(key, 1, MEMORY_STEPS, checkpointed, memory=True)
        if run:
            ranks = self.results["about"]["ranks"]
            peak = {"per_rank": (run["host_peak"] - run["start_host"]) / ranks, "peak_of_one": run["peak_of_one"]}
            self.results["rows"][key]["memory"]["checkpointed" if checkpointed else "plain"] = peak


def columns(results: dict[str, Any], *, brief: bool) -> list[Column]:
    """Return the columns of the table. `brief` selects the README's columns."""
    rows, about = results["rows"], results["about"]
    bases = [rows[key]["runs"] for key in (FIRST, LAST)]

    def per_step(key: str, field: str, scale: float) -> str:
        return number(median_of(rows[key]["runs"], field), scale)

    def system_time(key: str) -> str:
        runs = [run for run in rows[key]["runs"] if run]
        shares = [run["system"] / statistics.mean(run["times"]) for run in runs]
        return f"{per_step(key, 'system', 1e3)} ({100 * statistics.median(shares):.1f} %)" if runs else ""

    def loss(key: str) -> str:
        mine = next((run["losses"] for run in rows[key]["runs"] if run), None)
        theirs = next((run["losses"] for base in bases for run in base if run), None)
        if mine is None or theirs is None or not rows[key]["is_training"]:
            return ""
        apart = max(abs(round(a, 9) - round(b, 9)) for a, b in zip(mine, theirs, strict=True))
        return f"{mine[-1]:.9f} " + ("=" if apart < 1e-10 else f"± {apart:.0e}")

    def peak(kind: str) -> Column:
        heading = "peak per rank" + (", not checkpointed" if kind == "plain" and about["checkpointing"] else "")
        return f"{heading}, MiB", lambda key: number(rows[key]["memory"].get(kind, {}).get("per_rank"), 1 / MIB)

    found: list[Column] = [
        ("system", lambda key: rows[key]["label"]),
        ("step, x DDP", lambda key: rows[key]["failure"] or spread(ratios(rows[key]["runs"], bases))),
    ]
    if RIVAL in rows:
        found.append(("x FSDP2", lambda key: spread(ratios(rows[key]["runs"], [rows[RIVAL]["runs"]]))))
    found += [("step, ms", lambda key: per_step(key, "times", 1e3))]
    if not brief:
        found.append(("user, ms", lambda key: per_step(key, "user", 1e3)))
    found += [
        ("system, ms", system_time),
        ("page faults", lambda key: per_step(key, "faults", 1)),
        ("sent, MiB", lambda key: per_step(key, "sent", 1 / MIB)),
        *([peak("checkpointed")] if about["checkpointing"] else []),
        peak("plain"),
    ]
    return found if brief else [*found, ("last loss; all as DDP's", loss)]


def show_results(results: dict[str, Any], *, markdown: bool) -> None:
    """Print the table of this run or a saved one."""
    about, rows = results["about"], results["rows"]
    title = (
        f"GPT of {about['parameters'] / 1e6:.1f} M parameters, fp32, {about['ranks']} ranks on {about['cores']} cores"
    )
    title += f", {about['batch']} x {CONFIG.context} tokens each" + ", checkpointed" * about["checkpointing"]
    title += f"; {about['rounds']} rounds of {about['steps']} steps, {about.get('seconds', 0):.0f} s in all"
    title += f"; load {about['load at start']:.1f} when it began"
    show(title, columns(results, brief=markdown), list(rows), markdown=markdown)


def main(
    ranks: Annotated[int, typer.Option(help="Processes, one thread each.")] = 2,
    batch: Annotated[int, typer.Option(help="Sequences of 128 tokens per rank.")] = 1,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Activation checkpointing of every block.")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help="Rows by short name, as in rows.py: 'zs3*,fsdp2'.")] = None,
    rounds: Annotated[int, typer.Option(help="The number of rounds; 0 measures only peak memory.")] = 3,
    steps: Annotated[int, typer.Option(help="Timed steps per turn.")] = 4,
    memory: Annotated[bool, typer.Option(help="Measure peak memory, in separate runs.")] = True,
    limit: Annotated[float, typer.Option(help="Seconds after which a run is killed and reported.")] = 180.0,
    deepspeed_path: Annotated[
        Path | None, typer.Option(help="A folder in which the real DeepSpeed is installed.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the README's table.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="The JSON file for all figures. [default: benchmarks/results/step_...]")
    ] = None,
    saved: Annotated[Path | None, typer.Option(help="Print the table of this JSON file, and run nothing.")] = None,
    job: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Time a training step under zeroshard and other systems."""
    if job is not None:
        write_result(job, run_system(read_job(job)))
        return
    if saved is not None:
        show_results(load(saved), markdown=markdown)
        return
    try:
        rows = chosen(only or [], has_deepspeed=deepspeed_path is not None)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    about = machine() | {
        "ranks": ranks,
        "batch": batch,
        "checkpointing": checkpointing,
        "rounds": rounds,
        "steps": steps,
    }
    about["parameters"] = sum(parameter.numel() for parameter in GPT(CONFIG).parameters())
    name = f"step_{ranks}_ranks" + f"_batch_{batch}" * (batch != 1) + "_checkpointing" * checkpointing
    out = out or RESULTS / f"{name}.json"
    comparison, began = Comparison(rows, about, deepspeed_path, limit), time.monotonic()
    kinds = [False, True] if checkpointing else [False]
    with Console(stderr=True).status("") as line:
        for turn in range(rounds):
            for key, row in rows.items():
                line.update(f"round {turn + 1} of {rounds}: {row.label}")
                comparison.results["rows"][key]["runs"].append(comparison.run(key, WARMUP, steps, checkpointing))
                save(out, comparison.results)
        for key, row in rows.items():
            for checkpointed in kinds if memory and row.measures_memory else []:
                line.update(f"peak memory: {row.label}")
                comparison.measure_memory(key, checkpointed)
                save(out, comparison.results)
    about["seconds"] = time.monotonic() - began
    save(out, comparison.results)
    show_results(comparison.results, markdown=markdown)


if __name__ == "__main__":
    typer.run(main)
