"""A stock script whose config divides the model over ranks, its tensors or its experts: `divided.py CASES.json OUT.json`.

It does not use zeroshard. With `"stage": null` it trains the same on one process.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin
from cases import config_of, run_all, tokens, train_and_save
from long_sequences import ROWS, InOrder
from torch.utils.data import DataLoader, IterableDataset

transformers.logging.set_verbosity_error()


def config(case: dict[str, Any]) -> dict[str, Any]:
    """Return a config that divides experts over `ep` ranks, or tensors over two, if the case is not `without`."""
    blocks: dict[str, Any] = {"bf16": {"enabled": case.get("bf16", False)}}
    if "ep" in case:
        blocks["expert_parallel"] = {"enabled": True, "autoep_size": case["ep"]}
    else:
        blocks["tensor_parallel"] = {"autotp_size": 1 if case.get("without") else 2}
    if case.get("optimizer"):
        blocks["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-3, "weight_decay": 0.0}}
    return config_of(case["stage"], **blocks)


def share(case: dict[str, Any], batch: int) -> int:
    """Return a rank's samples of a batch: ranks that divide tensors have the same ones."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return batch // (1 if case["stage"] is None else ranks if "ep" in case else ranks // 2)


def tiny(case: dict[str, Any]) -> Any:
    """Return a model of two layers, or load it. At stage 3 transformers builds it inside of zero.Init."""
    if case.get("loaded"):
        plan: dict[str, Any] = {"tp_plan": "auto"} if case.get("transformers_plan") else {}
        return transformers.AutoModelForCausalLM.from_pretrained(case["loaded"], **plan)
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 16, "tie_word_embeddings": case.get("tied", False),
    }  # fmt: skip
    experts = {"moe_intermediate_size": 16, "num_experts": 4, "head_dim": 8, "num_experts_per_tok": 2}
    made = transformers.Qwen3MoeConfig(**sizes, **experts) if "ep" in case else transformers.LlamaConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(made)
    torch.manual_seed(1)  # at stage 3, only rank 0 has drawn random numbers
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.1 if "ep" in case else 0.02) + (parameter.ndim == 1))
    return model


class Stream(IterableDataset[torch.Tensor]):
    """A stream of samples without a length. By default, accelerate reads it only on rank 0."""

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.samples)


def loop(case: dict[str, Any]) -> dict[str, Any]:
    """Train in an accelerate loop with the script's own optimizer and loader; on one process, without accelerate."""
    model: Any = tiny(case)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    size = 4 if "ep" in case else 2
    data: Any = [tokens(n, 14) for n in range(4 * size)]
    loader: Any = DataLoader(Stream(data) if case.get("iterable") else data, share(case, size))
    accelerator = None
    if case["stage"] is not None:
        plugin = DeepSpeedPlugin(hf_ds_config={**config(case), "gradient_clipping": 0.5})
        options = DataLoaderConfiguration(dispatch_batches=case.get("dispatch"))
        accelerator = Accelerator(deepspeed_plugin=plugin, dataloader_config=options)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        if accelerator is None:
            loss.backward()
            found["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        else:
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator is None:
            found["losses"].append(loss.item())
        else:
            found["losses"].append(accelerator.gather(loss.detach().reshape(1)).mean().item())
            found["norms"].append(float(model.get_global_grad_norm()))
    if accelerator is not None:
        state = accelerator.get_state_dict(model)  # whole on rank 0, at stage 3
        found["experts"] = [len(one) for name, one in state.items() if name.endswith("experts.down_proj")]
        found["samples"], found["warnings"] = model.train_batch_size(), evaluated(model, loader)
    return found


def evaluated(model: Any, loader: Any) -> list[str]:
    """Run a model on a loader, and return the warnings."""
    model.eval()
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        for batch in loader:
            model(input_ids=batch)
    return sorted({str(one.message) for one in said})


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train with evaluations, and save."""
    if case.get("loop"):
        return loop(case)
    gc.collect()  # frees the previous case's config, which transformers would read while it loads a model
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=4, learning_rate=1e-2, eval_steps=2, lr_scheduler_type="constant",
        per_device_train_batch_size=share(case, 4 if "ep" in case else 2), per_device_eval_batch_size=share(case, 8),
        logging_steps=1, save_steps=2, report_to=[], eval_strategy="steps", disable_tqdm=True, seed=0, max_grad_norm=0.5,
        adam_epsilon=1e-3, bf16=case.get("bf16", False), gradient_checkpointing=case.get("checkpointing", False),
        use_cpu=not torch.accelerator.is_available(), save_only_model="transformers_plan" in case,
        deepspeed=None if case["stage"] is None else config(case),
    )  # fmt: skip
    trainer = InOrder(tiny(case), arguments, train_dataset=ROWS, eval_dataset=ROWS)
    return train_and_save(trainer, case, folder)


if __name__ == "__main__":
    run_all(run)
