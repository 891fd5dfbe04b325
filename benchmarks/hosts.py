"""Owns the benchmark of several hosts: a training step of a GPT on two hosts with a slow link, under several systems.

The hosts are namespaces of this machine (tests/support/hosts/two_hosts.py), each with its own torchrun. A link of the given
bandwidth and delay joins them; by default 1 Gbit/s and 1 ms. Each round runs every system once, in new processes. The
time of a step is the slowest rank's. "x DDP" divides a system's median step by DDP's median step of the same round,
and is the median over rounds. Bytes across are the bytes that one host sent in a step, with all headers, as its
kernel counts them. "of the formula" is their ratio to the bytes that zeroshard's formulas give for parameters and gradients.

    python benchmarks/hosts.py
    python benchmarks/hosts.py --only 'DDP,zeroshard*' --ranks 1 --mbit 100 --delay-us 5000
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from figures import MIB, RESULTS, Run, machine, median_of, number, ratios, save, show, spread
from systems import TrainStep, adamw, ddp, fsdp2, loop
from torch import nn

import zeroshard
from zeroshard.testing.gpt import GPT, GPTConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support" / "hosts"))

HOSTS = 2
CONFIGS = {"10M": GPTConfig(context=128), "50M": GPTConfig(layers=16, width=512, heads=8, context=128)}
WARMUP = 2


def hsdp(ranks: int, model: nn.Module) -> TrainStep:
    """Return FSDP2 over the ranks of each host (HSDP)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (HOSTS, ranks), mesh_dim_names=("across", "inside"))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return loop(model, adamw(model))


def zero(stage: int, within: bool, _: int, model: nn.Module) -> TrainStep:
    """Return zeroshard, over all ranks or within hosts."""
    policy = zeroshard.Policy.stage(stage, within="host" if within else None)
    return loop(model, zeroshard.shard(model, adamw(model), policy).optimizer)


SYSTEMS: dict[str, Callable[[int, nn.Module], TrainStep]] = {
    "DDP": lambda _, model: ddp(model),
    "FSDP2": lambda _, model: fsdp2(True, model),
    "FSDP2 as HSDP": hsdp,
    **{f"zeroshard stage {stage}": partial(zero, stage, False) for stage in (1, 2, 3)},
    **{f"zeroshard stage {stage}, within hosts": partial(zero, stage, True) for stage in (1, 2, 3)},
}


def across(system: str, ranks: int, nbytes: int) -> float | None:
    """Return the bytes that a host sends across in a step by the formulas, for fp32 states of `nbytes` each."""
    if not system.startswith("zeroshard"):
        return None
    if "within" in system:
        return 2 * nbytes * (HOSTS - 1) / HOSTS
    # A gathered row crosses once. Each of a host's ranks has a row for each rank elsewhere.
    gathers = 2 if "stage 3" in system else 1
    return (gathers + ranks) * nbytes * (HOSTS - 1) / HOSTS


# ---------------------------------------------------------------------- one rank


def given_to_wire() -> int:
    """Return the bytes that this host has sent so far."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return int(next(line for line in lines if "wire0" in line).split(":")[1].split()[8])


def given_when_quiet() -> int:
    """Return the bytes that this host has sent, after all messages of a step. Every rank must call it."""
    dist.barrier()
    before = -1
    while before != (now := given_to_wire()):
        before = now
        time.sleep(0.2)
    dist.barrier()
    return now


def train(job: dict[str, Any]) -> None:
    """Run one rank of one run."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    config = CONFIGS[job["size"]]
    model = GPT(config)
    nbytes = sum(p.nbytes for p in model.parameters())
    step = SYSTEMS[job["system"]](job["ranks"], model)
    tokens = torch.Generator().manual_seed(rank)
    times, losses, sent = [], [], 0
    for i in range(WARMUP + job["steps"]):
        data = torch.randint(0, config.vocabulary, (job["batch"], config.context + 1), generator=tokens)
        dist.barrier()
        if i == WARMUP:
            sent = given_when_quiet()
        start = time.perf_counter()
        losses.append(float(step(data)))
        if i >= WARMUP:
            times.append(time.perf_counter() - start)
    found = {"times": times, "losses": losses, "across": (given_when_quiet() - sent) / job["steps"], "nbytes": nbytes}
    Path(job["folder"], f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# ---------------------------------------------------------------------- all of them


def run(system: str, job: dict[str, Any], delay_us: int, mbit: int, timeout: float) -> Run | None:
    """Run one system in new processes on new hosts. Return None, and report it, if it failed."""
    from two_hosts import TwoHosts

    with tempfile.TemporaryDirectory() as folder, TwoHosts(delay_us, mbit) as hosts:
        text = json.dumps({**job, "system": system, "folder": folder})
        outcomes = hosts.torchrun(job["ranks"], Path(__file__), "--job", text, timeout=timeout)
        if any(one.status for one in outcomes):
            print(f"{system} failed:\n" + "\n".join(one.log[-2000:] for one in outcomes), file=sys.stderr)
            return None
        told = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    slowest = [max(step) for step in zip(*(one["times"] for one in told), strict=True)]
    sent = statistics.mean(one["across"] for one in told)
    return {"times": slowest, "across": sent, "nbytes": told[0]["nbytes"], "losses": told[0]["losses"]}


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=1)] = 8,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks on each host.")] = 2,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    size: Annotated[str, typer.Option(help=" or ".join(CONFIGS))] = "10M",
    mbit: Annotated[int, typer.Option(help="The bandwidth of the link in Mbit/s, in each direction.")] = 1000,
    delay_us: Annotated[int, typer.Option(help="The delay of the link in microseconds, in each direction.")] = 1000,
    only: Annotated[
        str, typer.Option(help="Patterns of systems, separated by commas; DDP is always among them.")
    ] = "*",
    timeout: Annotated[float, typer.Option(help="The time limit of a run in seconds.")] = 600.0,
    markdown: bool = False,
    job: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure a step of each system over two hosts."""
    if job is not None:
        train(json.loads(job))
        return
    chosen = [one for one in SYSTEMS if one == "DDP" or any(fnmatch(one, pattern) for pattern in only.split(","))]
    what = {"steps": steps, "ranks": ranks, "batch": batch, "size": size}
    found: dict[str, list[Run | None]] = {system: [] for system in chosen}
    about = machine()
    for _ in range(rounds):
        for system in chosen:
            found[system].append(run(system, what, delay_us, mbit, timeout))
    save(
        RESULTS / f"hosts_{ranks}_ranks.json",
        {"machine": about, "wire": {"mbit": mbit, "delay_us": delay_us}, **what, "runs": found},
    )

    def formula(system: str) -> str:
        runs = [one for one in found[system] if one]
        expected = across(system, ranks, runs[0]["nbytes"]) if runs else None
        return "" if expected is None else f"{statistics.median(one['across'] for one in runs) / expected:.3f}"

    show(
        f"{HOSTS} hosts of {ranks} ranks, {mbit} Mbit/s and {delay_us} us between them",
        [
            ("", lambda system: system),
            ("step, ms", lambda system: number(median_of(found[system], "times"), 1e3)),
            ("x DDP", lambda system: spread(ratios(found[system], [found["DDP"]]))),
            ("across, MiB", lambda system: number(median_of(found[system], "across"), 1 / MIB, 1)),
            (
                "of the formula",
                formula,
            ),  # an upper limit for flat stage 3, since kept units are not gathered again
        ],
        chosen,
        markdown=markdown,
    )


if __name__ == "__main__":
    typer.run(main)
