"""ZeroTrainer trains what the stock Trainer trains with DDP, saves what from_pretrained loads, and goes on where it stopped."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_trainers import Tokens, as_torchrun, gpt2
from torch import Tensor, nn

import zeroshard
from zeroshard import Policy, ZeroRedundancyOptimizer
from zeroshard.errors import ConfigError, UsageError
from zeroshard.integrations.trainer_parts import OuterModel
from zeroshard.integrations.transformers import (
    ZeroConsolidateCallback,
    ZeroSeq2SeqTrainer,
    ZeroTrainer,
)
from zeroshard.testing import run_ranks
from zeroshard.testing.ranks import free_port

transformers.logging.set_verbosity_error()

Losses = dict[str, dict[str, float]]


def llama(tied: bool = True) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def arguments(out: Path, rank: int, world: int, port: int, **kwargs: Any) -> Any:
    if world > 1:
        as_torchrun(rank, world, port)
    else:  # plain python
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    given = dict(
        use_cpu=True, per_device_train_batch_size=2, num_train_epochs=2, save_strategy="no", report_to=[], disable_tqdm=True,
        gradient_accumulation_steps=4, seed=0, logging_steps=1, learning_rate=1e-2, max_grad_norm=0.5,
    )  # fmt: skip
    given.update({"ddp_backend": "gloo"} if world > 1 else {})
    return transformers.TrainingArguments(str(out), **(given | kwargs))


def history(trainer: Any) -> Losses:
    """Numbers of the log, by step and by name."""
    return {
        f"{number}": {k: float(v) for k, v in entry.items() if k in ("loss", "grad_norm", "learning_rate", "eval_loss")}
        for number, entry in enumerate(trainer.state.log_history)
    }


def assert_close(one: Losses, other: Losses, tolerance: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    assert any("loss" in entry for entry in one.values())
    for number, entry in one.items():
        for name, value in entry.items():
            assert math.isclose(value, other[number][name], rel_tol=0, abs_tol=tolerance), (number, name, entry, other)


def run(body: Callable[..., Any], world: int, *args: Any, timeout: float = 120) -> list[Any]:
    return run_ranks(body, world, world, free_port(), *args, initialise=False, timeout=timeout)


def train(rank: int, world: int, port: int, out: Path, zero: Any, kwargs: dict[str, Any]) -> Losses:
    """One training; `zero` "stock" is transformers' own Trainer, with DDP."""
    given = dict(kwargs)
    model = given.pop("model", llama)()
    resume = given.pop("resume", None)
    args = arguments(out, rank, world, port, **given)
    both = dict(model=model, args=args, train_dataset=Tokens(), eval_dataset=Tokens())
    trainer = transformers.Trainer(**both) if zero == "stock" else ZeroTrainer(**both, zero=zero)
    trainer.train(resume_from_checkpoint=resume)
    return history(trainer)


EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}


def test_losses_are_ddps_under_every_stage(tmp_path: Path) -> None:
    """Three batches a rank and epoch in windows of four: the last window of each epoch is short."""
    stock = run(train, 2, tmp_path, "stock", EVALUATES)
    assert any("eval_loss" in entry for entry in stock[0].values())
    for zero in (0, 1, 2, 3):
        for mine, theirs in zip(run(train, 2, tmp_path, zero, EVALUATES), stock, strict=True):
            assert_close(mine, theirs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"gradient_checkpointing": True},
        {"max_grad_norm": 0.0},
        {"label_smoothing_factor": 0.1},
        {"lr_scheduler_type": "cosine", "warmup_steps": 2, "optim": "adafactor"},
        {"model": gpt2, "gradient_accumulation_steps": 1},
        {"torch_compile": True, "torch_compile_backend": "aot_eager"},
        {"eval_on_start": True, **EVALUATES},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_losses_are_ddps_with(tmp_path: Path, kwargs: dict[str, Any]) -> None:
    stock = run(train, 2, tmp_path, "stock", kwargs)
    assert_close(run(train, 2, tmp_path, 3, kwargs)[0], stock[0])
    assert_close(run(train, 1, tmp_path, Policy.stage(2), kwargs)[0], run(train, 1, tmp_path, "stock", kwargs)[0])
