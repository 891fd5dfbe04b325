"""Owns `Plan`: what a dry run says of a config, against the memory that there is. Made by planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from zeroshard.plan.dry_run import Figures, Job
from zeroshard.plan.machine import Machine

BOUNDS = {
    "computing": "computing", "CPU step": "the CPU's step", "link": "the link between ranks",
    "network": "the network between hosts",
    "copies": "copies to and from CPU memory", "disk": "the disk",
}  # fmt: skip
"""What a step's time goes to, and how that is called."""


@dataclass(frozen=True)
class Plan:
    """What one rank of a training takes. Bytes and seconds; all ranks take the same.

    Attributes:
        job: what is trained, and on what.
        figures: what the dry run saw.
        limit: bytes of an accelerator's memory.
        host_limit: bytes of a host's CPU memory.
        told: keys of the config that make a run talk.
    """

    job: Job
    figures: Figures
    limit: int
    host_limit: int
    told: Mapping[str, Any] = field(default_factory=dict)

    @property
    def machine(self) -> Machine:
        """What the times are for."""
        return self.job.machine

    @property
    def peak_nbytes(self) -> int:
        """The most that lives on an accelerator at once, in training."""
        return self.figures.peak.nbytes

    @property
    def parts(self) -> dict[str, int]:
        """Of that, by category."""
        return dict(self.figures.peak.parts)

    @cached_property
    def unseen(self) -> dict[str, int]:
        """What comes on top of live bytes, and no dry run sees: the constants of the machine."""
        unseen = self.machine.unseen
        return {
            "driver's context": unseen.context,
            "collectives' library": unseen.collectives if self.job.ranks > 1 else 0,
            "workspaces": unseen.workspaces,
            f"fragmentation ({unseen.fragmentation:.0%} of the peak)": round(unseen.fragmentation * self.most_nbytes),
        }

    @property
    def most_nbytes(self) -> int:
        """Live bytes at the most; start-up included, unless the model is born sharded."""
        return self.peak_nbytes if self.job.born_sharded else max(self.peak_nbytes, self.figures.start.nbytes)

    @property
    def needed_nbytes(self) -> int:
        """Of an accelerator's memory, all told."""
        return self.most_nbytes + sum(self.unseen.values())

    @property
    def host_nbytes(self) -> int:
        """Of CPU memory of a host: what rests there; or the models, as each rank builds its own before it moves."""
        built = 0 if self.machine.computes_on_cpu else self.figures.model_nbytes
        built = -(-built // self.job.ranks) if self.job.born_sharded else built
        return max(self.figures.host_peak.nbytes, built) * self.job.ranks_per_host

    @property
    def disk_nbytes(self) -> int:
        """On a host's disk."""
        return self.figures.disk * self.job.ranks_per_host

    @property
    def overshoot(self) -> int:
        """Bytes that are missing on an accelerator; negative: bytes that are left."""
        return self.needed_nbytes - self.limit

    @property
    def fits(self) -> bool:
        """Whether all of it is there."""
        return self.overshoot <= 0 and self.host_nbytes <= self.host_limit

    @property
    def sent_nbytes(self) -> int:
        """Handed to other ranks in a step."""
        return sum(self.figures.sent.values())

    @property
    def collectives(self) -> int:
        """Called in a step."""
        return sum(self.figures.calls.values())

    @property
    def seconds(self) -> float:
        """Of one step, on this machine."""
        return self.figures.seconds

    @property
    def bound(self) -> str:
        """What a step's time goes to first."""
        spent = self.figures.spent
        return max(spent, key=lambda name: spent[name], default="computing")

    @property
    def samples_per_second(self) -> float:
        """Of all ranks."""
        return self.figures.config.batch.train / self.seconds

    def complete_config(self) -> dict[str, Any]:
        """The config with values in the place of "auto", and all three batch sizes: for `initialize`, and for DeepSpeed."""
        batch = self.figures.config.batch
        sizes = {
            "train_batch_size": batch.train,
            "train_micro_batch_size_per_gpu": batch.micro,
            "gradient_accumulation_steps": batch.accumulation,
        }
        return {**self.figures.config.document, **sizes, **self.told}

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        figures, batch = self.figures, self.figures.config.batch
        return {
            "ranks": self.job.ranks,
            "hosts": self.job.hosts,
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
                "by_phase": figures.peaks,
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


def limits(machine: Machine, memory: int | None, host_memory: int | None) -> Mapping[str, int]:
    """What there is, as the caller says, or the machine."""
    return {"limit": memory or machine.memory, "host_limit": host_memory or machine.host_memory}
