"""Trains a model whose states are several times the memory that each process may use, with the states on disk.

    python benchmarks/larger_than_memory.py --limit 384 --times 4 --folder /tmp

Each rank is a process in a separate control group, to which the kernel applies the limit: it kills a process that
exceeds it, and nothing can be swapped out. The same training also runs without a limit and with everything in memory,
and the losses must be equal to the last bit. Making control groups needs special rights; without them, the script
exits with status 3.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from host_memory import ControlGroup, NoControlGroups

MIB = 1 << 20
NO_CONTROL_GROUPS = 3
BUCKET_NUMEL = 1 << 20


def control_group(limit: int) -> ControlGroup:
    """Return a new control group or end the script."""
    try:
        return ControlGroup(limit)
    except NoControlGroups as error:
        print(error, file=sys.stderr)
        raise SystemExit(NO_CONTROL_GROUPS) from None


@contextmanager
def ranks(arguments: argparse.Namespace, limit: int | None) -> Iterator[list[dict[str, Any]]]:
    """Train in `arguments.ranks` new processes and return the report of each."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    groups = [control_group(limit) for _ in range(arguments.ranks)] if limit is not None else [None] * arguments.ranks
    processes = []
    for rank, group in enumerate(groups):
        # Freed memory is returned to the system; heaps of many threads would each keep some.
        environment = os.environ | {
            "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(arguments.ranks),
            "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "2",
        }  # fmt: skip
        command = [sys.executable, __file__, "--as-rank", *sys.argv[1:], *(["--bounded"] if group else [])]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, preexec_fn=group.join if group else None)  # noqa: PLW1509
        )
    outputs = [process.communicate()[0] for process in processes]
    peaks = [group.peak if group else None for group in groups]
    for group in groups:
        if group:
            group.close()
    failed = [(rank, process.returncode) for rank, process in enumerate(processes) if process.returncode]
    if failed:
        raise SystemExit(f"ranks failed (rank, status): {failed}; -9: killed, for example at the memory limit")
    yield [json.loads(output.splitlines()[-1]) | {"peak": peak} for output, peak in zip(outputs, peaks, strict=True)]


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train on one rank."""
    import torch
    import torch.distributed as dist

    import zeroshard
    from zeroshard import Offload, Place, Policy
    from zeroshard.testing.gpt import GPT, GPTConfig

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    policy = Policy.stage(3)
    if arguments.bounded:
        of_optimizer = Offload(arguments.folder, buffer_count=4, buffer_numel=arguments.buffers * MIB // 16)
        of_parameters = Offload(arguments.folder, buffer_count=4, buffer_numel=BUCKET_NUMEL // arguments.ranks)
        policy = policy.offloaded(optimizer=Place.DISK, offload=of_optimizer)
        policy = policy.offloaded(parameters=Place.DISK, offload=of_parameters)
    torch.manual_seed(0)
    with zeroshard.sharded_init(folder=arguments.folder if arguments.bounded else None):
        model = GPT(GPTConfig(layers=layers(arguments), width=arguments.width, heads=8, context=64))
    zeroshard.checkpointing.Checkpointer().checkpoint_units(model)  # otherwise activations would fill the memory
    sharded = zeroshard.shard(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), policy, bucket_numel=BUCKET_NUMEL
    )
    losses, times = [], []
    for step in range(arguments.steps):
        start = time.perf_counter()
        data = torch.randint(0, 256, (1, 65), generator=torch.Generator().manual_seed(step * 100 + dist.get_rank()))
        loss = model(data[:, :-1], data[:, 1:])
        loss.backward()
        sharded.clip_grad_norm_(1.0)
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
    numel = sum(parameter.numel() for parameter in model.parameters())
    report = {"losses": losses, "times": times, "numel": numel, "memory": sharded.memory_report()}
    dist.barrier()
    dist.destroy_process_group()
    return report


def layers(arguments: argparse.Namespace) -> int:
    """Return the number of layers whose parameters, at 16 bytes each, are `times` the limit."""
    return -int(-arguments.times * arguments.limit * MIB // 16 // (12 * arguments.width**2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=384, help="MiB that each process may use")
    parser.add_argument("--times", type=int, default=4, help="all training states, as a multiple of the limit")
    parser.add_argument("--buffers", type=int, default=32, help="MiB of CPU memory for the optimizer's states")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--folder", default="/tmp", help="the folder for states")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bounded", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        print(json.dumps(train(arguments)), flush=True)
        return
    with ranks(arguments, arguments.limit * MIB) as bounded, ranks(arguments, None) as free:
        numel = free[0]["numel"]
        same = all(one["losses"] == other["losses"] for one, other in zip(bounded, free, strict=True))
        print(json.dumps({
            "parameters": numel, "states MiB": 16 * numel // MIB, "limit MiB": arguments.limit,
            "states / limit": round(16 * numel / MIB / arguments.limit, 2),
            "states of a rank / limit": round(16 * numel / arguments.ranks / MIB / arguments.limit, 2),
            "peak MiB": [one["peak"] // MIB for one in bounded], "losses": bounded[0]["losses"], "same losses": same,
            "step s": min(bounded[0]["times"][1:]), "step s without a limit": min(free[0]["times"][1:]),
            "disk MiB": bounded[0]["memory"]["disk"] // MIB, "cpu buffers MiB": bounded[0]["memory"]["cpu"] // MIB,
        }, indent=1))  # fmt: skip
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
