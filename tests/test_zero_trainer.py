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


# ---------------------------------------------------------------------- checkpoints


def fit(rank: int, world: int, port: int, out: Path, zero: Any, kwargs: dict[str, Any], look: Any = None) -> Any:
    """One training, and what `look(trainer)` finds after it."""
    given = dict(kwargs)
    model = given.pop("model", llama)()
    resume, callbacks = given.pop("resume", None), given.pop("callbacks", [])
    args = arguments(out, rank, world, port, **given)
    trainer = ZeroTrainer(
        model, args, train_dataset=Tokens(), eval_dataset=Tokens(), zero=zero, callbacks=[make() for make in callbacks]
    )
    trainer.train(resume_from_checkpoint=resume)
    return history(trainer), look(trainer) if look is not None else None


def weights(trainer: Any) -> dict[str, Tensor]:
    with zeroshard.unsharded(trainer.model):
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


SAVES = {"save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize(("zero", "then", "world"), [(3, 3, 2), (2, 3, 2), (3, 1, 1), (0, 2, 2)])
def test_resumes_at_another_stage_and_world_size(tmp_path: Path, zero: int, then: int, world: int) -> None:
    whole = run(fit, 2, tmp_path, zero, SAVES, weights)
    folder = tmp_path / "checkpoint-2"
    files = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json", "scheduler.pt", "trainer_state.json", "global_step2", "latest"} <= files
    assert not any(name.startswith("optimizer") for name in files)
    kwargs = {**SAVES, "resume": str(folder), "per_device_train_batch_size": 4 // world}
    resumed = run(fit, world, tmp_path, then, kwargs, weights)
    steps, again = ([one for one in losses.values() if "loss" in one] for losses in (whole[0][0], resumed[0][0]))
    assert len(steps) == len(again) == 4
    for one, other in zip(steps, again, strict=True):
        assert math.isclose(one["loss"], other["loss"], abs_tol=1e-5 if world == 1 else 1e-6), (steps, again)
    for name, value in whole[0][1].items():
        torch.testing.assert_close(resumed[0][1][name], value, rtol=0, atol=1e-4)


def test_checkpoints_load_with_from_pretrained(tmp_path: Path) -> None:
    """Ties once, in the true dtype; the best comes back at the end."""
    from safetensors import safe_open

    kwargs = {
        **SAVES, **EVALUATES, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True,
    }  # fmt: skip

    def look(trainer: Any) -> Any:
        trainer.save_model()
        return trainer.state.best_model_checkpoint, weights(trainer), trainer.evaluate()["eval_loss"]

    for zero in (2, 3):
        out = tmp_path / str(zero)
        losses, (best, found, at_best) = run(fit, 2, out, zero, kwargs, look)[0]
        assert best == str(out / "checkpoint-2"), "the loss falls, and greater is better"
        assert math.isclose(at_best, losses["2"]["eval_loss"], abs_tol=1e-6)
        for folder in (out / "checkpoint-2", out):
            with safe_open(folder / "model.safetensors", "pt") as file:
                assert "lm_head.weight" not in file.keys()  # noqa: SIM118
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
            for name, parameter in loaded.named_parameters():
                assert torch.equal(parameter, found[name]), (folder, name)


def test_only_the_model_is_saved(tmp_path: Path) -> None:
    kwargs = {
        **SAVES, **EVALUATES, "save_only_model": True, "load_best_model_at_end": True, "greater_is_better": True,
        "metric_for_best_model": "eval_loss",
    }  # fmt: skip
    for zero in (1, 3):
        out = tmp_path / str(zero)
        losses, again = run(fit, 2, out, zero, kwargs, lambda trainer: trainer.evaluate()["eval_loss"])[0]
        assert not (out / "checkpoint-2" / "latest").exists()
        assert math.isclose(again, losses["2"]["eval_loss"], abs_tol=1e-6)
        resumed = run(fit, 1, out, zero, {**kwargs, "resume": str(out / "checkpoint-4"), "num_train_epochs": 3})
        assert any("loss" in one for one in resumed[0][0].values())


def test_adapters_are_saved_whole(tmp_path: Path) -> None:
    import peft

    def adapted() -> Any:
        base = llama()
        torch.manual_seed(1)
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
        return peft.get_peft_model(base, config)

    kwargs = {"model": adapted, "gradient_checkpointing": True, **SAVES}
    stock = run(train, 2, tmp_path, "stock", {**kwargs, "save_strategy": "no"})[0]
    for zero in (2, 3):
        out = tmp_path / str(zero)
        losses, found = run(fit, 2, out, zero, kwargs, weights)[0]
        assert_close(losses, stock)
        files = {path.name for path in (out / "checkpoint-4").iterdir()}
        assert "adapter_model.safetensors" in files
        assert "model.safetensors" not in files
        loaded = peft.PeftModel.from_pretrained(llama(), out / "checkpoint-4")
        assert any("lora" in name for name in found)
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, found[name]), name
        best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
        more = {**kwargs, **EVALUATES, **best, "resume": str(out / "checkpoint-2")}
        resumed, after = run(fit, 2, out, zero, more, weights)[0]
        last, again = ([one["loss"] for one in log.values() if "loss" in one] for log in (losses, resumed))
        assert torch.allclose(torch.tensor(last), torch.tensor(again), atol=1e-6)


def test_a_stock_checkpoint_is_not_taken_for_ours(tmp_path: Path) -> None:
    run(train, 1, tmp_path, "stock", SAVES)

    def body(rank: int, world: int, port: int) -> None:
        with pytest.raises(UsageError, match="another Trainer"):
            fit(rank, world, port, tmp_path, 2, {**SAVES, "resume": str(tmp_path / "checkpoint-2")})

    run(body, 1)
