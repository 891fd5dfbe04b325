"""A stock script whose config divides the model over two ranks: `tensor_parallel.py CASES.json OUT.json`.

It knows nothing of zeroshard. With `"stage": null` it is the same training on one process.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from cases import run_all
from long_sequences import InOrder, Tokens
from safetensors.torch import load_file

transformers.logging.set_verbosity_error()


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that divide a model, and the data-parallel ranks' share of a batch of two."""
    if case["stage"] is None:
        return {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 8}
    config = {
        "zero_optimization": {"stage": case["stage"], "stage3_gather_16bit_weights_on_model_save": True},
        "tensor_parallel": {"autotp_size": 1 if case.get("without") else 2},
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": case.get("bf16", False)},
    }
    if case.get("optimizer"):
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-3, "weight_decay": 0.0}}
    ranks = int(os.environ["WORLD_SIZE"]) // 2
    sizes = {"per_device_train_batch_size": 2 // ranks, "per_device_eval_batch_size": 8 // ranks}
    return {**sizes, "deepspeed": config}


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train, save, load, and train again; the second half begins at a checkpoint."""
    options: dict[str, Any] = dict(
        output_dir=str(folder), max_steps=4, learning_rate=1e-2, eval_steps=2,
        lr_scheduler_type="constant", logging_steps=1, save_steps=2, report_to=[], eval_strategy="steps",
        disable_tqdm=True, seed=0, max_grad_norm=0.5, adam_epsilon=1e-3, bf16=case.get("bf16", False),
        use_cpu=not torch.accelerator.is_available(), save_only_model="transformers_plan" in case, **arguments(case),
    )  # fmt: skip
    gc.collect()  # the config of the case before, which transformers reads while a model is loaded
    made = transformers.TrainingArguments(**options)
    plan: dict[str, Any] = {"tp_plan": "auto"} if case.get("transformers_plan") else {}
    if case.get("loaded"):
        model = transformers.LlamaForCausalLM.from_pretrained(case["loaded"], **plan)
    else:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=case.get("tied", False),
            )
        )  # fmt: skip
    trainer = InOrder(model, made, train_dataset=Tokens(), eval_dataset=Tokens())
    trainer.train(resume_from_checkpoint=case.get("resume"))
    history = trainer.state.log_history
    trainer.save_model(str(folder / "final"))
    trainer.accelerator.wait_for_everyone()
    weights = {}
    if int(os.environ.get("RANK", "0")) == 0:
        saved = load_file(folder / "final" / "model.safetensors")
        weights = {name: one.double().sum().item() for name, one in saved.items()}
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [entry["grad_norm"] for entry in history if "grad_norm" in entry],
        "evaluations": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "weights": weights,
    }


if __name__ == "__main__":
    run_all(run)
