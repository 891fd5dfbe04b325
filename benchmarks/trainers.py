"""Owns the comparison under the stock transformers Trainer: the same 30-line script on DDP, FSDP, DeepSpeed and zeroshard.

Each system runs as a separate job, one job after another, for several rounds. A step's time is the time between two
optimizer steps and is shown as a ratio to DDP's in the same round. DDP runs twice in each round, to show the noise.

    python benchmarks/trainers.py [--rounds 3] [--deepspeed-path FOLDER]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from jobs import end, read_result, wait, without_settings
from rich.console import Console
from rich.table import Table

DDP = "DDP"
LIMIT_SECONDS = 240
"""The time limit of a job, in which DeepSpeed may compile an extension at its first run on a CPU."""
SYSTEMS = [
    DDP,
    "FSDP2",
    *(f"DeepSpeed {stage}" for stage in (1, 2, 3)),
    *(f"zeroshard {stage}" for stage in (1, 2, 3)),
    "DDP again",
]


def config(stage: int) -> dict[str, Any]:
    """Return the config that both DeepSpeed and zeroshard read."""
    return {
        "zero_optimization": {"stage": stage, "overlap_comm": True},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "zero_allow_untested_optimizer": True,
    }


def train(system: str, out: Path, batch: int, steps: int, warmup: int) -> None:
    """Run the script on one rank of one system."""
    import time

    import torch
    import torch.distributed as dist
    import transformers
    from torch.utils.data import Dataset

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if system.startswith("DeepSpeed"):  # otherwise accelerate finds no backend on a CPU and assumes one process
        dist.init_process_group("gloo")

    class Tokens(Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 1024

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            tokens = torch.randint(0, 8192, (128,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": tokens, "labels": tokens}

    class Clock(transformers.TrainerCallback):
        """A callback that records the time at the end of each step."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8192,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=12,
            num_attention_heads=8,
            max_position_embeddings=128,
            use_cache=False,
        )
    )
    name, _, stage = system.partition(" ")
    with_config = name in ("DeepSpeed", "zeroshard")
    fsdp: dict[str, Any] = {"fsdp": "full_shard auto_wrap"}
    fsdp["fsdp_config"] = {"version": 2, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    options: dict[str, Any] = fsdp if name == "FSDP2" else {}
    arguments = transformers.TrainingArguments(
        str(out.parent / "run"), per_device_train_batch_size=batch, max_steps=warmup + steps, learning_rate=1e-4, report_to=[],
        disable_tqdm=True, logging_steps=warmup + steps, save_strategy="no", seed=0, max_grad_norm=1.0, use_cpu=not with_config,
        ddp_backend=None if with_config else "gloo", average_tokens_across_devices=False,
        deepspeed=config(int(stage)) if with_config else None, **options,
    )  # fmt: skip
    assert arguments.world_size == int(os.environ["WORLD_SIZE"])
    clock = Clock()
    trainer = transformers.Trainer(model, arguments, train_dataset=Tokens(), callbacks=[clock])
    trainer.train()
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    if int(os.environ["RANK"]) == 0:
        times = [after - before for before, after in zip(clock.ends[warmup - 1 :], clock.ends[warmup:], strict=False)]
        loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
        out.write_text(json.dumps({"times": times, "loss": loss, "peak": int(peak.split()[1]) * 1024}))


def run(system: str, ranks: int, batch: int, steps: int, deepspeed_path: Path | None) -> dict[str, Any] | str:
    """Run one job. Return a sentence if the system does not run here."""
    name = system.partition(" ")[0]
    if name == "DeepSpeed" and deepspeed_path is None:
        return "not installed (--deepspeed-path)"
    launcher = ["zeroshard", "run"] if name == "zeroshard" else ["torch.distributed.run", "--standalone"]
    environment = {**without_settings(), "OMP_NUM_THREADS": "1"}
    if name == "DeepSpeed":
        environment["PYTHONPATH"] = os.pathsep.join([str(deepspeed_path), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        out, said = Path(folder, "out.json"), Path(folder, "said")
        command = [sys.executable, "-m", *launcher, "--nproc-per-node", str(ranks), __file__]
        command += ["--system", system, "--out", str(out), "--batch", str(batch), "--steps", str(steps)]
        with said.open("w") as stream:
            job = subprocess.Popen(
                command, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            return read_result(out, said, wait(job, LIMIT_SECONDS))
        finally:
            end(job)


def main(
    rounds: Annotated[int, typer.Option(help="The number of rounds.")] = 3,
    ranks: Annotated[int, typer.Option(help="The number of processes.")] = 2,
    batch: Annotated[int, typer.Option(help="Sequences of 128 tokens on each rank.")] = 4,
    steps: Annotated[int, typer.Option(help="Measured steps of a run.")] = 8,
    deepspeed_path: Annotated[
        Path | None, typer.Option(help="A folder in which the real DeepSpeed is installed.")
    ] = None,
    only: Annotated[str, typer.Option(help="Systems that contain this word, and DDP.")] = "",
    system: Annotated[str | None, typer.Option(hidden=True)] = None,
    out: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compare a step of the stock transformers Trainer under several systems."""
    if system is not None and out is not None:
        train(system, out, batch, steps, warmup=3)
        return
    ratios: dict[str, list[float]] = {}
    found: dict[str, dict[str, Any] | str] = {}
    for number in range(rounds):
        base = 0.0
        for one in SYSTEMS:
            if only not in one and not one.startswith(DDP):
                continue
            if number and isinstance(found[one], str):
                continue
            result = run(one, ranks, batch, steps, deepspeed_path)
            found[one] = result
            if isinstance(result, str):
                continue
            median = statistics.median(result["times"])
            base = median if one == DDP else base
            ratios.setdefault(one, []).append(median / base)
    table = Table("system", "step, x DDP", "of", "step, ms", "peak of rank 0, MiB", "loss")
    for one, last in found.items():
        if isinstance(last, str):
            table.add_row(one, last)
            continue
        each = ratios[one]
        table.add_row(
            one, f"{statistics.median(each):.2f}", f"{min(each):.2f} to {max(each):.2f}",
            f"{1e3 * statistics.median(last['times']):.0f}", f"{last['peak'] / 2**20:.0f}", f"{last['loss']:.6f}",
        )  # fmt: skip
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
