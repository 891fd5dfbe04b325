"""A stock transformers script, run by test_trainer_contract: `trainer.py CASES.json OUT.json`. It does not use zeroshard.

Each case trains a small Llama, and rank 0 writes the results. The script runs under DDP, or with a package named deepspeed.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from cases import config_of, figures, llama, run_all, tokens
from safetensors.torch import load_file

transformers.logging.set_verbosity_error()


ROWS = [{"input_ids": tokens(number), "labels": tokens(number)} for number in range(16)]


def deepspeed_config(case: dict[str, Any]) -> dict[str, Any] | str | None:
    """Return the config for TrainingArguments(deepspeed=...); None selects DDP."""
    if case["stage"] is None or isinstance(case["stage"], str):
        return case["stage"]
    fp16 = {"enabled": "auto", "initial_scale_power": 10}
    config = config_of(case["stage"], bf16={"enabled": "auto"}, fp16=fp16)
    if case["optimizer"]:
        params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
        config["optimizer"] = {"type": "AdamW", "params": params}
    if case["scheduler"]:
        keys = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        params = {**dict.fromkeys(keys, "auto"), "warmup_type": "linear"}  # the Trainer's own schedule is linear
        config["scheduler"] = {"type": "WarmupDecayLR", "params": params}
    return config


def late_schedule(model: torch.nn.Module) -> tuple[Any, Any]:
    """Return an optimizer, and DeepSpeed's linear schedule, which is the Trainer's one step later."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (0.0, 0.0, 0.5, 1.0, 0.5)[step])


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train with evaluations and saves, or resume, and load the best model. Then predict and generate."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    arguments = transformers.TrainingArguments(
        **{"learning_rate": 1e-2, "warmup_steps": 2, **case.get("arguments", {})},
        output_dir=str(folder), per_device_train_batch_size=4 // ranks, per_device_eval_batch_size=4 // ranks,
        gradient_accumulation_steps=2, max_steps=4, lr_scheduler_type="linear", logging_steps=1, eval_steps=2, save_steps=2,
        eval_strategy="steps", save_strategy="steps", report_to=[], disable_tqdm=True, seed=0, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", bf16=case["dtype"] == "bf16", fp16=case["dtype"] == "fp16", max_grad_norm=0.5,
        gradient_checkpointing=case["checkpointing"], deepspeed=deepspeed_config(case),
        use_cpu=not torch.accelerator.is_available(),  # otherwise the arguments refuse bf16 and fp16 on a CPU
        ddp_backend="gloo" if case["stage"] is None else None, average_tokens_across_devices=False,
        save_only_model=case.get("only_model", False),
    )  # fmt: skip
    assert arguments.world_size == ranks, (arguments.world_size, ranks)
    model = llama(tie_word_embeddings=True)
    optimizers = late_schedule(model) if case["stage"] is None and case["scheduler"] else (None, None)
    trainer = transformers.Trainer(model, arguments, train_dataset=ROWS, eval_dataset=ROWS, optimizers=optimizers)
    if case.get("only_evaluates"):
        return {
            "evaluated": trainer.evaluate()["eval_loss"],
            "predicted": float(trainer.predict(ROWS).predictions.astype("float64").sum()),
        }
    trainer.train(resume_from_checkpoint=case.get("resume"))
    found = {
        **figures(trainer.state.log_history),
        "best": trainer.state.best_model_checkpoint,
        "evaluated": trainer.evaluate()["eval_loss"],
    }
    prompt = tokens(0)[None, :4].to(arguments.device)
    with torch.no_grad():
        found["generated"] = trainer.model.generate(
            input_ids=prompt, max_new_tokens=4, do_sample=False, pad_token_id=0, synced_gpus=ranks > 1
        ).tolist()
    trainer.save_model(str(folder / "final"))
    trainer.accelerator.wait_for_everyone()
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()  # the loaded model is an ordinary one
    read = transformers.LlamaForCausalLM.from_pretrained(folder / "final", dtype=torch.float32)
    assert "lm_head.weight" not in load_file(folder / "final" / "model.safetensors"), "ties once"
    with torch.no_grad():
        found["read"] = float(read(input_ids=tokens(0)[None], labels=tokens(0)[None]).loss)
    trainer.accelerator.wait_for_everyone()
    assert math.isfinite(found["evaluated"])
    return found


if __name__ == "__main__":
    run_all(run)
