"""Owns `plan`: whether a config and the presets of ZeRO fit, and where their memory goes, before a job is queued."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.engine.config.load import expert_parallel_ranks, read
from zeroshard.errors import UsageError, ZeroshardError, counted
from zeroshard.model.expert_parallel import UnevenExperts
from zeroshard.policy import Place
from zeroshard.tools.planning.dry_run import Figures, Job, dry_run
from zeroshard.tools.planning.fakes import Repeats
from zeroshard.tools.planning.machine import Machine, machine_of
from zeroshard.tools.planning.table import MICRO, Plan, Row
from zeroshard.torch_private import tree_leaves

BASE: dict[str, Any] = {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
"""The settings of all presets if the caller names no config."""


# ---------------------------------------------------------------------- presets


@dataclass(frozen=True)
class Preset:
    """A stage, the places of states, and the number of ranks within which parameters are sharded."""

    stage: int
    optimizer: Place = Place.ACCELERATOR
    parameters: Place = Place.ACCELERATOR
    within: int | None = None

    def __str__(self) -> str:
        where = {Place.CPU: "on CPU", Place.DISK: "on disk"}
        text = f"stage {self.stage}" + " within hosts" * (self.within is not None)
        if self.optimizer is self.parameters and self.optimizer in where:
            return f"{text}, both {where[self.optimizer]}"
        for what, place in (("optimizer", self.optimizer), ("parameters", self.parameters)):
            if place in where:
                text += f", {what} {where[place]}"
        return text

    def config(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config with this preset in place of its stage, offloads and hosts."""
        made = copy.deepcopy(dict(base))
        zero = made["zero_optimization"] = {**(made.get("zero_optimization") or {}), "stage": self.stage}
        for key in ("zero_hpz_partition_size", "mics_shard_size"):
            zero.pop(key, None)
        for key, place in (("offload_optimizer", self.optimizer), ("offload_param", self.parameters)):
            device = {Place.CPU: "cpu", Place.DISK: "nvme"}.get(place, "none")
            given = zero.pop(key, None) or {}
            if device != "none":
                zero[key] = given if given.get("device") == device else {"device": device}
                if device == "nvme":
                    zero[key].setdefault("nvme_path", "/local_nvme")  # a dry run writes nothing
        if self.within is not None:
            zero["zero_hpz_partition_size"] = self.within
        return made


def presets(job: Job) -> list[Preset]:
    """Return the presets of a job: without offloads, then with states in CPU memory, then on disk."""
    made = [Preset(stage) for stage in range(4)]
    per_host, rest = divmod(job.ranks, job.hosts)
    if job.hosts > 1 and not rest and per_host > 1:
        made += [Preset(stage, within=per_host) for stage in (2, 3)]
    if not job.machine.computes_on_cpu:  # otherwise an offload would stay in the same memory
        made += [Preset(stage, optimizer=Place.CPU) for stage in (1, 2, 3)]
        made.append(Preset(3, parameters=Place.CPU))
        made += [Preset(stage, Place.CPU, Place.CPU) for stage in (2, 3)]
    return [*made, Preset(3, Place.DISK, Place.DISK)]


def _preset_of(figures: Figures) -> Preset:
    """Return the preset that a planned config is, apart from its other keys."""
    policy = figures.config.policy
    within = policy.within if isinstance(policy.within, int) else None
    return Preset(figures.config.stage, policy.optimizer.place, policy.parameters.place, within)


# ---------------------------------------------------------------------- the plan


_REMOVED = {
    "timeline": "a plan no longer draws a step. Plan.rows[0].figures.peaks has the peak of each phase",
    "sequence_parallel": "a plan does not count sequence parallelism. Plan one rank's slice: a batch of shorter sequences",
    "tile_tokens": "a plan does not count tiles. Call zeroshard.sequence.tile in the factory",
    "tensor_parallel": "a plan does not count tensor parallelism. Plan as many data-parallel ranks, which need more memory",
}
"""Arguments of earlier releases, with the remedy."""


def plan(
    model_factory: Callable[[], nn.Module], config: str | os.PathLike[str] | Mapping[str, Any] | None = None, *,
    world_size: int, batch: Callable[[int], Any] | Any, machine: str | Machine = "h100", memory: int | None = None,
    host_memory: int | None = None, hosts: int | None = None, loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None, micro_batch: int | None = None,
    sharded_init: bool = False, presets: bool = True, expert_parallel: int | None = None, **removed: Any,
) -> Plan:  # fmt: skip
    """Plan a training run: run two steps of the engine as one rank of many, on tensors without values, for each preset.

    It does not need weights, an accelerator or other processes. The presets are the stages 0 to 3, with and without
    optimizer states and parameters offloaded, and two-level sharding if there are several hosts.

    Args:
        model_factory: a function that builds the model without reading weights. Its tensors do not take memory.
        config: a config, as passed to `initialize`. It is the first row, and presets share its other keys. Default: only
            presets, in bf16 with AdamW.
        world_size: the number of ranks, each with one accelerator. All are data-parallel.
        batch: the arguments of one call of the model (a tuple, a mapping of keywords, or a tensor), or a function that
            returns them for n samples. Only their shapes and dtypes matter.
        machine: the name of a known machine (h100, a100-80gb, ...), or a `Machine`.
        memory, host_memory: the bytes of an accelerator's and of a host's memory; default: the machine's values.
        hosts: the number of hosts over which the ranks are spread; default: as few as the machine's accelerators allow.
        loss: a function that returns the loss from the model's output; default: the output itself, its `loss`, or its
            first element.
        optimizer: a function that creates an optimizer from parameters; default: the config's optimizer, or AdamW if
            the config does not name one.
        micro_batch: the samples of one call, if the config does not set a batch size, or leaves it "auto"; default: the
            samples in `batch`, unless `batch` is a function.
        sharded_init: whether the model will be built inside `sharded_init`. If not, the memory of start-up counts too.
        presets: whether to plan the presets. If not, the plan has only the config's row, and takes a tenth of the time.
        expert_parallel: the number of ranks over which the experts of a layer are divided, as in the config's
            `expert_parallel.autoep_size`. The plan then also has a row for each other number that divides the ranks and the
            experts: with the config, or at stage 3. Default: the config's.

    Raises:
        ConfigError, UsageError: a real run would refuse the config or the model; the model cannot be built or run
            without values; no batch size is known; an argument is invalid (see `job_of`); or a plan does not cover the
            config (tensor parallelism).
    """
    for name in removed:
        if name in _REMOVED:
            raise UsageError(f"plan() has no argument {name}: {_REMOVED[name]}.")
        raise TypeError(f"plan() got an unexpected keyword argument {name!r}")
    make_batch = batch
    shapes: list[torch.Size] = []
    if not callable(batch):
        make_batch = lambda _: batch  # noqa: E731
        shapes = [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
        if shapes:
            micro_batch = micro_batch or shapes[0][0]
    job = job_of(
        model_factory, make_batch, world_size, machine, hosts, loss, optimizer, sharded_init=sharded_init, memory=memory,
        host_memory=host_memory,
    )  # fmt: skip
    auto = {}
    if micro_batch is not None:
        auto[MICRO] = micro_batch
    made = plan_of(job, config, auto, presets=presets, ranks_of_experts=expert_parallel)
    planned = made.rows[0].figures.config.batch.micro
    if shapes and not any(planned in shape for shape in shapes):
        raise UsageError(
            f"no dimension of the batch has the microbatch size of the config, {planned}. Pass a function that returns a "
            "batch of n samples, or a batch of the config's size."
        )
    return made


def plan_of(
    job: Job, config: str | os.PathLike[str] | Mapping[str, Any] | None, auto: Mapping[str, Any], *, presets: bool = True,
    name: str = "the config", told: Callable[[int, int], None] = lambda _done, _of: None, ranks_of_experts: int | None = None,
) -> Plan:  # fmt: skip
    """Plan a job: a config, if there is one, and the presets.

    Args:
        auto: the values of the config's "auto" keys.
        name: the name of the config's row.
        told: called with the number of dry runs that have ended, and of all.
        ranks_of_experts: see `plan`.
    """
    if config is None and not presets:
        raise UsageError("there is nothing to plan: name a config, or leave presets on.")
    rows = []
    refused: dict[str, str] = {}
    waiting = _presets(job) if presets else []
    base: Mapping[str, Any] = BASE
    if ranks_of_experts is not None:
        base = _with_experts(base, ranks_of_experts)
        config = None if config is None else _with_experts(read(config), ranks_of_experts)
    repeats = Repeats()
    size = expert_parallel_ranks(base if config is None else config)
    others = [n for n in range(1, job.ranks + 1) if job.ranks % n == 0 and n != size] if size > 1 else []
    count = len(waiting) + len(others) + (config is not None)
    sent: dict[int, int] = {}
    with _frozen():
        if config is not None:
            told(0, count)
            figures = dry_run(job, config, auto, repeats)
            rows.append(Row(f"{name} (stage {figures.config.stage})", job, figures))
            base = read(config)
            if _preset_of(figures) in waiting:
                waiting.remove(_preset_of(figures))
        for preset in waiting:
            told(len(rows) + len(refused), count)
            try:
                rows.append(Row(str(preset), job, dry_run(job, preset.config(base), auto, repeats)))
            except ZeroshardError as error:
                refused[str(preset)] = str(error)
                if not rows and len(refused) == len(waiting):
                    raise
        compared = rows[0] if config is not None else next((row for row in rows if row.name == str(Preset(3))), None)
        if others and compared is not None:
            document = base if config is not None else Preset(3).config(base)
            sent[size] = compared.sent_nbytes
            for number in others:
                told(len(rows) + len(refused), count)
                title = f"{compared.name}, experts over {counted(number, 'rank')}"
                try:
                    row = Row(title, job, dry_run(job, _with_experts(document, number), auto, repeats))
                except UnevenExperts:
                    continue
                except ZeroshardError as error:
                    refused[title] = str(error)
                else:
                    rows.append(row)
                    sent[number] = row.sent_nbytes
    return Plan(job, tuple(rows), config is not None, refused, sent_by_ranks_of_experts=sent)


def _with_experts(config: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return a config that divides experts over `size` ranks."""
    made = {key: value for key, value in config.items() if key != "expert_parallel"}
    return made | {"expert_parallel": {"enabled": True, "autoep_size": size}} if size > 1 else made


_presets = presets
"""Inside functions with an argument of that name."""


@contextmanager
def _frozen() -> Iterator[None]:
    """Keep what exists out of garbage collections, since each dry run ends with one, which would go through all of torch.

    Inside the block, other collections leave out old objects. Those of a dry run are alive, and torch and Python have so many
    more in a real run that such a collection is rare there, too.
    """
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


_NEVER = 1 << 30
"""The number of collections of young objects between two of all objects."""


def job_of(
    model_factory: Callable[[], nn.Module], batch: Callable[[int], Any], world_size: int, machine: str | Machine,
    hosts: int | None = None, loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None, *, sharded_init: bool = False, memory: int | None = None,
    host_memory: int | None = None,
) -> Job:  # fmt: skip
    """Create the job of a plan; see `plan` for the arguments.

    Raises:
        UsageError: the machine is unknown, or `world_size` does not fit `hosts`.
    """
    known = machine if isinstance(machine, Machine) else machine_of(machine)
    # The machine has the caller's memory, since the engine uses free memory.
    known = known.model_copy(update={"memory": memory or known.memory, "host_memory": host_memory or known.host_memory})
    if world_size < 1:
        raise UsageError(f"world_size is at least 1, not {world_size}. Pass the number of ranks.")
    if hosts is not None and not 1 <= hosts <= world_size:
        raise UsageError(
            f"{world_size} ranks cannot be spread over {hosts} hosts: each host has at least one rank. Choose fewer "
            "hosts."
        )
    spread = hosts or -(-world_size // known.accelerators)
    return Job(model_factory, batch, world_size, spread, known, loss, optimizer, sharded_init)
