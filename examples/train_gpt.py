"""Train a byte-level GPT on text, under any ZeRO stage, from a DeepSpeed config.

    torchrun --nproc-per-node 2 examples/train_gpt.py --config examples/zero2.json [--stage 3] [--text PATH]
    python examples/train_gpt.py --config examples/zero2.json          # one rank

With --checkpoints FOLDER it saves as it goes, also at Ctrl-C, and goes on where it was stopped: with any number of ranks, under any
stage.

The text is the Python standard library's own source, unless --text names a file or a folder.
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
from collections.abc import Iterator
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
from zeroshard.testing.gpt import GPT, GPTConfig

LENGTH = 128  # tokens of one training sequence


def read_text(path: Path) -> Tensor:
    """All bytes of a file, or of the text files of a folder, as a tensor of uint8."""
    files = (
        [path] if path.is_file() else sorted(p for p in path.rglob("*.py" if path == STDLIB else "*") if p.is_file())
    )
    files = [p for p in files if "site-packages" not in p.parts and "test" not in p.parts]
    data = bytearray(b"\n".join(p.read_bytes() for p in files))
    if len(data) < 100 * LENGTH:
        raise SystemExit(f"{path}: {len(data)} bytes of text found, at least {100 * LENGTH} are needed.")
    return torch.frombuffer(data, dtype=torch.uint8)


STDLIB = Path(sysconfig.get_path("stdlib"))


class Windows(Iterator[Tensor]):
    """Random windows of the text: int64 of shape [batch, LENGTH + 1]. Its position is saved in checkpoints."""

    def __init__(self, text: Tensor, batch: int, seed: int, device: torch.device) -> None:
        self.text, self.batch, self.device, self.drawn = text, batch, device, 0
        self.generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> Tensor:
        self.drawn += 1
        starts = torch.randint(0, len(self.text) - LENGTH - 1, (self.batch,), generator=self.generator)
        return torch.stack([self.text[s : s + LENGTH + 1] for s in starts.tolist()]).long().to(self.device)

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        while self.drawn < state["drawn"]:
            next(self)


class CtrlC:
    """Inside, Ctrl-C is a wish that is looked at between steps: in the middle of one, ranks would wait for each other in vain.

    torchrun's processes get the signal from the terminal, and again from torchrun: there, the second one changes nothing.
    In one process the second Ctrl-C ends it at once.
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
        if not dist.is_initialized():
            signal.signal(signal.SIGINT, self._before)

    def on_any_rank(self, device: torch.device) -> bool:
        """Whether any rank was asked to stop. Every rank must call it."""
        if not dist.is_initialized():
            return self.pressed
        pressed = torch.tensor(float(self.pressed), device=device)
        dist.all_reduce(pressed)
        return bool(pressed > 0)


def stop(engine: zeroshard.Engine, folder: Path | None, console: Console) -> None:
    """Save, say how to go on, and end as programs do that Ctrl-C ended: with exit code 130."""
    if folder is None:
        console.print(f"stopped after step {engine.global_steps}; nothing was saved: --checkpoints FOLDER would have.")
    else:
        engine.save_checkpoint(folder, keep_last=2)
        local = os.environ.get("LOCAL_WORLD_SIZE")
        start = ["torchrun", "--nproc-per-node", local] if local else [Path(sys.executable).name]
        console.print(f"stopped after step {engine.global_steps}, and saved. To go on:")
        console.print(f"  {shlex.join([*start, *sys.argv])}", soft_wrap=True, markup=False, highlight=False)
    raise SystemExit(128 + signal.SIGINT)


@torch.no_grad()
def evaluate(engine: zeroshard.Engine, windows: Iterator[Tensor], count: int) -> float:
    """Bits per byte over `count` batches of every rank."""
    losses = [engine(tokens[:, :-1], tokens[:, 1:]) for tokens, _ in zip(windows, range(count), strict=False)]
    total = torch.stack(losses).mean()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return float(total) / math.log(2)


@torch.no_grad()
def sample(engine: zeroshard.Engine, prompt: str, length: int, temperature: float = 0.6) -> str:
    """Continue a prompt. Every rank runs it: under stage 3 each forward brings the parameters together."""
    tokens = torch.tensor([list(prompt.encode())], device=engine.device)
    generator = torch.Generator(engine.device).manual_seed(1)
    for _ in range(length):
        logits = engine(tokens[:, -LENGTH:])[0, -1].float() / temperature
        choice = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, choice[None]], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def report(engine: zeroshard.Engine, rank: int, world_size: int, console: Console) -> None:
    """A table per rank: bytes that live now, beside the formulas, and the peak of the process."""
    mine = {**engine.memory_report(), "peak of the process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    everyone = [mine] * world_size
    if dist.is_initialized():
        dist.all_gather_object(everyone, mine)
    if rank != 0:
        return
    formula = engine.memory_formula()
    table = Table(title=f"Memory at rest under ZeRO-{engine.zero_optimization_stage()}, MiB")
    table.add_column("")
    for other in range(world_size):
        table.add_column(f"rank {other}", justify="right")
    table.add_column("formula", justify="right")
    for kind in mine:
        cells = [f"{figures[kind] / 2**20:.2f}" for figures in everyone]
        table.add_row(kind, *cells, f"{formula[kind] / 2**20:.2f}" if kind in formula else "")
    console.print(table)


def parse() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", required=True, help="a DeepSpeed JSON config")
    parser.add_argument("--stage", type=int, choices=range(4), help="takes the place of the config's stage")
    parser.add_argument("--text", type=Path, default=STDLIB, help="a file or a folder")
    parser.add_argument("--steps", type=int, default=650)
    parser.add_argument("--checkpoints", type=Path, help="a folder to save to, and to go on from")
    parser.add_argument("--sample", type=int, default=400, help="bytes to generate")
    parser.add_argument("--fp16", action="store_true", help='where the config says "auto"')
    return parser.parse_args()


def train(engine: zeroshard.Engine, data: Iterator[Any], options: argparse.Namespace, console: Console) -> None:
    """Train until --steps or Ctrl-C, and save."""
    loss = torch.zeros(())
    shown = zeroshard.progress(engine, steps=options.steps, tokens=LENGTH)
    with CtrlC() as interrupt, shown as progress:
        for step in range(engine.global_steps, options.steps):
            start = time.perf_counter()
            for _ in range(engine.gradient_accumulation_steps()):
                tokens = next(data)
                loss = engine(tokens[:, :-1], tokens[:, 1:])
                engine.backward(loss)
                engine.step()
            if step % 50 == 0 or step == options.steps - 1:
                speed = engine.train_batch_size() * LENGTH / (time.perf_counter() - start)
                norm, rate = engine.get_global_grad_norm(), engine.get_lr()[0]
                progress.print(f"step {step:4d}  loss {loss:.3f}  lr {rate:.1e}  |g| {norm:.2f}  {speed:,.0f} tokens/s")
            if interrupt.on_any_rank(engine.device):
                progress.stop()
                stop(engine, options.checkpoints, console)
            if options.checkpoints is not None and (step + 1) % 100 == 0:
                engine.save_checkpoint(options.checkpoints, asynchronous=True, keep_last=2)
    if options.checkpoints is not None:
        engine.save_checkpoint(options.checkpoints, keep_last=2)


def main() -> None:
    """Train, validate, sample, and show where the memory is."""
    options = parse()

    config = json5.loads(Path(options.config).read_text())
    if options.stage is not None:
        config.setdefault("zero_optimization", {})["stage"] = options.stage
    torch.manual_seed(0)
    # What a config may leave to "auto", and only this script knows.
    auto = {
        "train_micro_batch_size_per_gpu": 4,
        "lr": 2e-3,
        "betas": (0.9, 0.95),
        "weight_decay": 0.1,
        "total_num_steps": options.steps,
        "warmup_num_steps": 40,
        "fp16": options.fp16,
    }
    engine, _, _, _ = zeroshard.initialize(model=GPT(GPTConfig()), config=config, auto=auto)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    console = Console(quiet=rank != 0)

    text = read_text(options.text)
    training, validation = text[: -len(text) // 20], text[-len(text) // 20 :]
    batch = engine.train_micro_batch_size_per_gpu()
    data = engine.training_dataloader = Windows(training, batch, seed=rank, device=engine.device)
    numel = sum(p.numel() for p in engine.module.parameters())
    console.print(f"{numel / 1e6:.1f} M parameters, {len(text) / 1e6:.1f} MB of text, {world_size} ranks")

    if options.checkpoints is not None and (options.checkpoints / "latest").exists():
        path, _ = engine.load_checkpoint(options.checkpoints)
        console.print(f"going on from {path}")

    train(engine, data, options, console)

    engine.eval()
    bits = evaluate(engine, Windows(validation, batch, seed=1000 + rank, device=engine.device), count=8)
    console.print(f"validation: {bits:.3f} bits per byte (8.000 before training)")
    console.rule("a sample")
    console.print(sample(engine, "def read(self, ", options.sample), markup=False, highlight=False)
    console.rule()
    report(engine, rank, world_size, console)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # before or after the training: there is nothing to save
        raise SystemExit(128 + signal.SIGINT) from None
