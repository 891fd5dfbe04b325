"""Owns the part `offload` of `make accelerator`: the speed of training with states in CPU memory or on disk.

Each row runs in a separate process, since the host gets pinned memory back only when a process ends. The process
first checks that the host has enough memory. Otherwise the kernel would kill the process, and the row would be lost.
"""

from __future__ import annotations

from stand_ins import stand_in

stand_in()

import json  # noqa: E402
import math  # noqa: E402
import os  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import asdict, dataclass, replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from accelerator import read  # noqa: E402
from accelerator_models import SHAPES, Llama, Shape  # noqa: E402
from accelerator_setting import GIB, Setting, host_memory_available  # noqa: E402
from accelerator_systems import BF16, adamw, batch_of  # noqa: E402

import zeroshard  # noqa: E402
from zeroshard import Offload, Place, Policy, Precision  # noqa: E402
from zeroshard.engine.recompute.checkpointer import Checkpointer  # noqa: E402

HOST_RESERVE = 8 * GIB
"""Bytes of CPU memory that a row leaves to the host."""
SLAB_SHARE = 1.07
"""The ratio of pinned memory to states: slabs are powers of two, and up to a sixteenth of a slab may be unused."""


USABLE = 0.96
"""The largest share of the device's memory for a row. The driver, and memory that the allocator cannot use, need the rest."""
PINNING = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""Settings of CUDA's pinned memory: several threads touch its pages, since a row pins up to a hundred GiB."""

BASES = ("5.4 B", "3.2 B", "1.3 B")
"""The models of the "base" rows. The first one whose states fit on the device is used."""
LARGEST = ("12.6 B", "9.6 B", "8.0 B", "5.4 B")
"""The models of the "largest" row. The first one that fits on device and host together is used."""
RATIOS = tuple(tenth / 10 for tenth in range(3, 11))


@dataclass(frozen=True)
class Row:
    """One training run.

    Attributes:
        model: a name in `SHAPES`; or "base" or "largest" (see `BASES` and `LARGEST`).
        where: the place of states: "device", "optimizer" or "all" (in CPU memory), "disk", "FSDP2" (its own CPU offload).
        ratio: the share of optimizer states off the device; None: the smallest share of `RATIOS` that fits.
        seconds: the estimated time of the row, which does not begin with less time left.
    """

    model: str
    where: str
    microbatches: int
    ratio: float | None = 1.0
    seconds: float = 60.0


ROWS = (
    Row("base", "device", 8),
    Row("base", "optimizer", 8, seconds=80),
    Row("base", "optimizer", 1),
    Row("base", "FSDP2", 8, seconds=80),
    Row("base", "all", 8, seconds=80),
    Row("8.0 B", "optimizer", 8, ratio=None, seconds=120),
    Row("largest", "optimizer", 4, ratio=None, seconds=140),
    Row("1.3 B", "disk", 8, seconds=90),
)
"""The rows, the most important first. `--rows` counts them from 1. One part has time for the first six."""


def offload(setting: Setting, tell: Callable[..., None]) -> None:
    """Measure training with offload, compared with training without it, also for larger models."""
    unknown = [number for number in setting.rows if not 1 <= number <= len(ROWS)]
    if unknown:
        raise SystemExit(f"the part offload has no row {unknown[0]}: its rows are 1 to {len(ROWS)}.")
    for number, row in enumerate(ROWS, 1):
        if setting.rows and number not in setting.rows:
            continue
        said = {"row": number, **{key: value for key, value in asdict(row).items() if key != "seconds"}}
        if setting.left < (5 if setting.rehearse else row.seconds):
            tell(**said, left_out=f"no time: give it a call of its own (ROWS={number})")
            continue
        if setting.rehearse and number > 1:  # a rehearsal needs only one row in a separate process
            found = measure(setting, row)
        else:
            found = _in_a_process(setting, row)
        base = base_tflops(setting.out)
        if row.where == "device":
            base = found.get("tflops")
        if base is not None and "tflops" in found:
            found["share"] = found["tflops"] / base
        tell(**said | found)


def base_tflops(out: Path) -> float | None:
    """Return the speed of the row without offload, from this call or an earlier one; None if neither has it."""
    rows = read(out)["parts"].get("offload", {}).get("rows", [])
    found = [row["tflops"] for row in rows if row["where"] == "device" and "tflops" in row]
    return found[-1] if found else None


def _in_a_process(setting: Setting, row: Row) -> dict[str, Any]:
    command = [sys.executable, __file__, json.dumps(asdict(row)), str(int(setting.rehearse))]
    environment = dict(os.environ)
    if setting.device.type == "cuda":
        environment.setdefault("PYTORCH_ALLOC_CONF", PINNING)
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=max(setting.left, 1)
        )
    except subprocess.TimeoutExpired:
        return {"left_out": "its time was up"}
    print(done.stdout, done.stderr[-4000:], flush=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"failed": last[:200]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


# ---------------------------------------------------------------------- in a separate process


BATCH, LENGTH = 8, 2048


def host_bytes(row: Row, parameters: int) -> float:
    """Return the CPU memory of a row, in bytes: fp32 masters, two states, bf16 gradients and, if all leave, bf16 parameters."""
    assert row.ratio is not None
    each = {"device": 0, "optimizer": 14, "all": 16, "disk": 0, "FSDP2": 16}[row.where]
    return SLAB_SHARE * row.ratio * each * parameters


def device_bytes(row: Row, shape: Shape) -> float:
    """Estimate the device memory of a row: states, and the tensors that a forward and a backward keep."""
    assert row.ratio is not None
    # FSDP2's model is made on the device in fp32. Sums of gradients stay there only while memory is free.
    each = {"device": 16, "optimizer": 2 + 14 * (1 - row.ratio), "all": 0, "disk": 4, "FSDP2": 4}[row.where]
    logits = 16 * shape.vocabulary  # in bf16 and fp32, with their softmax and gradients
    kept = 2 * shape.width * (shape.layers + 16) + 10 * shape.inner  # inputs of all blocks, and one block's activations
    return each * shape.parameters + BATCH * LENGTH * (logits + kept)


def fitted(row: Row, device: float, host: float) -> Row | None:
    """Return the row with the model and the ratio that fit these bytes of both memories; None if nothing fits."""
    models = {"base": (_base(device),), "largest": LARGEST}.get(row.model, (row.model,))
    ratios = RATIOS if row.ratio is None else (row.ratio,)
    for model in models:
        for ratio in ratios:
            one = replace(row, model=model, ratio=ratio)
            on_host = host_bytes(one, SHAPES[model].parameters) + HOST_RESERVE
            if device_bytes(one, SHAPES[model]) <= USABLE * device and on_host <= host:
                return one
    return None


def _base(device: float) -> str:
    """Return the base model, which is the same for each row, since it does not depend on the host's free memory."""
    for model in BASES:
        if device_bytes(Row(model, "device", 1), SHAPES[model]) <= USABLE * device:
            return model
    return BASES[-1]


def measure(setting: Setting, row: Row) -> dict[str, Any]:
    """Train and return the measurements of a step."""
    device, host = (80 * GIB, 120 * GIB)
    if not setting.rehearse:
        device, host = torch.accelerator.get_memory_info(setting.device)[1], host_memory_available()
    one = fitted(row, device, host)
    if one is None:
        return {
            "left_out": f"the device's {device / GIB:.0f} GiB and the host's free {host / GIB:.0f} GiB do not hold it"
        }
    if setting.rehearse:
        one = replace(one, microbatches=min(one.microbatches, 2))
    return {"model": one.model, "ratio": one.ratio, **_measured(setting, one)}


def _measured(setting: Setting, row: Row) -> dict[str, Any]:
    shape = setting.shape(row.model)
    batch, length = setting.tokens(BATCH, LENGTH)
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
            "tflops": shape.flops(row.microbatches * batch * length, length) / seconds / 1e12,
            "peak_gib": torch.accelerator.max_memory_allocated() / GIB,
            "reserved_gib": torch.accelerator.max_memory_reserved() / GIB,
            "retries": stats.get("num_alloc_retries", 0),
            "host_left_gib": host_memory_available() / GIB,
        }


def _zeroshard(setting: Setting, row: Row, folder: str) -> Callable[[torch.Tensor], None]:
    assert row.ratio is not None
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
