"""Owns the known machines of plans: their memory, and what takes it besides tensors. The numbers are in machines.json."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from zeroshard.errors import UsageError

TABLE = Path(__file__).with_name("machines.json")


class _MachinePart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Unseen(_MachinePart):
    """The memory of an accelerator that its tensors do not take.

    Attributes:
        context: bytes of the driver's context, kernels included.
        collectives: bytes that the communication library allocates.
        workspaces: bytes of cuBLAS and similar libraries.
        fragmentation: memory that the allocator holds and cannot use, as a share of the peak of live bytes.
    """

    context: int = Field(ge=0)
    collectives: int = Field(ge=0)
    workspaces: int = Field(ge=0)
    fragmentation: float = Field(ge=0, lt=1)


class Machine(_MachinePart):
    """A host with its accelerators.

    Attributes:
        memory: bytes of one accelerator.
        accelerators: the number of accelerators in one host.
        host_memory: bytes of one host.
        unseen: an accelerator's memory that a dry run does not allocate.
        transport: the transport between ranks: "native" (NCCL and similar) or "gloo".
        computes_on_cpu: whether ranks compute in CPU memory, without an accelerator.
        devices: the names that torch reports for accelerators of this kind.
    """

    name: str
    memory: int = Field(gt=0)
    accelerators: int = Field(ge=1)
    host_memory: int = Field(gt=0)
    unseen: Unseen
    transport: str = "native"
    computes_on_cpu: bool = False
    devices: tuple[str, ...] = ()


@cache
def machines() -> dict[str, Machine]:
    """Return the known machines, by name."""
    return {
        name: Machine(name=name, **values) for name, values in json.loads(TABLE.read_text(encoding="utf-8")).items()
    }


def machine_of(name: str) -> Machine:
    """Return a known machine. Raise `UsageError` for other names."""
    if name not in machines():
        raise UsageError(
            f"there is no machine {name!r}: name one of {', '.join(machines())}, and pass the bytes of its memory "
            "(--memory, --host-memory) if yours has more or less."
        )
    return machines()[name]
