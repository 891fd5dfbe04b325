"""torch.accelerator under DeepSpeed's names; the CPU where there is none."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from deepspeed._missing import missing

__getattr__ = missing(__name__)


class DeepSpeedAccelerator:
    """What torch says of the accelerator that there is. Indices default to the current device."""

    def __init__(self) -> None:
        self._kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._name = "cpu" if self._kind is None else self._kind.type

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Tensor") and hasattr(torch, name):
            dtype = getattr(torch, name).dtype
            return lambda data=(): torch.tensor(data, dtype=dtype, device=self.current_device_name())
        raise AttributeError(
            f"zeroshard's get_accelerator() has no {name}. torch.accelerator and torch.{self._name} are behind it."
        )

    # ---- devices

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._kind is None else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return torch.device(self.device_name(device_index))

    def current_device(self) -> Any:
        return torch.accelerator.current_device_index() if self._kind is not None else "cpu"

    def current_device_name(self) -> str:
        return self.device_name(torch.accelerator.current_device_index()) if self._kind is not None else "cpu"

    def set_device(self, device_index: int) -> None:
        if self._kind is not None:
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """On a CPU: this machine's ranks, as DeepSpeed says it."""
        return (
            torch.accelerator.device_count() if self._kind is not None else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        )

    def is_available(self) -> bool:
        return True

    def synchronize(self, device_index: int | None = None) -> None:
        if self._kind is not None:
            torch.accelerator.synchronize(device_index)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        return dist.get_default_backend_for_device(self._name)

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    # ---- what it can

    def is_synchronized_device(self) -> bool:
        return self._kind is None

    resolves_data_dependency = use_host_timers = is_synchronized_device

    def handles_memory_backpressure(self) -> bool:
        return False

    is_triton_supported = is_graph_supported = handles_memory_backpressure

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._name == "cuda" else True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float, torch.half, torch.bfloat16]

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._kind is not None else tensor

    def amp(self) -> Any:
        return torch.amp

    # ---- memory, bytes; 0 on a CPU, whose memory is not torch's

    def empty_cache(self) -> None:
        if self._kind is not None:
            torch.accelerator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._memory("memory_allocated", device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._memory("max_memory_allocated", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._memory("memory_reserved", device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self._memory("max_memory_reserved", device_index)

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return dict(torch.accelerator.memory_stats(self.current_device())) if self._kind is not None else {}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._kind is not None:
            torch.accelerator.reset_peak_memory_stats()

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

    def _memory(self, what: str, device_index: int | None) -> int:
        if self._kind is None:
            return 0
        index = self.current_device() if device_index is None else device_index
        return int(getattr(torch.accelerator, what)(index))

    # ---- streams and random numbers

    def Stream(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._kind is None else torch.Stream(self.device(), *args, **kwargs)

    def Event(self, **kwargs: Any) -> Any:
        return None if self._kind is None else torch.Event(self.device(), **kwargs)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else stream  # type: ignore[no-any-return]

    def current_stream(self, device_index: int | None = None) -> Any:
        return None if self._kind is None else torch.accelerator.current_stream(device_index)

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        module = torch if self._kind is None else torch.get_device_module(self._name)
        return module.get_rng_state() if device_index is None else module.get_rng_state(device_index)  # type: ignore[no-any-return]

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        module = torch if self._kind is None else torch.get_device_module(self._name)
        module.set_rng_state(new_state) if device_index is None else module.set_rng_state(new_state, device_index)


@cache
def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator of this process."""
    return DeepSpeedAccelerator()


def is_current_accelerator_supported() -> bool:
    """Whatever torch runs on."""
    return True
