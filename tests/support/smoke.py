"""Checks an installed zeroshard, with a fresh environment's Python in an empty folder, without pytest.

python -I tests/support/smoke.py [CHECKOUT]     # nothing may be imported from CHECKOUT
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import metadata, version
from importlib.util import find_spec
from pathlib import Path

import torch

import zeroshard
from zeroshard import Policy
from zeroshard.testing import Workload, run_ranks, train
from zeroshard.testing.gpt import GPT, GPTConfig

STEPS = 3


def batch(rank: int, step: int) -> tuple[torch.Tensor, ...]:
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(10 * step + rank))
    return tokens[:, :-1], tokens[:, 1:]


def every_stage(rank: int) -> list[bool]:
    workload = Workload(lambda: GPT(GPTConfig(layers=2, width=32, heads=2, context=16)), batch, steps=STEPS)
    runs = [train(rank, workload, Policy.stage(stage)) for stage in range(4)]
    return [run.equals(runs[0]) for run in runs]


def checkpoint(rank: int) -> int:
    """Save at one stage, load at another, and return the number of steps."""
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    for stage in (2, 3):
        model = GPT(GPTConfig(layers=2, width=32, heads=2, context=16))
        engine, *_ = zeroshard.initialize(model=model, config={**config, "zero_optimization": {"stage": stage}})
        if stage == 3:
            engine.load_checkpoint("checkpoints")
        with zeroshard.progress(engine, log="run"):
            engine.backward(engine(*batch(rank, stage)))
            engine.step()
        engine.save_checkpoint("checkpoints")
        engine.destroy()
    return engine.global_steps


def command(*arguments: str, status: int = 0) -> str:
    """Run the installed program, and return what it prints."""
    program = Path(sys.executable).parent / "zeroshard"
    start = [str(program)] if program.exists() else [sys.executable, "-m", "zeroshard"]
    done = subprocess.run([*start, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == status, (arguments, done.stdout, done.stderr)
    return done.stdout + done.stderr


def main() -> None:
    torch.set_num_threads(1)
    package = Path(zeroshard.__file__).parent
    if len(sys.argv) > 1:
        assert not package.is_relative_to(Path(sys.argv[1]) / "zeroshard"), f"{package} is the checkout's"
    assert version("zeroshard") == zeroshard.__version__
    assert metadata("zeroshard")["License-Expression"] == "Apache-2.0"
    assert (package / "py.typed").is_file()
    for name in zeroshard.__all__:
        getattr(zeroshard, name)
    assert run_ranks(every_stage, 2) == [[True] * 4] * 2
    assert run_ranks(checkpoint, 2) == [2, 2]
    assert "complete: all files" in command("inspect", "checkpoints")
    if find_spec("matplotlib") is None:
        assert "pip install 'zeroshard[plots]'" in command("report", "run", status=2)
    else:
        command("report", "run")
        assert Path("run/report.png").read_bytes().startswith(b"\x89PNG")
    Path("zero.json").write_text(json.dumps({"train_batch_size": 2, "zero_optimization": {"stage": 2}}))
    assert "ZeRO stage 2" in command("config", "check", "zero.json")
    assert "h200" in str(zeroshard_machines())
    shim = Path(command("shim-path").strip())
    paths = os.pathsep.join([str(shim), *sys.path[1:]])
    script = "import deepspeed, importlib.metadata as m; print(deepspeed.initialize.__module__, m.version('deepspeed'))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    print(f"zeroshard {zeroshard.__version__} in {package}: {done.stdout.strip()}: all is there")


def zeroshard_machines() -> list[str]:
    from zeroshard.tools.planning.machine import machines

    return list(machines())


if __name__ == "__main__":
    main()
