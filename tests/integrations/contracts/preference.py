"""A stock trl script, run by test_preference_contract: `preference.py CASES.json OUT.json`. It does not use zeroshard.

Each case trains a small Llama with SFTTrainer or DPOTrainer, most with LoRA adapters. Rank 0 writes the results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from cases import config_of, llama, run_all
from datasets import Dataset, load_from_disk
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.models import unwrap_model_for_generation

transformers.logging.set_verbosity_error()
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(29))]


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model_of_words() -> Any:
    return llama(vocab_size=len(WORDS), max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=None)


def sentences(seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    return [
        " ".join(WORDS[index] for index in torch.randint(3, len(WORDS), (5,), generator=generator)) for _ in range(16)
    ]


def make(case: dict[str, Any], folder: Path) -> Any:
    """Return the trainer of a case."""
    common: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4,
        "learning_rate": 1e-2, "logging_steps": 1, "save_steps": 2, "report_to": [], "disable_tqdm": True, "seed": 0,
        "bf16": False, "max_grad_norm": 0.5, "use_cpu": case["stage"] is None,
        "ddp_backend": "gloo" if case["stage"] is None else None, "gradient_checkpointing": case["checkpointing"],
        "average_tokens_across_devices": False, "dataset_num_proc": None,
    }  # fmt: skip
    if case["stage"] is not None:
        common["deepspeed"] = config_of(case["stage"])
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    rows = {"prompt": sentences(1), "chosen": [" " + one for one in sentences(2)]}
    if case["trainer"] == "sft":
        data = Dataset.from_dict({"prompt": rows["prompt"], "completion": rows["chosen"]})
        return SFTTrainer(
            model_of_words(),
            SFTConfig(**common, packing=False),
            train_dataset=data,
            processing_class=tokenizer(),
            peft_config=lora,
        )
    data = Dataset.from_dict({**rows, "rejected": [" " + one for one in sentences(3)]})
    if case["trainer"] == "dpo":
        arguments = DPOConfig(**common, beta=0.5)
        return DPOTrainer(
            model_of_words(), args=arguments, train_dataset=data, processing_class=tokenizer(), peft_config=lora
        )
    # Train every weight. The reference is a second model, or the same one before it is trained.
    before = case["trainer"] == "dpo-before"
    arguments = DPOConfig(**common, beta=0.5, precompute_ref_log_probs=before)
    if before:  # ranks find the figures in the folder of the data
        with arguments.main_process_first():
            if not (folder / "data").exists():
                data.save_to_disk(folder / "data")
        data = load_from_disk(folder / "data")
    reference = None if before else model_of_words()
    return DPOTrainer(
        model_of_words(), ref_model=reference, args=arguments, train_dataset=data, processing_class=tokenizer()
    )


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train, generate and save. Then load the adapters, or all weights, onto an ordinary model."""
    trainer = make(case, folder)
    trainer.train(resume_from_checkpoint=case.get("resume"))
    history = trainer.state.log_history
    found: dict[str, Any] = {
        "losses": {str(entry["step"]): entry["loss"] for entry in history if "loss" in entry},
        "norms": {str(entry["step"]): entry["grad_norm"] for entry in history if "grad_norm" in entry},
    }
    prompt = tokenizer()(sentences(4)[0], return_tensors="pt", return_token_type_ids=False).to(trainer.args.device)
    with torch.no_grad(), unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
        # Each rank generates a different number of tokens.
        count = 4 + trainer.args.process_index
        found["generated"] = model.generate(**prompt, max_new_tokens=count, do_sample=False)[0].tolist()[:9]
    trainer.save_model(str(folder / "final"))
    trainer.accelerator.wait_for_everyone()
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()  # the loaded model is an ordinary one
    read: Any = model_of_words()
    if case["trainer"] in ("sft", "dpo"):
        read = PeftModel.from_pretrained(read, str(folder / "final"))
        trained = {name: value for name, value in read.named_parameters() if "lora_B" in name}
        assert len(trained) == 4 and all(value.abs().sum() > 0 for value in trained.values())
    else:
        read = transformers.LlamaForCausalLM.from_pretrained(folder / "final", dtype=torch.float32)
    with torch.no_grad():
        logits = read(**{name: value.cpu() for name, value in prompt.items()}).logits
    found["read"] = float(logits.double().abs().sum())
    trainer.accelerator.wait_for_everyone()
    return found


if __name__ == "__main__":
    run_all(run)
