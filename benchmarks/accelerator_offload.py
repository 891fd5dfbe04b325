"""Owns the part `offload` of `make accelerator`: how much of the speed is left with states in CPU memory or on disk, row by row.

Each row is a process of its own: pinned memory goes back to the host only when a process ends. It asks first whether the host has
the memory, since the kernel would end a process that takes too much, and the row with it.
"""

from __future__ import annotations

from stand_ins import stand_in

stand_in()

import json  # noqa: E402
import math  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from accelerator_models import Llama  # noqa: E402
from accelerator_setting import GIB, Setting, host_memory_available  # noqa: E402
from accelerator_systems import BF16, adamw, batch_of  # noqa: E402

import zeroshard  # noqa: E402
from zeroshard import Offload, Place, Policy, Precision  # noqa: E402
from zeroshard.recompute.checkpointer import Checkpointer  # noqa: E402

HOST_RESERVE = 8 * GIB
"""Bytes of CPU memory that a row leaves to the host."""
SLAB_SHARE = 1.07
"""What pinned memory takes beside the states: slabs are powers of two, of which a sixteenth may be left over."""


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        where: of the states: "device", "optimizer", "all" (in CPU memory), "disk", "FSDP2" (its own CPU offload).
        ratio: the share of the optimizer that leaves the device.
        seconds: that the row takes, as far as is known: none begins with less time left.
    """

    model: str
    where: str
    microbatches: int
    ratio: float = 1.0
    seconds: float = 60.0


ROWS = (
    Row("5.4 B", "device", 8),
    Row("5.4 B", "optimizer", 8, seconds=90),
    Row("5.4 B", "optimizer", 1, seconds=90),
    Row("5.4 B", "FSDP2", 8, seconds=90),
    Row("5.4 B", "all", 8, seconds=90),
    Row("8.0 B", "optimizer", 8, ratio=0.8, seconds=120),
    Row("12.6 B", "optimizer", 4, ratio=0.5, seconds=120),
    Row("1.3 B", "disk", 8, seconds=90),
)
"""In order of value."""
REHEARSED = (Row("5.4 B", "device", 2, seconds=5), Row("5.4 B", "optimizer", 2, seconds=5))


def offload(setting: Setting, tell: Callable[..., None]) -> None:
    """Speed with states elsewhere beside the speed without, and larger models."""
    base: float | None = None
    for row in REHEARSED if setting.rehearse else ROWS:
        said = {key: value for key, value in asdict(row).items() if key != "seconds"}
        if setting.left < row.seconds:
            tell(**said, left_out="no time")
            continue
        found = _in_a_process(setting, row)
        speed = found.get("tokens_per_s")
        if row.where == "device" and speed is not None:
            base = speed * setting.shape(row.model).parameters
        if speed is not None and base is not None:
            found["share"] = speed * setting.shape(row.model).parameters / base
        tell(**said, **found)


def _in_a_process(setting: Setting, row: Row) -> dict[str, Any]:
    command = [sys.executable, __file__, json.dumps(asdict(row)), str(int(setting.rehearse))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(setting.left, 1))
    except subprocess.TimeoutExpired:
        return {"left_out": "its time was up"}
    print(done.stdout, done.stderr[-4000:], flush=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"failed": last[:200]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


# ---------------------------------------------------------------------- in a process of its own


def host_bytes(row: Row, parameters: int) -> float:
    """CPU memory that a row takes: fp32 masters and two states, and bf16 gradients; bf16 parameters where all leaves."""
    each = {"device": 0, "optimizer": 14, "all": 16, "disk": 0, "FSDP2": 16}[row.where]
    return SLAB_SHARE * row.ratio * each * parameters


def measure(setting: Setting, row: Row) -> dict[str, Any]:
    """Train, and return what a step took."""
    shape = setting.shape(row.model)
    needed = host_bytes(row, shape.parameters) + HOST_RESERVE
    if needed > host_memory_available() and not setting.rehearse:
        return {"left_out": f"needs {needed / GIB:.0f} GiB of the host, which has {host_memory_available() / GIB:.0f}"}
    batch, length = setting.tokens(8, 2048)
    with tempfile.TemporaryDirectory() as folder:
        step = _fsdp2(setting, row) if row.where == "FSDP2" else _zeroshard(setting, row, folder)
        data = batch_of(setting, shape, batch, length)
        step(data)
        torch.accelerator.reset_peak_memory_stats()
        seconds = statistics.median(setting.seconds(lambda: step(data)) for _ in range(2))
        stats = torch.accelerator.memory_stats(setting.device)
        return {
            "parameters_b": shape.parameters / 1e9,
            "step_s": seconds,
            "tokens_per_s": row.microbatches * batch * length / seconds,
            "peak_gib": torch.accelerator.max_memory_allocated() / GIB,
            "reserved_gib": torch.accelerator.max_memory_reserved() / GIB,
            "retries": stats.get("num_alloc_retries", 0),
            "host_left_gib": host_memory_available() / GIB,
        }


def _zeroshard(setting: Setting, row: Row, folder: str) -> Callable[[torch.Tensor], None]:
    where = {
        "device": Policy.stage(2),
        "optimizer": Policy.stage(2).offloaded(optimizer=Place.CPU, offload=Offload(ratio=row.ratio)),
        "all": Policy.stage(3).offloaded(optimizer=Place.CPU, parameters=Place.CPU),
        "disk": Policy.stage(3).offloaded(optimizer=Place.DISK, path=folder),
    }
    torch.manual_seed(0)
    with zeroshard.sharded_init(dtype=BF16), setting.device:
        model = Llama(setting.shape(row.model))
    Checkpointer().checkpoint_units(model)
    precision = Precision(BF16, accumulate_dtype=BF16)
    one = zeroshard.shard(model, adamw(model.parameters()), where[row.where], precision=precision)

    def step(data: torch.Tensor) -> None:
        for microbatch in range(row.microbatches):
            with one.accumulate(microbatch < row.microbatches - 1):
                model(data[:, :-1], data[:, 1:]).backward()
        one.optimizer.step()
        one.optimizer.zero_grad()

    return step


def _fsdp2(setting: Setting, row: Row) -> Callable[[torch.Tensor], None]:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    setting.alone()
    torch.manual_seed(0)
    with setting.device:
        model = Llama(setting.shape(row.model))
    Checkpointer().checkpoint_units(model)
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16), "offload_policy": CPUOffloadPolicy(),
    }  # fmt: skip
    for block in model.blocks.children():
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = adamw(model.parameters())

    def step(data: torch.Tensor) -> None:
        for microbatch in range(row.microbatches):
            model.set_requires_gradient_sync(microbatch == row.microbatches - 1)  # type: ignore[operator]
            model(data[:, :-1], data[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    rehearse = bool(int(sys.argv[2]))
    print(json.dumps(measure(Setting.make(Path(), math.inf, rehearse=rehearse), Row(**json.loads(sys.argv[1])))))
