"""Owns one dry run: the real engine takes two steps as one rank of many, on tensors without values. Called by planner and search.

No weights, no accelerator, no other process: torch's FakeTensorMode stands for the tensors, `PretendedRanks` for the others,
`PretendedStorages` for memory and disk, `Ledger` counts. The engine knows of none of it.
"""

from __future__ import annotations

import gc
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from zeroshard.collectives.two_level import Within
from zeroshard.config.load import Config, load_config, read
from zeroshard.engine import Engine
from zeroshard.errors import UsageError, ZeroshardError
from zeroshard.initialize import make_engine
from zeroshard.plan.clock import Clock
from zeroshard.plan.ledger import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    PARAMETERS,
    TEMPORARIES,
    Ledger,
    Moment,
    Peak,
)
from zeroshard.plan.machine import Machine
from zeroshard.plan.microbatches import Microbatches, shortened
from zeroshard.plan.pretended_hosts import Hosts, PretendedTwoLevel
from zeroshard.plan.pretended_ranks import PretendedRanks
from zeroshard.plan.pretended_storages import PretendedStorages
from zeroshard.plan.random_states import random_states
from zeroshard.plan.tracing import not_traced
from zeroshard.plan.whereabouts import whereabouts
from zeroshard.policy import Wire
from zeroshard.shard import Backend
from zeroshard.storage.transfers import CPU

STEPS = 2
"""The first agrees on an order, makes the optimizer's states and fills the pool of buffers; the second is as all that follow."""

_SILENT = (
    "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "tensorboard", "csv_monitor", "json_monitor",
    "wandb", "comet", "comms_logger",
)  # fmt: skip
"""Keys of a config that make a run talk: a dry run says nothing on the way."""


@dataclass(frozen=True)
class Job:
    """What is to be trained, and on what.

    Attributes:
        factory: makes the model; it builds, and reads no weights.
        batch: the arguments of one call of the model for so many samples: a tuple, a mapping of keywords, or one tensor.
        loss: the loss in what the model returns; default: itself, its `loss`, or its first element.
        ranks: data-parallel ranks.
        hosts: over which they are spread evenly.
        optimizer: makes one from parameters, where the config names none; default: AdamW.
        born_sharded: the model is built inside of `sharded_init`.
    """

    factory: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    ranks: int
    hosts: int
    machine: Machine
    loss: Callable[[Any], Tensor] | None = None
    optimizer: Callable[..., Any] | None = None
    born_sharded: bool = False

    @property
    def ranks_per_host(self) -> int:
        """The most on one host."""
        return -(-self.ranks // self.hosts)


@dataclass(frozen=True)
class Figures:
    """What a dry run saw of one rank. Bytes and seconds.

    Attributes:
        peak, host_peak: of live bytes in training, on the device and in CPU memory beside it.
        peak_together: of both at once, where they are one memory.
        peaks: on the device, by phase.
        start: the most on the device before the first step.
        rest: what is live between steps, by category.
        states: what is live when the optimizer steps: model states with all gradients.
        disk: bytes there, at most.
        sent, calls: of one step, by collective.
        seconds: of one step.
        spent: where they went: "computing", "CPU step", and waits for lines.
        numel, trained: parameters of the model, and of these what the optimizer updates.
        timeline: live bytes after each operation of the last step.
    """

    config: Config
    peak: Peak
    host_peak: Peak
    peak_together: int
    peaks: dict[str, int]
    start: Peak
    rest: dict[str, int]
    states: dict[str, int]
    disk: int
    sent: dict[str, int]
    calls: dict[str, int]
    seconds: float
    spent: dict[str, float]
    numel: int
    trained: int
    model_nbytes: int
    timeline: list[Moment] = field(default_factory=list)


def parted(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config as a mapping, and apart from it what makes a run talk."""
    raw = read(config)
    return {key: raw[key] for key in raw if key not in _SILENT}, {key: raw[key] for key in raw if key in _SILENT}


def dry_run(job: Job, config: Any, micro_batch: int | None = None, *, draws: bool = False) -> Figures:
    """Two steps of a config.

    Args:
        micro_batch: samples of one call, where the config names none.
        draws: keep the timeline.

    Raises:
        ConfigError, UsageError: as the real run would.
    """
    clock = Clock(job.machine)
    ledger = Ledger(clock, draws=draws)
    with _pretending(ledger):
        try:
            return _run(job, parted(config)[0], micro_batch, ledger, clock)
        finally:
            gc.collect()  # cycles of the engine's, so that one dry run leaves nothing to the next


@contextmanager
def _pretending(ledger: Ledger) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(ledger)
        yield


def _run(job: Job, raw: dict[str, Any], micro_batch: int | None, ledger: Ledger, clock: Clock) -> Figures:
    ledger.phase, ledger.born = "building the model", PARAMETERS
    model = _build(job)
    model_nbytes = sum(parameter.nbytes for parameter in model.parameters())
    auto = {} if micro_batch is None else {"train_micro_batch_size_per_gpu": micro_batch}
    config = load_config(raw, job.ranks, model, auto)
    if not config.names_batch_size:
        raise UsageError(
            "neither the config nor the caller names a batch size: say how many samples one call of the model has."
        )
    ledger.name(model.buffers(), INPUTS)
    ledger.phase, ledger.born = "start", TEMPORARIES
    members = _Members(job, config, ledger, clock)
    backend = Backend(members.collectives, members.storages, lambda _: None, FakeTensor)
    optimizer = job.optimizer if job.optimizer is not None or config.schema.optimizer is not None else _adamw
    run_config = load_config(shortened(raw, config), job.ranks, model, auto)
    engine = make_engine(run_config, model, CPU, optimizer, backend=backend)
    left_out = config.batch.accumulation - run_config.batch.accumulation
    _name_states(engine, ledger)
    start = ledger.peak
    ledger.forget_peaks()
    states = dict[str, int]()
    engine.optimizer.inner.register_step_pre_hook(lambda *_: states.update(ledger.parts()))
    stateful = engine.checkpointing.modules if engine.checkpointing is not None and job.machine.computes_on_cpu else []
    with not_traced(), whereabouts(model, ledger), random_states(stateful):  # now that the model's library is imported
        for _ in range(STEPS):
            microbatches = Microbatches(clock, members.made, left_out)
            ledger.timeline.clear()
            with _told_apart():
                _step(job, engine, ledger, microbatches)
            _name_states(engine, ledger)
            rest = ledger.parts()
    storages, spent = engine._sharded._context.storages, microbatches.all_told()
    return Figures(
        config=config,
        peak=ledger.peak,
        host_peak=ledger.host_peak,
        peak_together=ledger.peak_together,
        peaks=dict(ledger.peak_by_phase),
        start=start,
        rest=rest,
        states=states,
        disk=storages.nbytes()["disk"],
        sent=dict(spent.sent),
        calls=dict(spent.calls),
        seconds=spent.seconds,
        spent=dict(spent.where),
        numel=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        model_nbytes=model_nbytes,
        timeline=list(ledger.timeline),
    )


class _Members:
    """Makes the pretended members when `shard` asks for them."""

    made: PretendedRanks | PretendedTwoLevel

    def __init__(self, job: Job, config: Config, ledger: Ledger, clock: Clock) -> None:
        self._job, self._config, self._ledger, self._clock = job, config, ledger, clock

    def collectives(
        self, _group: Any, _device: torch.device, predivide_factor: float, what: str, within: Within | None, wire: Wire
    ) -> PretendedRanks | PretendedTwoLevel:
        """In the place of `create_collectives`."""
        if wire.is_lossy:
            raise UsageError(
                "no plan is made of wires that round what they bring (zero_quantized_weights, zero_quantized_gradients): plan "
                "without them. Memory at rest is the same."
            )
        job = self._job
        hosts = Hosts(
            job.ranks, job.hosts, job.machine, self._ledger, self._clock, self._config.policy.optimizer.sharded
        )
        self.made = hosts.collectives(predivide_factor, within)
        return self.made

    @property
    def storages(self) -> Callable[..., PretendedStorages]:
        """In the place of `Storages`."""
        return partial(
            PretendedStorages, ledger=self._ledger, clock=self._clock, machine=self._job.machine,
            sharers=self._job.ranks_per_host,
        )  # fmt: skip


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True)


def _build(job: Job) -> nn.Module:
    try:
        model = _born(job)
    except ZeroshardError:
        raise
    except Exception as error:
        raise UsageError(
            f"the model could not be built without values: {type(error).__name__}: {_first_line(error)} A plan builds the model as "
            "it is born, from its configuration: read no weights there (from_config in the place of from_pretrained)."
        ) from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"the factory made {type(model).__name__}, not a torch.nn.Module.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "the factory gave a model on the meta device: leave the device out, a plan makes tensors without values itself."
        )
    if any(not isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        raise UsageError(
            "the factory gave a model that has values already: make it inside of the factory, so that the plan needs no memory."
        )
    model.train()
    return model


_SWAP = "Couldn't swap"
"""What torch says where a module of tensors without values is moved while it is built, as peft's adapters are."""


def _born(job: Job) -> nn.Module:
    try:
        return job.factory()
    except RuntimeError as error:
        if _SWAP not in str(error):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold what was built so far
    gc.collect()
    return _born_on_meta(job)


def _born_on_meta(job: Job) -> nn.Module:
    """On the meta device a model may be moved. After that it gets tensors without values of CPU memory."""
    with _disable_current_modes(), torch.device("meta"):
        model = job.factory()
    made: dict[Tensor, Tensor] = {}
    for module in model.modules() if isinstance(model, nn.Module) else ():
        found: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in found:
            for name, value in held.items():
                if value is not None and value.device.type == "meta":
                    held[name] = made[value] if value in made else made.setdefault(value, _in_cpu_memory(value))
    return model


def _in_cpu_memory(value: Tensor) -> Tensor:
    empty = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=CPU)
    return nn.Parameter(empty, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else empty


@contextmanager
def _told_apart() -> Iterator[None]:
    """What torch cannot run without values is a sentence; what the engine refuses is said as ever."""
    try:
        yield
    except ZeroshardError:
        raise
    except Exception as error:
        raise UsageError(
            f"the model could not be run without values: {type(error).__name__}: {_first_line(error)} Shapes that depend on "
            "values, and operations that torch does not know without them, cannot be planned."
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") + "." if lines else ""


def _step(job: Job, engine: Engine, ledger: Ledger, microbatches: Microbatches) -> None:
    for _ in range(engine.gradient_accumulation_steps()):
        ledger.phase, ledger.born = "forward", INPUTS
        batch = tree_map_only(Tensor, _without_values, job.batch(engine.train_micro_batch_size_per_gpu()))
        ledger.born = ACTIVATIONS
        loss = _loss(job, _call(engine, batch))
        ledger.phase, ledger.born = "backward", TEMPORARIES
        engine.backward(loss)
        ledger.phase, ledger.module = "step", ""
        engine.step()
        microbatches.is_over()
        del loss, batch
    ledger.phase, ledger.born = "between steps", TEMPORARIES


def _without_values(tensor: Tensor) -> Tensor:
    """A tensor of the user's own may have been made before."""
    return (
        tensor
        if isinstance(tensor, FakeTensor)
        else torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    )


def _call(engine: Engine, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return engine(**batch)
    return engine(*batch) if isinstance(batch, tuple | list) else engine(batch)


def _loss(job: Job, output: Any) -> Tensor:
    found = job.loss(output) if job.loss is not None else getattr(output, "loss", output)
    if isinstance(found, tuple | list) and found:
        found = found[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise UsageError(
            f"the model returned {type(output).__name__}, in which no loss is known: return a scalar, or something with `loss`, or "
            "say loss=function of what it returns."
        )
    return found


def _name_states(engine: Engine, ledger: Ledger) -> None:
    """What rests is known by now; what an optimizer keeps, after its first step."""
    for unit in engine._sharded._schedule.units:
        ledger.name([unit.flat.tensor], PARAMETERS)
        for bucket in unit.buckets:
            ledger.name(bucket.tensors("master"), OPTIMIZER)
            ledger.name(bucket.tensors("parameters"), PARAMETERS)
        for gradients in unit.gradients:
            ledger.name(gradients.tensors(), GRADIENTS)
    kept = [value for state in engine.optimizer.state.values() for value in state.values()]
    ledger.name([value for value in kept if isinstance(value, Tensor)], OPTIMIZER)
