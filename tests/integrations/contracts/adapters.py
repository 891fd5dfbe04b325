"""A stock transformers script with peft's models: `adapters.py CASES.json OUT.json`. It does not use zeroshard.

Each case trains adapters that PEFT itself runs or reads while it saves. Rank 0 writes the results.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from cases import llama, run_all
from trainer import Tokens, deepspeed_config

transformers.logging.set_verbosity_error()


def adapter(kind: str) -> Any:
    """Return the adapter of a case."""
    if kind == "modules_to_save":
        return peft.LoraConfig(
            task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
        )
    if kind == "prompt":
        return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train, save, predict and save again. Then load the adapters onto an ordinary model."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=4, learning_rate=1e-2, logging_steps=1, save_steps=2,
        report_to=[], disable_tqdm=True, seed=0, deepspeed=deepspeed_config(case), use_cpu=not torch.accelerator.is_available(),
        average_tokens_across_devices=False,
    )  # fmt: skip
    model = peft.get_peft_model(llama(tie_word_embeddings=True), adapter(case["kind"]))
    trainer = transformers.Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens())
    trainer.train()
    trainer.save_model(str(folder / "final"))
    found = {"predicted": float(abs(trainer.predict(Tokens()).predictions).astype("float64").sum())}
    trainer.save_model(str(folder / "final"))
    trainer.accelerator.wait_for_everyone()
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()  # the loaded model is an ordinary one
    tokens = torch.stack([Tokens()[index]["input_ids"] for index in range(len(Tokens()))])
    for name in ("final", "checkpoint-4"):
        read = peft.PeftModel.from_pretrained(llama(tie_word_embeddings=True), folder / name).eval()
        with torch.no_grad():
            found[name] = float(read(input_ids=tokens).logits.double().abs().sum())
    trainer.accelerator.wait_for_everyone()
    assert math.isfinite(found["predicted"])
    return found


if __name__ == "__main__":
    run_all(run)
