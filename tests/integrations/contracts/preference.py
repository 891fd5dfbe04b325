"""A stock trl script, run by test_preference_contract: `preference.py CASES.json OUT.json`. It does not use zeroshard.

Each case trains a small Llama with SFTTrainer or DPOTrainer, most with LoRA adapters. Rank 0 writes the results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from cases import config_of, figures, llama, run_all, tokens
from datasets import Dataset, load_from_disk
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
    return [
        " ".join(WORDS[3 + int(token) % (len(WORDS) - 3)] for token in tokens(100 * seed + n, 5)) for n in range(16)
    ]


def adapter(kind: str) -> Any:
    """Return the adapter of a case. PEFT itself runs or reads some while it saves."""
    if kind == "prompt":
        return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    if kind == "prefix":
        return peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    if kind == "modules":
        options: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    else:
        options = {"target_modules": ["q_proj", "v_proj"]}
    return peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM", **options)


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
    rows = {"prompt": sentences(1), "chosen": [" " + one for one in sentences(2)]}
    kind, _, way = case["trainer"].partition("-")
    if kind == "sft":
        data = Dataset.from_dict({"prompt": rows["prompt"], "completion": rows["chosen"]})
        arguments = SFTConfig(**common, packing=False)
        return SFTTrainer(
            model_of_words(), arguments, train_dataset=data, processing_class=tokenizer(), peft_config=adapter(way)
        )
    data = Dataset.from_dict({**rows, "rejected": [" " + one for one in sentences(3)]})
    if not way:
        arguments = DPOConfig(**common, beta=0.5)
        return DPOTrainer(
            model_of_words(), args=arguments, train_dataset=data, processing_class=tokenizer(), peft_config=adapter(way)
        )
    # Train every weight. The reference is a second model, or the same one before it is trained.
    before = way == "before"
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
    found: dict[str, Any] = figures(trainer.state.log_history)
    prompt = tokenizer()(sentences(4)[0], return_tensors="pt", return_token_type_ids=False).to(trainer.args.device)
    with torch.no_grad(), unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
        # Each rank generates a different number of tokens.
        count = 4 + trainer.args.process_index
        found["generated"] = model.generate(**prompt, max_new_tokens=count, do_sample=False)[0].tolist()[:9]
    trainer.save_model(str(folder / "final"))
    trainer.accelerator.wait_for_everyone()
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()  # the loaded model is an ordinary one
    found["read"] = []
    for name in ("final", "checkpoint-4"):
        if case["trainer"] in ("dpo-full", "dpo-before"):
            read: Any = transformers.LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        else:
            read = peft.PeftModel.from_pretrained(model_of_words(), str(folder / name)).eval()
        if case["trainer"] in ("sft", "dpo"):
            trained = {name: value for name, value in read.named_parameters() if "lora_B" in name}
            assert len(trained) == 4 and all(value.abs().sum() > 0 for value in trained.values())
        with torch.no_grad():
            logits = read(**{name: value.cpu() for name, value in prompt.items()}).logits
        found["read"].append(float(logits.double().abs().sum()))
    trainer.accelerator.wait_for_everyone()
    return found


if __name__ == "__main__":
    run_all(run)
