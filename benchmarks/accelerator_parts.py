"""Owns the parts of `make accelerator`.

Each part reports its rows as it measures them and starts no row for which it lacks time.
"""

from __future__ import annotations

import gc
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import accelerator_offload
import accelerator_ranks
import torch
from accelerator_models import Llama, Shape
from accelerator_setting import GIB, Setting, host_memory_available
from accelerator_systems import (
    BF16,
    BUCKET_NUMEL,
    KEEP_MEMORY,
    LEARNING_RATE,
    Step,
    adamw,
    batch_of,
    llama,
    sharded,
    small_batch,
    small_model,
    systems,
)
from torch import nn

import zeroshard
from zeroshard import Policy
from zeroshard.model.memory import kept_count

Tell = Callable[..., None]
LIBRARIES = (
    "transformers", "accelerate", "deepspeed", "pydantic", "json5", "triton", "numpy", "safetensors",
)  # fmt: skip


# ---------------------------------------------------------------------- facts


def facts(setting: Setting, tell: Tell) -> None:
    """Describe the machine: versions, memory, clocks, and the speeds of copying and of pinning memory."""
    tell(fact="accelerator", value=setting.name)
    tell(fact="torch", value=f"{setting.version}, Python {platform.python_version()}")
    tell(fact="libraries", value=", ".join(f"{name} {found}" for name in LIBRARIES if (found := _version(name))))
    free, total = torch.accelerator.get_memory_info(setting.device)
    tell(fact="device memory: free, of total, GiB", value=f"{free / GIB:.1f} of {total / GIB:.1f}")
    tell(fact="host memory available, GiB", value=host_memory_available() / GIB)
    tell(fact="CPUs", value=len(os.sched_getaffinity(0)))
    disk = shutil.disk_usage(tempfile.gettempdir())
    tell(fact="disk free, GiB", value=disk.free / GIB)
    _ask_driver(tell)
    nbytes = 1 << 16 if setting.rehearse else 1 << 30
    seconds = setting.seconds(lambda: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).zero_())
    tell(fact="pinning, GB/s", value=nbytes / seconds / 1e9)
    if setting.device.type == "cuda":
        tell(fact=f"pinning with PYTORCH_ALLOC_CONF={accelerator_offload.PINNING}, GB/s", value=_pinned_by_threads())
    _time_copies(setting, tell, nbytes)


def _pinned_by_threads() -> float | str:
    """Return the GB/s of pinning 4 GiB in a new process with the settings of the part `offload`, or the error."""
    code = """
import time, torch
torch.zeros(1, device="cuda")
start = time.perf_counter()
torch.empty(4 << 30, dtype=torch.uint8, pin_memory=True)
print((4 << 30) / (time.perf_counter() - start) / 1e9)
"""
    environment = {**os.environ, "PYTORCH_ALLOC_CONF": accelerator_offload.PINNING}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stderr.strip()[-200:] if done.returncode else float(done.stdout)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _ask_driver(tell: Tell) -> None:
    """Report clocks, power and driver, if NVIDIA's tool is installed."""
    if shutil.which("nvidia-smi") is None:
        tell(fact="driver", value="no nvidia-smi here")
        return
    names = "driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit,temperature.gpu,memory.used"
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    tell(fact=names, value=done.stdout.strip() or done.stderr.strip())


def _time_copies(setting: Setting, tell: Tell, nbytes: int) -> None:
    """Time copies between pinned and device memory, in one direction and in both at once."""
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.zeros(nbytes, dtype=torch.uint8, device=setting.device) for _ in range(2)]
    streams = [torch.Stream(setting.device) for _ in range(2)]

    def to_device() -> None:
        with streams[0]:
            device[0].copy_(host[0], non_blocking=True)

    def to_host() -> None:
        with streams[1]:
            host[1].copy_(device[1], non_blocking=True)

    def both() -> None:
        to_device()
        to_host()

    for name, work in (("to the device", to_device), ("to the host", to_host), ("both ways, each", both)):
        work()
        seconds = statistics.median(setting.seconds(work) for _ in range(3))
        tell(fact=f"pinned copies {name}, GB/s", value=nbytes / seconds / 1e9)


# ---------------------------------------------------------------------- right


def right(setting: Setting, tell: Tell) -> None:
    """Check that kernels repeat their results, and that every policy and the simulated suite's features work."""
    accelerator_ranks.be_deterministic()
    workspaces = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    tell(what="deterministic kernels", result=f"requested where torch has them; CUBLAS_WORKSPACE_CONFIG={workspaces}")
    is_right = True
    with tempfile.TemporaryDirectory() as folder:
        policies = accelerator_ranks.policies(folder)
        train = partial(accelerator_ranks.train, setting)
        for dtype in (torch.float32, BF16):
            reference, _ = train(Policy.stage(0), dtype, 0)
            again, _ = train(Policy.stage(0), dtype, 0)
            repeats = torch.equal(reference, again)
            said = (
                "equal"
                if repeats
                else "kernels do not repeat their results: bits mean nothing, so rows below may be close"
            )
            tell(what=f"stage 0, twice, {_short(dtype)}", result=said)
            if dtype is torch.float32:
                difference = float((reference - _plain(setting)).abs().max())
                is_close = difference <= 10 * LEARNING_RATE
                tell(
                    what="stage 0 compared with plain AdamW",
                    result=f"{'' if is_close else 'WRONG: '}within {difference:.1e}",
                )
                is_right &= is_close
            expected = reference
            for name, policy in policies.items():
                row: dict[str, Any] = {"what": f"{setting.backend} forced: {name}, {_short(dtype)}"}
                if setting.left < 30:
                    tell(**row, result="left out: no time")
                    continue
                try:
                    trained, row["kept"] = train(policy, dtype, 0, forced=setting)
                    exact = repeats and "optimizer on" not in name
                    result = accelerator_ranks.compare(trained, expected, exact=exact)
                except Exception as error:
                    traceback.print_exc()
                    result = f"WRONG: {first_line(error)}"
                else:
                    if expected is reference:  # the forced stage 0 itself was compared with the one that sends nothing
                        expected = trained
                tell(**row, result=result)
                is_right &= not result.startswith("WRONG")
    is_right &= _bodies(setting, tell)
    if setting.left > 45 or setting.rehearse:
        is_right &= accelerator_ranks.run(2, rehearse=setting.rehearse, tell=tell, limit=min(90, max(setting.left, 1)))
    else:
        tell(what="2 processes on one device over gloo", result="left out: no time")
    if not is_right:
        raise SystemExit("some checks failed")


def _plain(setting: Setting) -> torch.Tensor:
    model = small_model(setting)
    optimizer = adamw(model.parameters())
    for number in range(accelerator_ranks.STEPS):
        data = small_batch(setting, 100 * number)
        model(data[:, :-1], data[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector(model.parameters()).detach().cpu()


NEED_PYDANTIC = {"checkpoints", "asynchronous_checkpoints", "engine", "failing_disk"}
"""The bodies that read a config or write files that pydantic describes, which its stand-in cannot do."""


def _bodies(setting: Setting, tell: Tell) -> bool:
    """Train with the features of the simulated suite on this device, whose kernels round differently from the CPU's."""
    from simgpu import device, rare  # type: ignore[import-not-found, unused-ignore]

    setting.alone()
    device.use(setting.device)
    is_right = True
    bodies = list(rare.EVERY_BODY.items())
    if setting.rehearse:  # tests run them all on the simulated device
        bodies = bodies[::-8]
    for name, body in bodies:
        if name in NEED_PYDANTIC and _version("pydantic") is None:
            tell(what=f"feature: {name}", result="left out: no pydantic")
            continue
        if setting.left < 30:
            tell(what=f"feature: {name}", result="left out: no time")
            continue
        try:
            body(0)
            result = "right"
        except Exception as error:
            traceback.print_exc()
            result = f"WRONG: {first_line(error)}"
            is_right = False
        tell(what=f"feature: {name}", result=result)
    return is_right


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__} {lines[0][:200]}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---------------------------------------------------------------------- memory


def memory(setting: Setting, tell: Tell) -> None:
    """Measure the memory of a Llama after a step: by the plan, zeroshard's report, the allocator and the driver."""
    shape = setting.shape("1.3 B")
    batch, length = setting.tokens(4, 2048)
    rows: dict[str, dict[str, Any]] = {str(number): {"number": number} for number in range(4)}
    rows |= {f"{number}, collectives forced": {"number": number, "forced": True} for number in range(4)}
    for name, options in rows.items():
        row: dict[str, Any] = {"stage": name, "parameters_b": shape.parameters / 1e9}
        if setting.left < 30:
            tell(**row, left_out="no time")
            continue
        tell(**row, **attempted(partial(_trained, setting, batch=batch, length=length, **options)))


def _trained(setting: Setting, *, number: int, batch: int, length: int, forced: bool = False) -> dict[str, float]:
    shape = setting.shape("1.3 B")
    torch.accelerator.reset_peak_memory_stats()
    model = llama(setting, shape)
    one = sharded(model, Policy.stage(number), BF16, forced=setting if forced else None)
    data = batch_of(setting, shape, batch, length)
    for step in range(3):
        if step == 2:
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()
        loss = model(data[:, :-1], data[:, 1:])
        after_forward = torch.accelerator.memory_allocated()
        loss.backward()
        if step == 2:
            reported = sum(value for kind, value in one.memory_report().items() if kind not in ("cpu", "disk"))
        one.optimizer.step()
        one.optimizer.zero_grad()
    torch.accelerator.synchronize()
    free, total = torch.accelerator.get_memory_info(setting.device)
    formula = one.memory_formula()
    found = {
        "formula_gib": sum(formula[kind] for kind in ("parameters", "gradients", "optimizer")),
        "report_gib": reported,
        "peak_allocated_gib": torch.accelerator.max_memory_allocated(),
        "peak_reserved_gib": torch.accelerator.max_memory_reserved(),
        "driver_used_gib": total - free,
        "after_forward_gib": after_forward,
    }
    kept = kept_count(one._schedule.units)
    one.remove()
    if not forced:  # a plan of one rank has no collectives
        found = _planned(shape, planned_config(number, batch), batch, length) | found
    return {**{key: value / GIB for key, value in found.items()}, "kept": kept}


def _planned(shape: Shape, config: dict[str, Any], batch: int, length: int) -> dict[str, float]:
    """Return the bytes of a dry run, allocated and reserved, or nothing if the libraries that read configs are missing."""
    if _version("pydantic") is None or _version("json5") is None:
        return {}
    tokens = torch.zeros(batch, length, dtype=torch.long)
    plan = zeroshard.plan(
        lambda: Llama(shape), config, world_size=1, batch=(tokens, tokens), micro_batch=batch, presets=False
    )
    made = plan.rows[0]
    return {"plan_gib": made.figures.peak.nbytes, "plan_reserved_gib": made.reserved_nbytes}


def planned_config(number: int, batch: int) -> dict[str, Any]:
    """Return a config that trains as `sharded` does, with gradients summed in fp32 instead of bf16."""
    return {
        "train_micro_batch_size_per_gpu": batch, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {
            "stage": number,
            "reduce_bucket_size": BUCKET_NUMEL, "allgather_bucket_size": BUCKET_NUMEL,
        },
        "activation_checkpointing": {"checkpoint_units": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
    }  # fmt: skip


def forget() -> None:
    """Free the allocator's unused memory."""
    for _ in range(2):  # one collection was seen to leave a whole model
        gc.collect()
        torch.accelerator.synchronize()
    torch.accelerator.empty_cache()


# ---------------------------------------------------------------------- speed

BF16_FLOPS = {
    "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA L40S": 362e12, "NVIDIA GeForce RTX 4090": 165e12,
}  # fmt: skip
"""The vendor's operations per second for dense matrices in bfloat16, by the name that torch reports: for the MFU."""
ROUNDS = 3
STEPS = 3
TURNS = ("FSDP2, reduces fp32", "FSDP2, reduces bf16", "zeroshard, stage 3")
"""The systems whose small steps are also timed in turns, all in memory together. The others are compared with the first."""
ROUNDS_OF_TURNS = 9


def speed(setting: Setting, tell: Tell) -> None:
    """Measure a step of each system, with its launches, the device's idle time, and a trace."""
    torch.set_float32_matmul_precision("high")
    _profiled(torch.Tensor.exp, torch.zeros(1), None)  # the profiler's first use takes longer
    _in_turns(setting, tell)
    sizes = (("1.2 B", 8, 2048), ("1.2 B", 1, 512), ("3.2 B", 8, 2048))
    every = systems()
    runs = [(size, system) for size in sizes for system in every]
    runs.sort(key=lambda run: run[1] in KEEP_MEMORY)
    first: dict[tuple[str, int, int], float] = {}
    for size, system in runs:
        name, batch, length = size
        row: dict[str, Any] = {"model": name, "tokens": f"{batch} x {length}", "system": system}
        if _lacks_time(setting):
            tell(**row, left_out="no time")
            continue
        found = attempted(partial(_timed, setting, every[system], name, batch, length, system))
        if "ms" in found:
            found["x_first"] = found["ms"] / first.setdefault(size, found["ms"])
        tell(**row, **found)


def _lacks_time(setting: Setting) -> bool:
    return setting.left < 45 and not (setting.rehearse and setting.left > 0)


def _in_turns(setting: Setting, tell: Tell) -> None:
    """Time steps of one short sequence, where launches dominate, in turns. Other host work then slows all systems alike."""
    about: dict[str, Any] = {"model": "1.2 B", "tokens": "1 x 512, in turns"}
    if _lacks_time(setting):
        tell(**about, left_out="no time")
        return
    shape = setting.shape("1.2 B")
    batch, length = setting.tokens(1, 512)

    def timed() -> dict[str, Any]:
        made = {system: systems()[system](setting, shape) for system in TURNS}
        data = batch_of(setting, shape, batch, length)
        rounds: dict[str, list[float]] = {system: [] for system in TURNS}
        for number in range(1 + (1 if setting.rehearse else ROUNDS_OF_TURNS)):
            for system, one in made.items():
                seconds = setting.seconds(partial(_repeat, one, data)) / STEPS
                if number > 0:  # the first warms up
                    rounds[system].append(seconds)
        return rounds

    found = attempted(timed)
    if "failed" in found:
        tell(**about, **found)
        return
    for system, seconds in found.items():
        ratios = [one / first for one, first in zip(seconds, found[TURNS[0]], strict=True)]
        tell(**about, system=system, ms=1e3 * statistics.median(seconds), x_first=statistics.median(ratios))


def attempted(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of `work`, or the reason why it failed, and free the device's memory."""
    try:
        found = work()
    except Exception as error:
        traceback.print_exc()
        found = {"failed": first_line(error)}
    forget()  # not in the block above, where the traceback holds the model
    return found


TRACED = ("FSDP2, reduces bf16", "zeroshard, stage 2", "zeroshard, stage 3")
"""The systems that write a trace, at two sizes. There are only three, since the archive must stay small."""
TRACED_MODEL = "1.2 B"
TRACE_NBYTES = 5 << 19


def _timed(
    setting: Setting, make: Callable[..., Step], name: str, batch: int, length: int, system: str
) -> dict[str, Any]:
    shape = setting.shape(name)
    batch, length = setting.tokens(batch, length)
    torch.accelerator.reset_peak_memory_stats()
    one = make(setting, shape)
    data = batch_of(setting, shape, batch, length)
    for _ in range(2):
        one(data)
    rounds = 1 if setting.rehearse else ROUNDS
    seconds = statistics.median(setting.seconds(partial(_repeat, one, data)) / STEPS for _ in range(rounds))
    tokens = batch * length
    found: dict[str, Any] = {"ms": 1e3 * seconds, "tokens_per_s": tokens / seconds}
    top = BF16_FLOPS.get(setting.name)
    if top is not None:
        found["mfu"] = shape.flops(tokens, length) / seconds / top
    found["peak_gib"] = torch.accelerator.max_memory_allocated() / GIB
    found["reserved_gib"] = torch.accelerator.max_memory_reserved() / GIB
    trace = None
    if system in TRACED and name == TRACED_MODEL:
        file = f"{name} {batch}x{length} {system}.json.gz".replace(" ", "-").replace(",", "")
        trace = setting.out / file
    found |= _profiled(one, data, trace)
    if setting.rehearse:
        found |= _counted(one, data)
    return found


def _repeat(one: Step, data: torch.Tensor) -> None:
    for _ in range(STEPS):
        one(data)


LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "hipLaunchKernel", "hipExtModuleLaunchKernel")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "hipStreamSynchronize")


def _counted(one: Step, data: torch.Tensor) -> dict[str, Any]:
    from simgpu import device  # type: ignore[import-not-found, unused-ignore]

    device.reset_counts()
    one(data)
    counts = device.counts()
    return {"launches": counts.launches.total(), "host_waits": counts.synchronisations.total()}


def _profiled(one: Step, data: torch.Tensor, trace: Path | None) -> dict[str, Any]:
    from torch.profiler import profile

    with profile() as found:  # profiles the CPU, and the device if torch can
        one(data)
        torch.accelerator.synchronize()
    more = {}
    if trace is not None:
        found.export_chrome_trace(str(trace))
        if trace.stat().st_size > TRACE_NBYTES:
            more = {"trace": f"left out: {trace.stat().st_size / (1 << 20):.1f} MiB"}
            trace.unlink()
    events = found.events() or []
    ranges = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        # Ranges that a program names contain the gaps between kernels.
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation  # type: ignore[attr-defined, unused-ignore]
    )
    if not ranges:
        return more
    calls = [event.name for event in events]
    return {
        "launches": sum(name.startswith(LAUNCHES) for name in calls),
        "host_waits": sum(name in WAITS for name in calls) - 2,  # the one above, and the profiler's own at its end
        "idle_share": idle_share(ranges),
        **more,
    }


def idle_share(ranges: list[tuple[float, float]]) -> float:
    """Return the share of time, from the first start to the last end, without any of these ranges, sorted by start."""
    begin, end = ranges[0][0], ranges[0][0]
    busy = 0.0
    for start, stop in ranges:
        busy += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return 1 - busy / (end - begin)


PARTS: dict[str, Callable[[Setting, Tell], None]] = {
    "facts": facts,
    "right": right,
    "memory": memory,
    "speed": speed,
    "offload": accelerator_offload.offload,
}
