"""LLaMA-Factory v1's own SFT, run by test_llama_factory: `llama_factory.py CASES.json OUT.json`.

Cases without a stage run first, on LLaMA-Factory's own backends. Its loop synchronises the accelerator after each step, also
where there is none, so `torch.accelerator.synchronize` does nothing here.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from cases import llama, run_all
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

sys.path.append(str(Path(sys.prefix, "llama_factory")))
torch.accelerator.synchronize = lambda: None  # type: ignore[assignment]

from llamafactory.v1.accelerator.interface import DistributedInterface  # noqa: E402
from llamafactory.v1.config import get_args  # noqa: E402
from llamafactory.v1.core.data_engine import DataEngine  # noqa: E402
from llamafactory.v1.core.model_engine import ModelEngine  # noqa: E402
from llamafactory.v1.trainers.sft_trainer import SFTTrainer  # noqa: E402

import zeroshard.integrations.llama_factory as entry  # noqa: E402

ARGUMENTS: dict[str, Any] = {
    "template": "chatml", "micro_batch_size": 2, "global_batch_size": 8, "cutoff_len": 64, "learning_rate": 1e-2, "max_steps": 4,
    "save_steps": 2, "batching_workers": 0, "bf16": False, "enable_activation_checkpointing": False,
}  # fmt: skip


def write_inputs(folder: Path) -> None:
    """Write a model with a tokenizer of bytes, and conversations."""
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<pad>", "<eos>"]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder / "model")
    llama(vocab_size=len(alphabet), max_position_embeddings=64).save_pretrained(folder / "model")
    turns = [
        [("user", str(number)), ("assistant", str(number * number))] for number in range(24)
    ]  # not of one length: ranks and microbatches have different numbers of tokens
    lines = [
        {"messages": [{"role": role, "content": [{"type": "text", "value": text}]} for role, text in turn]}
        for turn in turns
    ]
    (folder / "data.jsonl").write_text("\n".join(json.dumps(line) for line in lines))


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train and save; return the figures of each step, and the saved weights' sums."""
    inputs = folder.parent / "inputs"
    first = not dist.is_initialized()
    DistributedInterface()
    if first and dist.get_rank() == 0:
        write_inputs(inputs)
    dist.barrier()
    given = {"model": str(inputs / "model"), "train_dataset": str(inputs / "data.jsonl"), "output_dir": str(folder)}
    if case["stage"] is not None:
        entry.register()
        given["dist_config"] = {"name": "fsdp2", "stage": case["stage"]}
        given["optim_config"] = {"name": "zeroshard", "optimizer": "AdamW", "lr": ARGUMENTS["learning_rate"]}
    model_args, data_args, training_args, _ = get_args({**ARGUMENTS, **given, **case["arguments"]})
    made = ModelEngine(model_args, is_train=True)
    trainer = SFTTrainer(training_args, made.model, made.renderer, DataEngine(data_args.train_dataset))
    trainer.fit()
    trainer.save_model()
    dist.barrier()
    history = trainer.state.log_history
    found: dict[str, Any] = {name: [line[name] for line in history] for name in ("step", "loss", "grad_norm")}
    if int(os.environ["RANK"]) == 0:
        found["weights"] = {
            name: one.double().sum().item() for name, one in load_file(folder / "model.safetensors").items()
        }
        found["files"] = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return found


if __name__ == "__main__":
    run_all(run)
