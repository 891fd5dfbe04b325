"""Train a byte-level GPT on text at any ZeRO stage, from a DeepSpeed config.

    torchrun --nproc-per-node 2 examples/train_gpt.py --config examples/zero2.json [--stage 3] [--text PATH]
    python examples/train_gpt.py --config examples/zero2.json          # one rank

With --checkpoints FOLDER the script saves regularly and at Ctrl-C, and resumes from the last save with any number of ranks
and at any stage. Samples are numbered, and each step trains on the next ones, however many ranks share them. So
torchrun may restart the script with more or fewer machines (docs/elastic_hosts.md).

The text is the source of Python's standard library, unless --text names a file or a folder. At the end the script draws
the loss: as a PNG if matplotlib is installed (`pip install 'zeroshard[plots]'`), and otherwise in the terminal.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import shlex
import signal
import sys
import sysconfig
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import json5
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

import zeroshard
from zeroshard.launch import init_distributed, local_device
from zeroshard.observe.emulation import is_emulated
from zeroshard.testing.gpt import GPT, GPTConfig

LENGTH = 128  # tokens in one training sequence
MICROBATCH = 4  # sequences in one forward, at most
STEPS = 500
STEPS_IN_FP32 = 250  # on a CPU without bf16 instructions, where a step in fp32 takes about three times as long
CURVE = Path("runs/train_gpt.png")


def read_text(path: Path) -> Tensor:
    """Return all bytes of a file, or of a folder's files except tests and site-packages, as a uint8 tensor of shape [n]."""
    files = (
        [path] if path.is_file() else sorted(p for p in path.rglob("*.py" if path == STDLIB else "*") if p.is_file())
    )
    files = [p for p in files if not {"site-packages", "test"} & set(p.relative_to(path).parts)]
    data = bytearray(b"\n".join(p.read_bytes() for p in files))
    if len(data) < 100 * LENGTH:
        raise SystemExit(f"{path} has {len(data)} bytes of text. Choose a text of at least {100 * LENGTH} bytes.")
    return torch.frombuffer(data, dtype=torch.uint8)


STDLIB = Path(sysconfig.get_path("stdlib"))


class Windows:
    """Random windows of the text, by number. Sample 7 is the same window on every rank and in every run."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __getitem__(self, number: int) -> Tensor:
        random = torch.Generator().manual_seed(number)
        start = int(torch.randint(0, len(self.text) - LENGTH - 1, (), generator=random))
        return self.text[start : start + LENGTH + 1].long()

    def batch(self, first: int, engine: zeroshard.Engine) -> tuple[Tensor, Tensor]:
        """Return one microbatch that begins at sample `first`: tokens and targets, each of shape [batch, LENGTH]."""
        numbers = range(first, first + engine.train_micro_batch_size_per_gpu())
        tokens = torch.stack([self[number] for number in numbers]).to(engine.device)
        return tokens[:, :-1], tokens[:, 1:]


def microbatch_size(batch: object, world_size: int) -> int:
    """Return the number of sequences per forward. If the config fixes the number per step, fewer ranks run more forwards."""
    share = max(batch // world_size, 1) if isinstance(batch, int) else MICROBATCH
    return next(size for size in range(MICROBATCH, 0, -1) if share % size == 0)


class CtrlC:
    """A block in which Ctrl-C takes effect between steps. If one rank stopped within a step, the others would wait forever.

    Under torchrun, each process gets the signal twice: from the terminal and from torchrun. With several ranks, the
    second signal has no effect. A single rank ends at the second signal.
    """

    def __enter__(self) -> Self:
        self.pressed = False
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        if dist.get_world_size() == 1:
            signal.signal(signal.SIGINT, self._before)

    def on_any_rank(self, device: torch.device) -> bool:
        """Return whether Ctrl-C was pressed on any rank. Every rank must call it."""
        pressed = torch.tensor(float(self.pressed), device=device)
        dist.all_reduce(pressed)
        return bool(pressed > 0)


def stop(engine: zeroshard.Engine, folder: Path | None, console: Console) -> None:
    """Save, print the command that resumes, and exit with code 130, as programs do after Ctrl-C."""
    if folder is None:
        console.print(
            f"stopped after step {engine.global_steps}; nothing was saved. Pass --checkpoints FOLDER to save."
        )
    else:
        engine.save_checkpoint(folder, keep_last=2)
        local = os.environ.get("LOCAL_WORLD_SIZE")
        start = ["torchrun", "--nproc-per-node", local] if local else [Path(sys.executable).name]
        console.print(f"stopped after step {engine.global_steps}, and saved. To resume:")
        console.print(f"  {shlex.join([*start, *sys.argv])}", soft_wrap=True, markup=False, highlight=False)
    raise SystemExit(128 + signal.SIGINT)


@torch.no_grad()
def evaluate(engine: zeroshard.Engine, data: Windows, count: int) -> float:
    """Return bits per byte over `count` batches of every rank."""
    batch, own = engine.train_micro_batch_size_per_gpu(), dist.get_rank() * count
    total = torch.stack([engine(*data.batch((own + number) * batch, engine)) for number in range(count)]).mean()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size() / math.log(2)


@torch.no_grad()
def sample(engine: zeroshard.Engine, prompt: str, length: int, temperature: float = 0.6) -> str:
    """Continue a prompt. Every rank must call it, since at stage 3 each forward gathers the parameters."""
    tokens = torch.tensor([list(prompt.encode())], device=engine.device)
    generator = torch.Generator(engine.device).manual_seed(1)
    for _ in range(length):
        logits = engine(tokens[:, -LENGTH:])[0, -1].float() / temperature
        choice = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, choice[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def report(engine: zeroshard.Engine, console: Console) -> None:
    """Print a table of all ranks: live bytes, the formulas, and the peak of each process. Every rank must call it."""
    mine = {**engine.memory_report(), "peak of the process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    formula = engine.memory_formula()
    table = Table(title=f"Memory at rest at ZeRO stage {engine.zero_optimization_stage()}, MiB")
    table.add_column("")
    for rank in range(dist.get_world_size()):
        table.add_column(f"rank {rank}", justify="right")
    table.add_column("formula", justify="right")
    for kind in mine:
        cells = [f"{figures[kind] / 2**20:.2f}" for figures in everyone]
        table.add_row(kind, *cells, f"{formula[kind] / 2**20:.2f}" if kind in formula else "")
    console.print(table)


def is_emulated_on_any_rank(dtype: torch.dtype) -> bool:
    """Return whether any rank's processor lacks instructions for a dtype. All ranks train in the same dtype."""
    device = local_device()
    found = torch.tensor(float(is_emulated(dtype, device)), device=device)
    dist.all_reduce(found)
    return bool(found > 0)


def parse() -> argparse.Namespace:
    """Read the command-line options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", required=True, help="a DeepSpeed JSON config")
    parser.add_argument("--stage", type=int, choices=range(4), help="the stage, instead of the config's")
    parser.add_argument("--text", type=Path, default=STDLIB, help="a file or a folder")
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}, or {STEPS_IN_FP32} on a CPU without bf16")
    parser.add_argument("--checkpoints", type=Path, help="a folder to save to and to resume from")
    parser.add_argument("--save-every", type=int, default=25, help="steps between checkpoints")
    parser.add_argument("--sample", type=int, default=400, help="bytes to generate")
    parser.add_argument("--fp16", action="store_true", help='use fp16 instead of bf16 if the config has "auto"')
    return parser.parse_args()


def set_steps(options: argparse.Namespace, config: dict[str, Any], console: Console) -> None:
    """Choose the number of steps if --steps is missing: fewer on a CPU without bf16, with a shorter schedule."""
    if options.steps is not None:
        return
    options.steps = STEPS
    if is_emulated_on_any_rank(torch.bfloat16):
        options.steps = STEPS_IN_FP32
        schedule = config.get("scheduler", {}).get("params", {})
        if schedule.get("total_num_steps") == STEPS:
            schedule["total_num_steps"] = STEPS_IN_FP32
        console.print(
            f"this CPU has no bf16 instructions: {STEPS_IN_FP32} steps, not {STEPS} (--steps {STEPS} runs all)"
        )


def curve(losses: list[float], first: int, width: int = 64, height: int = 12) -> str:
    """Return a plot made of characters, in which each column is the mean of several steps.

    Args:
        losses: the loss of each step.
        first: the number of the first step.
        width: the largest number of columns.
        height: the number of rows.
    """
    width = min(width, len(losses))
    edges = [len(losses) * column // width for column in range(width + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    rows = [round((high - mean) / ((high - low) or 1) * (height - 1)) for mean in means]
    lines = []
    for row in range(height):
        value = high - (high - low) * row / (height - 1)
        points = "".join("*" if one == row else " " for one in rows)
        lines.append(f"{value:7.3f} |{points}".rstrip())
    last = str(first + len(losses) - 1)
    lines.append(f"{'loss':>7} +{'-' * width}")
    lines.append(f"{'step':>7}  {str(first).ljust(max(width - len(last), 0))}{last}")
    return "\n".join(lines)


def draw(losses: list[float], first: int, console: Console) -> None:
    """Draw the loss of each step from step `first` on, as a PNG or, without matplotlib, in the terminal."""
    if not losses:
        return
    if find_spec("matplotlib") is None:
        console.print(curve(losses, first), markup=False, highlight=False)
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(first, first + len(losses)), losses, linewidth=1)
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    CURVE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(CURVE, dpi=150)
    console.print(f"the loss of each step: {CURVE.resolve()}", soft_wrap=True, markup=False, highlight=False)


def train(engine: zeroshard.Engine, data: Windows, options: argparse.Namespace, console: Console) -> list[float]:
    """Train until --steps or Ctrl-C, and save. Return this rank's loss of each step's last microbatch."""
    loss = torch.zeros(())
    losses = []
    rank, world_size, batch = dist.get_rank(), dist.get_world_size(), engine.train_micro_batch_size_per_gpu()
    shown = zeroshard.progress(engine, steps=options.steps, tokens=LENGTH)
    with CtrlC() as interrupt, shown as progress:
        for step in range(engine.global_steps, options.steps):
            start = time.perf_counter()
            for microbatch in range(engine.gradient_accumulation_steps()):
                # A step uses the next train_batch_size() samples, however many ranks share them.
                first = engine.global_samples + (microbatch * world_size + rank) * batch
                loss = engine(*data.batch(first, engine))
                engine.backward(loss)
                engine.step()
            losses.append(loss.detach())
            if step % 50 == 0 or step == options.steps - 1:
                speed = engine.train_batch_size() * LENGTH / (time.perf_counter() - start)
                norm, rate = engine.get_global_grad_norm(), engine.get_lr()[0]
                progress.print(f"step {step:4d}  loss {loss:.3f}  lr {rate:.1e}  |g| {norm:.2f}  {speed:,.0f} tokens/s")
            if interrupt.on_any_rank(engine.device):
                progress.stop()
                stop(engine, options.checkpoints, console)
            if options.checkpoints is not None and (step + 1) % options.save_every == 0:
                engine.save_checkpoint(options.checkpoints, asynchronous=True, keep_last=2)
    if options.checkpoints is not None:
        engine.save_checkpoint(options.checkpoints, keep_last=2)
    return [float(one) for one in losses]


def main() -> None:
    """Train, validate, sample, print the memory at rest, and draw the loss."""
    options = parse()

    config = json5.loads(Path(options.config).read_text(encoding="utf-8"))
    if options.stage is not None:
        config.setdefault("zero_optimization", {})["stage"] = options.stage
    init_distributed()
    torch.manual_seed(0)
    console = Console(quiet=dist.get_rank() != 0)
    set_steps(options, config, console)
    # Values for keys that the config leaves to "auto".
    auto = {
        "train_micro_batch_size_per_gpu": microbatch_size(config.get("train_batch_size"), dist.get_world_size()),
        "lr": 2e-3,
        "betas": (0.9, 0.95),
        "weight_decay": 0.1,
        "total_num_steps": options.steps,
        "warmup_num_steps": 40,
        "fp16": options.fp16,
        "bf16": not options.fp16 and not is_emulated_on_any_rank(torch.bfloat16),
    }
    engine, _, _, _ = zeroshard.initialize(model=GPT(GPTConfig()), config=config, auto=auto)

    text = read_text(options.text)
    training, validation = Windows(text[: -len(text) // 20]), Windows(text[-len(text) // 20 :])
    numel = sum(p.numel() for p in engine.module.parameters())
    ranks = f"{dist.get_world_size()} ranks, a step of {engine.train_batch_size()} sequences"
    console.print(f"{numel / 1e6:.1f} M parameters, {len(text) / 1e6:.1f} MB of text, {ranks}")

    if options.checkpoints is not None:  # every rank calls it, even on a host without a checkpoint
        path, _ = engine.load_checkpoint(options.checkpoints, fall_back=True)
        console.print("no checkpoint yet" if path is None else f"resuming from {path}")

    first = engine.global_steps
    losses = train(engine, training, options, console)

    engine.eval()
    bits = evaluate(engine, validation, count=8)
    console.print(f"validation: {bits:.3f} bits per byte (8.000 before training)")
    console.rule("a sample")
    console.print(sample(engine, "def read(self, ", options.sample), markup=False, highlight=False)
    console.rule()
    report(engine, console)
    if dist.get_rank() == 0:
        draw(losses, first, console)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # before or after training, when there is nothing to save
        raise SystemExit(128 + signal.SIGINT) from None
