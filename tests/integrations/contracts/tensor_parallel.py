"""A stock script whose config divides the model over two ranks: `tensor_parallel.py CASES.json OUT.json`.

It does not use zeroshard. With `"stage": null` it trains the same on one process.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from cases import config_of, run_all, train_and_save
from long_sequences import InOrder, Tokens

transformers.logging.set_verbosity_error()


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that divide a model, and the data-parallel ranks' share of a batch of two."""
    if case["stage"] is None:
        return {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 8}
    size = 1 if case.get("without") else 2
    config = config_of(case["stage"], tensor_parallel={"autotp_size": size}, bf16={"enabled": case.get("bf16", False)})
    if case.get("optimizer"):
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-3, "weight_decay": 0.0}}
    ranks = int(os.environ["WORLD_SIZE"]) // 2
    sizes = {"per_device_train_batch_size": 2 // ranks, "per_device_eval_batch_size": 8 // ranks}
    return {**sizes, "deepspeed": config}


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """A stream of samples without a length. By default, accelerate reads it only on rank 0."""

    def __init__(self, samples: list[torch.Tensor]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.samples)


def loop(case: dict[str, Any]) -> dict[str, Any]:
    """Train in an accelerate loop with the script's own optimizer and loader; on one process, without accelerate."""
    torch.manual_seed(0)
    model: Any = tiny(case)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    data: Any = [Tokens()[n]["input_ids"] for n in range(8)]
    found: dict[str, Any] = {"losses": [], "norms": []}
    if case["stage"] is None:
        for batch in torch.utils.data.DataLoader(data, batch_size=2):  # type: ignore[arg-type]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            found["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            found["losses"].append(loss.item())
        return found
    if case.get("iterable"):
        data = Stream(data)
    config = arguments(case)
    options = accelerate.DataLoaderConfiguration(dispatch_batches=case.get("dispatch"))
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config={**config["deepspeed"], "gradient_clipping": 0.5})
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin, dataloader_config=options)
    samples = config["per_device_train_batch_size"]
    loader: Any = torch.utils.data.DataLoader(data, batch_size=samples)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        found["norms"].append(float(model.get_global_grad_norm()))
    found["samples"] = model.train_batch_size()
    model.eval()
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        for batch in loader:
            model(input_ids=batch)
    found["warnings"] = sorted({str(one.message) for one in said})
    return found


def tiny(case: dict[str, Any]) -> Any:
    """Return a model of two layers. At stage 3 transformers builds it inside of zero.Init."""
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=case.get("tied", False),
        )
    )  # fmt: skip
    torch.manual_seed(1)  # at stage 3, only rank 0 has drawn random numbers
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.02 + (parameter.ndim == 1))
    return model


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train with evaluations, and save."""
    if case.get("loop"):
        return loop(case)
    options: dict[str, Any] = dict(
        output_dir=str(folder), max_steps=4, learning_rate=1e-2, eval_steps=2,
        lr_scheduler_type="constant", logging_steps=1, save_steps=2, report_to=[], eval_strategy="steps",
        disable_tqdm=True, seed=0, max_grad_norm=0.5, adam_epsilon=1e-3, bf16=case.get("bf16", False),
        use_cpu=not torch.accelerator.is_available(), save_only_model="transformers_plan" in case, **arguments(case),
    )  # fmt: skip
    gc.collect()  # frees the previous case's config, which transformers would read while it loads a model
    made = transformers.TrainingArguments(**options)
    plan: dict[str, Any] = {"tp_plan": "auto"} if case.get("transformers_plan") else {}
    if case.get("loaded"):
        model = transformers.LlamaForCausalLM.from_pretrained(case["loaded"], **plan)
    else:
        torch.manual_seed(0)
        model = tiny(case)
    trainer = InOrder(model, made, train_dataset=Tokens(), eval_dataset=Tokens())
    return train_and_save(trainer, case, folder)


if __name__ == "__main__":
    run_all(run)
