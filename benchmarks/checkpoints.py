"""Owns the checkpoint part of `make bench`: saves and loads of a 50 M parameter GPT with Adam, under several systems.

Every system trains one step, then saves and loads in turn, for several rounds, in the same folder. Right before each
save, `dd` writes as many bytes there and flushes them (conv=fsync), which shows the disk's bandwidth at that moment.
A zeroshard save ends when its files are flushed. DCP and DeepSpeed flush nothing by default, so `sync` runs after
each, and its time counts.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import zeroshard
from zeroshard.testing.gpt import GPT, GPTConfig
from zeroshard.testing.ranks import run_ranks

CONFIG = GPTConfig(layers=16, width=512, heads=8, context=128)
MIB = 2**20
Work = Callable[[Path], Any]


def _timed(work: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def _flushed(work: Callable[[], Any]) -> Callable[[], None]:
    def run() -> None:
        work()
        dist.barrier()
        os.sync()

    return run


def _step(forward: Any, optimizer: Any) -> None:
    tokens = torch.randint(0, 256, (1, 65))
    forward(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _ours() -> tuple[Work, Work, zeroshard.Sharded]:
    model = GPT(CONFIG)
    sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), fused=True), zeroshard.Policy.stage(2))
    _step(model, sharded.optimizer)
    return partial(_save, sharded), sharded.load, sharded


def _save(sharded: zeroshard.Sharded, folder: Path) -> None:
    sharded.save(folder, "a")


def _dcp() -> tuple[Work, Work]:
    """Return FSDP2's save and load, as in torch's tutorial."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = GPT(CONFIG)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _step(model, optimizer)

    def save(folder: Path) -> None:
        state, optim = get_state_dict(model, optimizer)
        dcp_save({"model": state, "optim": optim}, checkpoint_id=folder)

    def load(folder: Path) -> None:
        state, optim = get_state_dict(model, optimizer)
        dcp_load({"model": state, "optim": optim}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optim)

    return save, load


def _deepspeed() -> tuple[Work, Work]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed as peer

    model = GPT(CONFIG)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine, *_ = peer.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    tokens = torch.randint(0, 256, (1, 65))
    engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
    engine.step()
    return (lambda folder: engine.save_checkpoint(str(folder))), (lambda folder: engine.load_checkpoint(str(folder)))


def train(rank: int, system: str, folder: str, rounds: int) -> dict[str, list[float]]:
    """Run one rank. Return the seconds of each save and load and, for zeroshard, how long an asynchronous save blocks."""
    torch.manual_seed(0)
    path, times = Path(folder), dict[str, list[float]](save=[], load=[], stall=[], dd=[])
    sharded = None
    if system == "zeroshard":
        save, load, sharded = _ours()
    else:
        save, load = _dcp() if system == "DCP" else _deepspeed()
    states = 12 * sum(p.numel() for p in GPT(CONFIG).parameters())
    for number in range(rounds + 1):
        target = path / f"{number}"
        if rank == 0:
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
        dist.barrier()
        dd = _timed(lambda: _dd(path / "dd", states) if rank == 0 else None)
        once = partial(save, target)
        saved = _timed(once if sharded else _flushed(once))
        loaded = _timed(partial(load, target))
        stall = 0.0
        if sharded is not None:
            stall = _timed(partial(sharded.save, target, "b", asynchronous=True))
            sharded.checkpoints.wait()
        if number:  # the first round warms up
            for kind, seconds in zip(("dd", "save", "load", "stall"), (dd, saved, loaded, stall), strict=True):
                times[kind].append(seconds)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(target)
    return times


def _dd(path: Path, nbytes: int) -> None:
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={nbytes // (4 << 20)}", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)
    path.unlink()


def main(
    ranks: Annotated[int, typer.Option(help="Processes, one thread each.")] = 2,
    rounds: Annotated[int, typer.Option(help="Saves and loads of each system, after one warm-up.")] = 4,
    folder: Annotated[Path | None, typer.Option(help="Where to write; default: a temporary folder.")] = None,
) -> None:
    """Time saves and loads under zeroshard and other systems."""
    systems = ["zeroshard", "DCP", *(["DeepSpeed"] if importlib.util.find_spec("deepspeed") else [])]
    numel = sum(p.numel() for p in GPT(CONFIG).parameters())
    table = Table(
        title=f"Checkpoints of {numel / 1e6:.1f} M parameters with Adam ({12 * numel / MIB:.0f} MiB), {ranks} ranks"
    )
    for column in ("system", "save / dd", "save", "asynchronous stall", "load", "dd"):
        table.add_column(column, justify="left" if column == "system" else "right", no_wrap=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        for system in systems:
            results = run_ranks(train, ranks, system, name, rounds, timeout=900, collective_timeout=600)
            times = {kind: [max(r[kind][i] for r in results) for i in range(rounds)] for kind in results[0]}
            ratio = statistics.median(a / b for a, b in zip(times["save"], times["dd"], strict=True))
            median = {kind: statistics.median(values) for kind, values in times.items()}
            table.add_row(
                system,
                f"{ratio:.2f}",
                f"{median['save'] * 1e3:.0f} ms",
                f"{median['stall'] * 1e3:.0f} ms ({median['stall'] / median['save']:.2f})"
                if system == "zeroshard"
                else "",
                f"{median['load'] * 1e3:.0f} ms",
                f"{median['dd'] * 1e3:.0f} ms",
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
