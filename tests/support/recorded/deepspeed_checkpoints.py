"""Records DeepSpeed's checkpoints of ZeRO 1, 2 and 3 after 4 steps on 2 ranks, and its next 5 losses.

This script needs deepspeed==0.19.8 and torch. The tests read the recorded files.

    python tests/support/recorded/deepspeed_checkpoints.py
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from torch import nn

from zeroshard.testing import run_ranks
from zeroshard.testing.gpt import GPT, GPTConfig

FOLDER = Path(__file__).parent / "of_deepspeed"
RUNS = {
    "stage1": (1, {}),
    "stage2": (2, {}),
    "stage3": (3, {}),
    "stage2-bf16": (2, {"bf16": {"enabled": True}}),
}


def make_model() -> nn.Module:
    """Make a small GPT with a tied head and a frozen norm."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=1, width=16, heads=2, context=8, vocabulary=33))
    model.head.weight = model.embedding.weight
    model.blocks[0].norm1.requires_grad_(False)
    return model


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Make AdamW with two param groups."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim == 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets."""
    tokens = torch.randint(0, 33, (3, 9), generator=torch.Generator().manual_seed(100 * step + rank))
    return tokens[:, :-1], tokens[:, 1:]


def config(stage: int, more: dict[str, object]) -> dict[str, object]:
    """Return the config for both DeepSpeed and zeroshard."""
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 20}},
        **more,
    }


def _record(rank: int, stage: int, more: dict[str, object], folder: str) -> list[float]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    model = make_model()
    peer = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if more:
        model.cos, model.sin = model.cos.bfloat16(), model.sin.bfloat16()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=make_optimizer(model), config={**config(stage, more), **peer}, dist_init_required=False
    )
    losses = []
    for step in range(9):
        if step == 4:
            engine.save_checkpoint(folder, client_state={"note": [1, 2.5, "x"]})
        loss = engine(*batch(rank, step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses[4:]


def main() -> None:
    """Write all files again."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    for name, (stage, more) in RUNS.items():
        folder = FOLDER / name
        losses = run_ranks(_record, 2, stage, more, str(folder), timeout=180)
        (folder / "losses.json").write_text(json.dumps(losses))
        for script in folder.glob("*.py"):
            script.unlink()


if __name__ == "__main__":
    main()
