"""Owns the parts of `make accelerator`. Each tells what it finds, row by row."""

from __future__ import annotations

import gc
import importlib.util
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import accelerator_ranks
import torch
from accelerator_setting import Setting
from accelerator_systems import LEARNING_RATE, SYSTEMS, Step, adamw, batch_of, model_of, native_at_one_rank, sharded
from torch import nn

import zeroshard
from zeroshard import Place, Policy, Precision
from zeroshard.recompute.checkpointer import Checkpointer
from zeroshard.testing.gpt import GPT, GPTConfig

Tell = Callable[..., None]
GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[1]
MICROBATCHES = 8


# ---------------------------------------------------------------------- correctness


def correctness(setting: Setting, tell: Tell) -> None:
    """The project's own tests; the backend's collectives at one rank beside plain AdamW; several processes on one device."""
    is_right = _tests(setting, tell) & _forced(setting, tell)
    for world in (2, 4):
        is_right &= accelerator_ranks.run(world, rehearse=setting.rehearse, tell=tell, limit=90)
    if not is_right:
        raise SystemExit("not everything is right")


def _tests(setting: Setting, tell: Tell) -> bool:
    what = "tests that need an accelerator"
    if importlib.util.find_spec("pytest") is None:
        tell(what=what, result="not run: pytest is not installed")
        return True
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "accelerator",
        "tests/test_accelerator.py",
    ]
    command += ["-k", "stages and late"] if setting.rehearse else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    tell(what=what, result=("" if done.returncode == 0 else "WRONG: ") + " ".join(done.stdout.splitlines()[-1:]))
    if done.returncode:
        print(done.stdout[-6000:])
    return done.returncode == 0


def _forced(setting: Setting, tell: Tell) -> bool:
    """In fp32, without clipping, one rank's step is AdamW's."""
    is_right = True
    model = model_of(setting, setting.small)
    optimizer = adamw(model.parameters())
    for number in range(accelerator_ranks.STEPS):
        data = batch_of(setting, setting.small, 100 * number)
        model(data[:, :-1], data[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    plain = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    with native_at_one_rank(setting), tempfile.TemporaryDirectory() as folder:
        reference = None
        for name, policy in accelerator_ranks.policies(folder).items():
            trained = accelerator_ranks.train(setting, policy, torch.float32, 0)
            reference = trained if reference is None else reference
            steps_there = "optimizer on" not in name
            result = accelerator_ranks.compare(trained, reference, exact=steps_there)
            beside = float((trained - plain).abs().max())
            result = f"WRONG: plain AdamW differs by {beside:.1e}" if beside > 10 * LEARNING_RATE else result
            tell(what=f"{setting.backend} at one rank: {name}", result=f"{result}; plain AdamW within {beside:.1e}")
            is_right &= "WRONG" not in result
    return is_right


# ---------------------------------------------------------------------- memory


def memory(setting: Setting, tell: Tell) -> None:
    """What lives after a step of the large model, by our report, by the formula, by the allocator."""
    base = Policy.stage(2)
    policies = {
        **{f"stage {number}": Policy.stage(number) for number in range(4)},
        "stage 2, optimizer in CPU memory": base.offloaded(optimizer=Place.CPU),
        "stage 3, all in CPU memory": Policy.stage(3).offloaded(optimizer=Place.CPU, parameters=Place.CPU),
    }
    for name, policy in policies.items():
        _forget()
        model, one = sharded(setting, setting.large, policy, torch.bfloat16)
        Checkpointer().checkpoint_units(model)
        data = batch_of(setting, setting.large)
        for number in range(3):
            torch.accelerator.reset_peak_memory_stats()
            model(data[:, :-1], data[:, 1:]).backward()
            one.optimizer.step()
            if number == 2:
                torch.accelerator.synchronize()
                report, allocated = one.memory_report(), torch.accelerator.memory_allocated()
            one.optimizer.zero_grad()
        formula = sum(
            value for key, value in one.memory_formula().items() if key in ("parameters", "gradients", "optimizer")
        )
        here = sum(value for key, value in report.items() if key not in ("cpu", "disk"))
        tell(
            policy=name, parameters=sum(p.numel() for p in model.parameters()), formula_gib=formula / GIB, report_gib=here / GIB,
            allocated_gib=allocated / GIB, peak_gib=torch.accelerator.max_memory_allocated() / GIB,
            reserved_gib=torch.accelerator.max_memory_reserved() / GIB, cpu_gib=report.get("cpu", 0) / GIB,
        )  # fmt: skip
        one.remove()
        del model, one


def _forget() -> None:
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()


# ---------------------------------------------------------------------- time of a step


def step(setting: Setting, tell: Tell) -> None:
    """All systems beside one another, in rounds; ratios are taken within a round."""
    torch.set_float32_matmul_precision("high")
    for dtype in (torch.bfloat16, torch.float32):
        _forget()
        config, data = setting.medium, batch_of(setting, setting.medium)
        steps = {name: make(setting, config, dtype) for name, make in SYSTEMS.items()}
        for one in steps.values():
            for _ in range(2):
                one(data)
        rounds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(setting.rounds):
            for name, one in steps.items():
                rounds[name].append(setting.seconds(partial(_repeat, one, data, setting.steps)) / setting.steps)
        for name, seconds in rounds.items():
            ratios = [mine / plain for mine, plain in zip(seconds, rounds["plain torch"], strict=True)]
            tell(
                system=name, dtype=str(dtype), ms=1e3 * statistics.median(seconds), x_plain=statistics.median(ratios),
                least=min(ratios), most=max(ratios), tokens_per_s=data[:, 1:].numel() / statistics.median(seconds),
            )  # fmt: skip
        steps.clear()


def _repeat(one: Step, data: torch.Tensor, count: int) -> None:
    for _ in range(count):
        one(data)


# ---------------------------------------------------------------------- profile

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "hipLaunchKernel", "hipExtModuleLaunchKernel")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "hipStreamSynchronize")


def profile(setting: Setting, tell: Tell) -> None:
    """One step of each: kernels, host synchronisations, and how long the device had nothing to do."""
    for name, make in SYSTEMS.items():
        _forget()
        data = batch_of(setting, setting.medium)
        one = make(setting, setting.medium, torch.bfloat16)
        for _ in range(3):
            one(data)
        torch.accelerator.synchronize()
        tell(system=name, **(_counted(one, data) if setting.rehearse else _profiled(one, data)))
        del one


def _counted(one: Step, data: torch.Tensor) -> dict[str, Any]:
    from simgpu import device  # type: ignore[import-not-found, unused-ignore]

    device.reset_counts()
    one(data)
    counts = device.counts()
    return {
        "launches": counts.launches.total(), "waits": counts.synchronisations.total(), "collectives": counts.collectives.total(),
        "what waits": dict(counts.synchronisations),
    }  # fmt: skip


def _profiled(one: Step, data: torch.Tensor) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        one(data)
        torch.accelerator.synchronize()
    events = found.events() or []
    calls = [event.name for event in events]
    ranges = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined, unused-ignore]
    )
    busy, longest, end = 0.0, 0.0, ranges[0][0] if ranges else 0.0
    for start, stop in ranges:
        longest = max(longest, start - end)
        busy += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    span = end - ranges[0][0] if ranges else 0.0
    waits = [name for name in calls if name in WAITS]
    return {
        "launches": sum(name.startswith(LAUNCHES) for name in calls), "waits": len(waits) - 1, "span_ms": span / 1e3,
        "idle_ms": (span - busy) / 1e3, "longest_gap_ms": longest / 1e3, "what waits": {name: waits.count(name) for name in set(waits)},
    }  # fmt: skip


# ---------------------------------------------------------------------- offload


def offload(setting: Setting, tell: Tell) -> None:
    """Speed with the optimizer in CPU memory beside none, at 8 microbatches; then ever larger models, until one does not fit."""
    away = Policy.stage(2).offloaded(optimizer=Place.CPU)
    everything = Policy.stage(3).offloaded(optimizer=Place.CPU, parameters=Place.CPU)
    speeds = [_offloaded(setting, setting.large, policy, 3) for policy in (Policy.stage(2), away)]
    numel = speeds[0]["parameters"]
    tell(policy="stage 2", **speeds[0], share=1.0)
    tell(
        policy="stage 2, optimizer in CPU memory",
        **speeds[1],
        share=speeds[1]["tokens_per_s"] / speeds[0]["tokens_per_s"],
    )
    for times in (0.6, 1.0, 1.25, 1.5) if not setting.rehearse else (0.6, 1.25):
        wide = replace(setting.large, width=setting.width, heads=max(setting.width // 128, 1))
        config = replace(wide, layers=max(int(times * setting.memory / 16 / (12 * setting.width**2)), 1))
        for name, policy in (("stage 2, optimizer in CPU memory", away), ("stage 3, all in CPU memory", everything)):
            try:
                found = _offloaded(setting, config, policy, 1)
            except (RuntimeError, torch.OutOfMemoryError) as error:
                tell(policy=name, states_in_memories=times, failed=str(error).splitlines()[0][:200])
                continue
            per_parameter = speeds[0]["tokens_per_s"] * numel / found["parameters"]
            tell(policy=name, **found, states_in_memories=times, share=found["tokens_per_s"] / per_parameter)


def _offloaded(setting: Setting, config: GPTConfig, policy: Policy, steps: int) -> dict[str, Any]:
    _forget()
    torch.accelerator.reset_peak_memory_stats()
    torch.manual_seed(0)
    with zeroshard.sharded_init(dtype=torch.bfloat16), setting.device:
        model = GPT(config)
    Checkpointer().checkpoint_units(model)
    precision = Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16)
    one = zeroshard.shard(model, adamw(model.parameters()), policy, precision=precision)
    data = batch_of(setting, config)

    microbatches = 2 if setting.rehearse else MICROBATCHES

    def step() -> None:
        for microbatch in range(microbatches):
            with one.accumulate(microbatch < microbatches - 1):
                model(data[:, :-1], data[:, 1:]).backward()
        one.optimizer.step()
        one.optimizer.zero_grad()

    try:
        step()
        seconds = statistics.median(setting.seconds(step) for _ in range(steps))
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters()), "step_s": seconds,
            "tokens_per_s": microbatches * data[:, 1:].numel() / seconds, "peak_gib": torch.accelerator.max_memory_allocated() / GIB,
        }  # fmt: skip
    finally:
        one.abandon()
