"""Sequences that are cut over ranks under ZeroTrainer's mixin and Lightning, with the same object as in a user's own loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
import transformers
from families import SIZES
from ranks import launched
from test_lightning import trainer
from test_zero_trainer import arguments, history
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler
from twin import update

from zeroshard.integrations.accelerate import count_samples_once
from zeroshard.integrations.lightning import ZeroStrategy
from zeroshard.integrations.transformers import ZeroTrainerMixin
from zeroshard.sequence import Sequences, tile

pytestmark = pytest.mark.full

LENGTH = 21
"""An odd one: slices are padded."""


def text(number: int) -> dict[str, Tensor]:
    """Return a text, of which each has another number of labels that count."""
    tokens = torch.randint(2, 64, (LENGTH,), generator=torch.Generator().manual_seed(number))
    labels = tokens.clone()
    labels[: 2 * number] = -100
    return {"input_ids": tokens, "labels": labels}


TEXTS: Any = [text(number) for number in range(8)]


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, use_cache=False))


class InOrder:
    """A Trainer whose batches come in order; those of a group of `replicas` trainings that share them."""

    replica: tuple[int, int] = (1, 0)

    def get_train_dataloader(self: Any) -> DataLoader[Any]:
        sampler = DistributedSampler(self.train_dataset, *self.replica, shuffle=False)
        return DataLoader(self.train_dataset, 2, sampler=sampler, collate_fn=self.data_collator)


class Stock(InOrder, transformers.Trainer):  # type: ignore[misc]
    pass


class Long(InOrder, ZeroTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    sequences: Sequences

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        # The Trainer counts the labels of all ranks, and the ranks of a sequence have the same.
        tokens = num_items_in_batch / self.sequences.size
        return self.sequences.loss(model, self.sequences.cut(inputs), tiles=3, tokens=tokens)


OPTIONS = {"gradient_accumulation_steps": 2, "eval_strategy": "epoch", "num_train_epochs": 2}


def trained(out: Path, stage: int | None, size: int) -> dict[str, Any]:
    """Train; stage None is the stock Trainer."""
    args = arguments(out, **OPTIONS)
    model = llama()
    given = {"model": model, "args": args, "train_dataset": TEXTS, "eval_dataset": TEXTS}
    if stage is None:
        made: Any = Stock(**given)
    else:
        made = Long(**given, zero=stage)
        groups = args.world_size // size
        mesh = init_device_mesh("cpu", (groups, size), mesh_dim_names=("dp", "sp"))
        made.sequences = Sequences(mesh["sp"]).attach(model)
        made.replica = (groups, mesh.get_local_rank("dp"))
        tile(model, "*.mlp", tokens=4)
    made.train()
    return history(made)


@pytest.mark.parametrize("stage", [2, 3])
def test_the_mixin_has_the_losses_of_one_process(stage: int, tmp_path: Path) -> None:
    (expected,) = launched(trained, 1, tmp_path / "one", None, 1)
    found, other = launched(trained, 2, tmp_path / "two", stage, 2)
    assert found == other and found.keys() == expected.keys()
    assert any("loss" in entry for entry in expected.values())
    for number, entry in expected.items():
        found[number].pop("eval_loss", None)  # a mean of the ranks' means
        entry.pop("eval_loss", None)
        assert found[number] == pytest.approx(entry, rel=1e-5), number


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.losses: list[float] = []

    def setup(self, stage: str) -> None:
        self.sequences = Sequences(torch.distributed.group.WORLD).attach(self.model)
        tile(self.model, "*.mlp", tokens=4)

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self.sequences.loss(self.model, self.sequences.cut(batch), tiles=3)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("whole", self.model(**batch).loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, eps=1e-3)


def alone() -> list[float]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    clip = partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), 0.1)
    return [float(update(model(**batch).loss, optimizer, clip)) for batch in DataLoader(TEXTS, 2)]


@pytest.mark.parametrize("stage", [2, 3])
def test_lightning_has_the_losses_of_one_process(stage: int, tmp_path: Path) -> None:
    def fit() -> list[float]:
        module = Module()
        options = {"use_distributed_sampler": False, "gradient_clip_val": 0.1}
        trainer(tmp_path, ZeroStrategy(stage), **options).fit(module, DataLoader(TEXTS, 2), DataLoader(TEXTS, 2))
        return module.losses

    first, second = launched(fit, 2)
    assert first == second
    assert first == pytest.approx(alone(), rel=1e-5)


def test_a_batch_size_of_accelerates_that_counts_no_groups_is_left_out() -> None:
    """Without a data-parallel size it counts one group of ranks, however many there are."""
    ranks = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)
    sizes = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4}
    assert count_samples_once({**sizes, "train_batch_size": 12}, ranks) == sizes
    assert count_samples_once({**sizes, "train_batch_size": 24}, ranks) == {**sizes, "train_batch_size": 48}
    assert count_samples_once({**sizes, "train_batch_size": 24}, None) == {**sizes, "train_batch_size": 24}
