"""Lightning's Trainer and Fabric run on zeroshard as on DDP, at every stage, and resume from checkpoints of any stage."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixedPrecision
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from ranks import RankError, launched
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import zeroshard
from zeroshard import ZeroRedundancyOptimizer
from zeroshard.errors import ConfigError, PolicyError, UsageError
from zeroshard.integrations.lightning import FabricZeroStrategy, ZeroStrategy, write_single_file
from zeroshard.optim.lr_schedules import WarmupDecayLR
from zeroshard.testing.gpt import GPT, GPTConfig

Outcome = tuple[list[float], list[Tensor]]
"""Losses and parameters."""
SMALL = GPTConfig(vocabulary=32, layers=2, width=16, heads=2, context=9)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)

TOKENS: Any = [torch.randint(0, 32, (9,), generator=torch.Generator().manual_seed(number)) for number in range(24)]


def loader() -> DataLoader[Tensor]:
    return DataLoader(TOKENS, 2)  # 6 batches a rank, of 2


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """`by` says how the step comes to the model: through the module's own forward, or the inner model.

    `make_optimizer` gets the trained parameters; the default is AdamW with a schedule.
    """

    def __init__(self, by: str = "inner", make_optimizer: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.save_hyperparameters("by")
        torch.manual_seed(0)
        self.model = GPT(SMALL)
        self.by, self.make_optimizer = by, make_optimizer
        self.losses: list[float] = []

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def loss(self, batch: Tensor) -> Tensor:
        if self.by == "inner":
            return self.model(batch[:, :-1], batch[:, 1:])
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch)[:, -1].float()

    def configure_optimizers(self) -> Any:
        if self.make_optimizer is not None:
            return self.make_optimizer([p for p in self.parameters() if p.requires_grad])
        optimizer = ADAMW(self.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def trainer(folder: Path, strategy: Any, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "max_epochs": 1, "logger": False,
        "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False, "default_root_dir": str(folder),
    }  # fmt: skip
    return lightning.Trainer(strategy=strategy, **settings | more)


def strategy_of(stage: int | None) -> Any:
    """Return zeroshard's strategy or, without a stage, DDP's."""
    if stage is None:
        return DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
    return ZeroStrategy(stage)


def outcome(module: Any) -> Outcome:
    assert all(type(p) is nn.Parameter for p in module.parameters())
    return module.losses, [p.detach().clone() for p in module.parameters()]


def fitted(folder: Path, stage: int | None, make: Callable[[], Module] = Module, **more: Any) -> Outcome:
    module = make()
    trainer(folder, strategy_of(stage), **more).fit(module, loader())
    return outcome(module)


def assert_same(ours: Any, theirs: Any, atol: float = 1e-6) -> None:
    for (losses, parameters), (expected, expected_parameters) in zip(ours, theirs, strict=True):
        assert len(losses) == len(expected) > 0
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=atol)
        for one, other in zip(parameters, expected_parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=10 * atol)


def expect_ddps(body: Callable[[int | None], Outcome], stage: int, atol: float = 1e-6) -> None:
    """Assert that `body(stage)` on two ranks comes to what `body(None)` does under DDP."""
    assert_same(launched(body, 2, stage), launched(body, 2, None), atol)


def no_optimizer(_: Any) -> None:
    """What a module returns whose config names the optimizer."""


def full(*values: Any) -> Any:
    """Return parameters that the quick set leaves out."""
    return pytest.param(*values, marks=pytest.mark.full)


class Manual(Module):
    def __init__(self) -> None:
        super().__init__("own")
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        last = index % 2 == 1
        with optimizer.toggle_model(sync_grad=last):
            loss = self.loss(batch)
            self.losses.append(loss.item())
            self.manual_backward(loss / 2)
        if last:
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()


class InTurns(Module):
    """Two optimizers, as a GAN has them: each steps on a backward of its own, for which the other's parameters are frozen."""

    def __init__(self) -> None:
        super().__init__("own")
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, index: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            self.losses.append(loss.item())
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        blocks = [*self.model.blocks.parameters()]
        rest = [p for name, p in self.model.named_parameters() if not name.startswith("blocks.")]
        return [torch.optim.AdamW(blocks, lr=1e-2), torch.optim.SGD(rest, lr=0.1)]


class Clips(Module):
    """Clips with torch's own function."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        assert float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)) > 0.01


CASES: dict[str, tuple[Callable[[], Module], dict[str, Any]]] = {
    "clipped by value": (Module, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "accumulation": (Module, {"accumulate_grad_batches": 4, "max_epochs": 2, "gradient_clip_val": 0.1}),
    "the module's own forward": (partial(Module, "own"), {"gradient_clip_val": 0.1}),
    "manual optimization": (Manual, {"max_epochs": 2}),
    "two optimizers in turn": (InTurns, {"max_epochs": 2}),
    "torch's clipping": (Clips, {"max_epochs": 2}),
}


@pytest.mark.parametrize("stage", [2, 3, full(0), full(1)])
def test_losses_and_parameters_are_those_of_ddp_to_the_bit(stage: int, tmp_path: Path) -> None:
    expect_ddps(lambda stage: fitted(tmp_path, stage), stage, atol=0.0)


@pytest.mark.full
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_ddp(case: str, stage: int, tmp_path: Path) -> None:
    make, options = CASES[case]
    expect_ddps(lambda stage: fitted(tmp_path, stage, make, **options), stage, 1e-5 if make is Clips else 1e-6)


def test_an_optimizer_of_stage_one_is_any_optimizer_under_ddp(tmp_path: Path) -> None:
    def body(make_optimizer: Callable[..., Any]) -> Outcome:
        module = Module(make_optimizer=make_optimizer)
        trains = trainer(tmp_path, strategy_of(None), max_epochs=2, gradient_clip_val=0.5)
        trains.fit(module, loader())
        trains.save_checkpoint(tmp_path / "saved.ckpt")
        return outcome(module)

    stage_one = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, lr=1e-2)
    assert_same(launched(body, 2, stage_one), launched(body, 2, ADAMW), 0.0)


# ---------------------------------------------------------------------- checkpoints


def saves(folder: Path, stage: int, steps: int, resume: str | None = None) -> Outcome:
    module = Module()
    # The batch of all ranks together stays the same.
    batches = DataLoader(TOKENS, 4 // int(os.environ["WORLD_SIZE"]))
    callbacks = [ModelCheckpoint(folder, "{step}", every_n_train_steps=6, save_top_k=-1)]
    limits = {"max_epochs": -1, "max_steps": steps, "enable_checkpointing": True}
    one = trainer(folder, strategy_of(stage), callbacks=callbacks, **limits)
    one.fit(module, batches, ckpt_path=None if resume is None else str(folder / resume))
    assert one.global_step == steps
    return outcome(module)


def expect_continued(resumed: list[Outcome], through: list[Outcome]) -> None:
    """Assert that a run whose first six losses are left out came to the same, at whatever world size."""
    losses, expected = (torch.tensor([one[0] for one in run]).mean(0) for run in (resumed, through))
    torch.testing.assert_close(losses, expected[6:], rtol=0, atol=1e-6)
    for one, other in zip(resumed[0][1], through[0][1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("stage", "world_size"), [full(2, 2), (3, 1), full(1, 2), full(0, 1)])
def test_a_run_resumes_at_any_world_size_and_stage(stage: int, world_size: int, tmp_path: Path) -> None:
    first = 3 if stage == 2 else 2
    through = launched(saves, 2, tmp_path / "through", first, 12)
    launched(saves, 2, tmp_path, first, 6)
    assert (tmp_path / "step=6.ckpt").is_dir()
    expect_continued(launched(saves, world_size, tmp_path, stage, 12, "step=6.ckpt"), through)


def test_checkpoints_are_kept_removed_and_read_by_lightning_alone(tmp_path: Path) -> None:
    def body() -> Any:
        module = Module()
        best = ModelCheckpoint(tmp_path / "best", "{epoch}", monitor="val", save_top_k=1, save_last=True)
        weights = ModelCheckpoint(tmp_path / "weights", "{epoch}", save_weights_only=True)
        stop = EarlyStopping("val", patience=5)
        one = trainer(
            tmp_path, ZeroStrategy(3), max_epochs=3, enable_checkpointing=True, callbacks=[best, weights, stop]
        )
        one.fit(module, loader(), loader())
        trained = one.validate(module, loader(), verbose=False)
        again = one.validate(Module(), loader(), ckpt_path="best", verbose=False)
        predicted = one.predict(module, loader())
        assert one.test(module, loader(), verbose=False) == [{"val": trained[0]["val"]}]
        one.save_checkpoint(tmp_path / "after.ckpt")
        return trained[0]["val"], again[0]["val"], torch.cat(predicted), best.best_model_path, best.best_model_score

    (value, again, predicted, path, score), (other, *_) = launched(body, 2)
    assert value == other == again == float(score)
    assert sorted(p.name for p in (tmp_path / "best").iterdir()) == sorted([Path(path).name, "last.ckpt"])
    write_single_file(path, tmp_path / "single.ckpt")
    for file in (tmp_path / "single.ckpt", tmp_path / "weights" / "epoch=2.ckpt", tmp_path / "after.ckpt"):
        alone = Module.load_from_checkpoint(file, map_location="cpu").eval()
        with torch.no_grad():
            first = torch.stack([alone(TOKENS[i][None])[0, -1] for i in range(0, 24, 2)])
        torch.testing.assert_close(first, predicted, rtol=0, atol=1e-5)
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert "optimizer_states" not in saved


@pytest.mark.full
def test_weights_of_another_strategy_load_and_its_optimizer_does_not(tmp_path: Path) -> None:
    def body() -> None:
        module = Module()
        one = trainer(tmp_path, strategy_of(None))
        one.fit(module, loader())
        one.save_checkpoint(tmp_path / "ddp.ckpt")
        value = one.validate(module, loader(), verbose=False)
        for stage in (2, 3):
            ours = trainer(tmp_path, ZeroStrategy(stage), max_epochs=2)
            assert ours.validate(Module(), loader(), ckpt_path=tmp_path / "ddp.ckpt", verbose=False) == value
            with pytest.raises(UsageError, match="another strategy's optimizer states"):
                ours.fit(Module(), loader(), ckpt_path=tmp_path / "ddp.ckpt")

    launched(body, 2)


# ---------------------------------------------------------------------- precision


def scaled(precision: str, mixed: type[Any]) -> tuple[dict[str, Any], Any]:
    """Return options of a trainer with a precision, and a scaler whose scale overflows at first."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
    if precision != "16-mixed":
        return {"precision": precision}, scaler
    # On a CPU Lightning turns "16-mixed" into bf16, but takes the plugin.
    return {"plugins": mixed("16-mixed", "cpu", scaler)}, scaler


@pytest.mark.full
@pytest.mark.parametrize("stage", [full(2), 3])
@pytest.mark.parametrize("precision", [full("bf16-true"), full("bf16-mixed"), "16-mixed"])
def test_precision(precision: str, stage: int, tmp_path: Path) -> None:
    def body(stage: int | None) -> Outcome:
        options, scaler = scaled(precision, MixedPrecision)
        losses, parameters = fitted(tmp_path, stage, gradient_clip_val=0.5, max_epochs=3, **options)
        assert (2.0**10 < scaler.get_scale() < 2.0**40) == (precision == "16-mixed")
        return losses, [*parameters, torch.tensor(scaler.get_scale())]

    if precision != "bf16-true":
        expect_ddps(body, stage, 1e-3)
        return
    # DDP updates bf16 parameters; here their masters are in fp32.
    (losses, parameters), (expected, _) = (launched(body, 2, one)[0] for one in (stage, None))
    assert parameters[0].dtype == torch.bfloat16
    assert losses == pytest.approx(expected, abs=0.1)
    assert losses[-1] < losses[0]


# ---------------------------------------------------------------------- ways to write modules and loops


class Unfreezes(BaseFinetuning):  # type: ignore[misc]
    """Trains the head alone for an epoch, then the blocks too."""

    def __init__(self, compares_values: bool) -> None:
        super().__init__()
        self.compares_values = compares_values

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.blocks)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1 and self.compares_values:
            self.unfreeze_and_add_param_group(pl_module.model.blocks, optimizer, lr=1e-3)
        elif epoch == 1:
            self.make_trainable(pl_module.model.blocks)
            optimizer.add_param_group({"params": pl_module.model.blocks.parameters(), "lr": 1e-3})


@pytest.mark.full
@pytest.mark.parametrize("stage", [full(0), full(1), 2, full(3)])
def test_finetuning_callbacks_free_parameters(stage: int, tmp_path: Path) -> None:
    """One process: DDP of several does not average the gradients of what was frozen when it was made."""

    def body(stage: int | None, compares_values: bool = True) -> Outcome:
        return fitted(
            tmp_path, stage, partial(Module, "own", ADAMW), max_epochs=3, callbacks=[Unfreezes(compares_values)]
        )

    assert_same(launched(body, 1, stage, stage < 3), launched(body, 1, None), 0.0)
    two = launched(body, 2, stage, stage < 3)
    assert_same(two, launched(body, 2, 1), 0.0)
    assert all(torch.equal(one, other) for one, other in zip(two[0][1], two[1][1], strict=True))
    if stage == 3:
        with pytest.raises(RankError, match="is sharded at rest, and `equal` needs its values"):
            launched(body, 2, stage)


class Born(Module):
    """Built in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        del self.model

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(0)
            self.model = GPT(SMALL)
            self.kinds = {type(p).__name__ for p in self.model.blocks.parameters()}


@pytest.mark.full
@pytest.mark.parametrize("stage", [full(2), 3])
def test_models_are_born_sharded(stage: int, tmp_path: Path) -> None:
    def body(stage: int | None) -> Outcome:
        module = Born()
        trainer(tmp_path, strategy_of(stage)).fit(module, loader())
        assert module.kinds == {"BornSharded" if stage == 3 else "Parameter"}
        return outcome(module)

    expect_ddps(body, stage)


class Looks(Callback):
    """Looks at gradients before a step, as callbacks do."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])))
        by_parameter = torch.stack([p.grad.norm() for p in module.parameters()])
        assert float(by_parameter.norm()) == pytest.approx(self.norms[-1], rel=1e-5)
        if isinstance(trainer.strategy, ZeroStrategy):
            with pytest.raises(UsageError, match="grad"):
                _ = [p.grad.flatten() for p in module.parameters()]
        module.log("lr", optimizer.param_groups[0]["lr"])


@pytest.mark.full
def test_callbacks_see_norms_and_no_values_of_gradients(tmp_path: Path) -> None:
    def body(stage: int | None) -> list[float]:
        looks = Looks()
        fitted(tmp_path, stage, callbacks=[looks], gradient_clip_val=0.1)
        return looks.norms

    assert launched(body, 2, 3)[0] == pytest.approx(launched(body, 2, None)[0], rel=1e-5)


def test_a_config_takes_the_place_of_the_stage(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2, "warmup_max_lr": 1e-2}},
        "activation_checkpointing": {"checkpoint_units": "auto"},
    }  # fmt: skip

    class Warms(Module):
        def configure_optimizers(self) -> Any:
            optimizer = ADAMW(self.parameters())
            schedule = WarmupDecayLR(optimizer, 6, warmup_max_lr=1e-2, warmup_num_steps=2)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:  # one that Lightning does not know
            scheduler.step()

    def body(stage: int | None) -> Outcome:
        module = Warms() if stage is None else Module(make_optimizer=no_optimizer)
        strategy = strategy_of(None) if stage is None else ZeroStrategy(config=config)
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "max_epochs": 2}
        trainer(tmp_path, strategy, **options).fit(module, loader())
        return outcome(module)

    expect_ddps(body, 3)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("what", ["validate", "test", "predict", "fit without an epoch", "fit without a batch"])
def test_a_config_whose_optimizer_takes_no_step(what: str, stage: int, tmp_path: Path) -> None:
    """Values that are "auto" because only the training has them are not asked for."""
    options = ("lr", "betas", "eps", "weight_decay")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(options, "auto")},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 0}},
    }  # fmt: skip

    def body(config: dict[str, Any] | None) -> Any:
        strategy = strategy_of(None) if config is None else ZeroStrategy(config=config)
        limits = {"fit without an epoch": {"max_epochs": 0}, "fit without a batch": {"limit_train_batches": 0}}
        runs, module = trainer(tmp_path, strategy, **limits.get(what, {})), Module()
        if what == "predict":
            return torch.cat(runs.predict(module, loader()))
        if what.startswith("fit"):
            runs.fit(module, loader())
            return outcome(module)[1]
        getattr(runs, what)(module, loader(), verbose=False)
        return runs.callback_metrics["val"]

    for one, other in zip(launched(body, 2, config), launched(body, 2, None), strict=True):
        torch.testing.assert_close(one, other)


class Edits(Module):
    """A module whose hooks edit the state dict of checkpoints, each in one way."""

    def __init__(self, way: str, loads: bool = False) -> None:
        momentum = 0 if way == "another size" else 0.9
        super().__init__(make_optimizer=partial(torch.optim.SGD, lr=0.1, momentum=momentum))
        self.way, self.loads = way, loads
        torch.manual_seed(1 + loads)
        self.teacher = torch.nn.Linear(4, 4).requires_grad_(False)
        self.extra = torch.nn.Linear(4, 8 if way == "another size" and loads else 4)
        self.strict_loading = way not in ("leaves out", "leaves out a trained one", "another size")
        if way == "renames" and loads:
            self.new, self.extra = self.extra, torch.nn.Identity()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        layer = self.new if hasattr(self, "new") else self.extra
        return super().training_step(batch, index) + layer(self.teacher(torch.ones(4))).square().mean()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        if self.way == "leaves out":
            checkpoint["state_dict"] = {key: value for key, value in state.items() if not key.startswith("teacher")}
        elif self.way == "leaves out a trained one":
            state.pop("extra.weight")
        elif self.way == "adds" and "extra.weight" in state:
            state["added"] = torch.ones(3)
        elif self.way == "casts":
            state["teacher.weight"] = state["teacher.weight"].double() * 2
        elif self.way == "another key":
            checkpoint["mine"] = {"value": 3, "names": sorted(state)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        if self.way == "renames":
            for name in ("weight", "bias"):
                state[f"new.{name}"] = state.pop(f"extra.{name}")
        elif self.way == "adds":
            assert torch.equal(state.pop("added"), torch.ones(3))
        elif self.way == "another size":
            del state["extra.weight"], state["extra.bias"]
        elif self.way == "another key":
            assert checkpoint["mine"] == {"value": 3, "names": sorted(state)}
        elif self.way == "changes":
            state["model.head.weight"] = state["model.head.weight"] * 0.5


WAYS = ["leaves out", "leaves out a trained one", "adds", "casts", "renames", "another size", "another key", "changes"]


@pytest.mark.quick(4)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_hooks_edit_the_state_dict_of_a_checkpoint(way: str, stage: int, tmp_path: Path) -> None:
    """What they leave is in the file, and is what a run resumes with: as under DDP, at every stage."""

    def saves(name: str, **more: Any) -> Any:
        return ModelCheckpoint(tmp_path / name, filename="one", **more)

    def body(stage: int | None) -> Any:
        name = str(stage)
        whole, weights = saves(name), saves(name + "weights", save_weights_only=True, every_n_train_steps=6)
        trainer(tmp_path, strategy_of(stage), enable_checkpointing=True, callbacks=[whole, weights]).fit(
            Edits(way), loader()
        )
        path = tmp_path / name / "one.ckpt"
        module = Edits(way, loads=True)
        if way == "another size" and stage is None:  # torch's states have the old shapes, and by number
            return None
        trainer(tmp_path, strategy_of(stage), max_epochs=2).fit(module, loader(), ckpt_path=path)
        return outcome(module)

    if way == "casts" and stage == 3:
        with pytest.raises(RankError, match="names, shapes and dtypes only"):
            launched(body, 2, stage)
        return
    ours, theirs = launched(body, 2, stage), launched(body, 2, None)
    if way != "another size":
        assert_same(ours, theirs)
    write_single_file(tmp_path / str(stage) / "one.ckpt", tmp_path / "file.ckpt", weights_only=False)
    expected = torch.load(tmp_path / "None" / "one.ckpt", weights_only=False)
    for path in (tmp_path / "file.ckpt", tmp_path / f"{stage}weights" / "one.ckpt"):
        found = torch.load(path, weights_only=False)
        assert found.get("mine") == expected.get("mine")
        torch.testing.assert_close({**found["state_dict"]}, {**expected["state_dict"]})


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_averages_of_weights_are_saved_and_resumed(stage: int, tmp_path: Path) -> None:
    def body(stage: int | None) -> Outcome:
        keeper = ModelCheckpoint(tmp_path / str(stage), filename="one")
        fitted(tmp_path, stage, enable_checkpointing=True, callbacks=[keeper, EMAWeightAveraging(decay=0.5)])
        module = Module()
        resumed = trainer(tmp_path, strategy_of(stage), max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.5)])
        resumed.fit(module, loader(), ckpt_path=keeper.best_model_path)
        return outcome(module)

    expect_ddps(body, stage)
    write_single_file(tmp_path / str(stage) / "one.ckpt", tmp_path / "file.ckpt", weights_only=False)
    files = (tmp_path / "file.ckpt", tmp_path / "None" / "one.ckpt")
    found, expected = (torch.load(path, weights_only=False) for path in files)
    for key in ("state_dict", "current_model_state", "averaging_state"):
        torch.testing.assert_close({**found[key]}, {**expected[key]})


# ---------------------------------------------------------------------- mistakes


def fit(folder: Path, strategy: Any, module: Any = None, ckpt_path: Any = None, **more: Any) -> None:
    trainer(folder, strategy, **more).fit(module or Module(), loader(), ckpt_path=ckpt_path)


MISTAKES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "stage 4": (lambda p: ZeroStrategy(4), PolicyError, "0, 1, 2 or 3"),
    "config as stage": (lambda p: ZeroStrategy("zero.json"), UsageError, "config=..."),  # type: ignore[arg-type]
    "both": (lambda p: ZeroStrategy(2, {}), UsageError, "leave the other arguments out"),
    "DDP's": (lambda p: ZeroStrategy(find_unused_parameters=True), UsageError, "no argument 'find_unused_parameters'"),
    "clipping": (lambda p: fit(p, ZeroStrategy(config={"gradient_clipping": 1.0})), ConfigError, "gradient_clip_val is 0.0"),
    "accumulation": (
        lambda p: fit(p, ZeroStrategy(config={"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4})),
        ConfigError, "accumulate_grad_batches is 1"),
    "fp16": (lambda p: fit(p, ZeroStrategy(config={"fp16": {"enabled": True}})), ConfigError, "16-mixed"),
    "bf16": (lambda p: fit(p, ZeroStrategy(config={"bf16": {"enabled": True}})), ConfigError, "bf16-true"),
    "no checkpoint": (
        lambda p: fit(p, ZeroStrategy(), ckpt_path=p / "none.ckpt"), zeroshard.CheckpointError, "no checkpoint at"),
    "a folder": (lambda p: fit(p, ZeroStrategy(), ckpt_path=p), zeroshard.CheckpointError, "not a sharded checkpoint"),
    "no optimizer": (lambda p: fit(p, ZeroStrategy(), Module(make_optimizer=no_optimizer)), UsageError, "name one in the config"),
    "SWA": (lambda p: fit(p, ZeroStrategy(3), callbacks=[StochasticWeightAveraging(1e-2)]),
            UsageError, "StochasticWeightAveraging .* use stage 2"),
    "EMA": (lambda p: fit(p, ZeroStrategy(3), callbacks=[EMAWeightAveraging()]), UsageError, "EMAWeightAveraging .* use stage 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_have_a_sentence(name: str, tmp_path: Path) -> None:
    make, kind, words = MISTAKES[name]

    def body() -> None:
        with pytest.raises(kind, match=words):
            make(tmp_path)

    launched(body, 1)


class Fails(Module):
    """Raises an error in the third batch, on rank 1 or on every rank."""

    fails: tuple[int, ...] = (1,)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if index == 2 and self.global_rank in self.fails:
            raise ValueError("a bad batch")
        return loss


@pytest.mark.full
@pytest.mark.parametrize("stage", [full(2), 3])
def test_an_exception_on_one_rank_ends_the_others(stage: int, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="a bad batch") as caught:
        launched(fitted, 2, tmp_path, stage, Fails)
    assert "hung" not in str(caught.value)


@pytest.mark.full
def test_after_an_exception_on_all_the_module_trains_again(tmp_path: Path) -> None:
    def body(stage: int | None) -> Outcome:
        if stage is None:
            return fitted(tmp_path, stage)
        module = Fails()
        module.fails = (0, 1)
        start = {name: value.clone() for name, value in module.state_dict().items()}
        with pytest.raises(ValueError, match="a bad batch"):
            trainer(tmp_path, ZeroStrategy(stage)).fit(module, loader())
        module.load_state_dict(start)
        module.fails, module.losses = (), []
        trainer(tmp_path, ZeroStrategy(stage)).fit(module, loader())
        return outcome(module)

    expect_ddps(body, 2)


# ---------------------------------------------------------------------- Fabric


def fabric(strategy: Any, **more: Any) -> Any:
    made = lightning.Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, **more)
    made.launch()
    return made


def loop(
    folder: Path, stage: int | None, steps: int, *, save: bool = False, resume: bool = False, **options: Any
) -> Outcome:
    """Take steps of two microbatches of all ranks together."""
    made = fabric(
        FabricDDPStrategy(process_group_backend="gloo") if stage is None else FabricZeroStrategy(stage), **options
    )
    torch.manual_seed(0)
    model = GPT(SMALL)
    optimizer = ADAMW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer = made.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if resume:
        assert made.load(folder / "state.ckpt", state) == {"note": "kept"}
    losses = []
    for number in range(2 * state["step"], 2 * steps):
        rows = torch.stack(TOKENS[4 * number % 24 :][:4])[made.global_rank :: made.world_size]
        is_last = number % 2 == 1
        with made.no_backward_sync(model, enabled=not is_last):
            loss = model(rows[:, :-1], rows[:, 1:])
            made.backward(loss / 2)
        losses.append(loss.item())
        if is_last:
            made.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            state["step"] += 1
    if save:
        made.save(folder / "state.ckpt", {**state, "note": "kept"})
    return losses, [value.detach().clone() for value in model.state_dict().values()]


@pytest.mark.parametrize("stage", [full(0), 1, full(2), 3])
def test_fabric_as_ddp(stage: int, tmp_path: Path) -> None:
    expect_ddps(lambda stage: loop(tmp_path, stage, 4), stage)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "world_size"), [(2, 2), full(3, 1), full(1, 2)])
def test_fabric_resumes_at_any_world_size_and_stage(stage: int, world_size: int, tmp_path: Path) -> None:
    first = 3 if stage == 2 else 2
    through = launched(loop, 2, tmp_path, first, 6)
    launched(partial(loop, save=True), 2, tmp_path, first, 3)
    expect_continued(launched(partial(loop, resume=True), world_size, tmp_path, stage, 6), through)
    write_single_file(tmp_path / "state.ckpt", tmp_path / "single.ckpt")
    alone = GPT(SMALL)
    alone.load_state_dict(torch.load(tmp_path / "single.ckpt")["state_dict"])


@pytest.mark.full
@pytest.mark.parametrize("precision", [full("bf16-mixed"), "16-mixed"])
def test_fabric_precision(precision: str, tmp_path: Path) -> None:
    def body(stage: int | None) -> Outcome:
        options, scaler = scaled(precision, FabricMixedPrecision)
        losses, parameters = loop(tmp_path, stage, 12, **options)
        assert (scaler.get_scale() < 2.0**40) == (precision == "16-mixed")
        return losses, [*parameters, torch.tensor(scaler.get_scale())]

    expect_ddps(body, 3, 1e-3)


@pytest.mark.full
def test_fabric_builds_sharded_evaluates_and_refuses(tmp_path: Path) -> None:
    def body() -> None:
        made = fabric("zeroshard_stage_3")
        with made.init_module():
            born = GPT(SMALL)
        assert {type(p).__name__ for p in born.blocks.parameters()} == {"BornSharded"}
        model = made.setup(born)
        rows = torch.stack([TOKENS[0]])
        with torch.no_grad():
            assert torch.isfinite(model(rows)).all()
        with pytest.raises(UsageError, match="together with its optimizer"):
            made.setup_optimizers(torch.optim.SGD(born.parameters(), lr=0.1))
        made.strategy.sharded(model).remove()
        model, optimizer = made.setup(born, torch.optim.SGD(born.parameters(), lr=0.1))
        model(rows).mean().backward()
        made.clip_gradients(model, optimizer, clip_val=1.0)
        made.clip_gradients(model, optimizer, max_norm=1.0, norm_type=1.0)
        optimizer.step()
        optimizer.zero_grad()
        made.save(tmp_path / "y.ckpt", {"model": model, "optimizer": optimizer})
        with pytest.raises(UsageError, match="without its model"):
            made.save(tmp_path / "x.ckpt", {"optimizer": optimizer})
        with pytest.raises(zeroshard.CheckpointError, match="no checkpoint at"):
            made.load(tmp_path / "x.ckpt", {"model": model})

    launched(body, 2)


# ---------------------------------------------------------------------- packages and processes


EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_gpt.py"
SCRIPTS: dict[str, tuple[str, str]] = {
    "Lightning is imported on request": (
        """
        import sys, zeroshard
        zeroshard.shard, zeroshard.initialize
        assert not any(name.startswith(("lightning", "pytorch_lightning")) for name in sys.modules)
        sys.modules.update(dict.fromkeys(["lightning", "pytorch_lightning"]))
        import zeroshard.integrations.lightning
        """,
        "pip install lightning",
    ),
    "an older release is refused": (
        """
        import lightning.fabric
        lightning.fabric.__version__ = "2.4.0"
        import zeroshard.integrations.lightning
        """,
        "Lightning 2.4.0 is older than 2.6",
    ),
    "the package that the script imports is the one taken": (
        """
        import pytorch_lightning
        from zeroshard.integrations.lightning import ZeroStrategy
        one = pytorch_lightning.Trainer(accelerator="cpu", strategy="zeroshard_stage_3", logger=False, enable_checkpointing=False)
        assert issubclass(ZeroStrategy, pytorch_lightning.strategies.DDPStrategy)
        print(type(one.strategy) is ZeroStrategy)
        """,
        "True",
    ),
    "Lightning starts the processes": (
        f"""
        import runpy, sys
        sys.argv = ["x", "--steps", "4"]
        runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
        """,
        "same weights",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", SCRIPTS)
def test_processes_and_packages(name: str, tmp_path: Path) -> None:
    code, expected = SCRIPTS[name]
    if "import pytorch_lightning" in code:
        pytest.importorskip("pytorch_lightning")
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(code))
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": str(Path(zeroshard.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120, check=False
    )
    assert expected in done.stdout + done.stderr, done
