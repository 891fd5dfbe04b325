"""Train a small GPT on text at any ZeRO stage, from a DeepSpeed config, in about two minutes on any machine.

    torchrun --nproc-per-node 2 examples/train_gpt.py --config examples/zero2.json [--stage 3] [--text PATH]
    python examples/train_gpt.py --config examples/zero2.json          # one rank

The script times a few steps, and then trains as many as fit into --minutes. --steps sets their number instead. At the
end, and at Ctrl-C, it prints a validation loss, a sample and the curve of the loss, and draws the run as a picture if
matplotlib is installed (`pip install 'zeroshard[plots]'`). After Ctrl-C, the exit code is 130, as of other programs.

With --checkpoints FOLDER the script saves regularly and at Ctrl-C, and resumes from the last save with any number of ranks
and at any stage. Samples are numbered, and each step trains on the next ones, however many ranks share them. So
torchrun may restart the script with more or fewer machines (docs/several_hosts.md).

The text is the source of Python's standard library, unless --text names a file or a folder.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import resource
import shlex
import signal
import statistics
import sys
import sysconfig
import time
import zlib
from array import array
from collections import Counter
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
from zeroshard.model.emulation import is_emulated
from zeroshard.testing.gpt import GPT, GPTConfig
from zeroshard.tools.curves import draw, read_run

LENGTH = 128  # tokens in one training sequence
MICROBATCH = 4  # sequences in one forward, at most
VOCABULARY = 2048  # the bytes, and the words that shorten the text most
SIZES = {
    "1M": (GPTConfig(vocabulary=VOCABULARY, layers=4, width=128, heads=2), 4e-3),
    "10M": (GPTConfig(vocabulary=VOCABULARY), 2e-3),
}
"""The sizes of the models, and their learning rates. Of the sizes tried, 1M learns most in two minutes of a slow CPU."""
FEWEST, MOST = 60, 2000
"""The bounds of the number of steps that --minutes may choose."""
STEPS_OF_CHECKPOINTS = 500
"""The number of steps of a run with --checkpoints, which may continue on another machine."""
LOG = Path("runs/train_gpt")


def read_text(path: Path) -> bytes:
    """Return all bytes of a file, or of a folder's files except tests and site-packages."""
    files = (
        [path] if path.is_file() else sorted(p for p in path.rglob("*.py" if path == STDLIB else "*") if p.is_file())
    )
    files = [p for p in files if not {"site-packages", "test"} & set(p.relative_to(path).parts)]
    data = b"\n".join(p.read_bytes() for p in files)
    if len(data) < 100 * LENGTH:
        raise SystemExit(f"{path} has {len(data)} bytes of text. Choose a text of at least {100 * LENGTH} bytes.")
    return data


STDLIB = Path(sysconfig.get_path("stdlib"))


class Text:
    """A text as tokens.

    A token is one byte, or a frequent word or indentation. Words make a token 2 bytes long on average, so that a small model
    sees more text in the same time.
    """

    def __init__(self, data: bytes) -> None:
        # In pieces of a mebibyte, since a list of all words takes 20 times the memory of the text.
        stretches = [data[start : start + 2**20] for start in range(0, len(data), 2**20)]
        counts = Counter[bytes]()
        for stretch in stretches:
            counts.update(word for word in PIECE.findall(stretch) if len(word) > 1)
        saved = sorted(counts, key=lambda word: (-counts[word] * (len(word) - 1), word))
        self.vocabulary = [bytes([byte]) for byte in range(256)] + saved[: VOCABULARY - 256]
        numbers: dict[bytes, Any] = {word: (256 + i,) for i, word in enumerate(self.vocabulary[256:])}
        tokens = array("h")
        for stretch in stretches:
            for word in PIECE.findall(stretch):
                tokens.extend(numbers.get(word, word))  # the bytes of other words
        if len(tokens) < 100 * LENGTH:
            raise SystemExit(f"the text has {len(tokens)} tokens. Choose one of at least {100 * LENGTH}.")
        self.tokens = torch.frombuffer(tokens, dtype=torch.int16)
        self.lengths = torch.tensor([len(word) for word in self.vocabulary])

    @property
    def checksum(self) -> int:
        """A number that changes with the vocabulary."""
        return zlib.crc32(b"\0".join(self.vocabulary))

    def decode(self, tokens: Tensor) -> str:
        return b"".join(self.vocabulary[token] for token in tokens.tolist() if token < len(self.vocabulary)).decode(
            errors="replace"
        )


PIECE = re.compile(rb"\n *| ?[A-Za-z]+|[\x00-\xff]")
"""A line's end with the next line's indentation, a word with the blank before it, or one byte."""


class Windows:
    """Random windows of the tokens, by number. Sample 7 is the same window on every rank and in every run."""

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
    """A block in which Ctrl-C ends the training between two steps.

    If one rank stopped within a step, the others would wait forever.

    Under torchrun, each process gets the signal twice: from the terminal and from torchrun. With several ranks, the
    second signal has no effect, and torchrun ends ranks that take 30 more seconds. A single rank ends at the second signal.
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


def resume_command() -> str:
    """Return the command that started this script."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    start = ["torchrun", "--nproc-per-node", local] if local else [Path(sys.executable).name]
    return shlex.join([*start, *sys.argv])


@torch.no_grad()
def evaluate(engine: zeroshard.Engine, data: Windows, text: Text, count: int) -> float:
    """Return bits per byte over `count` batches of every rank."""
    batch, own = engine.train_micro_batch_size_per_gpu(), dist.get_rank() * count
    sums = torch.zeros(2, device=engine.device)  # nats, and bytes
    for number in range(count):
        tokens, targets = data.batch((own + number) * batch, engine)
        nats = engine(tokens, targets) * targets.numel()
        sums += torch.stack([nats.float(), text.lengths[targets.cpu()].sum().to(sums)])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1]) / math.log(2)


@torch.no_grad()
def sample(engine: zeroshard.Engine, text: Text, prompt: bytes, length: int, temperature: float = 0.6) -> str:
    """Continue a prompt. Every rank must call it, since at stage 3 each forward gathers the parameters."""
    tokens = torch.tensor([list(prompt)], device=engine.device)
    generator = torch.Generator(engine.device).manual_seed(1)
    for _ in range(length):
        logits = engine(tokens[:, -LENGTH:])[0, -1].float() / temperature
        choice = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, choice[None]], dim=1)
    return text.decode(tokens[0])


def report(engine: zeroshard.Engine, console: Console) -> None:
    """Print a table of all ranks: live bytes, the formulas, and the peak of each process. Every rank must call it."""
    mine = {**engine.memory_report(), "peak of the process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    formula = engine.memory_formula()
    expected = {kind: f"{nbytes / 2**20:.2f}" for kind, nbytes in formula.items()}
    expected["gradients"] += " until a step frees them"
    table = Table(title=f"Memory between steps at ZeRO stage {engine.zero_optimization_stage()}, MiB")
    table.add_column("")
    for rank in range(dist.get_world_size()):
        table.add_column(f"rank {rank}", justify="right")
    table.add_column("formula", justify="right")
    for kind in mine:
        cells = [f"{figures[kind] / 2**20:.2f}" for figures in everyone]
        table.add_row(kind, *cells, expected.get(kind, ""))
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
    parser.add_argument("--size", choices=SIZES, default="1M", help="the number of parameters, roughly")
    parser.add_argument(
        "--minutes", type=float, default=2.0, help="the time of the training, which sets the number of steps"
    )
    parser.add_argument("--steps", type=int, help="an exact number of steps, instead of --minutes")
    parser.add_argument(
        "--checkpoints",
        type=Path,
        help="a folder to save to and to resume from",
    )
    parser.add_argument("--save-every", type=int, default=25, help="steps between checkpoints")
    parser.add_argument("--sample", type=int, default=250, help="tokens to generate")
    parser.add_argument("--fp16", action="store_true", help='use fp16 instead of bf16 if the config has "auto"')
    return parser.parse_args()


LOGS = ("json_monitor", "csv_monitor", "tensorboard", "wandb", "comet", "trackio", "mlflow", "steps_per_print")


def seconds_per_step(model: GPTConfig, config: dict[str, Any], auto: dict[str, Any], data: Windows) -> float:
    """Time a few steps of a model that is thrown away. All ranks return the same number, the slowest rank's."""
    timed = {key: value for key, value in config.items() if key not in LOGS}
    engine, _, _, _ = zeroshard.initialize(model=GPT(model), config=timed, auto=auto)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(engine.gradient_accumulation_steps()):
            first = engine.global_samples + dist.get_rank() * engine.train_micro_batch_size_per_gpu()
            engine.backward(engine(*data.batch(first, engine)))
            engine.step()
        if engine.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(seconds[2:]), device=engine.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    engine.destroy()
    return float(slowest)


def steps_for(minutes: float, seconds: float, console: Console) -> int:
    """Return the number of steps that fit into a time, if each takes `seconds`, and say how long they take."""
    steps = min(max(int(60 * minutes / seconds), FEWEST), MOST)
    took = round(steps * seconds)
    console.print(
        f"about {steps} steps, done in about {took // 60}:{took % 60:02}; Ctrl-C stops earlier and shows what it has learnt",
        soft_wrap=True,
    )
    return steps


def curve(losses: list[float], first: int, width: int = 64, height: int = 10) -> str:
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


def train(
    engine: zeroshard.Engine, data: Windows, text: Text, interrupt: CtrlC, options: argparse.Namespace
) -> tuple[list[float], bool]:
    """Train until --steps or Ctrl-C, and save.

    Returns:
        losses: this rank's loss of each step's last microbatch.
        stopped: whether Ctrl-C was pressed on any rank.
    """
    # One tensor for all losses: small tensors that outlive a step would keep malloc from using the step's memory again.
    losses = torch.zeros(max(options.steps - engine.global_steps, 0), device=engine.device)
    count, stopped = 0, False
    rank, world_size, batch = dist.get_rank(), dist.get_world_size(), engine.train_micro_batch_size_per_gpu()
    every = max(1, options.steps // 10)
    shown = zeroshard.progress(engine, steps=options.steps, tokens=LENGTH, log=LOG)
    state = {"vocabulary": text.checksum}
    with shown as progress:
        for step in range(engine.global_steps, options.steps):
            for microbatch in range(engine.gradient_accumulation_steps()):
                # A step uses the next train_batch_size() samples, however many ranks share them.
                first = engine.global_samples + (microbatch * world_size + rank) * batch
                loss = engine(*data.batch(first, engine))
                engine.backward(loss)
                engine.step()
            losses[count] = loss.detach()
            count += 1
            if step % every == 0 or step == options.steps - 1:
                norm, rate = engine.get_global_grad_norm(), engine.get_lr()[0]
                progress.print(f"step {step:4d}  loss {loss:.3f}  lr {rate:.1e}  |g| {norm:.2f}")
            stopped = interrupt.on_any_rank(engine.device)
            if stopped:
                break
            if options.checkpoints is not None and (step + 1) % options.save_every == 0:
                engine.save_checkpoint(options.checkpoints, client_state=state, asynchronous=True, keep_last=2)
    if options.checkpoints is not None:
        engine.save_checkpoint(options.checkpoints, client_state=state, keep_last=2)
    return losses[:count].tolist(), stopped


def show(losses: list[float], first: int, console: Console) -> None:
    """Print the curve of the loss from step `first` on, and draw the log as a picture if matplotlib is there."""
    if not losses:
        return
    console.print(curve(losses, first), markup=False, highlight=False)
    if find_spec("matplotlib") is not None:
        picture = LOG / "report.png"
        draw([read_run(LOG)], picture)
        console.print(f"the run as a picture: {picture.resolve()}", soft_wrap=True, markup=False, highlight=False)


def values_for_auto(options: argparse.Namespace, config: dict[str, Any], rate: float) -> dict[str, Any]:
    """Return values for keys that the config leaves to "auto". `rate` is the learning rate."""
    steps = options.steps or MOST
    return {
        "train_micro_batch_size_per_gpu": microbatch_size(config.get("train_batch_size"), dist.get_world_size()),
        "lr": rate,
        "warmup_max_lr": rate,
        "betas": (0.9, 0.95),
        "weight_decay": 0.1,
        "total_num_steps": steps,
        "warmup_num_steps": max(2, steps // 12),
        "fp16": options.fp16,
        "bf16": not options.fp16 and not is_emulated_on_any_rank(torch.bfloat16),
    }


def run(interrupt: CtrlC) -> int:
    """Train, validate, sample, print the memory, and draw the loss. Return the exit code."""
    options = parse()
    config = json5.loads(Path(options.config).read_text(encoding="utf-8"))
    if options.stage is not None:
        config.setdefault("zero_optimization", {})["stage"] = options.stage
    console = Console(quiet=dist.get_rank() != 0)
    size, rate = SIZES[options.size]
    if options.checkpoints is not None and options.steps is None:
        options.steps = STEPS_OF_CHECKPOINTS
    if options.steps is None:
        console.print(f"this trains for about {options.minutes:g} minutes (--minutes); Ctrl-C stops earlier")
    data = read_text(options.text)
    text = Text(data)
    cut = len(text.tokens) - len(text.tokens) // 20
    training, validation = Windows(text.tokens[:cut]), Windows(text.tokens[cut:])
    auto = values_for_auto(options, config, rate)
    if options.steps is None:
        options.steps = steps_for(options.minutes, seconds_per_step(size, config, auto, training), console)
        auto = values_for_auto(options, config, rate)
    torch.manual_seed(0)
    engine, _, _, _ = zeroshard.initialize(model=GPT(size), config=config, auto=auto)
    numel = sum(p.numel() for p in engine.module.parameters())
    ranks = f"{dist.get_world_size()} ranks, a step of {engine.train_batch_size()} sequences"
    console.print(f"{numel / 1e6:.1f} M parameters, {len(data) / 1e6:.1f} MB of text, {ranks}")

    if options.checkpoints is not None:  # every rank calls it, even on a host without a checkpoint
        path, state = engine.load_checkpoint(options.checkpoints, fall_back=True)
        console.print("no checkpoint yet" if path is None else f"resuming from {path}")
        if state and state.get("vocabulary", text.checksum) != text.checksum:
            raise SystemExit(f"{path} was trained on another text. Pass the same --text, or another --checkpoints.")
    first = engine.global_steps
    if first == 0 and dist.get_rank() == 0:
        (LOG / "steps.jsonl").unlink(missing_ok=True)  # another run's
    losses, stopped = train(engine, training, text, interrupt, options)

    untrained = math.log2(VOCABULARY) * len(text.tokens) / len(data)
    prompt = b"\n    def read(self" if options.text == STDLIB else text.decode(validation.text[:16]).encode()
    engine.eval()
    bits = evaluate(engine, validation, text, count=8)
    console.print(f"validation: {bits:.3f} bits per byte ({untrained:.3f} before training)")
    console.rule("a sample")
    console.print(sample(engine, text, prompt, options.sample), markup=False, highlight=False)
    console.rule()
    report(engine, console)
    if dist.get_rank() == 0:
        show(losses, first, console)
    if stopped:
        saved = "nothing was saved. Pass --checkpoints FOLDER to save."
        if options.checkpoints is not None:
            saved = f"and saved. To resume:\n  {resume_command()}"
        console.print(
            f"stopped after step {engine.global_steps}: {saved}", soft_wrap=True, markup=False, highlight=False
        )
    return 128 + signal.SIGINT if stopped else 0


def main() -> int:
    """Run the script, and return its exit code."""
    init_distributed()
    with CtrlC() as interrupt:
        status = run(interrupt)
    dist.destroy_process_group()
    return status


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:  # before the training, or a second Ctrl-C
        raise SystemExit(128 + signal.SIGINT) from None
