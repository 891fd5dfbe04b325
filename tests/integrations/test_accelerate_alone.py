"""accelerate's own loop without DeepSpeed, with a sharded model and everything else from `prepare`: the losses equal DDP's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from models import Stack, tokens
from ranks import launched
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader
from twin import build, steps

import zeroshard
from zeroshard import UsageError


def saved(accelerator: Accelerator, model: torch.nn.Module, folder: Path) -> None:
    """Save the model with accelerate's own function, and compare the file with it."""
    accelerator.save_model(model, folder)
    accelerator.wait_for_everyone()
    found = load_file(folder / "model.safetensors")
    expected = model.state_dict()
    assert {fqn for fqn, parameter in model.named_parameters() if parameter.numel()} <= found.keys()
    assert all(torch.equal(value, expected[fqn]) for fqn, value in found.items())


def train(stage: int | None, folder: Path) -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Stack()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    rows: Any = [tokens(0, number) for number in range(8)]
    loader: Any = DataLoader(rows, batch_size=1, collate_fn=lambda batch: batch[0])
    if stage is None:
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    else:
        zeroshard.shard(model, optimizer, stage)
        optimizer, loader, schedule = accelerator.prepare(optimizer, loader, schedule)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss: Tensor = model(*batch).mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    if stage is not None:
        saved(accelerator, model, folder)
    return losses


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.full), pytest.param(1, marks=pytest.mark.full), 2, 3]
)
def test_losses_are_ddps_and_the_saved_model_is_whole(stage: int, tmp_path: Path) -> None:
    for found, expected in zip(launched(train, 2, stage, tmp_path), launched(train, 2, None, tmp_path), strict=True):
        assert len(found) == 4
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=0)


def test_a_model_that_is_wrapped_after_it_was_sharded_is_refused() -> None:
    """accelerator.prepare(model) puts DDP around it, which fills `grad` itself."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, sharded = build(2)
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        with pytest.raises(UsageError, match=r"accelerator\.prepare\(model\)"):
            steps(wrapped, sharded.optimizer, 0, range(2))
    finally:
        torch.distributed.destroy_process_group()
