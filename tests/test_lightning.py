"""Lightning's Trainer and Fabric run on zeroshard as on DDP, at every stage, and go on from their checkpoints anywhere."""

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
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import zeroshard
from zeroshard.errors import ConfigError, PolicyError, UsageError
from zeroshard.integrations.lightning import FabricZeroStrategy, ZeroStrategy, write_single_file
from zeroshard.testing import run_ranks
from zeroshard.testing.gpt import GPT, GPTConfig
from zeroshard.testing.ranks import RankError, free_port

SMALL = GPTConfig(vocabulary=32, layers=2, width=16, heads=2, context=8)


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
    settings: dict[str, Any] = dict(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), max_epochs=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=str(folder),
    )  # fmt: skip
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


def assert_same(ours: Any, theirs: Any) -> None:
    for (losses, parameters), (expected, expected_parameters) in zip(ours, theirs, strict=True):
        assert len(losses) == len(expected) > 0
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=0, atol=1e-6)
        for one, other in zip(parameters, expected_parameters, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulates": {"accumulate_grad_batches": 4, "max_epochs": 2, "gradient_clip_val": 0.1},
    "own forward": {"by": "own", "gradient_clip_val": 0.1},
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_ddp(case: str, stage: int, tmp_path: Path) -> None:
    assert_same(*(ranks(lambda s: fitted(tmp_path, s, **CASES[case]), s) for s in (stage, None)))
