"""Owns the specification of equality: the settings, the training under each setting, and the comparison.

A `Setting` defines a training run. zeroshard promises that all settings of a table give equal results, to the last bit. A
test names a workload and rows of a table, and `expect_equal` trains and compares. The tables list the possible settings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from insides import transport_of
from models import OPTIMIZERS, Stack, tokens
from oracles import same_on_all_ranks
from torch import Tensor, nn

import zeroshard
from zeroshard import Offload, Place, Policy, Precision, Residency, Sharded, ZeroshardError
from zeroshard.core.storage import storages
from zeroshard.core.transport.base import Alone, Collectives
from zeroshard.core.transport.composed import TwoLevel
from zeroshard.core.transport.grouped import PointToPoint
from zeroshard.core.transport.shared_memory import SharedMemory
from zeroshard.testing import Run, Workload, train, whole_parameters
from zeroshard.testing.parity import buffers_of, same

__all__ = ["same", "same_on_all_ranks"]

FEW_STAGES = pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.full), 2, 3])
"""All stages. Stage 1 has the gradients of stage 0, and the optimizer states of stage 2, so the quick set may do without it."""
SMALL_BUCKETS = 256
"""Elements of a bucket, of which the larger parameters of the test models span several."""
LARGE_BUCKETS = 10**6
"""Elements of a bucket that is larger than any unit."""
PRECISIONS = {
    "fp32": None,
    "bf16": Precision(torch.bfloat16),
    "bf16, buffers too": Precision(torch.bfloat16, buffer_dtype=torch.bfloat16),
    "fp16": Precision(torch.float16),
    "bf16 states": Precision(state_dtype=torch.bfloat16),
    "bf16, states too": Precision(torch.bfloat16, state_dtype=torch.bfloat16),
    "8-bit states": Precision(state_dtype=torch.uint8),
}
LOSS_SCALES = dict.fromkeys(PRECISIONS, 1.0) | {"fp16": 2.0**12}
ACCELERATOR, CPU, DISK = Place.ACCELERATOR, Place.CPU, Place.DISK


# ---------------------------------------------------------------------- settings


@dataclass(frozen=True)
class Setting:
    """One way to train that must not change the result."""

    policy: Policy
    transport: str = "shared memory"
    """Or "gloo"."""
    overlap: bool = True
    apart: bool = False
    """Whether CPU memory counts as separate from the accelerator's memory, so that every copy between the two is made."""
    parks: Place | None = None
    """The place where all states are parked, and from which they are reloaded, after each step."""


def kept(policy: Policy) -> Policy:
    """Return a policy whose units stay unsharded from their forward to their backward."""
    return replace(policy, reshard_after_forward=False)


STAGES = {
    "stage 0": Setting(Policy.stage(0)),
    "stage 1": Setting(Policy.stage(1)),
    "stage 2": Setting(Policy.stage(2)),
    "stage 3": Setting(Policy.stage(3)),
    "stage 3, kept": Setting(kept(Policy.stage(3))),
}
TRANSPORTS = {
    "stage 0 over gloo": Setting(Policy.stage(0), "gloo"),
    "stage 1 over gloo": Setting(Policy.stage(1), "gloo"),
    "stage 2 over gloo": Setting(Policy.stage(2), "gloo"),
    "stage 3 over gloo": Setting(Policy.stage(3), "gloo"),
    "stage 1 without overlap": Setting(Policy.stage(1), overlap=False),
    "stage 3 without overlap": Setting(Policy.stage(3), overlap=False),
    "stage 3, kept, over gloo, without overlap": Setting(kept(Policy.stage(3)), "gloo", overlap=False),
    "stage 3, nothing prefetched": Setting(replace(Policy.stage(3), prefetch_numel=0)),
}


def places(folder: Path, stage: int, optimizer: Place) -> dict[str, Setting]:
    """Return every legal combination of a stage's residencies with states off the accelerator, with separate CPU memory."""
    how = Offload(str(folder), buffer_numel=4096, block_nbytes=4096)
    parameters = [ACCELERATOR, CPU] + ([DISK] if stage == 3 else [])
    gradients = [ACCELERATOR] + ([CPU, DISK] if stage > 1 else [])
    settings = {"on the accelerator": Setting(Policy.stage(stage))}
    for parameter, gradient in product(parameters, gradients):
        if {parameter, gradient, optimizer} == {ACCELERATOR}:
            continue
        policy = Policy(
            Residency(sharded=stage > 2, place=parameter),
            Residency(sharded=stage > 1, place=gradient),
            Residency(sharded=True, place=optimizer),
            offload_parameters=how,
            offload_optimizer=how,
        )
        name = f"parameters: {parameter.value}, gradients: {gradient.value}, optimizer: {optimizer.value}"
        settings[name] = Setting(policy, apart=True)
    return settings


def offloaded(stage: int, place: Place, folder: Path) -> Policy:
    """Return a stage, with everything that may rest on the place."""
    if place is ACCELERATOR:
        return Policy.stage(stage)
    how = Offload(str(folder), buffer_numel=1 << 16, block_nbytes=4096)
    return Policy.stage(stage).offloaded(optimizer=place, parameters=place if stage == 3 else CPU, offload=how)


def in_one_memory(settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Return the same settings for an accelerator that shares the CPU's memory, where states are used in place."""
    return {name: replace(setting, apart=False) for name, setting in settings.items()}


def hosts(within: int) -> dict[str, Setting]:
    """Return the stages over hosts of `within` ranks, with sums host by host."""
    stages = {f"stage {stage}": Setting(Policy.stage(stage, within=within)) for stage in range(4)}
    third = stages["stage 3"].policy
    return {
        **stages,
        "stage 3, kept": Setting(kept(third)),
        "stage 3 over all ranks": Setting(replace(third, parameters=Residency(sharded=True))),
        "stage 3 over gloo": Setting(third, "gloo"),
        "stage 1 over gloo": Setting(stages["stage 1"].policy, "gloo"),
        "stage 3 without overlap": Setting(third, overlap=False),
    }


# ---------------------------------------------------------------------- training and comparing


@contextmanager
def as_set(setting: Setting) -> Iterator[None]:
    """Apply the setting's transport and places to this process."""
    transport, is_cpu_memory = os.environ.get("ZEROSHARD_SHARED_MEMORY"), storages.is_cpu_memory
    os.environ["ZEROSHARD_SHARED_MEMORY"] = "0" if setting.transport == "gloo" else "1"
    if setting.apart:
        storages.is_cpu_memory = lambda device: False
    try:
        yield
    finally:
        storages.is_cpu_memory = is_cpu_memory
        if transport is None:
            del os.environ["ZEROSHARD_SHARED_MEMORY"]
        else:
            os.environ["ZEROSHARD_SHARED_MEMORY"] = transport


def run(
    rank: int, work: Workload, setting: Setting, *, precision: str = "fp32", bucket_numel: int = SMALL_BUCKETS
) -> Run:
    """Train the workload under a setting, over its transport; every rank ends with finite losses and the same parameters."""

    def inspect(sharded: Sharded) -> None:
        _expect_transport(transport_of(sharded), setting.transport)
        if setting.parks is not None:
            sharded.offload_states(place=setting.parks)
            sharded.reload_states()

    with as_set(setting):
        done = train(
            rank, work, setting.policy, precision=PRECISIONS[precision], bucket_numel=bucket_numel,
            overlap=setting.overlap, inspect=inspect,
        )  # fmt: skip
    assert torch.isfinite(done.losses).all(), setting
    assert same_on_all_ranks(done.parameters), f"ranks ended with different parameters under {setting}"
    return done


def _expect_transport(collectives: Collectives, transport: str) -> None:
    """Assert that ranks use the transport. If memory cannot be shared, the test would compare gloo with gloo."""
    wanted = PointToPoint if transport == "gloo" else SharedMemory
    parts = [collectives.inside, collectives.across] if isinstance(collectives, TwoLevel) else [collectives]
    found = {type(part) for part in parts} - {Alone}
    assert found <= {wanted}, f"ranks use {found}, and the setting says {transport}"


def expect_equal(
    rank: int,
    work: Workload,
    settings: Mapping[str, Setting],
    precision: str = "fp32",
    bucket_numel: int = SMALL_BUCKETS,
) -> dict[bool, Run]:
    """Train under each setting, and compare with the first run of its kind, to the last bit. Return these first runs.

    With several microbatches there are two kinds (docs/design.md): unsharded gradients (False) are summed over microbatches
    first, sharded ones (True) over ranks first.
    """
    first: dict[bool, Run] = {}
    differ = []
    for name, setting in settings.items():
        kind = work.microbatches > 1 and setting.policy.gradients.sharded
        done = run(rank, work, setting, precision=precision, bucket_numel=bucket_numel)
        if not done.equals(first.setdefault(kind, done)):
            differ.append(name)
    assert not differ, f"other bits than under {next(iter(settings))}: {', '.join(differ)}"
    return first


def close(values: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Assert that values by name are close to the expected values, as after sums in a different order."""
    assert values.keys() == expected.keys()
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")  # noqa: B023


# ---------------------------------------------------------------------- loops that tests write out


def plain_torch(
    make_optimizer: Callable[[Any], Any] | None, make_model: Callable[[], nn.Module] = Stack, seed: int = 0
) -> tuple[Any, Any]:
    """Return the model that `build` shards, and its optimizer."""
    torch.manual_seed(seed)
    model = make_model()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, None if make_optimizer is None else make_optimizer(trained)


def build(
    policy: Policy | int,
    *,
    precision: Precision | torch.dtype | str | None = None,
    make_model: Callable[[], nn.Module] = Stack,
    make_optimizer: Callable[[Any], Any] | None = OPTIMIZERS["fused AdamW"],
    seed: int = 0,
    bucket_numel: int = SMALL_BUCKETS,
    **options: Any,
) -> tuple[Any, Sharded]:
    """Return the same model on every rank, and its `Sharded`, whose optimizer has the parameters that are trained.

    `policy` may be a stage, and `precision` a dtype, or a name of `PRECISIONS`. Without `make_optimizer`, the model is only
    evaluated. The options are those of `zeroshard.shard`.
    """
    model, optimizer = plain_torch(make_optimizer, make_model, seed)
    policy = Policy.stage(policy) if isinstance(policy, int) else policy
    if isinstance(precision, str):
        precision = PRECISIONS[precision]
    if not isinstance(precision, Precision):
        precision = Precision(precision)
    return model, zeroshard.shard(model, optimizer, policy, precision=precision, bucket_numel=bucket_numel, **options)


def update(loss: Tensor, optimizer: Any, clip: Callable[[], object] | None = None) -> Tensor:
    """Take one optimizer step on a loss, and return its value. The graph is not kept. `clip` is called before the step."""
    value = loss.detach()
    loss.backward()
    del loss
    if clip is not None:
        clip()
    optimizer.step()
    optimizer.zero_grad()
    return value


Batches = Callable[[int, int], tuple[Any, ...]]
"""Returns the model's arguments for a rank and the number of a batch."""


def step(
    model: nn.Module, optimizer: Any, rank: int, number: int, make_batch: Batches = tokens,
    clip: Callable[[], object] | None = None,
) -> Tensor:  # fmt: skip
    """Take one optimizer step on this rank's batch with that number. The optimizer may be a `Sharded`'s."""
    own = optimizer.optimizer if isinstance(optimizer, Sharded) else optimizer
    return update(model(*make_batch(rank, number)), own, clip)


def steps(
    model: nn.Module, optimizer: Any, rank: int, numbers: Iterable[int], make_batch: Batches = tokens
) -> list[Tensor]:
    """Take a `step` for each number, and return the losses."""
    return [step(model, optimizer, rank, number, make_batch) for number in numbers]


def microbatch(engine: Any, loss: Tensor) -> Tensor:
    """Call an engine's `backward` and `step` for a loss, and return its value."""
    engine.backward(loss)
    engine.step()
    return loss.detach()


def engine_steps(engine: Any, rank: int, numbers: Iterable[int], make_batch: Batches = tokens) -> list[Tensor]:
    """Run an engine on this rank's batch of each number, a microbatch, and return the losses."""
    return [microbatch(engine, engine(*make_batch(rank, number))) for number in numbers]


class Boom(Exception):
    """An error that a test raises inside a forward or a backward."""


def abort(loss: Tensor, parameter: Tensor) -> None:
    """Run a backward that raises when it computes a parameter's gradient."""

    def fail(_: Tensor) -> None:
        raise Boom

    handle = parameter.register_hook(fail)
    with pytest.raises(Boom):
        loss.backward()
    handle.remove()


def refusal(call: Callable[[], object]) -> str:
    """Return the message of the error of zeroshard that a call raises."""
    with pytest.raises(ZeroshardError) as caught:
        call()
    return str(caught.value)


def build_engine(
    stage: int, *, make_model: Callable[[], nn.Module] = Stack, seed: int = 0, **config: Any
) -> zeroshard.Engine:
    """Return an engine with the same model on every rank, and AdamW. The options are keys of its config."""
    torch.manual_seed(seed)
    base = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }
    return zeroshard.initialize(model=make_model(), config=base | config)[0]


whole = whole_parameters


def every_state(sharded: Sharded) -> dict[str, Tensor]:
    """Return copies of all whole master weights and optimizer states, by name. Every rank must call it."""
    found = {}
    states = sharded.states
    for fqn, _ in sharded.model.named_parameters():
        for state in ("parameters", *states.optimizer_names()):
            value = states.get(fqn, state)
            if value is not None:
                found[f"{fqn} {state}"] = value.clone()
    return found


def everything(sharded: Sharded) -> dict[str, Tensor]:
    """Return `every_state` with buffers, and with the parameters that a forward uses."""
    shown = {f"{fqn} shown": value for fqn, value in whole(sharded.model).items()}
    return every_state(sharded) | shown | buffers_of(sharded.model)


def gpt_batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets for the example's GPT, of shape [2, 16]."""
    drawn = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(100 * number + rank))
    return drawn[:, :-1], drawn[:, 1:]
