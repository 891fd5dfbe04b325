"""A stock accelerate script, run by test_accelerate_contract: `accelerate_loop.py CASES.json OUT.json`.

It does not use zeroshard. Each case is a raw loop over a small Llama, and rank 0 writes its results. The script runs under DDP, or
with a package named deepspeed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, skip_first_batches
from accelerate.state import AcceleratorState
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from cases import config_of, llama, run_all, tokens
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

transformers.logging.set_verbosity_error()
MICROBATCHES = 2
CLIP = 0.5
OPTIONS: dict[str, Any] = {"tie_word_embeddings": True, "attention_dropout": 0.1}
"""Options of the model."""


TOKENS: Any = [tokens(number) for number in range(20)]
"""Sequences of one length. Two ranks get five batches of two each, so the last step has one microbatch."""


class Count:
    """An object that the user registers for checkpointing."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def plugin(case: dict[str, Any], stage: int) -> Any:
    """Return a plugin made from arguments or, if the config makes the optimizer and the schedule, from a config."""
    if not case["config"]:
        return DeepSpeedPlugin(
            zero_stage=stage, gradient_accumulation_steps=MICROBATCHES, gradient_clipping=CLIP, zero3_save_16bit_model=True,
            zero3_init_flag=case["born"],
        )  # fmt: skip
    warmup = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto")
    config = config_of(
        stage,
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        scheduler={"type": "WarmupLR", "params": {**warmup, "warmup_type": "linear"}},
    )
    config["gradient_clipping"] = CLIP
    return DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=MICROBATCHES, zero3_init_flag=case["born"])


class Run:
    """A prepared model, as after the start of a script."""

    def __init__(self, case: dict[str, Any]) -> None:
        stage = case["stage"]
        self.accelerator = Accelerator(
            deepspeed_plugin=plugin(case, stage) if isinstance(stage, int) else None,
            gradient_accumulation_steps=MICROBATCHES, cpu=stage is None, mixed_precision=case["dtype"],
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        )  # fmt: skip
        model = llama(**OPTIONS)
        if case["config"] and stage is not None:
            optimizer: Any = DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.1)
            schedule: Any = DummyScheduler(optimizer, warmup_num_steps=2)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: self._rate(case, step))
        loader = DataLoader(TOKENS, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.count = Count()
        self.accelerator.register_for_checkpointing(self.count)

    def _rate(self, case: dict[str, Any], step: int) -> float:
        """Return DeepSpeed's linear warm-up, or a linear decay. accelerate steps torch's schedules once for each rank."""
        if case["config"]:
            return min(1.0, max(0.0, step // self.accelerator.num_processes - 1) / 2)
        return 1 - step / 20

    def epoch(self, skip: int = 0) -> Iterator[tuple[float, float | None, float]]:
        """Yield (loss over ranks, norm, rate) for each microbatch."""
        self.model.train()
        for batch in skip_first_batches(self.loader, skip):
            torch.manual_seed(self.count.value)  # for dropout; each rank has its own rows
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=batch, labels=batch).loss
                self.accelerator.backward(loss)
                norm = None
                if self.accelerator.sync_gradients:
                    norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.count.value += 1
            mean = self.accelerator.reduce(loss.detach(), "mean")
            yield float(mean), norm, float(self.optimizer.param_groups[0]["lr"])

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        loader = self.accelerator.prepare(DataLoader(TOKENS, batch_size=3))
        losses = []
        for batch in loader:
            logits = self.model(input_ids=batch).logits[:, :-1]
            each = nn.functional.cross_entropy(logits.transpose(1, 2).float(), batch[:, 1:], reduction="none").mean(1)
            losses.append(self.accelerator.gather_for_metrics(each))
        whole = torch.cat(losses)
        assert len(whole) == len(TOKENS)
        return float(whole.mean())


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train two epochs with a checkpoint in the first, and then resume from the checkpoint."""
    first = Run(case)
    told = []
    for number, figures in enumerate(first.epoch()):
        told.append(figures)
        if number == 1:
            first.accelerator.save_state(str(folder / "state"))
    told += list(first.epoch())
    found: dict[str, Any] = {"told": told, "evaluated": first.evaluate(), "steps": len(told)}

    values = first.accelerator.get_state_dict(first.model)
    is_main = first.accelerator.is_main_process
    if is_main:
        found["values"] = float(sum(value.double().abs().sum() for value in values.values()))
        found["keys"] = sorted(values)
    plain = first.accelerator.unwrap_model(first.model)
    assert type(plain) is transformers.LlamaForCausalLM
    plain.save_pretrained(
        folder / "pretrained", is_main_process=is_main, save_function=first.accelerator.save, state_dict=values
    )
    first.accelerator.save_model(first.model, str(folder / "model"))
    first.accelerator.wait_for_everyone()
    if is_main:
        found["read"] = [
            float(sum(value.double().abs().sum() for value in load_file(path).values()))
            for path in (folder / "pretrained" / "model.safetensors", folder / "model" / "model.safetensors")
        ]
    first.accelerator.free_memory()
    AcceleratorState._reset_state(reset_partial_state=False)

    second = Run(case)
    second.accelerator.load_state(str(folder / "state"))
    assert second.count.value == 2
    found["resumed"] = list(second.epoch(skip=2))
    found["resumed"] += list(second.epoch())
    second.accelerator.load_state(str(folder / "state"))  # a second load, in a run that has continued
    found["back"] = list(second.epoch(skip=2))
    second.accelerator.wait_for_everyone()
    second.accelerator.free_memory()
    return found


def two_models(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train a student with the outputs of a teacher that is not trained. With DeepSpeed, there are two plugins."""
    if case["stage"] is None:
        accelerator = Accelerator(cpu=True)
    else:
        teacher = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
        plugins = {"student": plugin(case, case["stage"]), "teacher": DeepSpeedPlugin(hf_ds_config=teacher)}
        plugins["student"].deepspeed_config["gradient_accumulation_steps"] = 1
        accelerator = Accelerator(deepspeed_plugins=plugins)
    student = llama(**OPTIONS)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2, fused=True)
    loader = DataLoader(TOKENS, batch_size=2)
    student, optimizer, loader = accelerator.prepare(student, optimizer, loader)
    if case["stage"] is not None:
        accelerator.state.select_deepspeed_plugin("teacher")
    looks_on = accelerator.prepare(llama(seed=1, num_hidden_layers=3, **OPTIONS).eval())
    if case["stage"] is not None:
        accelerator.state.select_deepspeed_plugin("student")
    told = []
    for batch in loader:
        torch.manual_seed(len(told))
        with torch.no_grad():
            wanted = looks_on(input_ids=batch).logits.softmax(-1)
        loss = nn.functional.cross_entropy(student(input_ids=batch).logits.flatten(0, 1), wanted.flatten(0, 1))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(student.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        told.append(float(accelerator.reduce(loss.detach(), "mean")))
    accelerator.free_memory()
    return {"told": told}


if __name__ == "__main__":
    run_all(lambda case, folder: (two_models if case["two"] else run)(case, folder))
