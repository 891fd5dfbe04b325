"""QLoRA with a stock Trainer and DeepSpeed's config: quantised.py STAGE BASE OUT trains 4 steps, and again from the second."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments

stage, base, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])


def train(resumes: bool) -> list[float]:
    args = TrainingArguments(
        output_dir=str(out / "run"), use_cpu=True, max_steps=4, per_device_train_batch_size=2, logging_steps=1, save_steps=2,
        report_to=[], learning_rate=1e-2, lr_scheduler_type="constant", seed=1, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        deepspeed={"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": stage}},
    )  # fmt: skip
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32,
        bnb_4bit_quant_storage=torch.float32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=how, dtype=torch.float32)
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM", init_lora_weights="gaussian")
    model = get_peft_model(model, lora)
    drawn = torch.randint(0, 64, (40, 12), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in drawn]
    trainer = Trainer(model=model, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=str(out / "run" / "checkpoint-2") if resumes else None)
    trainer.save_model(str(out / ("resumed" if resumes else "once")))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


losses = [train(False), train(True)]
(out / "losses.json").write_text(json.dumps(losses))
