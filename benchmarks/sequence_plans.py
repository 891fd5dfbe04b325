"""Writes the tables of benchmarks/results/sequence_plans.md from dry runs of two steps, at the shapes of Llama.

`python benchmarks/sequence_plans.py` takes about 12 minutes on one core and needs no accelerator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard

PAGE = Path(__file__).parent / "results" / "sequence_plans.md"
BEGIN = "<!-- figures: benchmarks/sequence_plans.py -->\n"
BEGIN_REACH = "<!-- figures: benchmarks/sequence_plans.py, reach -->\n"
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False},
}
LENGTHS = {"32k": 32 * 1024, "128k": 128 * 1024, "1M": 1024 * 1024}
DEVICES = (1, 8, 32)
TILE = 4096
STEP = 64 * 1024
PUBLISHED = {("8B", 1): "500k", ("8B", 8): "3.7M", ("8B", 32): "15M"}
"""Sequence lengths that DeepSpeed publishes for ALST."""


def config(devices: int) -> dict[str, Any]:
    """Return a stage-3 config in bf16, with checkpoints and optimizer in CPU memory; on one device, parameters too."""
    on_cpu = {"device": "cpu", "pin_memory": True}
    block: dict[str, Any] = {"stage": 3, "offload_optimizer": on_cpu}
    if devices == 1:
        block["offload_param"] = on_cpu
    return {
        "zero_optimization": block,
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "activation_checkpointing": {"checkpoint_units": "auto", "cpu_checkpointing": True},
    }


def model(shape: dict[str, Any]) -> nn.Module:
    """Build Llama 3's 1B or 8B model, which has 32 heads and 8 key heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, max_position_embeddings=1 << 20, use_cache=False))


def planned(size: str, tokens: int, devices: int) -> zeroshard.Plan:
    """Plan a training run on one sequence of `tokens` tokens."""

    def batch(samples: int) -> dict[str, Tensor]:
        whole = torch.zeros(samples, tokens, dtype=torch.long)
        return {"input_ids": whole, "labels": whole}

    return zeroshard.plan(
        lambda: model(SHAPES[size]), config(devices), world_size=devices, batch=batch, hosts=-(-devices // 8),
        sequence_parallel=devices, tile_tokens=TILE, sharded_init=True,
    )  # fmt: skip


def row(size: str, length: str, devices: int) -> str:
    """Plan one training run and return its row."""
    made = planned(size, LENGTHS[length], devices)
    host = made.figures.host_peak.nbytes / 1e9
    return f"| {size} | {length} | {devices} | {made.peak_nbytes / 1e9:.1f} | {host:.1f} |"


def reach(size: str, devices: int) -> str:
    """Find the longest sequence that fits, in steps of STEP tokens, and return its row.

    Memory grows linearly with the length, so two plans predict the longest sequence.
    """
    made = dict[int, zeroshard.Plan]()

    def at(steps: int) -> zeroshard.Plan:
        if steps not in made:
            made[steps] = planned(size, steps * STEP, devices)
        return made[steps]

    low, high = 4 * devices, 8 * devices
    grows = (at(high).needed_nbytes - at(low).needed_nbytes) / (high - low)
    found = low + int((at(low).limit - at(low).needed_nbytes) / grows)
    while not at(found).fits:
        found -= 1
    while at(found + 1).fits:
        found += 1
    best = at(found)
    gigabytes = f"{best.needed_nbytes / 1e9:.1f} | {best.host_nbytes / 1e9:.0f}"
    return f"| {size} | {devices} | {found * STEP:,} | {gigabytes} | {PUBLISHED.get((size, devices), '')} |"


def with_rows(page: str, begin: str, rows: list[str]) -> str:
    """Return the text of a page, with the rows of one table replaced."""
    before, after = page.split(begin)
    lines = after.lstrip("\n").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("|"))
    return before + begin + "\n" + "\n".join([*lines[:2], *rows, *lines[end:]]) + "\n"


def write(begin: str, rows: Iterable[str]) -> None:
    """Make rows, print each, and write all to the page."""
    made = []
    for one in rows:
        print(one, file=sys.stderr, flush=True)
        made.append(one)
    PAGE.write_text(with_rows(PAGE.read_text(encoding="utf-8"), begin, made), encoding="utf-8")


if __name__ == "__main__":
    cases = [(size, length, devices) for size in SHAPES for devices in reversed(DEVICES) for length in LENGTHS]
    write(BEGIN, (row(*case) for case in cases))
    write(BEGIN_REACH, (reach(size, devices) for size in SHAPES for devices in DEVICES))
