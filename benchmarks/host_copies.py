"""Owns the benchmark of checkpoint copies in another host's memory: their cost per step, and the time to restore a lost host.

Two hosts (tests/support/hosts/two_hosts.py) train a GPT at stage 3 and save asynchronously every few steps. A run saves
nothing, a checkpoint in a folder that both hosts see, or one in each host's own /dev/shm with copies on the other
host (`node_local=True`). The time of a step is the time of all steps divided by their number, including the time
for which saves block training. Then new processes load the checkpoint; for the copies, the second host's folder
is empty. The shared folder is on a disk of this machine, without a network in between, so a file system for many
hosts would be slower.

    python benchmarks/host_copies.py
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from figures import MIB, RESULTS, Run, machine, median_of, number, ratios, save, show, spread

import zeroshard
from zeroshard.launch import init_distributed
from zeroshard.testing.gpt import GPT, GPTConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support" / "hosts"))

CONFIGS = {"10M": GPTConfig(context=128), "50M": GPTConfig(layers=16, width=512, heads=8, context=128)}
NOTHING, FILES, COPIES = "no checkpoints", "files that all see", "copies in memory"
WARMUP = 2


def folder_of(job: dict[str, Any]) -> Path:
    """Return the folder that this rank's host saves to."""
    return Path(job["memory"], f"host{dist.get_rank() // job['ranks']}") if job["to"] == COPIES else Path(job["disk"])


def made(job: dict[str, Any]) -> tuple[GPT, zeroshard.Sharded]:
    torch.manual_seed(0)
    model = GPT(CONFIGS[job["size"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, zeroshard.shard(model, optimizer, zeroshard.Policy.stage(3, within="host"))


def check_sum(model: GPT) -> float:
    """Return the parameters' sum, which is bit-identical if the load restored the saved values."""
    with zeroshard.unsharded(model):
        return float(sum(p.detach().double().sum() for p in model.parameters()))


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Run one rank's training."""
    model, sharded = made(job)
    tokens = torch.Generator().manual_seed(dist.get_rank())
    stalls, start = [], 0.0
    for step in range(WARMUP + job["steps"]):
        if step == WARMUP:
            dist.barrier()
            start = time.perf_counter()
        data = torch.randint(0, model.config.vocabulary, (1, model.config.context + 1), generator=tokens)
        model(data[:, :-1], data[:, 1:]).backward()
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
        if job["to"] != NOTHING and step >= WARMUP and (step - WARMUP + 1) % job["every"] == 0:
            before = time.perf_counter()
            own = job["to"] == COPIES
            sharded.save(folder_of(job), f"step{step}", asynchronous=True, keep_last=1, node_local=own)
            stalls.append(time.perf_counter() - before)
    dist.barrier()
    trained = time.perf_counter()
    sharded.checkpoints.wait()
    found = {"times": [(trained - start) / job["steps"]], "stall": stalls, "behind": time.perf_counter() - trained}
    return {**found, "sum": check_sum(model), "nbytes": 3 * sum(p.nbytes for p in model.parameters())}


def resume(job: dict[str, Any]) -> dict[str, Any]:
    """Resume on one rank and return the time from joining the ranks to loaded states."""
    model, sharded = made(job)
    dist.barrier()
    start = time.perf_counter()
    sharded.load(folder_of(job), node_local=job["to"] == COPIES)
    dist.barrier()
    return {"load": time.perf_counter() - start, "sum": check_sum(model)}


def of_all_ranks(job: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    """Run a job on fresh hosts and return each rank's results."""
    from two_hosts import TwoHosts

    with tempfile.TemporaryDirectory() as folder, TwoHosts(job["delay_us"], job["mbit"]) as hosts:
        text = json.dumps({**job, "folder": folder})
        outcomes = hosts.torchrun(job["ranks"], Path(__file__), "--job", text, timeout=timeout)
        if any(one.status for one in outcomes):
            raise SystemExit(f"{job['to']} failed:\n" + "\n".join(one.log[-3000:] for one in outcomes))
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


def run(to: str, job: dict[str, Any], timeout: float) -> Run:
    """Train and, if the run saved, resume."""
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        job = {**job, "to": to, "disk": disk, "memory": memory}
        trained = of_all_ranks({**job, "part": "train"}, timeout)
        found: Run = {"times": [max(one["times"][0] for one in trained)], "nbytes": trained[0]["nbytes"]}
        if to == NOTHING:
            return found
        found["stall"] = [max(stalls) for stalls in zip(*(one["stall"] for one in trained), strict=True)]
        found["behind"] = max(one["behind"] for one in trained)
        if to == COPIES:
            shutil.rmtree(Path(memory, "host1"))
        loaded = of_all_ranks({**job, "part": "resume"}, timeout)
        assert {one["sum"] for one in loaded} == {one["sum"] for one in trained}, (
            "the loaded values are not the saved ones"
        )
        return {**found, "load": max(one["load"] for one in loaded)}


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=1)] = 20,
    every: Annotated[int, typer.Option(min=1, help="Steps between saves.")] = 5,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks on each host.")] = 1,
    size: Annotated[str, typer.Option(help=" or ".join(CONFIGS))] = "10M",
    mbit: Annotated[int, typer.Option(help="The bandwidth of the link in Mbit/s, in each direction.")] = 1000,
    delay_us: Annotated[int, typer.Option(help="The delay of the link in microseconds, in each direction.")] = 1000,
    timeout: Annotated[float, typer.Option(help="The time limit of a run in seconds.")] = 600.0,
    markdown: bool = False,
    job: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure training with asynchronous saves, and loads after a host was lost."""
    if job is not None:
        told = json.loads(job)
        torch.set_num_threads(1)
        init_distributed()
        found = (train if told["part"] == "train" else resume)(told)
        Path(told["folder"], f"{dist.get_rank()}.json").write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()
        return
    what = {"steps": steps, "every": every, "ranks": ranks, "size": size, "mbit": mbit, "delay_us": delay_us}
    about, systems = machine(), (NOTHING, FILES, COPIES)
    runs: dict[str, list[Run | None]] = {to: [] for to in systems}
    for _ in range(rounds):
        for to in systems:
            runs[to].append(run(to, what, timeout))
    save(RESULTS / f"host_copies_{size}.json", {"machine": about, **what, "runs": runs})

    def cell(key: str, unit: str) -> Any:
        return lambda to: "" if to == NOTHING else number(median_of(runs[to], key), 1e3, 0, unit)

    nbytes = statistics.median(one["nbytes"] for one in runs[NOTHING] if one)
    show(
        f"{nbytes / MIB:.0f} MiB of states saved every {every} steps, 2 hosts of {ranks}, {mbit} Mbit/s and {delay_us} us",
        [
            ("", lambda to: to),
            ("step, ms", lambda to: number(median_of(runs[to], "times"), 1e3)),
            ("x without", lambda to: spread(ratios(runs[to], [runs[NOTHING]]))),
            ("stall of a save", cell("stall", " ms")),
            ("last save goes on", cell("behind", " ms")),
            ("load", cell("load", " ms")),
        ],
        systems,
        markdown=markdown,
    )


if __name__ == "__main__":
    typer.run(main)
