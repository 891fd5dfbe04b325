"""Writes the table of plans of docs/sequences.md: `python benchmarks/sequence_plans.py`; a row takes up to three minutes of one core.

Each row is a dry run of two steps at Llama's shapes. A machine is not needed, and none was run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroshard

PAGE = Path(__file__).parent.parent / "docs" / "sequences.md"
BEGIN = "<!-- figures: benchmarks/sequence_plans.py -->\n"
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False},
}
LENGTHS = {"32k": 32 * 1024, "128k": 128 * 1024, "1M": 1024 * 1024}
DEVICES = (1, 8, 32)
TILE = 4096


def config(devices: int) -> dict[str, Any]:
    """Return stage 3 in bf16, with checkpoints and optimizer in CPU memory; on one device the parameters rest there, too."""
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
    """Build Llama 3's 1B or 8B, which has 32 heads and 8 of keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads, max_position_embeddings=1 << 20, use_cache=False))


def row(size: str, length: str, devices: int) -> str:
    """Plan one training, and return its row."""

    def batch(samples: int) -> dict[str, Tensor]:
        tokens = torch.zeros(samples, LENGTHS[length], dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    began = time.process_time()
    made = zeroshard.plan(
        lambda: model(SHAPES[size]), config(devices), world_size=devices, batch=batch, hosts=-(-devices // 8),
        sequence_parallel=devices, tile_tokens=TILE, sharded_init=True,
    )  # fmt: skip
    took = time.process_time() - began
    return f"| {size} | {length} | {devices} | {made.peak_nbytes / 1e9:.1f} | {took:.0f} |"


def with_rows(page: str, rows: list[str]) -> str:
    """Return a page's text with the rows of its table replaced."""
    before, after = page.split(BEGIN)
    lines = after.lstrip("\n").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("|"))
    return before + BEGIN + "\n" + "\n".join([*lines[:2], *rows, *lines[end:]]) + "\n"


if __name__ == "__main__":
    cases = [(size, length, devices) for size in SHAPES for devices in reversed(DEVICES) for length in LENGTHS]
    made = {}
    for case in cases:
        made[case] = row(*case)
        print(made[case], file=sys.stderr, flush=True)
    PAGE.write_text(with_rows(PAGE.read_text(encoding="utf-8"), list(made.values())), encoding="utf-8")
