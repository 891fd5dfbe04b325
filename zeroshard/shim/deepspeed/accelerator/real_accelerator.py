"""torch.accelerator under DeepSpeed's names, or the CPU if there is none."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partialmethod
from typing import Any

import torch
import torch.distributed as dist


class DeepSpeedAccelerator:
    """The accelerator that torch finds. Indices default to the current device."""

    def __init__(self) -> None:
        self._kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._name = "cpu" if self._kind is None else self._kind.type

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Tensor") and hasattr(torch, name):
            dtype = getattr(torch, name).dtype
            return lambda data=(): torch.tensor(data, dtype=dtype, device=self.current_device_name())
        raise AttributeError(
            f"zeroshard's get_accelerator() has no {name}. Use torch.accelerator or torch.{self._name}."
        )

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
        """Return the number of devices; on a CPU this machine's ranks, as DeepSpeed does."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if self._kind is None else torch.accelerator.device_count()

    def set_device(self, device_index: int) -> None:
        self._call("set_device_index", device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        self._call("synchronize", device_index)

    def _call(self, name: str, *args: Any) -> Any:
        """Call a function of torch's accelerator; return None on a CPU."""
        return None if self._kind is None else getattr(torch.accelerator, name)(*args)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        return dist.get_default_backend_for_device(self._name)

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    # ---- what it can

    def is_available(self) -> bool:
        return True

    def handles_memory_backpressure(self) -> bool:
        return False

    def is_synchronized_device(self) -> bool:
        return self._kind is None

    is_fp16_supported = is_available
    is_triton_supported = is_graph_supported = handles_memory_backpressure
    resolves_data_dependency = use_host_timers = is_synchronized_device

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._name == "cuda" else True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor if self._kind is None else tensor.pin_memory()

    def amp(self) -> Any:
        return torch.amp

    # ---- memory, bytes; 0 on a CPU, whose memory is not torch's

    def empty_cache(self) -> None:
        self._call("empty_cache")

    def _memory(self, name: str, device_index: int | None = None) -> int:
        return self._call(name, self.current_device() if device_index is None else device_index) or 0

    memory_allocated = partialmethod(_memory, "memory_allocated")
    max_memory_allocated = partialmethod(_memory, "max_memory_allocated")
    memory_reserved = memory_cached = partialmethod(_memory, "memory_reserved")
    max_memory_reserved = max_memory_cached = partialmethod(_memory, "max_memory_reserved")

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return dict(self._call("memory_stats", self.current_device()) or {})

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        self._call("reset_peak_memory_stats")

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def total_memory(self, device_index: int | None = None) -> int:
        return self._free_and_total(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return self._free_and_total(device_index)[0]

    def _free_and_total(self, device_index: int | None) -> tuple[int, int]:
        if self._kind is None:
            page = os.sysconf("SC_PAGE_SIZE")
            return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
        free, total = torch.get_device_module(self._name).mem_get_info(device_index)
        return free, total

    # ---- marks for a profiler, where torch has them

    def range_push(self, msg: str) -> Any:
        return torch.cuda.nvtx.range_push(msg) if self._name == "cuda" else None

    def range_pop(self) -> Any:
        return torch.cuda.nvtx.range_pop() if self._name == "cuda" else None

    # ---- streams and random numbers

    def Stream(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._kind is None else torch.Stream(self.device(), *args, **kwargs)

    def Event(self, **kwargs: Any) -> Any:
        return None if self._kind is None else torch.Event(self.device(), **kwargs)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else stream  # type: ignore[no-any-return]

    def current_stream(self, device_index: int | None = None) -> Any:
        return self._call("current_stream", device_index)

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return self._rng("get_rng_state", device_index)  # type: ignore[no-any-return]

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self._rng("set_rng_state", device_index, new_state)

    def _rng(self, name: str, device_index: int | None, *state: torch.Tensor) -> Any:
        module = torch if self._kind is None else torch.get_device_module(self._name)
        return getattr(module, name)(*state, *([] if device_index is None else [device_index]))


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    return DeepSpeedAccelerator()


def is_current_accelerator_supported() -> bool:
    return True
