"""ZeroTrainer equals the stock Trainer with DDP, saves models for `from_pretrained`, and resumes."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import launched
from test_refused_optimizers import ScheduleFree
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

transformers.logging.set_verbosity_error()

Losses = dict[str, dict[str, float]]
full = pytest.mark.full


def row(number: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens}


ROWS = [row(number) for number in range(24)]


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    )


def arguments(out: Path, **kwargs: Any) -> Any:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:  # plain python
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
    """Return the numbers of the log, by step and by name."""
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


def fit(out: Path, zero: Any, kwargs: dict[str, Any], look: Callable[[Any], Any] | None = None) -> tuple[Losses, Any]:
    """Return the log of a training, and what `look(trainer)` finds after it.

    Args:
        zero: ZeroTrainer's argument; "stock" is transformers' own Trainer, with DDP.
        kwargs: arguments of the training, apart from `model`, `resume`, and `more`, which returns a Trainer's further arguments
            for a model.
    """
    given = dict(kwargs)
    model, resume, more = given.pop("model", llama)(), given.pop("resume", None), given.pop("more", lambda _: {})
    args = arguments(out, **given)
    both = {"model": model, "args": args, "train_dataset": ROWS, "eval_dataset": ROWS, **more(model)}
    trainer = transformers.Trainer(**both) if zero == "stock" else ZeroTrainer(**both, zero=zero)
    trainer.train(resume_from_checkpoint=resume)
    return history(trainer), None if look is None else look(trainer)


def train(world: int, out: Path, zero: Any, kwargs: dict[str, Any]) -> Losses:
    """Return rank 0's log of a training on so many ranks."""
    losses: Losses = launched(fit, world, out, zero, kwargs)[0][0]
    return losses


EVALUATES = {"eval_strategy": "steps", "eval_steps": 2}


def test_losses_are_ddps_under_every_stage(tmp_path: Path) -> None:
    """Three batches a rank and epoch in windows of four: the last window of each epoch is short."""
    stock = launched(fit, 2, tmp_path, "stock", EVALUATES)
    assert any("eval_loss" in entry for entry in stock[0][0].values())
    for zero in (0, 1, 2, 3):
        for (mine, _), (theirs, _) in zip(launched(fit, 2, tmp_path, zero, EVALUATES), stock, strict=True):
            assert_close(mine, theirs)


@full
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
    for world, zero in ((2, 3), (1, Policy.stage(2))):
        assert_close(train(world, tmp_path, zero, kwargs), train(world, tmp_path, "stock", kwargs))


# ---------------------------------------------------------------------- checkpoints


def weights(trainer: Any) -> dict[str, Tensor]:
    with zeroshard.unsharded(trainer.model):
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


SAVES = {"save_strategy": "steps", "save_steps": 2}
BEST = {**EVALUATES, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}


@pytest.mark.parametrize(
    ("zero", "then", "world"),
    [
        (3, 1, 1),
        *(pytest.param(*one, marks=full) for one in ((3, 3, 2), (2, 3, 2), (0, 2, 2))),
    ],
)
def test_resumes_at_another_stage_and_world_size(tmp_path: Path, zero: int, then: int, world: int) -> None:
    losses, expected = launched(fit, 2, tmp_path, zero, SAVES, weights)[0]
    folder = tmp_path / "checkpoint-2"
    files = {path.name for path in folder.iterdir()}
    assert {"model.safetensors", "config.json", "scheduler.pt", "trainer_state.json", "global_step2", "latest"} <= files
    assert not any(name.startswith("optimizer") for name in files)
    kwargs = {**SAVES, "resume": str(folder), "per_device_train_batch_size": 4 // world}
    again, found = launched(fit, world, tmp_path, then, kwargs, weights)[0]
    steps, resumed = ([one["loss"] for one in log.values() if "loss" in one] for log in (losses, again))
    assert len(steps) == 4
    assert resumed == pytest.approx(steps, rel=0, abs=1e-5 if world == 1 else 1e-6)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_checkpoints_load_with_from_pretrained(tmp_path: Path) -> None:
    """Ties once, in the true dtype; the best comes back at the end."""
    from safetensors import safe_open

    def look(trainer: Any) -> Any:
        trainer.save_model()
        return trainer.state.best_model_checkpoint, weights(trainer), trainer.evaluate()["eval_loss"]

    for zero in (2, 3):
        out = tmp_path / str(zero)
        losses, (best, found, at_best) = launched(fit, 2, out, zero, {**SAVES, **BEST}, look)[0]
        assert best == str(out / "checkpoint-2"), "the loss falls, and greater is better"
        assert math.isclose(at_best, losses["2"]["eval_loss"], abs_tol=1e-6)
        for folder in (out / "checkpoint-2", out):
            with safe_open(folder / "model.safetensors", "pt") as file:
                assert "lm_head.weight" not in file.keys()  # noqa: SIM118
            loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
            for name, parameter in loaded.named_parameters():
                assert torch.equal(parameter, found[name]), (folder, name)


@full
def test_only_the_model_is_saved(tmp_path: Path) -> None:
    kwargs = {**SAVES, **BEST, "save_only_model": True}
    for zero in (1, 3):
        out = tmp_path / str(zero)
        losses, again = launched(fit, 2, out, zero, kwargs, lambda trainer: trainer.evaluate()["eval_loss"])[0]
        assert not (out / "checkpoint-2" / "latest").exists()
        assert math.isclose(again, losses["2"]["eval_loss"], abs_tol=1e-6)
        resumed = train(1, out, zero, {**kwargs, "resume": str(out / "checkpoint-4"), "num_train_epochs": 3})
        assert any("loss" in one for one in resumed.values())


def adapter(kind: str) -> Any:
    """Return PEFT's model. It runs and reads some of these modules itself while it saves, on the rank that writes."""
    import peft

    task: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    configs = {
        "lora": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **task),
        "modules_to_save": lambda: peft.LoraConfig(
            r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"], **task
        ),
        "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, **task),
        "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, **task),
        "shared_buffers": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"], **task),
    }
    base = llama()
    torch.manual_seed(1)
    return peft.get_peft_model(base, configs[kind]())


@full
@pytest.mark.parametrize(
    ("kind", "zero"),
    [("modules_to_save", 3), ("prompt", 3), ("prefix", 3), ("shared_buffers", 3), ("lora", 2), ("lora", 3)],
)
def test_adapters_are_saved_whole(tmp_path: Path, kind: str, zero: int) -> None:
    import peft

    kwargs = {"model": lambda: adapter(kind), "gradient_checkpointing": kind == "lora"}

    def look(trainer: Any) -> dict[str, Tensor]:
        trainer.save_model()
        trainer.evaluate()
        if kind == "shared_buffers":
            trainer.sharded.export(tmp_path / "export")
        return weights(trainer)

    losses, found = launched(fit, 2, tmp_path, zero, {**kwargs, **SAVES}, look)[0]
    assert_close(losses, train(2, tmp_path / "stock", "stock", kwargs))
    for folder in (tmp_path, tmp_path / "checkpoint-4", *tmp_path.glob("export")):
        files = {path.name for path in folder.iterdir()}
        assert "adapter_model.safetensors" in files and "model.safetensors" not in files
        loaded = peft.PeftModel.from_pretrained(llama(), folder)
        for name, parameter in loaded.named_parameters():
            assert torch.equal(parameter, found[name]), (folder, name)
    if kind == "lora":
        resumed = train(2, tmp_path, zero, {**kwargs, **SAVES, **BEST, "resume": str(tmp_path / "checkpoint-2")})
        last, again = ([one["loss"] for one in log.values() if "loss" in one] for log in (losses, resumed))
        assert again == pytest.approx(last, rel=0, abs=1e-6)


@pytest.mark.parametrize(
    ("zero", "error", "words"),
    [
        pytest.param("stock", UsageError, "another Trainer", marks=full),
        (2, CheckpointError, "checkpoint-2 has no file 'latest'"),
    ],
)
def test_a_checkpoint_without_our_states_is_refused(
    tmp_path: Path, zero: Any, error: type[Exception], words: str
) -> None:
    """Otherwise the optimizer would start anew."""
    train(1, tmp_path, zero, SAVES)
    (tmp_path / "checkpoint-2" / "latest").unlink(missing_ok=zero == "stock")

    def body() -> None:
        with pytest.raises(error, match=words):
            fit(tmp_path, 2, {**SAVES, "resume": str(tmp_path / "checkpoint-2")})

    launched(body, 1)


# ---------------------------------------------------------------------- precision and configs


@full
@pytest.mark.parametrize("kind", ["bf16", pytest.param("fp16", marks=full)])
def test_sixteen_bits(tmp_path: Path, kind: str) -> None:
    """Parameters in 16 bits, fp32 masters; the stages agree, and a resumed training goes on with the same numbers."""
    kwargs: dict[str, Any] = {kind: True, "learning_rate": 1e-3, **SAVES, **EVALUATES}
    plain = train(2, tmp_path, "stock", {"learning_rate": 1e-3, **EVALUATES})

    def look(trainer: Any) -> Any:
        with zeroshard.unsharded(trainer.model):
            dtypes = {str(p.dtype) for p in trainer.model.parameters()}
        scaler = getattr(trainer.accelerator, "scaler", None)
        return sorted(dtypes), scaler.state_dict()["scale"] if scaler is not None else None

    dtype = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[kind]
    seen = []
    for zero in (1, 3):
        out = tmp_path / f"{zero}"
        losses, (dtypes, scale) = launched(fit, 2, out, zero, kwargs, look)[0]
        assert dtypes == [dtype]
        assert (scale is not None) == (kind == "fp16")
        assert_close(losses, plain, tolerance=5e-2)
        seen.append(losses)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out / "checkpoint-4")
        assert str(loaded.dtype) == dtype
        again, (_, scale_again) = launched(fit, 2, out, zero, {**kwargs, "resume": str(out / "checkpoint-2")}, look)[0]
        assert scale_again == scale
        assert_close(again, losses)
    assert_close(*seen, tolerance=1e-3)


@full
def test_fp16_skips_steps_that_overflow(tmp_path: Path) -> None:
    """The rate stays, and the scale halves, until gradients are finite."""
    config = {
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": "auto", "initial_scale_power": 32, "hysteresis": 1},
    }

    def look(trainer: Any) -> Any:
        return trainer.accelerator.scaler.state_dict()["scale"]

    kwargs = {"fp16": True, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 10}
    losses, scale = launched(fit, 2, tmp_path, config, kwargs, look)[0]
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
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(FULL))

    def look(trainer: Any) -> Any:
        return type(trainer.lr_scheduler).__name__, trainer.sharded.policy.parameters.sharded

    kwargs = {"warmup_steps": 2, "weight_decay": 0.1, **SAVES}
    losses, (scheduler, sharded) = launched(fit, 2, tmp_path, str(path), kwargs, look)[0]
    assert (scheduler, sharded) == ("WarmupDecayLR", True)
    rates = [one["learning_rate"] for one in losses.values() if "learning_rate" in one]
    assert rates == [0.0, 0.0, 1e-2, 1e-2], "DeepSpeed's: two steps at the smallest"
    dictionary = {**FULL, "zero_optimization": {"stage": 1}}
    assert_close(train(2, tmp_path / "other", dictionary, kwargs), losses)
    resume = {"resume": str(tmp_path / "checkpoint-2")}
    assert_close(train(2, tmp_path, str(path), {**kwargs, **resume}), losses)


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"gradient_accumulation_steps": 3, "train_batch_size": 6},
     "gradient_accumulation_steps = 3, and gradient_accumulation_steps=4"),
    ({"gradient_clipping": 2.0}, "gradient_clipping = 2.0, and max_grad_norm=0.5"),
    ({"bf16": {"enabled": True}}, "bf16.enabled = True, and bf16=False"),
    ({"train_micro_batch_size_per_gpu": 7, "train_batch_size": 28, "gradient_accumulation_steps": 4},
     "per_device_train_batch_size=2"),
    ({"optimizer": {"type": "AdamW", "params": {"lr": 3.0}}}, "optimizer.params.lr = 3.0, and learning_rate=0.01"),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}},
     "optimizer.params.betas = [0.9, 0.95], and adam_beta1=0.9, adam_beta2=0.999 in"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 2}}},
     "scheduler.params.warmup_max_lr = 0.1, and learning_rate=0.01"),
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"zero": {**FULL, "gradient_allreduce_op": "sum"}}, "averages gradients"),
    ({"zero": {**FULL, "checkpoint": {"use_node_local_storage": True}}}, "saves to a folder that all ranks can read"),
    ({"zero": {**FULL, "activation_checkpointing": {"checkpoint_units": "auto"}}}, "activation_checkpointing=True"),
    ({"bf16_full_eval": True}, "bf16_full_eval"),
    ({"optim": "adalomo"}, "lomo"),
    ({"zero": True}, "zero is True: pass"),
    ({"zero": 4}, "0, 1, 2 or 3"),
]


def test_contradictions_and_what_cannot_be_had(tmp_path: Path) -> None:
    def body() -> None:
        def make(zero: Any = 2, optimizers: Any = (None, None), **kwargs: Any) -> Any:
            args = arguments(tmp_path, **kwargs)
            return ZeroTrainer(llama(), args, train_dataset=ROWS, zero=zero, optimizers=optimizers)

        for change, words in CONTRADICTIONS:
            with pytest.raises(ConfigError, match="contradict") as caught:
                make({**FULL, **change})
            assert words in str(caught.value)
        for kwargs, words in REFUSED:
            with pytest.raises(zeroshard.ZeroshardError, match=words):
                make(**kwargs)
        with pytest.raises(UsageError, match="schedule-free"):
            make(optimizers=(ScheduleFree(nn.Linear(2, 2).parameters(), lr=0.1), None)).train()
        args = arguments(tmp_path)
        args.sync_ref_model = True  # one of TRL's arguments
        ZeroTrainer(llama(), args, train_dataset=ROWS, zero=2)
        with pytest.raises(UsageError, match="sync_ref_model"):
            ZeroTrainer(llama(), args, train_dataset=ROWS, zero=3)

    launched(body, 1)


@full
def test_a_config_that_names_no_accumulation_sums_in_fp32(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    args = arguments(tmp_path, bf16=True, gradient_accumulation_steps=4)
    assert read_settings(config, args, nn.Linear(2, 2)).precision.accumulate_dtype is None  # fp32
    args.gradient_accumulation_steps = 1
    assert read_settings(config, args, nn.Linear(2, 2)).precision.accumulate_dtype is torch.bfloat16


# ---------------------------------------------------------------------- loops


@full
def test_ranks_generate_different_lengths(tmp_path: Path) -> None:
    """Under sharded parameters, each rank's answers are those of the whole model."""

    def t5() -> Any:
        torch.manual_seed(3)  # with which some sequences end early
        config = transformers.T5Config(
            vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0, dropout_rate=0.0,
            initializer_factor=3.0,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config)

    def body(zero: Any) -> Any:
        args = transformers.Seq2SeqTrainingArguments(
            str(tmp_path), use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True, save_strategy="no",
            learning_rate=1e-5, per_device_train_batch_size=2, per_device_eval_batch_size=1, num_train_epochs=1,
            predict_with_generate=True, generation_max_length=12,
        )  # fmt: skip
        both = {"model": t5(), "args": args, "train_dataset": ROWS, "eval_dataset": ROWS}
        trainer = transformers.Seq2SeqTrainer(**both) if zero == "stock" else ZeroSeq2SeqTrainer(**both, zero=zero)
        trainer.train()
        found = trainer.predict(ROWS, num_beams=1)
        lengths = {int((row != 0).sum()) for row in torch.as_tensor(found.predictions)}
        return torch.as_tensor(found.predictions), sorted(lengths), found.metrics["test_loss"]

    stock = launched(body, 2, "stock")[0]
    for zero in (2, 3):
        mine = launched(body, 2, zero)[0]
        assert len(mine[1]) > 1, "ranks stop at different lengths"
        assert torch.equal(mine[0], stock[0])
        assert math.isclose(mine[2], stock[2], abs_tol=1e-6)


@full
def test_training_again_in_one_process(tmp_path: Path) -> None:
    """As a hyperparameter search does, and as one who calls train() twice; and after an exception in the middle."""

    class Stops(transformers.TrainerCallback):  # type: ignore[misc]
        armed = True

        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            if self.armed:
                raise RuntimeError("in the middle")

    def body() -> None:
        for zero in (1, 3):
            args = arguments(tmp_path)
            stops = Stops()
            trainer = ZeroTrainer(args=args, model_init=llama, train_dataset=ROWS, zero=zero, callbacks=[stops])
            with pytest.raises(RuntimeError, match="in the middle"):
                trainer.train()
            stops.armed = False
            logs = []
            for _ in range(2):
                trainer.train()
                logs.append(history(trainer))
            assert_close(logs[0], logs[1], 0.0)
            with pytest.raises(UsageError, match="sharded by another"):
                ZeroTrainer(trainer.model, args, train_dataset=ROWS, zero=zero)
            stops.armed = True
            trainer = ZeroTrainer(llama(), args, train_dataset=ROWS, zero=zero, callbacks=[stops])
            with pytest.raises(RuntimeError, match="in the middle"):
                trainer.train()
            stops.armed = False
            trainer.train()
            assert_close(history(trainer), logs[0], 1e-6)
            trainer.train()  # goes on from there
            assert history(trainer)["0"]["loss"] < logs[0]["0"]["loss"]
            assert sum(isinstance(module, OuterModel) for module in trainer.model_wrapped.modules()) == 1

    launched(body, 2)


@full
def test_a_batch_that_is_too_large(tmp_path: Path) -> None:
    class TooLarge(ZeroTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            if len(inputs["input_ids"]) > 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(model, inputs, *args, **kwargs)

    def body() -> Any:
        args = arguments(tmp_path, per_device_train_batch_size=4, auto_find_batch_size=True, max_steps=3)
        trainer = TooLarge(llama(), args, train_dataset=ROWS, zero=3)
        trainer.train()
        return trainer.state.global_step, trainer.state.train_batch_size

    assert launched(body, 1)[0] == (3, 2)


@full
def test_evaluation_without_training(tmp_path: Path) -> None:
    def body(kind: str, evaluates: bool) -> Any:
        args = arguments(tmp_path)
        both = {"model": llama(), "args": args, "train_dataset": ROWS, "eval_dataset": ROWS}
        trainer = transformers.Trainer(**both) if kind == "stock" else ZeroTrainer(**both, zero=3)
        before = trainer.evaluate()["eval_loss"] if evaluates else None
        trainer.train()
        return before, trainer.evaluate()["eval_loss"]

    before, after = launched(body, 2, "ours", True)[0]
    assert before == pytest.approx(launched(body, 2, "stock", True)[0][0], abs=1e-6)
    # After an evaluation, the stock Trainer trains without DDP: each rank its own model.
    assert after == pytest.approx(launched(body, 2, "stock", False)[0][1], abs=1e-6)


@full
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
        (own, mean), (other, same) = (found for _, found in launched(fit, 2, tmp_path, zero, {"model": normed}, look))
        assert not torch.equal(own, other)
        assert torch.equal(mean, own)
        assert torch.equal(same, own)


@full
@pytest.mark.parametrize("checks", [True, False])
def test_batches_without_a_gradient_are_skipped(checks: bool, tmp_path: Path) -> None:
    """A gradient that is not finite leaves the model, the optimizer and the rate as they are; not where bf16 asks for no check."""
    bf16 = {"bf16": {"enabled": True, "check_grad_overflow": False}, "zero_optimization": {"stage": 2}}

    class Poisons(ZeroTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            poisoned = self.state.global_step == 1 and self.args.process_index == 1
            return loss * float("nan") if poisoned and isinstance(loss, Tensor) else loss

    def body() -> None:
        args = arguments(tmp_path, bf16=not checks)
        trainer = Poisons(llama(), args, train_dataset=ROWS, zero=2 if checks else bf16)
        trainer.train()
        is_finite = all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())
        assert is_finite == checks
        if not checks:
            return
        rates = [one["learning_rate"] for one in history(trainer).values() if "learning_rate" in one]
        assert len(set(rates)) == len(rates) - 1

    launched(body, 2)


# ---------------------------------------------------------------------- a stock Trainer with ZeroRedundancyOptimizer


def by_class(model: nn.Module) -> dict[str, Any]:
    return {
        "optimizer_cls_and_kwargs": (ZeroRedundancyOptimizer, {"optimizer_class": torch.optim.AdamW, "lr": 1e-2}),
        "callbacks": [ZeroConsolidateCallback()],
    }


def by_object(model: nn.Module) -> dict[str, Any]:
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, weight_decay=0.0)
    return {"optimizers": (optimizer, None), "callbacks": [ZeroConsolidateCallback()]}


def plain_object(model: nn.Module) -> dict[str, Any]:
    return {"optimizers": (torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0), None)}


def test_stage_one_in_a_stock_trainer_has_ddps_bits(tmp_path: Path) -> None:
    """No integration at all."""
    plain, ours = (launched(fit, 2, tmp_path, "stock", {"more": more}, weights) for more in (plain_object, by_object))
    assert_close(ours[0][0], plain[0][0], 0.0)
    for _, found in ours:
        torch.testing.assert_close(found, plain[0][1], rtol=0, atol=0)


@full
@pytest.mark.parametrize(
    ("more", "plain"), [(by_object, plain_object), (by_class, lambda _: {})], ids=["object", "class"]
)
def test_checkpoints_of_stage_one_are_stock(tmp_path: Path, more: Any, plain: Any) -> None:
    """The callback is for what checkpoints hold."""
    stock = train(2, tmp_path / "stock", "stock", {**SAVES, "more": plain})
    assert_close(train(2, tmp_path, "stock", {**SAVES, "more": more}), stock)
    folder = tmp_path / "checkpoint-2"
    state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
    assert state[0]["exp_avg"].shape == (64, 32), "the whole, as AdamW's own"
    for world, kind in ((2, more), (1, more), (2, plain)):
        resume = {"resume": str(folder), "per_device_train_batch_size": 4 // world}
        assert_close(train(world, tmp_path, "stock", {**SAVES, **resume, "more": kind}), stock, 1e-4)


@full
def test_the_best_checkpoint_is_consolidated_too(tmp_path: Path) -> None:
    train(
        2,
        tmp_path,
        "stock",
        {**EVALUATES, "save_strategy": "best", "metric_for_best_model": "eval_loss", "more": by_class},
    )
    saved = sorted(tmp_path.glob("checkpoint-*"))
    assert saved
    for folder in saved:
        assert "zeroshard" not in torch.load(folder / "optimizer.pt", weights_only=True)


@full
def test_shards_alone_are_not_loaded_elsewhere(tmp_path: Path) -> None:
    def without_callback(model: nn.Module) -> dict[str, Any]:
        return {**by_class(model), "callbacks": []}

    train(2, tmp_path, "stock", {**SAVES, "more": without_callback})

    def body() -> None:
        resume = {"resume": str(tmp_path / "checkpoint-2"), "more": without_callback}
        with pytest.raises(UsageError, match="consolidate_state_dict"):
            fit(tmp_path, "stock", {**SAVES, **resume})
        with pytest.raises(UsageError, match="is for zeroshard"):
            fit(tmp_path, "stock", {**SAVES, "more": lambda _: {"callbacks": [ZeroConsolidateCallback()]}})

    launched(body, 1)


# ---------------------------------------------------------------------- TRL


def words_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{number}": number for number in range(4, 64)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def tune(out: Path, kind: str, adapted: bool, zero: Any) -> Losses:
    import datasets
    import peft
    import trl

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


@full
@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize("adapted", [False, True])
def test_trl(tmp_path: Path, kind: str, adapted: bool) -> None:
    stock = launched(tune, 2, tmp_path, kind, adapted, "stock")[0]
    for zero in (2, 3):
        assert_close(launched(tune, 2, tmp_path, kind, adapted, zero)[0], stock)


@full
def test_grpo_completions_of_different_lengths(tmp_path: Path) -> None:
    """TRL calls `generate` itself: under sharded parameters ranks go on until the last is done, else each as it likes."""

    def body() -> list[int]:
        import datasets
        import trl

        rank = int(os.environ["RANK"])

        class Ends(transformers.LogitsProcessor):  # type: ignore[misc]
            def __call__(self, tokens: Tensor, scores: Tensor) -> Tensor:
                if tokens.shape[1] >= 6 + 4 * rank:
                    scores[:, 2] = 1e4
                return scores

        class Llama(transformers.LlamaForCausalLM):  # type: ignore[misc]
            def _get_logits_processor(self, *args: Any, **kwargs: Any) -> Any:
                return transformers.LogitsProcessorList([*super()._get_logits_processor(*args, **kwargs), Ends()])

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

    short, long = launched(body, 2)
    assert max(short) < max(long), "the ranks' completions end at different lengths"
