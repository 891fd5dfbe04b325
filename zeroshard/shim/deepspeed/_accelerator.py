"""torch.accelerator, or the CPU, under DeepSpeed's names."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partialmethod
from typing import Any

import torch
import torch.distributed as dist

from deepspeed._names import constant


class DeepSpeedAccelerator:
    """The accelerator that torch finds. Indices default to the current device."""

    def __init__(self) -> None:
        self._kind = torch.accelerator.current_accelerator(check_available=True)
        self._name = "cpu" if self._kind is None else self._kind.type

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Tensor") and hasattr(torch, name):
            dtype = getattr(torch, name).dtype
            return lambda data=(): torch.tensor(data, dtype=dtype, device=self.current_device_name())
        raise AttributeError(
            f"zeroshard's get_accelerator() has no {name}. Use torch.accelerator or torch.{self._name}."
        )

    def _call(self, name: str, device_index: int | None = None) -> Any:
        """Call a function of torch.accelerator; return None on a CPU."""
        if self._kind is None:
            return None
        return getattr(torch.accelerator, name)(*[] if device_index is None else [device_index])

    # ---- devices

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._kind is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device(self.device_name(device_index))

    def current_device(self) -> Any:
        return "cpu" if self._kind is None else torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        return self._name if self._kind is None else self.device_name(self.current_device())

    def device_count(self) -> int:
        """Return the number of devices, or the number of this machine's ranks on a CPU, as DeepSpeed does."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if self._kind is None else torch.accelerator.device_count()

    set_device = partialmethod(_call, "set_device_index")
    synchronize = partialmethod(_call, "synchronize")
    current_stream = partialmethod(_call, "current_stream")

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        return dist.get_default_backend_for_device(self._name)

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    # ---- features

    is_available = is_fp16_supported = constant(True)
    is_triton_supported = is_graph_supported = handles_memory_backpressure = constant(False)

    def is_synchronized_device(self) -> bool:
        return self._kind is None

    resolves_data_dependency = use_host_timers = is_synchronized_device

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._name == "cuda" else True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor if self._kind is None else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    # ---- memory in bytes; torch does not count allocations on a CPU, so they are 0

    def _memory(self, name: str, device_index: int | None = None) -> int:
        return self._call(name, device_index) or 0

    memory_allocated = partialmethod(_memory, "memory_allocated")
    max_memory_allocated = partialmethod(_memory, "max_memory_allocated")
    memory_reserved = memory_cached = partialmethod(_memory, "memory_reserved")
    max_memory_reserved = max_memory_cached = partialmethod(_memory, "max_memory_reserved")
    empty_cache = partialmethod(_call, "empty_cache")
    reset_peak_memory_stats = partialmethod(_call, "reset_peak_memory_stats")
    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return dict(self._call("memory_stats", device_index) or {})

    def _free_or_total(self, number: int, device_index: int | None = None) -> int:
        if self._kind is not None:
            return int(torch.get_device_module(self._name).mem_get_info(device_index)[number])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf(("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")[number])

    available_memory = partialmethod(_free_or_total, 0)
    total_memory = partialmethod(_free_or_total, 1)

    # ---- modules of torch, streams, random numbers, and ranges for a profiler

    amp = constant(torch.amp)
    random = constant(torch.random)

    def Stream(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._kind is None else torch.Stream(self.device(), *args, **kwargs)

    def Event(self, **kwargs: Any) -> Any:
        return None if self._kind is None else torch.Event(self.device(), **kwargs)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else stream  # type: ignore[no-any-return]

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    initial_seed = staticmethod(torch.initial_seed)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return self._rng("get_rng_state", device_index)  # type: ignore[no-any-return]

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self._rng("set_rng_state", device_index, new_state)

    def _rng(self, name: str, device_index: int | None, *state: torch.Tensor) -> Any:
        module = torch if self._kind is None else torch.get_device_module(self._name)
        return getattr(module, name)(*state, *([] if device_index is None else [device_index]))

    def range_push(self, msg: str) -> Any:
        return torch.cuda.nvtx.range_push(msg) if self._name == "cuda" else None

    def range_pop(self) -> Any:
        return torch.cuda.nvtx.range_pop() if self._name == "cuda" else None


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    return DeepSpeedAccelerator()


def empty_cache() -> None:
    get_accelerator().empty_cache()


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the use of the accelerator's memory on rank 0, and reset its peak. Do nothing unless `force` is set."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    device = get_accelerator()
    figures = {
        "allocated": device.memory_allocated(),
        "peak": device.max_memory_allocated(),
        "reserved": device.memory_reserved(),
        f"in use on {device.device_name()}": device.total_memory() - device.available_memory(),
    }
    print(f"{message}: " + ", ".join(f"{name} {nbytes / 2**30:.2f} GB" for name, nbytes in figures.items()))
    device.reset_peak_memory_stats()
