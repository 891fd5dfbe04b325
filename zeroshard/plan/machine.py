"""Owns what a dry run knows of a machine: speeds, bandwidths, and costs that no dry run can see. Called by plan and its clock.

The numbers are data, in machines.json. Speeds are what training reaches, not what a data sheet says.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zeroshard.errors import UsageError

TABLE = Path(__file__).with_name("machines.json")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Processor(_Part):
    """What computes, with its memory.

    Attributes:
        flops: by dtype of the operands, a second.
        memory_bandwidth: bytes a second, read and written together.
        launch_seconds: of one operation, besides its work.
        peak_flops: by dtype, what its maker says of dense matrices, where that is known.
    """

    flops: dict[str, float]
    memory_bandwidth: float = Field(gt=0)
    launch_seconds: float = Field(ge=0)
    peak_flops: dict[str, float] = {}

    def flops_of(self, dtype: str) -> float:
        """Of a dtype; of fp32 where nothing is known of it."""
        return self.flops.get(dtype) or self.flops["float32"]


class Link(_Part):
    """Between two places: bytes a second in one direction, and seconds of a transfer of none."""

    bandwidth: float = Field(gt=0)
    latency: float = Field(ge=0)


class Unseen(_Part):
    """Memory of an accelerator that is none of this process's tensors.

    Attributes:
        context: bytes of the driver's context, kernels included.
        collectives: bytes that the library of collectives takes for itself.
        workspaces: bytes of cuBLAS and its kin.
        fragmentation: what the allocator holds and cannot use, as a share of the peak of live bytes.
    """

    context: int = Field(ge=0)
    collectives: int = Field(ge=0)
    workspaces: int = Field(ge=0)
    fragmentation: float = Field(ge=0, lt=1)


class Machine(_Part):
    """A host with its accelerators. See the attributes of its parts.

    Attributes:
        memory: bytes of one accelerator.
        accelerators: in one host.
        host_memory: bytes of one host.
        inside, between: links that one rank has to others of its host, and to other hosts.
        copies: between one accelerator and CPU memory.
        disk_write, disk_read: bytes a second of a host's disk, which its ranks share.
        transport: how ranks talk: "native" (NCCL and its kin) or "gloo".
        computes_on_cpu: there is no accelerator: ranks compute in CPU memory.
        devices: how torch names such accelerators.
    """

    name: str
    memory: int = Field(gt=0)
    accelerators: int = Field(ge=1)
    host_memory: int = Field(gt=0)
    device: Processor
    host: Processor
    inside: Link
    between: Link
    copies: Link
    disk_write: float = Field(gt=0)
    disk_read: float = Field(gt=0)
    unseen: Unseen
    transport: str = "native"
    computes_on_cpu: bool = False
    devices: tuple[str, ...] = ()


@cache
def machines() -> dict[str, Machine]:
    """The known ones, by name."""
    return {name: Machine(name=name, **values) for name, values in json.loads(TABLE.read_text()).items()}


def peak_flops_of(device: str, dtype: str) -> float | None:
    """What an accelerator of this name does at most in a second; None where the table does not say."""
    known = (machine.device.peak_flops.get(dtype) for machine in machines().values() if device in machine.devices)
    return next(known, None)


def machine_of(name: str) -> Machine:
    """A known machine, or one that a file describes, as `zeroshard doctor --profile` writes it.

    Raises:
        UsageError: there is none.
    """
    if name in machines():
        return machines()[name]
    path = Path(name)
    if not path.is_file():
        raise UsageError(
            f"there is no machine {name!r}: known are {', '.join(machines())}; or name a file of doctor --profile."
        )
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
        return Machine(**{"name": path.stem, **values})
    except (ValueError, TypeError, ValidationError) as error:
        raise UsageError(
            f"{path} does not describe a machine: {str(error).splitlines()[0]} Write it with doctor --profile."
        ) from None
