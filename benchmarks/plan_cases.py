"""Owns the cases that plans are compared with: the same training on real ranks over gloo.

torch's allocator provides every byte, as an accelerator's allocator does. On a CPU, zeroshard would share memory
between ranks, which an accelerator cannot. So this module turns it off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import zeroshard
from zeroshard.core.storage import storages
from zeroshard.testing import run_ranks
from zeroshard.testing.gpt import GPT, GPTConfig
from zeroshard.tools.planning import dry_run, ledger
from zeroshard.tools.planning.machine import Machine, machine_of
from zeroshard.tools.planning.table import Row

STEPS = 6


def gpt() -> nn.Module:
    return GPT(GPTConfig(layers=4, width=256, heads=4, context=64))


def tokens(samples: int) -> tuple[Tensor, Tensor]:
    generated = torch.randint(0, 256, (samples, 65))
    return generated[:, :-1], generated[:, 1:]


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        apart: whether CPU memory is separate from the device's, as for an accelerator.
    """

    config: dict[str, Any]
    ranks: int = 2
    factory: Callable[[], nn.Module] = gpt
    batch: Callable[[int], Any] = tokens
    apart: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def config_of(
    stage: int, dtype: str = "fp32", *, checkpointing: bool = False, accumulation: int = 1, micro: int = 4, **zero: Any
) -> dict[str, Any]:
    """Return a DeepSpeed config."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": stage, **zero},
    }  # fmt: skip
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if checkpointing:
        config["activation_checkpointing"] = {"checkpoint_units": "auto"}
    return config


def machine_for(case: Case) -> Machine:
    """Return the machine of the ranks. If CPU memory is separate, no memory is free, since a CPU uses none for speed."""
    machine = machine_of("cpu")
    return machine.model_copy(update={"computes_on_cpu": not case.apart, "memory": 1 if case.apart else machine.memory})


@contextmanager
def to_the_byte() -> Iterator[None]:
    """Plan in the block for a CPU's allocator, which rounds nothing, and for optimizers without `foreach`."""
    with patch.object(ledger, "Segments", lambda: None), patch.object(dry_run, "take_foreach", lambda _: None):
        yield


def row_of(*arguments: Any, **options: Any) -> Row:
    """Return the row of a config; see `zeroshard.plan`."""
    return zeroshard.plan(*arguments, presets=False, **options).rows[0]


def planned(case: Case) -> Row:
    """Return the row of the dry run."""
    with to_the_byte():
        return row_of(
            case.factory, case.config, world_size=case.ranks, batch=case.batch, machine=machine_for(case), **case.extra
        )


def measured(case: Case, timeout: float = 120.0) -> list[dict[str, Any]]:
    """Return for each real rank the allocator's peak of live bytes in training, and the bytes sent in a step."""
    before = os.environ.get("ZEROSHARD_SHARED_MEMORY")
    os.environ["ZEROSHARD_SHARED_MEMORY"] = "0"
    try:
        return run_ranks(_train, case.ranks, case, timeout=timeout)
    finally:
        os.environ.pop("ZEROSHARD_SHARED_MEMORY")
        if before is not None:
            os.environ["ZEROSHARD_SHARED_MEMORY"] = before


def _loss(engine: zeroshard.Engine, arguments: Any) -> Tensor:
    """Return only the loss, since the model's output would keep the logits through the backward."""
    output = engine(**arguments) if isinstance(arguments, dict) else engine(*arguments)
    loss: Tensor = getattr(output, "loss", output)
    return loss


def _train(rank: int, case: Case) -> dict[str, Any]:
    if case.apart:
        storages.is_cpu_memory = lambda device: device.type == "none"
    torch.manual_seed(rank)
    activities = [torch.profiler.ProfilerActivity.CPU]
    # For 16-bit products, if the processor has instructions for them, oneDNN allocates scratch that no dry run sees.
    without_onednn = torch.backends.mkldnn.flags(enabled=False)
    with without_onednn, torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        engine, *_ = zeroshard.initialize(model=case.factory(), config=case.config)
        sent: dict[str, int] = {}
        for step in range(STEPS):
            with torch.profiler.record_function(f"step {step}"):
                engine._sharded.comm_report()
                for _microbatch in range(engine.gradient_accumulation_steps()):
                    arguments = case.batch(engine.train_micro_batch_size_per_gpu())
                    engine.backward(_loss(engine, arguments))
                    engine.step()
                    del arguments
                sent = dict(engine._sharded.comm_report())
    events = profile.profiler.kineto_results.events()
    begins = {event.name(): event.start_ns() for event in events if event.name().startswith("step ")}
    later = sorted(begins.values())[1:]
    live, peaks = 0, [0] * len(later)
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        live += event.nbytes()
        for step in range(len(later)):
            if later[step] <= event.start_ns() < (later[step + 1] if step + 1 < len(later) else event.start_ns() + 1):
                peaks[step] = max(peaks[step], live)
    # A gloo thread keeps its last message until it has other work, so the lowest peak is that of the engine itself.
    peak = min(peaks)
    return {"peak": peak, "sent": sent, "live": live}
