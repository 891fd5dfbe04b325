"""Stock trainers accept ZeroRedundancyOptimizer as any other optimizer, and reach the same parameters."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from ports import free_port
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from zeroshard import ZeroRedundancyOptimizer
from zeroshard.testing import run_ranks


class Tokens(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def as_torchrun(rank: int, world_size: int, port: int) -> None:
    """The environment that torchrun gives; the trainers initialise torch.distributed themselves."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test", ACCELERATE_USE_CPU="true",
    )  # fmt: skip


def gpt2() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def make(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "plain":
        return torch.optim.AdamW(parameters, lr=1e-2)
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-2)


def test_transformers_trainer(tmp_path: Path) -> None:
    import transformers

    def body(rank: int, kind: str, port: int) -> list[Tensor]:
        as_torchrun(rank, 2, port)
        arguments = transformers.TrainingArguments(
            str(tmp_path), use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=3, num_train_epochs=2, save_strategy="no",
            report_to=[], disable_tqdm=True, gradient_accumulation_steps=2, seed=0, logging_strategy="no",
        )  # fmt: skip
        assert arguments.world_size == 2
        model = gpt2()
        optimizer = make(kind, model.parameters())
        trainer = transformers.Trainer(model, arguments, train_dataset=Tokens(), optimizers=(optimizer, None))
        trainer.train()
        assert trainer.state.global_step == 4
        return [p.detach() for p in model.parameters()]

    plain, ours = (run_ranks(body, 2, kind, free_port(), initialise=False) for kind in ("plain", "ours"))
    for rank in range(2):
        assert all(torch.equal(a, b) for a, b in zip(plain[0], ours[rank], strict=True))
    assert not torch.equal(plain[0][0], next(gpt2().parameters()))


def test_lightning(tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.model, self.kind = gpt2(), kind

        def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make(self.kind, self.parameters())

    def body(rank: int, kind: str, port: int) -> list[Tensor]:
        as_torchrun(rank, 2, port)
        module = Module(kind)
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"), max_epochs=2, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5,
            default_root_dir=str(tmp_path),
        )  # fmt: skip
        trainer.fit(module, DataLoader(Tokens(), 3))
        assert trainer.global_step == 8
        trainer.save_checkpoint(tmp_path / f"{kind}.ckpt")
        return [p.detach() for p in module.parameters()]

    plain, ours = (run_ranks(body, 2, kind, free_port(), initialise=False) for kind in ("plain", "ours"))
    for rank in range(2):
        assert all(torch.equal(a, b) for a, b in zip(plain[0], ours[rank], strict=True))
    assert not torch.equal(plain[0][0], next(gpt2().parameters()))
