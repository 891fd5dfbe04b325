"""Lightning's Trainer on zeroshard: train, stop, continue at another stage, and read the weights with plain torch.

    python examples/lightning_gpt.py                                    # Lightning starts 2 processes
    torchrun --nproc-per-node 2 examples/lightning_gpt.py --stage 3     # torchrun starts them

The script trains on its own source code. With accelerators, pass --accelerator auto.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from zeroshard.integrations.lightning import ZeroStrategy
from zeroshard.testing.gpt import GPT, GPTConfig

LENGTH = 64
TEXT = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()


class Windows(Dataset[Tensor]):
    """A dataset of windows of the text: int64 of shape [LENGTH + 1]."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Tensor:
        start = index * 7919 % (len(TEXT) - LENGTH - 1)
        return TEXT[start : start + LENGTH + 1]


class Model(lightning.LightningModule):
    """A byte-level GPT. `configure_model` builds its layers, which at stage 3 are sharded from the start."""

    def configure_model(self) -> None:
        """Build the layers. The Trainer calls this method once for each run."""
        if not hasattr(self, "gpt"):
            torch.manual_seed(0)
            self.gpt = GPT(GPTConfig(layers=4, width=64, heads=2, context=LENGTH))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Return the mean loss in nats per byte."""
        loss: Tensor = self.gpt(batch[:, :-1], batch[:, 1:])
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Log the norm of all gradients, which every rank must compute."""
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.log("norm", torch.nn.utils.get_total_norm(gradients), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    """Train half of the steps at one stage, and half at another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("lightning_gpt"))
    arguments = parser.parse_args()
    last = arguments.out / "last.ckpt"

    def trainer(stage: int, steps: int) -> lightning.Trainer:
        sharded = ModelCheckpoint(arguments.out, "{step}", every_n_train_steps=arguments.steps // 2, save_last=True)
        weights = ModelCheckpoint(arguments.out, "weights", save_weights_only=True, enable_version_counter=False)
        return lightning.Trainer(
            strategy=ZeroStrategy(stage), devices=2 if arguments.accelerator == "cpu" else "auto",
            accelerator=arguments.accelerator, max_steps=steps, gradient_clip_val=1.0,
            callbacks=[sharded, weights], logger=False, enable_model_summary=False, default_root_dir=arguments.out,
        )  # fmt: skip

    trainer(arguments.stage, arguments.steps // 2).fit(Model(), DataLoader(Windows(), 8))
    second = trainer(3 - arguments.stage % 2, arguments.steps)
    model = Model()
    second.fit(
        model, DataLoader(Windows(), 8), ckpt_path=last
    )  # another stage; the number of processes may change as well

    if second.is_global_zero:
        saved = torch.load(arguments.out / "weights.ckpt")["state_dict"]
        same = all(torch.equal(value.cpu(), saved[name]) for name, value in model.state_dict().items())
        print(
            f"\nloss {second.callback_metrics['loss']:.3f} nats per byte; {'same weights' if same else 'WEIGHTS DIFFER'}"
        )


if __name__ == "__main__":
    main()
