"""A stock script, run by test_trainer_contract: it loads a file whose head has another size, or builds such a model without the
file. It does not use zeroshard.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from cases import config_of, run_all

transformers.logging.set_verbosity_error()


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load the file, and compute a loss if it loads. Every rank adds its own answer to the folder."""
    config = None if case["stage"] is None else config_of(case["stage"])
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), report_to=[], disable_tqdm=True, deepspeed=config, use_cpu=not torch.accelerator.is_available(),
        ddp_backend="gloo" if case["stage"] is None else None, max_steps=6, logging_steps=1, save_strategy="no", learning_rate=1e-2,
    )  # fmt: skip
    torch.manual_seed(0)
    try:
        if case.get("builds"):  # the constructor builds all but the head by `from_config`
            config = transformers.AutoConfig.from_pretrained(case["file"], num_labels=3)
            model = transformers.LlamaForSequenceClassification(config)
        else:
            model = transformers.LlamaForSequenceClassification.from_pretrained(
                case["file"], num_labels=3, ignore_mismatched_sizes=case["ignores"]
            )
    except RuntimeError as error:
        answer = {"error": str(error)}
    else:
        tokens = torch.randint(2, 64, (8, 6), generator=torch.Generator().manual_seed(1))
        data = [{"input_ids": row, "labels": number % 3} for number, row in enumerate(tokens)]
        trainer = transformers.Trainer(model, arguments, train_dataset=data)
        trainer.train()
        answer = {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}
    answers: list[Any] = [None, None]
    torch.distributed.all_gather_object(answers, answer)
    return {"answers": answers}


if __name__ == "__main__":
    run_all(run)
