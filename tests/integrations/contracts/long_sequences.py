"""A stock script that cuts each sequence over two ranks, as in accelerate's guide: `long_sequences.py CASES.json OUT.json`.

It does not use zeroshard. With `"stage": null` it trains the same on one process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import transformers
from accelerate import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from cases import config_of, figures, llama, run_all, tokens
from torch import Tensor
from torch.utils.data import SequentialSampler

transformers.logging.set_verbosity_error()


def row(number: int) -> dict[str, Tensor]:
    """Return a sequence that has fewer tokens that count than the one before."""
    labels = tokens(number, 14)
    labels[:number] = -100
    return {"input_ids": tokens(number, 14), "labels": labels}


ROWS: Any = [row(number) for number in range(8)]


class InOrder(transformers.Trainer):
    """A Trainer whose two ranks of one sequence load the same samples as one process."""

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


def words() -> Any:
    """Return a tokenizer of the words t0 to t63."""
    from tokenizers import Tokenizer, models

    words = models.WordLevel({f"t{number}": number for number in range(64)}, unk_token="t0")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="t1", pad_token="t2")


def tuner(**arguments: Any) -> Any:
    """Return TRL's trainer for fine-tuning, over prompts and completions of several lengths."""
    import trl
    from datasets import Dataset as Rows

    class Tuner(trl.SFTTrainer):  # type: ignore[misc, name-defined]
        _get_train_sampler = InOrder._get_train_sampler

    rows = [
        {
            "input_ids": tokens(n, 14)[n:].tolist(),
            "completion_mask": [0] * (2 + n // 2) + [1] * (12 - n - n // 2),
        }
        for n in range(8)
    ]
    more = {"bf16": False, "gradient_checkpointing": False, "pad_to_multiple_of": 4}
    options = trl.SFTConfig(**arguments.pop("options"), **more)
    return Tuner(**arguments, args=options, train_dataset=Rows.from_list(rows), processing_class=words())


def parallelism(case: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that cut sequences."""
    if case["stage"] is None:
        return {}
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    return {
        "parallelism_config": ParallelismConfig(sp_size=2, sp_backend="deepspeed", sp_handler=handler),
        "deepspeed": config_of(case["stage"]),
    }


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train with evaluations, and save."""
    options: dict[str, Any] = dict(
        output_dir=str(folder), per_device_train_batch_size=1, per_device_eval_batch_size=1, max_steps=4, learning_rate=1e-2,
        lr_scheduler_type="constant", logging_steps=1, eval_steps=2, save_strategy="no", report_to=[],
        disable_tqdm=True, seed=0, max_grad_norm=0.5, use_cpu=case["stage"] is None, adam_epsilon=1e-3, **parallelism(case),
    )  # fmt: skip
    model = llama()
    if case.get("tuner"):
        trainer = tuner(model=model, options=options)
    else:
        options |= {"eval_strategy": "steps", "gradient_checkpointing": case["checkpointing"]}
        trainer = InOrder(model, transformers.TrainingArguments(**options), train_dataset=ROWS, eval_dataset=ROWS)
    trainer.train()
    found: dict[str, Any] = {**figures(trainer.state.log_history), "saved": None}
    trainer.save_model(str(folder / "final"))
    trainer.accelerator.wait_for_everyone()
    if int(os.environ.get("RANK", "0")) == 0:
        found["saved"] = "attn" in (folder / "final" / "config.json").read_text()
    return found


if __name__ == "__main__":
    run_all(run)
