"""A stock script whose config divides experts over ranks: `experts.py CASES.json OUT.json`.

It does not use zeroshard. With `"stage": null` it trains the same on one process.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from cases import config_of, run_all, train_and_save
from long_sequences import InOrder, Tokens

transformers.logging.set_verbosity_error()


def arguments(case: dict[str, Any]) -> dict[str, Any]:
    """Return each rank's share of a batch of four and, on several ranks, the config."""
    if case["stage"] is None:
        return {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8}
    experts = {"enabled": True, "autoep_size": case["ep"]}
    config = config_of(case["stage"], expert_parallel=experts, bf16={"enabled": case.get("bf16", False)})
    if case.get("optimizer"):
        config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-3, "weight_decay": 0.0}}
    ranks = int(os.environ["WORLD_SIZE"])
    return {"per_device_train_batch_size": 4 // ranks, "per_device_eval_batch_size": 8 // ranks, "deepspeed": config}


def tiny(case: dict[str, Any]) -> Any:
    """Return a mixture of four experts in two layers, or load it. At stage 3 transformers initialises parameters on rank 0."""
    if case.get("loaded"):
        return transformers.AutoModelForCausalLM.from_pretrained(case["loaded"])
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3MoeConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, moe_intermediate_size=16, num_hidden_layers=2, num_experts=4,
            num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts_per_tok=2, max_position_embeddings=16,
        )
    )  # fmt: skip
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1 + (parameter.ndim == 1))
    return model


def loop(case: dict[str, Any]) -> dict[str, Any]:
    """Train in an accelerate loop with the script's own optimizer and loader; on one process, without accelerate."""
    model: Any = tiny(case)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    config = arguments(case)
    data: Any = [Tokens()[n]["input_ids"] for n in range(16)]
    found: dict[str, Any] = {"losses": [], "norms": []}
    if case["stage"] is None:
        for batch in torch.utils.data.DataLoader(data, batch_size=4):  # type: ignore[arg-type]
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            found["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
            found["losses"].append(loss.item())
        return found
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config={**config["deepspeed"], "gradient_clipping": 0.5})
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=config["per_device_train_batch_size"])
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        found["norms"].append(float(model.get_global_grad_norm()))
    state = accelerator.get_state_dict(model)
    found["experts"] = [
        len(one) for name, one in state.items() if name.endswith("experts.down_proj")
    ]  # on rank 0, at stage 3
    return found


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train with evaluations, and save."""
    if case.get("loop"):
        return loop(case)
    options: dict[str, Any] = dict(
        output_dir=str(folder), max_steps=case.get("steps", 4), learning_rate=1e-2, eval_steps=2, lr_scheduler_type="constant",
        logging_steps=1, save_steps=2, report_to=[], eval_strategy="steps", disable_tqdm=True, seed=0, max_grad_norm=0.5,
        adam_epsilon=1e-3, bf16=case.get("bf16", False), gradient_checkpointing=case.get("checkpointing", False),
        use_cpu=not torch.accelerator.is_available(), **arguments(case),
    )  # fmt: skip
    gc.collect()  # frees the previous case's config, which transformers would read while it loads a model
    made = transformers.TrainingArguments(**options)
    trainer = InOrder(tiny(case), made, train_dataset=Tokens(), eval_dataset=Tokens())
    return train_and_save(trainer, case, folder)


if __name__ == "__main__":
    run_all(run)
