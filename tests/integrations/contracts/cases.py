"""Owns what the stock scripts in this folder share: their cases, from CASES.json to OUT.json, their model, config and figures."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from torch import Tensor


def llama(seed: int = 0, **options: Any) -> Any:
    """Return a small Llama, with some options of its config."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 16,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **options}))


def tokens(seed: int, length: int = 8) -> Tensor:
    return torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(seed))


def config_of(stage: int, **blocks: Any) -> dict[str, Any]:
    """Return a DeepSpeed config whose numbers come from the Trainer's arguments, with these blocks in addition."""
    numbers = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping")
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    return {"zero_optimization": zero, **dict.fromkeys(numbers, "auto"), **blocks}


def figures(history: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return the figures in a Trainer's history."""
    names = {"losses": "loss", "norms": "grad_norm", "evaluations": "eval_loss"}
    return {name: [entry[key] for entry in history if key in entry] for name, key in names.items()}


def train_and_save(trainer: transformers.Trainer, case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train, save the model, and return the figures and, on rank 0, the sum of each saved weight."""
    trainer.train(resume_from_checkpoint=case.get("resume"))
    found: dict[str, Any] = {**figures(trainer.state.log_history), "weights": {}}
    trainer.save_model(str(folder / "final"))
    trainer.accelerator.wait_for_everyone()
    if int(os.environ.get("RANK", "0")) == 0:
        saved = load_file(folder / "final" / "model.safetensors")
        found["weights"] = {name: one.double().sum().item() for name, one in saved.items()}
    return found


def run_all(run: Callable[[dict[str, Any], Path], dict[str, Any]]) -> None:
    """Run the cases one after another, as separate programs would. Rank 0 writes the results."""
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results = []
    for case in cases:
        folder = out.parent / case["name"]
        results.append(run(case, folder))
        AcceleratorState._reset_state(reset_partial_state=False)
        if case.get("throw_away", True) and int(os.environ.get("RANK", "0")) == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if int(os.environ.get("RANK", "0")) == 0:
        out.write_text(json.dumps(results))
