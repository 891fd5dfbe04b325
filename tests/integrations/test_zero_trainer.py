"""ZeroTrainer equals the stock Trainer with DDP, saves models for `from_pretrained`, and resumes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ports import free_port
from test_refused_optimizers import ScheduleFree
from test_trainers import Tokens, as_torchrun, gpt2
from torch import Tensor, nn

import zeroshard
from zeroshard import Policy, ZeroRedundancyOptimizer
from zeroshard.errors import CheckpointError, ConfigError, UsageError
from zeroshard.integrations.transformers import (
    OuterModel,
    ZeroConsolidateCallback,
    ZeroSeq2SeqTrainer,
    ZeroTrainer,
    ZeroTrainerMixin,
    read_settings,
)
from zeroshard.testing import run_ranks

transformers.logging.set_verbosity_error()

Losses = dict[str, dict[str, float]]


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def arguments(out: Path, rank: int, world: int, port: int, **kwargs: Any) -> Any:
    if world > 1:
        as_torchrun(rank, world, port)
    else:  # plain python
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
    given = {
        "use_cpu": True,
        "per_device_train_batch_size": 2, "num_train_epochs": 2, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "gradient_accumulation_steps": 4, "seed": 0, "logging_steps": 1, "learning_rate": 1e-2, "max_grad_norm": 0.5,
    }  # fmt: skip
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
    both = {"model": model, "args": args, "train_dataset": Tokens(), "eval_dataset": Tokens()}
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


@pytest.mark.full
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


@pytest.mark.parametrize(
    ("zero", "then", "world"),
    [
        (3, 1, 1),
        *(pytest.param(*one, marks=pytest.mark.full) for one in ((3, 3, 2), (2, 3, 2), (0, 2, 2))),
    ],
)
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


@pytest.mark.full
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


@pytest.mark.full
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
        resumed, _after = run(fit, 2, out, zero, more, weights)[0]
        last, again = ([one["loss"] for one in log.values() if "loss" in one] for log in (losses, resumed))
        assert torch.allclose(torch.tensor(last), torch.tensor(again), atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["modules_to_save", "prompt", "prefix", "shared_buffers"])
@pytest.mark.quick(2)
def test_adapters_of_whole_modules_and_prompts_are_saved(tmp_path: Path, kind: str) -> None:
    """PEFT runs and reads such modules itself while it saves, on the rank that writes."""
    import peft

    def adapted() -> Any:
        base = llama()
        torch.manual_seed(1)
        configs = {
            "modules_to_save": peft.LoraConfig(
                task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"]
            ),
            "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
            "shared_buffers": peft.VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"]),
        }
        return peft.get_peft_model(base, configs[kind])

    def look(trainer: Any) -> dict[str, Tensor]:
        trainer.save_model()
        trainer.evaluate()
        if kind == "shared_buffers":
            trainer.sharded.export(tmp_path / "export")
        return weights(trainer)

    losses, found = run(fit, 2, tmp_path, 3, {"model": adapted, **SAVES}, look)[0]
    assert_close(losses, run(train, 2, tmp_path / "stock", "stock", {"model": adapted})[0])
    for folder in (tmp_path, tmp_path / "checkpoint-4", *tmp_path.glob("export")):
        loaded = peft.PeftModel.from_pretrained(llama(), folder)
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, found[name]), (folder, name)


@pytest.mark.full
def test_a_stock_checkpoint_is_not_taken_for_ours(tmp_path: Path) -> None:
    run(train, 1, tmp_path, "stock", SAVES)

    def body(rank: int, world: int, port: int) -> None:
        with pytest.raises(UsageError, match="another Trainer"):
            fit(rank, world, port, tmp_path, 2, {**SAVES, "resume": str(tmp_path / "checkpoint-2")})

    run(body, 1)


def test_a_checkpoint_that_lost_its_latest_is_named(tmp_path: Path) -> None:
    """Its optimizer states are there, so the optimizer must not start anew."""
    run(fit, 1, tmp_path, 2, SAVES)
    (tmp_path / "checkpoint-2" / "latest").unlink()

    def body(rank: int, world: int, port: int) -> None:
        with pytest.raises(CheckpointError, match="checkpoint-2 has no file 'latest'"):
            fit(rank, world, port, tmp_path, 2, {**SAVES, "resume": str(tmp_path / "checkpoint-2")})

    run(body, 1)


# ---------------------------------------------------------------------- precision and configs


@pytest.mark.full
@pytest.mark.parametrize("kind", ["bf16", pytest.param("fp16", marks=pytest.mark.full)])
def test_sixteen_bits(tmp_path: Path, kind: str) -> None:
    """Parameters in 16 bits, fp32 masters; the stages agree, and a resumed training goes on with the same numbers."""
    kwargs: dict[str, Any] = {kind: True, "learning_rate": 1e-3, **SAVES, **EVALUATES}
    plain = run(train, 2, tmp_path, "stock", {"learning_rate": 1e-3, **EVALUATES})[0]

    def look(trainer: Any) -> Any:
        with zeroshard.unsharded(trainer.model):
            dtypes = {str(p.dtype) for p in trainer.model.parameters()}
        scaler = getattr(trainer.accelerator, "scaler", None)
        return sorted(dtypes), scaler.state_dict()["scale"] if scaler is not None else None, str(trainer.model.dtype)

    dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[kind]
    seen = []
    for zero in (1, 3):
        out = tmp_path / f"{zero}"
        losses, (dtypes, scale, _) = run(fit, 2, out, zero, kwargs, look)[0]
        assert dtypes == [dtype]
        assert (scale is not None) == (kind == "fp16")
        assert_close(losses, plain, tolerance=5e-2)
        seen.append(losses)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint-4")
        assert str(loaded.dtype) == dtype
        again, (_, scale_again, _) = run(fit, 2, out, zero, {**kwargs, "resume": str(out / "checkpoint-2")}, look)[0]
        assert scale_again == scale
        assert_close(again, losses)
    assert_close(*seen, tolerance=1e-3)


@pytest.mark.full
def test_fp16_skips_steps_that_overflow(tmp_path: Path) -> None:
    """The rate stays, and the scale halves, until gradients are finite."""
    config = {
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": "auto", "initial_scale_power": 32, "hysteresis": 1},
    }

    def look(trainer: Any) -> Any:
        before = weights(trainer)
        return before, trainer.accelerator.scaler.state_dict()["scale"]

    losses, (_after, scale) = run(fit, 2, tmp_path, config, {"fp16": True, "lr_scheduler_type": "constant_with_warmup",
                                                             "warmup_steps": 10}, look)[0]  # fmt: skip
    norms = [one["grad_norm"] for one in losses.values() if "grad_norm" in one]
    skipped = sum(not math.isfinite(norm) for norm in norms)
    assert skipped >= 2
    assert scale == 2.0 ** (32 - skipped)


FULL: dict[str, Any] = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
}  # fmt: skip


def test_a_deepspeed_config_with_autos(tmp_path: Path) -> None:
    import json

    path = tmp_path / "zero.json"
    path.write_text(json.dumps(FULL))

    def look(trainer: Any) -> Any:
        return type(trainer.lr_scheduler).__name__, trainer.sharded.policy.parameters.sharded

    kwargs = {"warmup_steps": 2, "weight_decay": 0.1, **SAVES}
    losses, (scheduler, sharded) = run(fit, 2, tmp_path, str(path), kwargs, look)[0]
    assert (scheduler, sharded) == ("WarmupDecayLR", True)
    rates = [one["learning_rate"] for one in losses.values() if "learning_rate" in one]
    assert rates == [0.0, 0.0, 1e-2, 1e-2], "DeepSpeed's: two steps at the smallest"
    dictionary = {**FULL, "zero_optimization": {"stage": 1}}
    assert_close(run(fit, 2, tmp_path / "other", dictionary, kwargs)[0][0], losses)
    resumed = run(fit, 2, tmp_path, str(path), {**kwargs, "resume": str(tmp_path / "checkpoint-2")}, look)[0][0]
    assert_close(resumed, losses)


def test_contradictions_and_what_cannot_be_had(tmp_path: Path) -> None:
    def body(rank: int, world: int, port: int) -> None:
        def make(zero: Any = 2, optimizers: Any = (None, None), **kwargs: Any) -> Any:
            args = arguments(tmp_path, rank, world, port, **kwargs)
            return ZeroTrainer(llama(), args, train_dataset=Tokens(), zero=zero, optimizers=optimizers)

        for change, words in (
            (
                {"gradient_accumulation_steps": 3, "train_batch_size": 6},
                "gradient_accumulation_steps = 3, and gradient_accumulation_steps=4",
            ),
            ({"gradient_clipping": 2.0}, "gradient_clipping = 2.0, and max_grad_norm=0.5"),
            ({"bf16": {"enabled": True}}, "bf16.enabled = True, and bf16=False"),
            (
                {"train_micro_batch_size_per_gpu": 7, "train_batch_size": 28, "gradient_accumulation_steps": 4},
                "per_device_train_batch_size=2",
            ),
            (
                {"optimizer": {"type": "AdamW", "params": {"lr": 3.0}}},
                "optimizer.params.lr = 3.0, and learning_rate=0.01",
            ),
            (
                {"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}},
                "optimizer.params.betas = [0.9, 0.95], and adam_beta1=0.9, adam_beta2=0.999 in",
            ),
            (
                {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 2}}},
                "scheduler.params.warmup_max_lr = 0.1, and learning_rate=0.01",
            ),
        ):
            with pytest.raises(ConfigError, match="contradict") as caught:
                make({**FULL, **change})
            assert words in str(caught.value)
        for change, words in (
            ({"gradient_allreduce_op": "sum"}, "averages gradients"),
            ({"checkpoint": {"use_node_local_storage": True}}, "saves to a folder that all ranks can read"),
        ):
            with pytest.raises(ConfigError, match=words):
                make({**FULL, **change})
        with pytest.raises(ConfigError, match="activation_checkpointing=True"):
            make({**FULL, "activation_checkpointing": {"checkpoint_units": "auto"}})
        for kwargs, words in (
            ({"bf16_full_eval": True}, "bf16_full_eval"),
            ({"optim": "adalomo"}, "lomo"),
            ({"zero": True}, "zero is True: pass"),
            ({"zero": 4}, "0, 1, 2 or 3"),
        ):
            with pytest.raises(zeroshard.ZeroshardError, match=words):
                make(**kwargs)
        with pytest.raises(UsageError, match="schedule-free"):
            make(optimizers=(ScheduleFree(nn.Linear(2, 2).parameters(), lr=0.1), None)).train()
        args = arguments(tmp_path, rank, world, port)
        args.sync_ref_model = True  # one of TRL's arguments
        ZeroTrainer(llama(), args, train_dataset=Tokens(), zero=2)
        with pytest.raises(UsageError, match="sync_ref_model"):
            ZeroTrainer(llama(), args, train_dataset=Tokens(), zero=3)

    run(body, 1)


# ---------------------------------------------------------------------- loops


@pytest.mark.full
def test_ranks_generate_different_lengths(tmp_path: Path) -> None:
    """Under sharded parameters, each rank's answers are those of the whole model."""

    def t5() -> Any:
        torch.manual_seed(3)  # with which some sequences end early
        config = transformers.T5Config(
            vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0, dropout_rate=0.0,
            initializer_factor=3.0,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config)

    def body(rank: int, world: int, port: int, zero: Any) -> Any:
        args = arguments(tmp_path, rank, world, port, learning_rate=1e-5)
        args = transformers.Seq2SeqTrainingArguments(**{
            **{k: v for k, v in args.to_dict().items() if k in ("output_dir", "use_cpu", "per_device_train_batch_size",
               "report_to", "disable_tqdm", "ddp_backend", "learning_rate", "save_strategy")},
            "num_train_epochs": 1, "predict_with_generate": True, "generation_max_length": 12, "per_device_eval_batch_size": 1,
        })  # fmt: skip
        both = {"model": t5(), "args": args, "train_dataset": Tokens(), "eval_dataset": Tokens()}
        trainer = transformers.Seq2SeqTrainer(**both) if zero == "stock" else ZeroSeq2SeqTrainer(**both, zero=zero)
        trainer.train()
        found = trainer.predict(Tokens(), num_beams=1)
        lengths = {int((row != 0).sum()) for row in torch.as_tensor(found.predictions)}
        return torch.as_tensor(found.predictions), sorted(lengths), found.metrics["test_loss"]

    stock = run(body, 2, "stock")[0]
    for zero in (2, 3):
        mine = run(body, 2, zero)[0]
        assert len(mine[1]) > 1, "ranks stop at different lengths"
        assert torch.equal(mine[0], stock[0])
        assert math.isclose(mine[2], stock[2], abs_tol=1e-6)


@pytest.mark.full
def test_training_again_in_one_process(tmp_path: Path) -> None:
    """As a hyperparameter search does, and as one who calls train() twice; and after an exception in the middle."""

    class Stops(transformers.TrainerCallback):  # type: ignore[misc]
        armed = True

        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            if self.armed:
                raise RuntimeError("in the middle")

    def body(rank: int, world: int, port: int) -> None:
        for zero in (1, 3):
            args = arguments(tmp_path, rank, world, port)
            stops = Stops()
            trainer = ZeroTrainer(args=args, model_init=llama, train_dataset=Tokens(), zero=zero, callbacks=[stops])
            with pytest.raises(RuntimeError, match="in the middle"):
                trainer.train()
            stops.armed = False
            logs = []
            for _ in range(2):
                trainer.train()
                logs.append(history(trainer))
                first = trainer.model
            assert logs[0].keys() == logs[1].keys()
            assert_close(logs[0], logs[1], 0.0)
            with pytest.raises(UsageError, match="sharded by another"):
                ZeroTrainer(first, args, train_dataset=Tokens(), zero=zero)
            trainer = ZeroTrainer(llama(), args, train_dataset=Tokens(), zero=zero, callbacks=[Stops()])
            with pytest.raises(RuntimeError, match="in the middle"):
                trainer.train()
            trainer.callback_handler.callbacks[-2].armed = trainer.callback_handler.callbacks[-1].armed = False
            trainer.remove_callback(Stops)
            trainer.train()
            assert_close(history(trainer), logs[0], 1e-6)
            trainer.train()  # goes on from there
            assert history(trainer)["0"]["loss"] < logs[0]["0"]["loss"]
            assert sum(isinstance(module, OuterModel) for module in trainer.model_wrapped.modules()) == 1

    run(body, 2)


@pytest.mark.full
def test_a_batch_that_is_too_large(tmp_path: Path) -> None:
    class TooLarge(ZeroTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            if len(inputs["input_ids"]) > 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *args, **kwargs)

    def body(rank: int, world: int, port: int) -> Any:
        args = arguments(
            tmp_path, rank, world, port, per_device_train_batch_size=4, auto_find_batch_size=True, max_steps=3
        )
        trainer = TooLarge(llama(), args, train_dataset=Tokens(), zero=3)
        trainer.train()
        return trainer.state.global_step, trainer.state.train_batch_size

    assert run(body, 1)[0] == (3, 2)


@pytest.mark.full
def test_evaluation_without_training(tmp_path: Path) -> None:
    def body(rank: int, world: int, port: int, kind: str, evaluates: bool) -> Any:
        args = arguments(tmp_path, rank, world, port)
        both = {"model": llama(), "args": args, "train_dataset": Tokens(), "eval_dataset": Tokens()}
        trainer = transformers.Trainer(**both) if kind == "stock" else ZeroTrainer(**both, zero=3)
        before = trainer.evaluate()["eval_loss"] if evaluates else None
        trainer.train()
        return before, trainer.evaluate()["eval_loss"]

    before, after = run(body, 2, "ours", True)[0]
    assert before == pytest.approx(run(body, 2, "stock", True)[0][0], abs=1e-6)
    # After an evaluation, the stock Trainer trains without DDP: each rank its own model.
    assert after == pytest.approx(run(body, 2, "stock", False)[0][1], abs=1e-6)


@pytest.mark.full
def test_every_rank_evaluates_with_rank_0s_running_statistics(tmp_path: Path) -> None:
    """Rank 0's are those that are saved."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 8)
            self.norm = nn.BatchNorm1d(8)
            self.head = nn.Linear(8, 64)

        def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.head(self.norm(self.embed(input_ids).flatten(0, 1)))
            return {"loss": nn.functional.cross_entropy(logits, labels.flatten())}

    def normed() -> nn.Module:
        torch.manual_seed(0)
        return Normed()

    def look(trainer: Any) -> Any:
        own = trainer.model.norm.running_mean.clone()
        trainer.evaluate()
        return own, trainer.model.norm.running_mean.clone()

    for zero in (2, 3):
        (own, mean), (other, same) = (found for _, found in run(fit, 2, tmp_path, zero, {"model": normed}, look))
        assert not torch.equal(own, other)
        assert torch.equal(mean, own)
        assert torch.equal(same, own)


@pytest.mark.full
@pytest.mark.parametrize("checks", [True, False])
def test_batches_without_a_gradient_are_skipped(checks: bool, tmp_path: Path) -> None:
    """A gradient that is not finite leaves the model, the optimizer and the rate as they are; not where bf16 asks for no check."""
    bf16 = {"bf16": {"enabled": True, "check_grad_overflow": False}, "zero_optimization": {"stage": 2}}

    class Poisons(ZeroTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            poisoned = self.state.global_step == 1 and self.args.process_index == 1
            return loss * float("nan") if poisoned and isinstance(loss, Tensor) else loss

    def body(rank: int, world: int, port: int) -> None:
        args = arguments(tmp_path, rank, world, port, bf16=not checks)
        trainer = Poisons(llama(), args, train_dataset=Tokens(), zero=2 if checks else bf16)
        trainer.train()
        is_finite = all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())
        assert is_finite == checks
        if not checks:
            return
        rates = [one["learning_rate"] for one in history(trainer).values() if "learning_rate" in one]
        assert len(set(rates)) == len(rates) - 1

    run(body, 2)


# ---------------------------------------------------------------------- a stock Trainer with ZeroRedundancyOptimizer


def stage_one(rank: int, world: int, port: int, out: Path, how: str, kwargs: dict[str, Any]) -> Losses:
    """No integration at all; the callback is for what checkpoints hold."""
    given = dict(kwargs)
    resume, callbacks = given.pop("resume", None), given.pop("callbacks", [ZeroConsolidateCallback])
    args, model = arguments(out, rank, world, port, **given), llama()
    both: dict[str, Any] = {"args": args, "train_dataset": Tokens(), "eval_dataset": Tokens()}
    if not how.startswith("stock"):
        both["callbacks"] = [make() for make in callbacks]
    if how == "class":
        both["optimizer_cls_and_kwargs"] = (
            ZeroRedundancyOptimizer,
            {"optimizer_class": torch.optim.AdamW, "lr": 1e-2},
        )
    if how == "object":
        both["optimizers"] = (
            ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.0),
            None,
        )
    if how == "stock object":
        both["optimizers"] = (torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0), None)
    trainer = transformers.Trainer(model, **both)
    trainer.train(resume_from_checkpoint=resume)
    return history(trainer)


@pytest.mark.full
@pytest.mark.parametrize("how", ["class", pytest.param("object", marks=pytest.mark.full)])
def test_stage_one_in_a_stock_trainer(tmp_path: Path, how: str) -> None:
    stock = run(stage_one, 2, tmp_path / "stock", "stock", SAVES)[0]
    out = tmp_path / how
    assert_close(run(stage_one, 2, out, how, SAVES)[0], stock)
    state = torch.load(out / "checkpoint-2" / "optimizer.pt", weights_only=True)["state"]
    assert state[0]["exp_avg"].shape == (64, 32), "the whole, as AdamW's own"
    for world in (2, 1):
        resume = {"resume": str(out / "checkpoint-2"), "per_device_train_batch_size": 4 // world}
        again = run(stage_one, world, out, how, {**SAVES, **resume})[0]
        assert_close(again, stock, 1e-4)
    plain = run(
        stage_one,
        2,
        out,
        "stock object" if how == "object" else "stock",
        {**SAVES, "resume": str(out / "checkpoint-2")},
    )[0]
    assert_close(plain, stock, 1e-4)


@pytest.mark.full
def test_the_best_checkpoint_is_consolidated_too(tmp_path: Path) -> None:
    kwargs = {**EVALUATES, "save_strategy": "best", "metric_for_best_model": "eval_loss"}
    run(stage_one, 2, tmp_path, "class", kwargs)
    saved = sorted(tmp_path.glob("checkpoint-*"))
    assert saved
    for folder in saved:
        assert "zeroshard" not in torch.load(folder / "optimizer.pt", weights_only=True)


@pytest.mark.full
def test_shards_alone_are_not_loaded_elsewhere(tmp_path: Path) -> None:
    run(stage_one, 2, tmp_path, "class", {**SAVES, "callbacks": []})

    def body(rank: int, world: int, port: int) -> None:
        with pytest.raises(UsageError, match="consolidate_state_dict"):
            kwargs = {**SAVES, "callbacks": [], "resume": str(tmp_path / "checkpoint-2")}
            stage_one(rank, world, port, tmp_path, "class", kwargs)

    run(body, 1)

    def other(rank: int, world: int, port: int) -> None:
        args = arguments(tmp_path, rank, world, port, **SAVES)
        trainer = transformers.Trainer(llama(), args, train_dataset=Tokens(), callbacks=[ZeroConsolidateCallback()])
        with pytest.raises(UsageError, match="is for zeroshard"):
            trainer.train()

    run(other, 1)


# ---------------------------------------------------------------------- TRL


def words_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{number}": number for number in range(4, 64)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def tune(rank: int, world: int, port: int, out: Path, kind: str, adapted: bool, zero: Any) -> Losses:
    import datasets
    import peft
    import trl

    as_torchrun(rank, world, port)
    kwargs = {
        "use_cpu": True, "per_device_train_batch_size": 2, "max_steps": 3, "report_to": [], "disable_tqdm": True, "bf16": False,
        "logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no", "gradient_accumulation_steps": 2, "max_length": 32,
    }  # fmt: skip

    def words(first: int, count: int) -> str:
        return " ".join(f"w{4 + (first * 7 + i) % 60}" for i in range(count))

    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]) if adapted else None
    if kind == "sft":
        rows = [{"text": words(i, 8 + i % 3)} for i in range(24)]
        base, args = trl.SFTTrainer, trl.SFTConfig(str(out), **kwargs)
    else:
        rows = [{"prompt": words(i, 4), "chosen": words(i + 1, 4), "rejected": words(i + 2, 5)} for i in range(24)]
        base, args = trl.DPOTrainer, trl.DPOConfig(str(out), **kwargs)
    reference = {"ref_model": llama()} if kind == "dpo" and not adapted else {}  # it would be read by the model's name
    made: Any = base if zero == "stock" else type("Zero", (ZeroTrainerMixin, base), {})
    torch.manual_seed(1)
    trainer = made(
        model=llama(), args=args, train_dataset=datasets.Dataset.from_list(rows), processing_class=words_tokenizer(),
        peft_config=lora, **reference, **({} if zero == "stock" else {"zero": zero}),
    )  # fmt: skip
    trainer.train()
    return history(trainer)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize("adapted", [False, True])
def test_trl(tmp_path: Path, kind: str, adapted: bool) -> None:
    stock = run(tune, 2, tmp_path, kind, adapted, "stock")[0]
    for zero in (2, 3):
        assert_close(run(tune, 2, tmp_path, kind, adapted, zero)[0], stock)


@pytest.mark.full
def test_grpo_completions_of_different_lengths(tmp_path: Path) -> None:
    """TRL calls `generate` itself: under sharded parameters ranks go on until the last is done, else each as it likes."""

    def body(rank: int, world: int, port: int) -> list[int]:
        import copy

        import datasets
        import trl

        class Ends(transformers.LogitsProcessor):  # type: ignore[misc]
            def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
                if tokens.shape[1] >= 6 + 4 * rank:
                    scores[:, 2] = 1e4
                return scores

        class Llama(transformers.LlamaForCausalLM):  # type: ignore[misc]
            def _get_logits_processor(self, *args: Any, **kwargs: Any) -> Any:
                return transformers.LogitsProcessorList([*super()._get_logits_processor(*args, **kwargs), Ends()])

        as_torchrun(rank, world, port)
        lengths: list[int] = []

        def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
            lengths.extend(len(one) for one in completion_ids)
            return [float(one[0]) for one in completion_ids]

        args = trl.GRPOConfig(
            str(tmp_path), use_cpu=True, per_device_train_batch_size=2, num_generations=2, max_steps=2, report_to=[], bf16=False,
            disable_tqdm=True, save_strategy="no", max_completion_length=16, gradient_checkpointing=False,
        )  # fmt: skip
        torch.manual_seed(0)
        model = Llama(llama().config)
        rows = datasets.Dataset.from_list([{"prompt": f"w{i} w{i + 1}"} for i in range(4, 12)])
        made: Any = type("Zero", (ZeroTrainerMixin, trl.GRPOTrainer), {})
        trainer = made(
            model=model, args=args, train_dataset=rows, processing_class=words_tokenizer(), reward_funcs=reward, zero=3
        )
        trainer.train()
        assert model._is_fsdp_managed_module
        with zeroshard.unsharded(model):
            if rank == 0:
                model.generate(torch.tensor([[5, 6]]), max_new_tokens=3)
            assert not copy.deepcopy(model)._is_fsdp_managed_module
        trainer.sharded.remove()
        assert not model._is_fsdp_managed_module
        return lengths

    short, long = run(body, 2)
    assert max(short) < max(long), "the ranks' completions end at different lengths"


@pytest.mark.full
def test_a_config_that_names_no_accumulation_sums_in_fp32(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    args = arguments(tmp_path, 0, 1, 0, bf16=True, gradient_accumulation_steps=4)
    assert read_settings(config, args, nn.Linear(2, 2)).precision.accumulate_dtype is None  # fp32
    args.gradient_accumulation_steps = 1
    assert read_settings(config, args, nn.Linear(2, 2)).precision.accumulate_dtype is torch.bfloat16
