"""Train a byte-level GPT on Ray Train, which restarts the ranks from the last reported checkpoint if a rank fails.

    pip install 'zeroshard[ray]'
    python examples/ray_gpt.py --storage FOLDER [--workers 2] [--gpu]

All machines must see FOLDER. Each rank writes its own part of a checkpoint there, and Ray uploads nothing.
The script trains on its own source code.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import Tensor

import zeroshard
from zeroshard.testing.gpt import GPT, GPTConfig

LENGTH = 64
BATCH = 8  # sequences in a step, over all workers
CONFIG = {
    "train_batch_size": BATCH,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 3},
}


def windows(text: Tensor, first: int, count: int) -> Tensor:
    """Return samples by number, from `first` on: int64 of shape [count, LENGTH + 1]."""
    starts = [number * 7919 % (len(text) - LENGTH - 1) for number in range(first, first + count)]
    return torch.stack([text[start : start + LENGTH + 1] for start in starts])


def train(settings: dict[str, Any]) -> None:
    """Train on one worker. Ray has initialised torch.distributed."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=4, width=64, heads=2, context=LENGTH))
    engine, _, _, _ = zeroshard.initialize(model=model, config=CONFIG)
    last = ray.train.get_checkpoint()
    if last is not None:
        engine.load_checkpoint(last.path)  # saved by any number of workers
    rank, own = ray.train.get_context().get_world_rank(), engine.train_micro_batch_size_per_gpu()
    text = torch.frombuffer(bytearray(settings["text"]), dtype=torch.uint8).long()
    for step in range(engine.global_steps, settings["steps"]):
        tokens = windows(text, engine.global_samples + rank * own, own).to(engine.device)
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        if (step + 1) % settings["save_every"] == 0:
            folder = Path(settings["storage"], settings["name"], f"step{step + 1}")
            engine.save_checkpoint(folder)
            ray.train.report(
                {"step": step + 1, "loss": loss.item()},
                checkpoint=Checkpoint.from_directory(str(folder)),
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            )


def trainer(storage: Path, name: str, workers: int, steps: int, save_every: int, gpu: bool = False) -> TorchTrainer:
    """Return the trainer of a run. A run of the same name in the storage continues."""
    settings = {
        "text": Path(__file__).read_bytes(), "storage": str(storage), "name": name, "steps": steps, "save_every": save_every,
    }  # fmt: skip
    return TorchTrainer(
        train,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=gpu),
        run_config=RunConfig(name, storage_path=str(storage), failure_config=FailureConfig(max_failures=3)),
    )


def main() -> None:
    """Train on Ray's workers. The same command continues a run that was stopped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--storage", type=Path, required=True, help="a folder that all machines see")
    parser.add_argument("--name", default="gpt", help="the name of the run in that folder")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="give each worker an accelerator")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()
    given = {**vars(options), "storage": options.storage.resolve()}
    result = trainer(**given).fit()
    print(f"{result.metrics}, in {result.checkpoint.path if result.checkpoint else 'no checkpoint'}")


if __name__ == "__main__":
    main()
