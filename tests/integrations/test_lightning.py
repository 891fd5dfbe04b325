"""Lightning's Trainer and Fabric run on zeroshard as on DDP, at every stage, and resume from checkpoints of any stage."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from ports import free_port
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import zeroshard
from zeroshard.errors import ConfigError, PolicyError, UsageError
from zeroshard.integrations.lightning import FabricZeroStrategy, ZeroStrategy, write_single_file
from zeroshard.optim.lr_schedules import WarmupDecayLR
from zeroshard.testing import run_ranks
from zeroshard.testing.gpt import GPT, GPTConfig
from zeroshard.testing.ranks import RankError

SMALL = GPTConfig(vocabulary=32, layers=2, width=16, heads=2, context=9)


class Tokens(Dataset[Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 32, (9,), generator=torch.Generator().manual_seed(index))


def loader() -> DataLoader[Tensor]:
    return DataLoader(Tokens(), 2)  # 6 batches a rank, of 2


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """`by` says how the step comes to the model: through the module's own forward, or the inner model."""

    def __init__(self, by: str = "inner", lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.model = GPT(SMALL)
        self.by = by
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
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def environment(rank: int, world_size: int, port: int) -> None:
    """What torchrun sets."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test",
    )  # fmt: skip


def trainer(folder: Path, strategy: Any, **more: Any) -> Any:
    settings: dict[str, Any] = {
        "accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "max_epochs": 1, "logger": False,
        "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False, "default_root_dir": str(folder),
    }  # fmt: skip
    return lightning.Trainer(strategy=strategy, **settings | more)


def ranks(body: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    port = free_port()

    def run(rank: int) -> Any:
        environment(rank, world_size, port)
        return body(*args)

    return run_ranks(run, world_size, initialise=False, timeout=120)


def strategy_of(stage: int | None) -> Any:
    return DDPStrategy(process_group_backend="gloo") if stage is None else ZeroStrategy(stage)


def fitted(folder: Path, stage: int | None, by: str = "inner", **more: Any) -> tuple[list[float], list[Tensor]]:
    module = Module(by)
    trainer(folder, strategy_of(stage), **more).fit(module, loader(), loader())
    assert all(type(p) is nn.Parameter for p in module.parameters())
    return module.losses, [p.detach().clone() for p in module.parameters()]


def assert_same(ours: Any, theirs: Any, atol: float = 1e-6) -> None:
    for (losses, parameters), (expected, expected_parameters) in zip(ours, theirs, strict=True):
        assert len(losses) == len(expected) > 0
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=atol)
        for one, other in zip(parameters, expected_parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=10 * atol)


def full(*values: Any) -> Any:
    """Parameters that the quick set leaves out."""
    return pytest.param(*values, marks=pytest.mark.full)


CASES: dict[str, dict[str, Any]] = {
    "by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "accumulates": {"accumulate_grad_batches": 4, "max_epochs": 2, "gradient_clip_val": 0.1},
    "own forward": {"by": "own", "gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("stage", [2, 3, full(0), full(1)])
def test_losses_and_parameters_are_those_of_ddp_to_the_bit(stage: int, tmp_path: Path) -> None:
    assert_same(*(ranks(lambda s: fitted(tmp_path, s), s) for s in (stage, None)), atol=0.0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "stage"),
    [("accumulates", 2), ("own forward", 3)]
    + [
        full(case, stage)
        for case in CASES
        for stage in range(4)
        if (case, stage) not in (("accumulates", 2), ("own forward", 3))
    ],
)
def test_losses_are_those_of_ddp(case: str, stage: int, tmp_path: Path) -> None:
    assert_same(*(ranks(lambda s: fitted(tmp_path, s, **CASES[case]), s) for s in (stage, None)))


# ---------------------------------------------------------------------- checkpoints


def saves(
    folder: Path, stage: int | None, steps: int, resume: str | None, **more: Any
) -> tuple[list[float], list[Tensor]]:
    module = Module()
    # The batch of all ranks together stays the same.
    batches = DataLoader(Tokens(), 4 // int(os.environ["WORLD_SIZE"]))
    keeper = ModelCheckpoint(folder, "{step}", every_n_train_steps=6, save_top_k=-1)
    one = trainer(
        folder,
        strategy_of(stage),
        max_epochs=-1,
        max_steps=steps,
        enable_checkpointing=True,
        callbacks=[keeper],
        **more,
    )
    one.fit(module, batches, ckpt_path=None if resume is None else str(folder / resume))
    assert one.global_step == steps
    return module.losses, [p.detach().clone() for p in module.parameters()]


def world_losses(results: list[Any]) -> Tensor:
    return torch.tensor([result[0] for result in results]).mean(0)


@pytest.mark.parametrize(("stage", "world_size"), [full(2, 2), (3, 1), full(1, 2), full(0, 1)])
def test_a_run_resumes_at_any_world_size_and_stage(stage: int, world_size: int, tmp_path: Path) -> None:
    through = ranks(lambda: saves(tmp_path / "through", 3 if stage == 2 else 2, 12, None))
    ranks(lambda: saves(tmp_path, 3 if stage == 2 else 2, 6, None))
    assert (tmp_path / "step=6.ckpt").is_dir()
    resumed = ranks(lambda: saves(tmp_path, stage, 12, "step=6.ckpt"), world_size=world_size)
    torch.testing.assert_close(world_losses(resumed), world_losses(through)[6:], rtol=0, atol=1e-6)
    for one, other in zip(resumed[0][1], through[0][1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


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

    (value, again, predicted, path, score), (other, *_) = ranks(body)
    assert value == other == again == float(score)
    assert sorted(p.name for p in (tmp_path / "best").iterdir()) == sorted([Path(path).name, "last.ckpt"])
    write_single_file(path, tmp_path / "single.ckpt")
    for file in (tmp_path / "single.ckpt", tmp_path / "weights" / "epoch=2.ckpt", tmp_path / "after.ckpt"):
        alone = Module.load_from_checkpoint(file, map_location="cpu").eval()
        with torch.no_grad():
            first = torch.stack([alone(Tokens()[i][None])[0, -1] for i in range(0, 24, 2)])
        torch.testing.assert_close(first, predicted, rtol=0, atol=1e-5)
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert "optimizer_states" not in saved


@pytest.mark.full
def test_weights_of_another_strategy_load_and_its_optimizer_does_not(tmp_path: Path) -> None:
    def body() -> Any:
        module = Module()
        one = trainer(tmp_path, strategy_of(None))
        one.fit(module, loader(), loader())
        one.save_checkpoint(tmp_path / "ddp.ckpt")
        value = one.validate(module, loader(), verbose=False)[0]["val"]
        for stage in (2, 3):
            ours = trainer(tmp_path, ZeroStrategy(stage), max_epochs=2)
            assert ours.validate(Module(), loader(), ckpt_path=tmp_path / "ddp.ckpt", verbose=False)[0]["val"] == value
            with pytest.raises(UsageError, match="another strategy's optimizer states"):
                ours.fit(Module(), loader(), ckpt_path=tmp_path / "ddp.ckpt")
        return value

    ranks(body)


# ---------------------------------------------------------------------- precision


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "stage"),
    [
        ("16-mixed", 3),
        full("bf16-true", 3),
        full("bf16-mixed", 3),
        full("bf16-mixed", 2),
        full("16-mixed", 2),
        full("bf16-true", 2),
    ],
)
def test_precision(precision: str, stage: int, tmp_path: Path) -> None:
    def body(stage: int | None) -> tuple[list[float], list[Tensor]]:
        # On a CPU Lightning turns "16-mixed" into bf16, but takes the plugin. A scale that overflows at first.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
        how: Any = (
            {"plugins": MixedPrecision("16-mixed", "cpu", scaler)}
            if precision == "16-mixed"
            else {"precision": precision}
        )
        losses, parameters = fitted(tmp_path, stage, gradient_clip_val=0.5, max_epochs=3, **how)
        if precision == "16-mixed":
            assert 2.0**10 < scaler.get_scale() < 2.0**40
            parameters.append(torch.tensor(scaler.get_scale()))
        return losses, parameters

    ours, ddp = ranks(body, stage), ranks(body, None)
    if precision != "bf16-true":
        assert_same(ours, ddp, 1e-3)
    else:  # DDP updates bf16 parameters; here their masters are in fp32
        assert ours[0][1][0].dtype == torch.bfloat16
        torch.testing.assert_close(torch.tensor(ours[0][0]), torch.tensor(ddp[0][0]), rtol=0, atol=0.1)
        assert ours[0][0][-1] < ours[0][0][0]


# ---------------------------------------------------------------------- ways to write modules and loops


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


@pytest.mark.full
@pytest.mark.parametrize("stage", [full(1), full(2), 3])
def test_manual_optimization(stage: int, tmp_path: Path) -> None:
    def body(stage: int | None) -> tuple[list[float], list[Tensor]]:
        module = Manual()
        trainer(tmp_path, strategy_of(stage), max_epochs=2).fit(module, loader())
        return module.losses, [p.detach().clone() for p in module.parameters()]

    assert_same(ranks(body, stage), ranks(body, None))


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


@pytest.mark.full
@pytest.mark.parametrize("stage", [full(0), full(1), full(2), 3])
def test_two_optimizers_that_take_turns(stage: int, tmp_path: Path) -> None:
    def body(stage: int | None) -> tuple[list[float], list[Tensor]]:
        module = InTurns()
        strategy = strategy_of(stage)
        if stage is None:
            strategy = DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
        trainer(tmp_path, strategy, max_epochs=2).fit(module, loader())
        return module.losses, [p.detach().clone() for p in module.parameters()]

    assert_same(ranks(body, stage), ranks(body, None))


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


class Finetuned(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.full
@pytest.mark.parametrize("stage", [full(0), full(1), 2, full(3)])
def test_finetuning_callbacks_free_parameters(stage: int, tmp_path: Path) -> None:
    """One process: DDP of several does not average the gradients of what was frozen when it was made."""

    def body(stage: int | None, compares_values: bool = True) -> tuple[list[float], list[Tensor]]:
        module = Finetuned("own")
        callbacks = [Unfreezes(compares_values)]
        trainer(tmp_path, strategy_of(stage), max_epochs=3, callbacks=callbacks).fit(module, loader())
        return module.losses, [p.detach().clone() for p in module.parameters()]

    expected = ranks(body, None, world_size=1)
    assert_same(ranks(body, stage, stage < 3, world_size=1), expected, 0.0)
    two = ranks(body, stage, stage < 3)
    assert_same(two, ranks(body, 1), 0.0)
    assert all(torch.equal(one, other) for one, other in zip(two[0][1], two[1][1], strict=True))
    if stage == 3:
        with pytest.raises(RankError, match="is sharded at rest, and `equal` needs its values"):
            ranks(body, stage)


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
    def body(stage: int | None) -> tuple[list[float], list[Tensor]]:
        module = Born()
        one = trainer(tmp_path, strategy_of(stage))
        one.fit(module, loader())
        assert module.kinds == {"BornSharded" if stage == 3 else "Parameter"}
        return module.losses, [p.detach().clone() for p in module.parameters()]

    assert_same(ranks(body, stage), ranks(body, None))


class Looks(Callback):
    """What callbacks look at before a step."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.problem = ""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if isinstance(trainer.strategy, ZeroStrategy):
            self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters()])))
            by_parameter = torch.stack([p.grad.norm() for p in module.parameters()])
            torch.testing.assert_close(float(by_parameter.norm()), self.norms[-1], rtol=1e-5, atol=0.0)
            try:
                _ = [p.grad.flatten() for p in module.parameters()]
            except UsageError as error:
                self.problem = str(error)
        else:
            self.norms.append(float(torch.cat([p.grad.flatten() for p in module.parameters()]).norm()))
        module.log("lr", optimizer.param_groups[0]["lr"])


@pytest.mark.full
def test_callbacks_see_norms_and_no_values_of_gradients(tmp_path: Path) -> None:
    def body(stage: int | None) -> Any:
        looks = Looks()
        trainer(tmp_path, strategy_of(stage), callbacks=[looks], gradient_clip_val=0.1).fit(Module(), loader())
        return looks.norms, looks.problem

    ours, ddp = ranks(body, 3)[0], ranks(body, None)[0]
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(ddp[0]), rtol=1e-5, atol=0)
    assert "grad" in ours[1]


@pytest.mark.full
def test_averages_of_weights_are_refused_before_training_at_stage_3(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

    def body(stage: int) -> None:
        for callback in (StochasticWeightAveraging(1e-2), EMAWeightAveraging()):
            with pytest.raises(UsageError, match=f"{type(callback).__name__} .* use stage 2"):
                trainer(tmp_path, strategy_of(stage), callbacks=[callback]).fit(Module(), loader())

    ranks(body, 3)


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
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [
                {"scheduler": WarmupDecayLR(optimizer, 6, warmup_max_lr=1e-2, warmup_num_steps=2), "interval": "step"}
            ]

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:  # one that Lightning does not know
            scheduler.step()

    def body(ours: bool) -> tuple[list[float], list[Tensor]]:
        module = Without() if ours else Warms()
        strategy = ZeroStrategy(config=config) if ours else strategy_of(None)
        trainer(tmp_path, strategy, accumulate_grad_batches=2, gradient_clip_val=0.5, max_epochs=2).fit(
            module, loader()
        )
        return module.losses, [p.detach().clone() for p in module.parameters()]

    assert_same(ranks(body, True), ranks(body, False))


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
            return [parameter.detach().clone() for parameter in module.parameters()]
        getattr(runs, what)(module, loader(), verbose=False)
        return runs.callback_metrics["val"]

    for one, other in zip(ranks(body, config), ranks(body, None), strict=True):
        torch.testing.assert_close(one, other)


class Edits(Module):
    """A module whose hooks edit the state dict of checkpoints, each in one way."""

    def __init__(self, way: str, loads: bool = False) -> None:
        super().__init__()
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

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0 if self.way == "another size" else 0.9)


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
        return module.losses, [parameter.detach().clone() for parameter in module.parameters()]

    if way == "casts" and stage == 3:
        with pytest.raises(RankError, match="names, shapes and dtypes only"):
            ranks(body, stage)
        return
    ours, theirs = ranks(body, stage), ranks(body, None)
    if way != "another size":
        assert_same(ours, theirs)
    write_single_file(tmp_path / str(stage) / "one.ckpt", tmp_path / "file.ckpt", weights_only=False)
    expected = torch.load(tmp_path / "None" / "one.ckpt", weights_only=False)
    for path in (tmp_path / "file.ckpt", tmp_path / f"{stage}weights" / "one.ckpt"):
        found = torch.load(path, weights_only=False)
        assert found["state_dict"].keys() == expected["state_dict"].keys()
        assert found.get("mine") == expected.get("mine")
        for key, value in expected["state_dict"].items():
            assert found["state_dict"][key].dtype == value.dtype
            torch.testing.assert_close(found["state_dict"][key], value)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_averages_of_weights_are_saved_and_resumed(stage: int, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EMAWeightAveraging

    def body(stage: int | None) -> Any:
        callbacks = [ModelCheckpoint(tmp_path / str(stage), filename="one"), EMAWeightAveraging(decay=0.5)]
        module = Module()
        trainer(tmp_path, strategy_of(stage), enable_checkpointing=True, callbacks=callbacks).fit(module, loader())
        module = Module()
        resumed = trainer(tmp_path, strategy_of(stage), max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.5)])
        resumed.fit(module, loader(), ckpt_path=tmp_path / str(stage) / "one.ckpt")
        return module.losses, [parameter.detach().clone() for parameter in module.parameters()]

    assert_same(ranks(body, stage), ranks(body, None))
    write_single_file(tmp_path / str(stage) / "one.ckpt", tmp_path / "file.ckpt", weights_only=False)
    found, expected = (
        torch.load(path, weights_only=False) for path in (tmp_path / "file.ckpt", tmp_path / "None" / "one.ckpt")
    )
    for key in ("state_dict", "current_model_state", "averaging_state"):
        assert found[key].keys() == expected[key].keys()
        for name, value in expected[key].items():
            torch.testing.assert_close(found[key][name], value)


# ---------------------------------------------------------------------- mistakes


class Without(Module):
    def configure_optimizers(self) -> None:
        return None


class Clips(Module):
    def __init__(self) -> None:
        super().__init__()
        self.clipped: list[float] = []

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        self.clipped.append(float(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)))


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
    "no optimizer": (lambda p: fit(p, ZeroStrategy(), Without()), UsageError, "name one in the config"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("stage", [full(1), 2, 3])
def test_torchs_own_clipping_clips(stage: int, tmp_path: Path) -> None:
    def body(stage: int | None) -> tuple[list[float], list[Tensor]]:
        module = Clips()
        trainer(tmp_path, strategy_of(stage), max_epochs=2).fit(module, loader())
        assert module.clipped
        assert module.clipped[0] > 0.01
        return module.losses, [p.detach().clone() for p in module.parameters()]

    assert_same(ranks(body, stage), ranks(body, None), atol=1e-5)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_have_a_sentence(name: str, tmp_path: Path) -> None:
    make, kind, words = MISTAKES[name]

    def body() -> None:
        with pytest.raises(kind, match=re.escape(words)):
            make(tmp_path)

    ranks(body, world_size=1)


@pytest.mark.full
@pytest.mark.parametrize("stage", [full(2), 3])
def test_an_exception_on_one_rank_ends_the_others(stage: int, tmp_path: Path) -> None:
    class Fails(Module):
        def training_step(self, batch: Tensor, index: int) -> Tensor:
            if index == 2 and self.global_rank == 1:
                raise ValueError("a bad batch")
            return super().training_step(batch, index)

    with pytest.raises(RankError) as caught:
        ranks(lambda: trainer(tmp_path, ZeroStrategy(stage)).fit(Fails(), loader()))
    assert "a bad batch" in str(caught.value)
    assert "hung" not in str(caught.value)


@pytest.mark.full
def test_after_an_exception_on_all_the_module_trains_again(tmp_path: Path) -> None:
    class Fails(Module):
        fails = True

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = super().training_step(batch, index)
            if index == 2 and self.fails:
                raise ValueError("a bad batch")
            return loss

    def body() -> tuple[list[float], list[Tensor]]:
        module = Fails()
        start = {name: value.clone() for name, value in module.state_dict().items()}
        with pytest.raises(ValueError, match="a bad batch"):
            trainer(tmp_path, ZeroStrategy(2)).fit(module, loader())
        module.load_state_dict(start)
        module.fails, module.losses = False, []
        trainer(tmp_path, ZeroStrategy(2)).fit(module, loader())
        return module.losses, [p.detach().clone() for p in module.parameters()]

    assert_same(ranks(body), ranks(lambda: fitted(tmp_path, None)))


# ---------------------------------------------------------------------- Fabric


def fabric(strategy: Any, **more: Any) -> Any:
    made = lightning.Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, **more)
    made.launch()
    return made


def of_fabric(stage: int | None) -> Any:
    from lightning.fabric.strategies import DDPStrategy as FabricDDP

    return FabricDDP(process_group_backend="gloo") if stage is None else FabricZeroStrategy(stage)


def loop(
    made: Any, folder: Path, steps: int, save: bool = False, resume: bool = False
) -> tuple[list[float], list[Tensor]]:
    """Steps of two microbatches of all ranks together."""
    torch.manual_seed(0)
    model = GPT(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer = made.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    if resume:
        assert made.load(folder / "state.ckpt", state) == {"note": "kept"}
    losses = []
    data = [Tokens()[index] for index in range(24)]
    for step in range(state["step"], steps):
        for half in range(2):
            rows = torch.stack(data[(4 * (2 * step + half)) % 24 :][:4])[made.global_rank :: made.world_size]
            with made.no_backward_sync(model, enabled=half == 0):
                loss = model(rows[:, :-1], rows[:, 1:])
                made.backward(loss / 2)
            losses.append(loss.item())
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
    assert_same(*(ranks(lambda s: loop(fabric(of_fabric(s)), tmp_path, 4), s) for s in (stage, None)))


@pytest.mark.full
@pytest.mark.parametrize(("stage", "world_size"), [(2, 2), full(3, 1), full(1, 2)])
def test_fabric_resumes_at_any_world_size_and_stage(stage: int, world_size: int, tmp_path: Path) -> None:
    first = 3 if stage == 2 else 2
    through = ranks(lambda: loop(fabric(of_fabric(first)), tmp_path, 6))
    ranks(lambda: loop(fabric(of_fabric(first)), tmp_path, 3, save=True))
    resumed = ranks(lambda: loop(fabric(of_fabric(stage)), tmp_path, 6, resume=True), world_size=world_size)
    torch.testing.assert_close(world_losses(resumed), world_losses(through)[6:], rtol=0, atol=1e-6)
    for one, other in zip(resumed[0][1], through[0][1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    write_single_file(tmp_path / "state.ckpt", tmp_path / "single.ckpt")
    alone = GPT(SMALL)
    alone.load_state_dict(torch.load(tmp_path / "single.ckpt")["state_dict"])


@pytest.mark.full
@pytest.mark.parametrize("precision", [full("bf16-mixed"), "16-mixed"])
def test_fabric_precision(precision: str, tmp_path: Path) -> None:
    from lightning.fabric.plugins.precision import MixedPrecision as FabricMixed

    def body(stage: int | None) -> tuple[list[float], list[Tensor]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=3)
        how: Any = (
            {"plugins": FabricMixed("16-mixed", "cpu", scaler)} if precision == "16-mixed" else {"precision": precision}
        )
        losses, parameters = loop(fabric(of_fabric(stage), **how), tmp_path, 12)
        return losses, [*parameters, torch.tensor(scaler.get_scale())]

    ours, ddp = ranks(body, 3), ranks(body, None)
    assert_same(ours, ddp, 1e-3)
    assert (ours[0][1][-1] < 2.0**40) == (precision == "16-mixed")


@pytest.mark.full
def test_fabric_builds_sharded_evaluates_and_refuses(tmp_path: Path) -> None:
    def body() -> None:
        made = fabric("zeroshard_stage_3")
        with made.init_module():
            born = GPT(SMALL)
        assert {type(p).__name__ for p in born.blocks.parameters()} == {"BornSharded"}
        model = made.setup(born)
        rows = torch.stack([Tokens()[0]])
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

    ranks(body, world_size=2)


# ---------------------------------------------------------------------- packages and processes


def script(folder: Path, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"PYTHONPATH": str(Path(zeroshard.__file__).parent.parent), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, env=env, cwd=folder, timeout=120, check=False
    )


@pytest.mark.full
def test_zeroshard_imports_no_lightning_and_says_when_it_is_missing(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        """
        import sys, zeroshard
        zeroshard.shard, zeroshard.initialize
        assert not any(name.startswith(("lightning", "pytorch_lightning")) for name in sys.modules)
        sys.modules.update(dict.fromkeys(["lightning", "pytorch_lightning"]))
        import zeroshard.integrations.lightning
        """,
    )
    assert "pip install lightning" in done.stderr.splitlines()[-1]


@pytest.mark.full
def test_an_older_release_is_refused_by_name(tmp_path: Path) -> None:
    done = script(
        tmp_path,
        """
        import lightning.fabric
        lightning.fabric.__version__ = "2.4.0"
        import zeroshard.integrations.lightning
        """,
    )
    assert "Lightning 2.4.0 is older than 2.6" in done.stderr.splitlines()[-1]


@pytest.mark.full
def test_the_other_package_is_taken_where_the_script_imports_it(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_lightning")
    done = script(
        tmp_path,
        """
        import pytorch_lightning
        from zeroshard.integrations.lightning import ZeroStrategy
        one = pytorch_lightning.Trainer(accelerator="cpu", strategy="zeroshard_stage_3", logger=False, enable_checkpointing=False)
        assert type(one.strategy) is ZeroStrategy
        assert issubclass(ZeroStrategy, pytorch_lightning.strategies.DDPStrategy)
        """,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_lightning_starts_the_processes(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "lightning_gpt.py"
    done = script(
        tmp_path,
        f"import runpy, sys; sys.argv = ['x', '--steps', '4']; runpy.run_path({str(example)!r}, run_name='__main__')",
    )
    assert done.returncode == 0, done.stderr
    assert "same weights" in done.stdout
