"""Trains two models with optimizer states in fp32, bf16 and 8 bits, and draws the losses: docs/small_states.md shows them.

    python benchmarks/small_states.py --task GPT --rows 3
    python benchmarks/small_states.py --task classifier --rows 3
    python benchmarks/small_states.py --times

The models are the example's GPT in a smaller size, and a classifier that tells from 64 bytes of Python's standard library which of its packages
they are from. Each seed has its own weights and samples, the same for all rows. The last sixteenth of each text is held out. The
memory is that of one rank at stage 2, between steps. The results of a task replace its earlier ones, or join those of other
seeds and rows (`--join`), and the picture shows those of all tasks.

`--times` prints instead how long a step and the optimizer's update take, as ratios to fp32: each row trains a GPT of its own, in one
process and in turn, and fp32 twice, to show the noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard
from zeroshard import Precision
from zeroshard.testing.gpt import GPT, GPTConfig
from zeroshard.tools.plots import require_matplotlib, save

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))
from train_gpt import STDLIB, VOCABULARY, Text, Windows, read_text  # noqa: E402

RESULT = HERE / "results" / "small_states.json"
PICTURE = HERE.parent / "docs" / "small_states.png"
ROWS = {
    "fp32": (Precision(), "#4477aa"),
    "bf16": (Precision(state_dtype=torch.bfloat16), "#228833"),
    "8 bits": (Precision(state_dtype=torch.uint8), "#aa3377"),
    "bf16, to the nearest": (Precision(state_dtype=torch.bfloat16, state_rounding="nearest"), "#ccbb44"),
    "8 bits, to the nearest": (Precision(state_dtype=torch.uint8, state_rounding="nearest"), "#ee6677"),
}
PACKAGES = (
    "asyncio",
    "ctypes",
    "distutils",
    "email",
    "encodings",
    "idlelib",
    "lib2to3",
    "multiprocessing",
    "tkinter",
    "unittest",
)


@dataclass(frozen=True)
class Task:
    """A model to train. `batch` returns the samples with some numbers, held out or not, and a forward of them the loss."""

    make: Callable[[], nn.Module]
    batch: Callable[[range, bool], tuple[Tensor, Tensor]]
    rate: float
    numel: int
    """The samples of a step."""


class Classifier(nn.Module):
    """A small convolutional network over bytes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 32)
        self.layers = nn.Sequential(nn.Conv1d(32, 128, 5), nn.ReLU(), nn.Conv1d(128, 128, 5, stride=2), nn.ReLU())
        self.head = nn.Linear(128, classes)

    def forward(self, text: Tensor, targets: Tensor) -> Tensor:
        found = self.layers(self.embedding(text).transpose(1, 2)).amax(2)
        return nn.functional.cross_entropy(self.head(found), targets)


def divided(text: Tensor) -> tuple[Tensor, Tensor]:
    """Return the part of a text to train on, and the part that is held out."""
    first = len(text) * 15 // 16
    return text[:first], text[first:]


def gpt_task() -> Task:
    """Return the training of the example's GPT with 0.36 M parameters: nine runs take minutes of one slow core."""
    parts = [Windows(part) for part in divided(Text(read_text(STDLIB)).tokens)]
    config = GPTConfig(vocabulary=VOCABULARY, layers=2, width=64, heads=2)

    def batch(numbers: range, held_out: bool) -> tuple[Tensor, Tensor]:
        found = torch.stack([parts[held_out][number] for number in numbers])
        return found[:, :-1], found[:, 1:]

    return Task(lambda: GPT(config), batch, 2e-3, 4)


def classifier_task() -> Task:
    """Return the training of the classifier. Samples of one package are as frequent as those of another."""
    texts = [
        divided(torch.frombuffer(bytearray(read_text(STDLIB / one)), dtype=torch.uint8))
        for one in PACKAGES
        if (STDLIB / one).is_dir()
    ]

    def batch(numbers: range, held_out: bool) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(numbers.start)
        targets = torch.randint(0, len(texts), (len(numbers),), generator=random)
        starts = torch.rand(len(numbers), generator=random)
        found = []
        for target, place in zip(targets.tolist(), starts.tolist(), strict=True):
            text = texts[target][held_out]
            start = int(place * (len(text) - 64))
            found.append(text[start : start + 64])
        return torch.stack(found).long(), targets

    return Task(lambda: Classifier(len(texts)), batch, 2e-3, 64)


TASKS = {"GPT": gpt_task, "classifier": classifier_task}


def train(row: str, seed: int, steps: int, task: Task) -> dict[str, Any]:
    """Return the loss of each step, the mean loss of samples that are held out, and the bytes of each model state."""
    torch.manual_seed(seed)
    model = task.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, betas=(0.9, 0.999), weight_decay=0.1, fused=True)
    sharded = zeroshard.shard(model, optimizer, 2, precision=ROWS[row][0])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1 - 0.9 * step / steps))
    losses = []
    for step in range(steps):
        first = (seed * steps + step) * task.numel
        loss = model(*task.batch(range(first, first + task.numel), False))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        starts = range(0, 64 * task.numel, task.numel)
        held_out = [model(*task.batch(range(first, first + task.numel), True)).item() for first in starts]
    return {"losses": losses, "held out": statistics.mean(held_out), "memory": sharded.memory_report()}


def times(rounds: int = 60) -> None:
    """Print the medians, over rounds of one step of each row in turn, of the ratios to fp32: of the update, and of the step."""
    config = GPTConfig(vocabulary=VOCABULARY, layers=4, width=160, heads=4)
    names = ["fp32", "bf16", "8 bits", "fp32"]
    runs = []
    for name in names:
        torch.manual_seed(0)
        model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        zeroshard.shard(model, optimizer, 2, precision=ROWS[name][0])
        runs.append((model, optimizer))
    tokens = torch.randint(0, VOCABULARY, (4, 129), generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(rounds):
        of_round = []
        for model, optimizer in runs:
            begin = time.perf_counter()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            before = time.perf_counter()
            optimizer.step()
            end = time.perf_counter()
            optimizer.zero_grad()
            of_round.append((end - before, end - begin))
        seconds.append(of_round)
    for number, name in enumerate(names):
        kept = seconds[10:]
        update, step = (statistics.median(row[number][part] / row[0][part] for row in kept) for part in (0, 1))
        print(f"{name:8} update {update:.2f}, step {step:.2f}")


def draw(found: dict[str, dict[str, Any]]) -> None:
    """Draw the mean loss over seeds, smoothed over 20 steps, and each row's difference from fp32."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.0 * len(found)), layout="constrained")
    for (left, right), (task, done) in zip(figure.subplots(len(found), 2, squeeze=False), found.items(), strict=True):
        smooth = {
            row: torch.tensor([run["losses"] for run in runs.values()]).mean(0).unfold(0, 20, 1).mean(1)
            for row, runs in done["rows"].items()
        }
        for row, values in smooth.items():
            steps = range(20, 20 + len(values))
            left.plot(steps, values, color=ROWS[row][1], label=row, linewidth=1.2)
            right.plot(steps, values - smooth["fp32"], color=ROWS[row][1], linewidth=1.2)
        left.set(xlabel="step", ylabel="training loss, mean of 20 steps", title=f"{task}: optimizer states in")
        right.set(xlabel="step", title="difference from fp32")
        left.legend(frameon=False)
    save(figure, PICTURE)


def write(task: str, row: str, seed: int, run: dict[str, Any], steps: int) -> None:
    """Add the results of a run to those of its task."""
    found = read()
    rows = found.setdefault(task, {"steps": steps, "rows": {}})["rows"]
    rows.setdefault(row, {})[str(seed)] = {**run, "losses": [round(loss, 4) for loss in run["losses"]]}
    found[task]["rows"] = {row: dict(sorted(rows[row].items())) for row in ROWS if row in rows}
    RESULT.write_text(json.dumps({name: found[name] for name in TASKS if name in found}) + "\n", encoding="utf-8")


def read() -> dict[str, dict[str, Any]]:
    """Return the results of each task."""
    found: dict[str, dict[str, Any]] = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.is_file() else {}
    return found


def main() -> None:
    """Train, and write the results and the picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--task", choices=TASKS, default="classifier")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="none: only draw the results")
    parser.add_argument("--rows", type=int, default=len(ROWS), help="how many of the rows, in their order, to train")
    parser.add_argument(
        "--join", action="store_true", help="keep the results of other seeds and rows with as many steps"
    )
    parser.add_argument("--times", action="store_true", help="only print how long steps take")
    options = parser.parse_args()
    if options.times:
        times()
        return
    require_matplotlib("this benchmark")
    found = read()
    if options.seeds and not (options.join and found.get(options.task, {}).get("steps") == options.steps):
        found.pop(options.task, None)
        RESULT.write_text(json.dumps(found) + "\n", encoding="utf-8")
    task = TASKS[options.task]()
    for seed in options.seeds:
        for row in [*ROWS][: options.rows]:
            run = train(row, seed, options.steps, task)
            print(f"seed {seed}, {row}: {run['held out']:.4f}, {run['memory']}", flush=True)
            write(options.task, row, seed, run, options.steps)
    for row, runs in read()[options.task]["rows"].items():
        values = [run["held out"] for run in runs.values()]
        print(f"{row}: {statistics.mean(values):.4f} ({', '.join(f'{value:.4f}' for value in values)})")
    draw(read())


if __name__ == "__main__":
    main()
