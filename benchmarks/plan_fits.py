"""Checks whether plans predict that a training run fits: random runs, each in a control group of about the planned memory.

python benchmarks/plan_fits.py [--cases 60] [--seed 0] [--out FILE]

If a plan reports that a run fits, the run must end. If not, the kernel must kill the run, or the plan must be within
3 % of the limit.

Each rank is a separate process. As in plan_cases.py, memory behaves as on an accelerator: ranks share none, and freed
memory is free, since malloc maps each larger block separately. With --as-it-is, both are as they are for CPU users. The
memory that a process needs before it trains is measured first, with a tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from host_memory import ControlGroup, join
from plan_cases import config_of, row_of

import zeroshard
from zeroshard.testing.gpt import GPT, GPTConfig
from zeroshard.tools.planning.machine import Machine, machine_of
from zeroshard.tools.planning.table import Row

AS_IT_IS = "--as-it-is"
STEPS = 2
NEAR = 0.03


@dataclass(frozen=True)
class Training:
    """A training run of a GPT: its sizes, settings and ranks."""

    ranks: int
    layers: int
    width: int
    context: int
    config: dict[str, Any]

    def model(self) -> GPT:
        return GPT(GPTConfig(layers=self.layers, width=self.width, heads=self.width // 64, context=self.context))

    def batch(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, 256, (samples, self.context + 1))
        return tokens[:, :-1], tokens[:, 1:]


def drawn(random_: random.Random) -> Training:
    """Draw a run whose settings vary in every respect that a plan covers."""
    stage, dtype = random_.randrange(4), random_.choice(("fp32", "bf16"))
    offload = {"offload_optimizer": {"device": "cpu"}} if stage and random_.random() < 0.25 else {}
    config = config_of(
        stage, dtype, checkpointing=random_.random() < 0.4, accumulation=random_.choice((1, 1, 3)),
        micro=random_.choice((1, 2, 4)), **offload,
    )  # fmt: skip
    return Training(
        random_.choice((1, 2)),
        random_.choice((4, 6, 10)),
        random_.choice((512, 640, 768)),
        random_.choice((64, 128, 256)),
        config,
    )


NEARLY_NOTHING = Training(2, 1, 64, 64, config_of(2))


def planned(training: Training, machine: Machine) -> Row:
    return row_of(training.model, training.config, world_size=training.ranks, batch=training.batch, machine=machine)


def trained(training: Training, limit: int | None) -> tuple[bool, int]:
    """Return whether every rank finished, and the most bytes that the group used."""
    group = ControlGroup(limit)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(training.ranks):
        env = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(training.ranks), "MASTER_ADDR": "127.0.0.1",
            "LOCAL_WORLD_SIZE": str(training.ranks), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            **({} if AS_IT_IS in sys.argv else {"ZEROSHARD_SHARED_MEMORY": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}),
        }  # fmt: skip
        command = [sys.executable, __file__, "--rank-of", str(group.path), json.dumps(asdict(training))]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):  # as torchrun does, since the others wait for the failed rank
            for process in ranks:
                process.kill()
        time.sleep(0.05)
    statuses = [process.wait() for process in ranks]
    peak = group.peak
    group.close()
    return not any(statuses), peak


def _train(group: str, training: Training) -> None:
    torch.set_num_threads(1)
    join(Path(group))
    engine, *_ = zeroshard.initialize(model=training.model(), config=training.config)
    for _ in range(STEPS * engine.gradient_accumulation_steps()):
        inputs, targets = training.batch(engine.train_micro_batch_size_per_gpu())
        engine.backward(engine(inputs, targets))
        engine.step()


def machine_here() -> Machine:
    """Return the known CPU machine, with the measured memory of a process that does not train."""
    table = machine_of("cpu")
    _, used = trained(NEARLY_NOTHING, None)
    plan = planned(NEARLY_NOTHING, table)
    context = used // NEARLY_NOTHING.ranks - plan.peak.nbytes
    return table.model_copy(update={"unseen": table.unseen.model_copy(update={"context": context})})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="a file for JSON lines, one per case")
    parser.add_argument(AS_IT_IS, action="store_true", help="use shared memory and the default malloc settings")
    parser.add_argument("--rank-of", nargs=2, metavar=("GROUP", "TRAINING"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        _train(options.rank_of[0], Training(**json.loads(options.rank_of[1])))
        return
    machine, random_, lies = machine_here(), random.Random(options.seed), 0
    print(f"a process takes {machine.unseen.context / 1e6:.0f} MB before it trains", flush=True)
    for number in range(options.cases):
        training, share = drawn(random_), random_.uniform(0.85, 1.15)
        plan = planned(training, machine)
        needed = plan.needed_nbytes * training.ranks
        limit = int(needed * share)
        ended, peak = trained(training, limit)
        is_near = abs(needed / limit - 1) <= NEAR
        is_true = ended if needed <= limit else not ended or is_near
        lies += not is_true
        zero = training.config["zero_optimization"]
        words = f"{training.ranks} ranks stage {zero['stage']}{' offload' * ('offload_optimizer' in zero)}"
        verdict = "fits" if needed <= limit else "does not fit"
        print(
            f"{number:3} {words:24} planned {needed / 1e6:7.0f} MB of {limit / 1e6:7.0f}: {verdict}; "
            f"{'ended' if ended else 'killed'} at {peak / 1e6:7.0f} MB{'' if is_true else '  NOT TRUE'}",
            flush=True,
        )
        if options.out is not None:
            one = {
                "training": asdict(training),
                "needed": needed,
                "limit": limit,
                "ended": ended,
                "peak": peak,
                "true": is_true,
            }
            with options.out.open("a") as file:
                file.write(json.dumps(one) + "\n")
    print(f"{options.cases} cases; wrong in {lies}")


if __name__ == "__main__":
    main()
