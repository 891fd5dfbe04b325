"""Records DeepSpeed's losses of a small Llama in bf16, for the first 10 steps of 2 ranks under ZeRO 1, 2 and 3.

This script needs deepspeed==0.19.8, transformers and torch. The test reads the recorded file.

    python tests/support/recorded/deepspeed_llama.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.testing import run_ranks

LOSSES = Path(__file__).parent / "llama_losses.json"
STEPS = 10
STAGES = (1, 2, 3)
VOCABULARY = 61


def make_model() -> nn.Module:
    """Make a Llama with fixed values, since transformers' may change. Its rotary frequencies stay in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=512, attn_implementation="eager",
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.05, generator=generator)
    return model


def batch(rank: int, step: int) -> torch.Tensor:
    """Return tokens [2, 300]. At positions beyond 256, 16-bit frequencies would be off by whole radians."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (2, 300), generator=generator)
    tokens[:, 150:] = tokens[:, :150]  # the model can learn a dependency over a distance
    return tokens


def config(stage: int) -> dict[str, Any]:
    """Return the config for both DeepSpeed and zeroshard."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3, "torch_adam": True}},
    }


def train(engine: Any, rank: int) -> list[float]:
    """Train for 10 steps, and return their losses."""
    losses = []
    for step in range(STEPS):
        tokens = batch(rank, step)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def record() -> None:
    """Train with DeepSpeed, and write the losses."""
    os.environ["DS_ACCELERATOR"] = "cpu"

    def body(rank: int, stage: int) -> list[float]:
        import deepspeed

        os.environ["LOCAL_RANK"] = str(rank)
        engine, *_ = deepspeed.initialize(model=make_model(), config=config(stage), dist_init_required=False)
        return train(engine, rank)

    recorded = {str(stage): run_ranks(body, 2, stage, timeout=500, collective_timeout=500) for stage in STAGES}
    LOSSES.write_text(json.dumps(recorded, indent=0) + "\n")


if __name__ == "__main__":
    record()
