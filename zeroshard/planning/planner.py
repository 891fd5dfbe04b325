"""Owns `plan`: whether a config fits, where its memory goes, and how fast it is, before a job is queued."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.config.load import tensor_parallel_ranks
from zeroshard.errors import UsageError
from zeroshard.planning.dry_run import Figures, Job, dry_run
from zeroshard.planning.long_sequences import LongSequences
from zeroshard.planning.machine import Machine, machine_of
from zeroshard.torch_private import tree_leaves

BOUNDS = {
    "computing": "computing", "CPU step": "the CPU's step", "link": "the link between ranks",
    "network": "the network between hosts",
    "copies": "copies to and from CPU memory", "disk": "the disk",
}  # fmt: skip
"""The causes of a step's time, with their printed names."""


@dataclass(frozen=True)
class Plan:
    """The memory of an accelerator, host and disk, and the time of a step, in bytes and seconds.

    The plan assumes that all ranks are alike.

    Attributes:
        job: the training run and its machine.
        figures: the results of the dry run.
    """

    job: Job
    figures: Figures

    @property
    def machine(self) -> Machine:
        """The machine for which the times are estimated."""
        return self.job.machine

    @property
    def limit(self) -> int:
        """The bytes of an accelerator's memory."""
        return self.machine.memory

    @property
    def host_limit(self) -> int:
        """The bytes of a host's CPU memory."""
        return self.machine.host_memory

    @property
    def peak_nbytes(self) -> int:
        """The peak of live bytes on an accelerator, in training."""
        return self.figures.peak.nbytes

    @property
    def reserved_nbytes(self) -> int:
        """The bytes that an accelerator's allocator reserves from the driver, start-up included; 0 on a CPU.

        If memory runs out, the allocator returns unused segments, so less memory may suffice, down to `most_nbytes`.
        """
        return self.figures.reserved

    @property
    def parts(self) -> dict[str, int]:
        """The bytes at the peak, by category."""
        return dict(self.figures.peak.parts)

    @cached_property
    def unseen(self) -> dict[str, int]:
        """The bytes that an accelerator needs on top of live bytes, by cause. A dry run does not allocate them."""
        unseen = self.machine.unseen
        return {
            "driver's context": unseen.context,
            "collectives' library": unseen.collectives if self.job.ranks > 1 else 0,
            "workspaces": unseen.workspaces,
            f"fragmentation ({unseen.fragmentation:.0%} of the peak)": round(unseen.fragmentation * self.most_nbytes),
        }

    @property
    def most_nbytes(self) -> int:
        """The peak of live bytes, start-up included unless the model is built inside `sharded_init`."""
        if self.job.born_sharded:
            return self.peak_nbytes
        return max(self.peak_nbytes, self.figures.start.nbytes)

    @property
    def needed_nbytes(self) -> int:
        """The total bytes of an accelerator's memory that the job needs."""
        return self.most_nbytes + sum(self.unseen.values())

    @property
    def host_nbytes(self) -> int:
        """The bytes of CPU memory that a host needs: the peak of its ranks in training, or their models at start-up if larger.

        On a machine that computes on CPUs, this is all memory of its ranks.
        """
        built = self.figures.model_nbytes
        if self.machine.computes_on_cpu:
            start = 0 if self.job.born_sharded else self.figures.start.nbytes
            return (max(self.figures.peak_together, start) + sum(self.unseen.values())) * self.job.ranks_per_host
        if self.job.born_sharded:
            built = -(-built // self.job.ranks)
        return max(self.figures.host_peak.nbytes, built) * self.job.ranks_per_host

    @property
    def disk_nbytes(self) -> int:
        """The bytes on a host's disk."""
        return self.figures.disk * self.job.ranks_per_host

    @property
    def overshoot(self) -> int:
        """The bytes that an accelerator lacks; if negative, the bytes that remain free."""
        return self.needed_nbytes - self.limit

    @property
    def fits(self) -> bool:
        """Whether the memory suffices, on accelerators and hosts."""
        return self.overshoot <= 0 and self.host_nbytes <= self.host_limit

    @property
    def sent_nbytes(self) -> int:
        """The bytes that a rank sends in a step."""
        return sum(self.figures.sent.values())

    @property
    def collectives(self) -> int:
        """The number of collectives that a rank calls in a step."""
        return sum(self.figures.calls.values())

    @property
    def seconds(self) -> float:
        """The seconds of one step on `machine`."""
        return self.figures.seconds

    @property
    def bound(self) -> str:
        """The largest cause of a step's time, a key of `BOUNDS`."""
        spent = self.figures.spent
        return max(spent, key=lambda name: spent[name], default="computing")

    @property
    def samples_per_second(self) -> float:
        """The samples per second of all ranks. Ranks that hold a sequence together share its sample."""
        return self.figures.config.batch.train / self.job.sequences.ranks / self.seconds

    def complete_config(self) -> dict[str, Any]:
        """Return the config with values instead of "auto", and all three batch sizes, for `initialize` or DeepSpeed."""
        batch = self.figures.config.batch
        sizes = {
            "train_batch_size": batch.train,
            "train_micro_batch_size_per_gpu": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
        }
        document = dict(self.figures.config.document)
        if document.get("steps_per_print") == math.inf:  # accelerate writes it, but JSON lacks it
            document["steps_per_print"] = 10**9
        return document | sizes

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as a dict for JSON, in bytes and seconds, without its timeline."""
        figures = self.figures
        batch = figures.config.batch
        return {
            "ranks": self.job.ranks,
            "hosts": self.job.hosts,
            "sequence_parallel": self.job.sequences.ranks,
            "tile_tokens": self.job.sequences.tile_tokens,
            "tensor_parallel": self.job.tensor_parallel,
            "machine": self.machine.name,
            "stage": figures.config.stage,
            "parameters": figures.numel,
            "trained": figures.trained,
            "batch": {"micro": batch.micro, "accumulation": batch.accumulation, "train": batch.train},
            "fits": self.fits,
            "limit": self.limit,
            "needed": self.needed_nbytes,
            "unseen": self.unseen,
            "peak": {
                "bytes": self.peak_nbytes, "phase": figures.peak.phase, "module": figures.peak.module, "parts": self.parts,
                "by_phase": figures.peaks, "reserved": self.reserved_nbytes,
            },
            "start": {"bytes": figures.start.nbytes, "phase": figures.start.phase, "counts": not self.job.born_sharded},
            "rest": figures.rest,
            "host": {"bytes": self.host_nbytes, "limit": self.host_limit, "rank": figures.host_peak.parts},
            "disk": self.disk_nbytes,
            "step": {
                "seconds": self.seconds, "bound": self.bound, "spent": figures.spent, "sent": figures.sent,
                "collectives": figures.calls, "samples_per_second": self.samples_per_second,
            },
            "config": self.complete_config(),
        }  # fmt: skip


def plan(
    model_factory: Callable[[], nn.Module], config: str | os.PathLike[str] | Mapping[str, Any], *, world_size: int,
    batch: Callable[[int], Any] | Any, machine: str | Machine = "h100", memory: int | None = None,
    host_memory: int | None = None, hosts: int | None = None, loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None, micro_batch: int | None = None,
    sharded_init: bool = False, timeline: bool = False, sequence_parallel: int = 1, tile_tokens: int = 0,
    tensor_parallel: int = 1,
) -> Plan:  # fmt: skip
    """Plan a training run: run two steps of the engine as one rank of many, on tensors without values.

    It does not need weights, an accelerator or other processes.

    Args:
        model_factory: a function that builds the model without reading weights. Its tensors do not take memory.
        config: a config, as passed to `initialize`.
        world_size: the number of ranks, each with one accelerator. All are data-parallel unless `sequence_parallel` or
            `tensor_parallel` is above 1.
        batch: the arguments of one call of the model (a tuple, a mapping of keywords, or a tensor), or a function that
            returns them for n samples. Only their shapes and dtypes matter.
        machine: the name of a known machine (h100, a100-80gb, ...), a file written by `zeroshard doctor --profile`, or
            a `Machine`.
        memory, host_memory: the bytes of an accelerator's and of a host's memory; default: the machine's values.
        hosts: the number of hosts over which the ranks are spread; default: as few as the machine's accelerators allow.
        loss: a function that returns the loss from the model's output; default: the output itself, its `loss`, or its
            first element.
        optimizer: a function that creates an optimizer from parameters; default: the config's optimizer, or AdamW if
            the config does not name one.
        micro_batch: the samples of one call, if the config does not set a batch size, or leaves it "auto"; default: the
            samples in `batch`, unless `batch` is a function.
        sharded_init: whether the model will be built inside `sharded_init`. If not, the memory of start-up counts too.
        timeline: whether to keep the live bytes after each operation, in `figures.timeline`.
        sequence_parallel: the number of ranks that hold one sequence together (`zeroshard.sequence.Sequences`). `batch`
            supplies whole sequences.
        tile_tokens: the number of tokens in a tile of the loss, each MLP and each norm; 0 means no tiles. This and
            `sequence_parallel` are for causal transformers models, whose batch has `input_ids` and `labels`.
        tensor_parallel: the number of ranks that divide one model, like the config's `tensor_parallel.autotp_size`.
            Divided modules have their local size and send sums of activations. The plan does not count the separate
            buckets of parameters that stay whole, or the exchange with which these ranks compute each step's gradient
            norm.

    Raises:
        ConfigError, UsageError: a real run would refuse the config or the model; the model cannot be built or run
            without values; no batch size is known; an argument is invalid (see `job_of`); or a plan does not cover the
            config (tensor parallelism with sequence parallelism or `sharded_init`).
    """
    make_batch = batch
    shapes: list[torch.Size] = []
    if not callable(batch):
        make_batch = lambda _: batch  # noqa: E731
        shapes = [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
        if shapes:
            micro_batch = micro_batch or shapes[0][0]
    job = job_of(
        model_factory, make_batch, world_size, machine, hosts, loss, optimizer, sharded_init=sharded_init,
        sequences=LongSequences(sequence_parallel, tile_tokens), tensor_parallel=tensor_parallel, config=config,
        memory=memory, host_memory=host_memory,
    )  # fmt: skip
    auto = {}
    if micro_batch is not None:
        auto["train_micro_batch_size_per_gpu"] = micro_batch
    figures = dry_run(job, config, auto, draws=timeline)
    planned = figures.config.batch.micro
    if shapes and not any(planned in shape for shape in shapes):
        raise UsageError(
            f"no dimension of the batch has the microbatch size of the config, {planned}. Pass a function that returns a "
            "batch of n samples, or a batch of the config's size."
        )
    return Plan(job, figures)


def job_of(
    model_factory: Callable[[], nn.Module], batch: Callable[[int], Any], world_size: int, machine: str | Machine,
    hosts: int | None = None, loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None, *, sharded_init: bool = False,
    sequences: LongSequences | None = None, tensor_parallel: int = 1,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None, memory: int | None = None, host_memory: int | None = None,
) -> Job:  # fmt: skip
    """Create the job of a plan; see `plan` for the arguments. Only the number of tensor-parallel ranks is read from the config.

    Raises:
        ConfigError, UsageError: the config cannot be read; the machine is unknown; `world_size` does not fit `hosts`,
            `sequences` or `tensor_parallel`; or `tensor_parallel` contradicts the config or another argument.
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
    sequences = sequences or LongSequences()
    sequences.refuse(world_size)
    named = tensor_parallel_ranks(config or {})
    if tensor_parallel > 1 and named not in (1, tensor_parallel):
        raise UsageError(
            f"tensor_parallel is {tensor_parallel}, and the config's tensor_parallel.autotp_size {named}: leave one out."
        )
    ranks = max(tensor_parallel, named)
    if ranks > 1 and (world_size % spread or (world_size // spread) % ranks):
        raise UsageError(
            f"{world_size} ranks on {spread} hosts cannot hold models on {ranks} tensor-parallel ranks each. Choose a number "
            "that divides the ranks of each host."
        )
    if ranks > 1 and (sequences.ranks > 1 or sharded_init):
        raise UsageError(
            "a plan cannot combine tensor parallelism with sequence parallelism or sharded_init. Leave one of them out."
        )
    return Job(model_factory, batch, world_size, spread, known, loss, optimizer, sharded_init, sequences, ranks)
