"""torch.accelerator (or the CPU) under DeepSpeed's names, and DeepSpeed's estimates of memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard import Policy, Precision
from zeroshard.observe.memory import formula


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
        """Return the number of devices, or the number of this machine's ranks on a CPU, as DeepSpeed does."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if self._kind is None else torch.accelerator.device_count()

    def _call(self, name: str, device_index: int | None = None) -> Any:
        """Call a function of torch.accelerator; return None on a CPU."""
        if self._kind is None:
            return None
        return getattr(torch.accelerator, name)(*[] if device_index is None else [device_index])

    set_device = partialmethod(_call, "set_device_index")
    synchronize = partialmethod(_call, "synchronize")

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        return dist.get_default_backend_for_device(self._name)

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    # ---- features

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

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor if self._kind is None else tensor.pin_memory()

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def amp(self) -> Any:
        return torch.amp

    # ---- memory in bytes; 0 on a CPU, whose memory torch does not count

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

    # ---- ranges for a profiler

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

    current_stream = partialmethod(_call, "current_stream")
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    initial_seed = staticmethod(torch.initial_seed)

    def random(self) -> Any:
        return torch.random

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


# ---------------------------------------------------------------------- memory

_GB = 2**30


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the use of the accelerator's memory on rank 0, if `force` is set."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    accelerator = get_accelerator()
    used = accelerator.total_memory() - accelerator.available_memory()
    print(
        f"{message}: allocated {accelerator.memory_allocated() / _GB:.2f} GB (peak "
        f"{accelerator.max_memory_allocated() / _GB:.2f}), reserved {accelerator.memory_reserved() / _GB:.2f} GB, in "
        f"use on {accelerator.device_name()} {used / _GB:.2f} GB"
    )
    accelerator.reset_peak_memory_stats()


def empty_cache() -> None:
    get_accelerator().empty_cache()


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of elements of all parameters, and of those of the largest layer."""
    layers = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
    return number_of_parameters(model), max(layers)


def number_of_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _need(
    stage: int, total: float, largest: float, machine: tuple[int, int], optimizer: bool, parameters: bool = False,
    born: bool = False,
) -> tuple[float, float]:  # fmt: skip
    """Return the bytes that model states of bf16 training with Adam need: in each machine's CPU memory, and on each accelerator.

    Activations and communication buffers are not included.

    Args:
        stage: the ZeRO stage.
        total: the number of elements of all parameters.
        largest: the number of elements of the largest layer, which is whole with its gradient at stage 3 while it runs.
        machine: (ranks per machine, machines).
        optimizer: whether optimizer states and sharded gradients are in CPU memory.
        parameters: whether parameters are in CPU memory.
        born: whether the model is born sharded. Otherwise every rank builds the whole model in fp32 in CPU memory.
    """
    per_machine, machines = machine
    dtypes = Precision(torch.bfloat16).resolve(torch.bfloat16)
    nbytes = formula(Policy.stage(stage), dtypes, total, per_machine * machines)
    on_host = {"parameters"} if parameters else set()
    if optimizer:
        on_host |= {"optimizer", "gradients"}  # sharded gradients are stored with the optimizer
    host = sum(nbytes[state] for state in on_host)
    accelerator = sum(nbytes.values()) - host
    if stage == 3:
        accelerator += 4 * largest
    start = 4 * largest if born else 4 * total
    return max(host, start) * per_machine, accelerator


_PLACES = {True: "cpu ", False: "none"}
"""DeepSpeed's name of a place, by whether states are offloaded."""


def _print_needs(model: str, machine: tuple[int, int], factor: float, needs: Mapping[str, tuple[float, float]]) -> None:
    """Print a line for each set of options, with the bytes that `_need` returns for it."""
    per_machine, machines = machine
    print(
        "Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {machines} {'nodes' if machines > 1 else 'node'}, "
        f"{per_machine} {'GPUs' if per_machine > 1 else 'GPU'} per node.\n"
        f"SW: Model with {model}.\n"
        "  per CPU  |  per GPU |   Options"
    )
    for options, (host, accelerator) in needs.items():
        print(f" {host * factor / _GB:7.2f}GB | {accelerator / _GB:6.2f}GB | {options}")


def estimate_zero2_model_states_mem_needs(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:  # fmt: skip
    """Return the bytes of model states at stage 2: in a machine's CPU memory, and on a rank's accelerator."""
    host, accelerator = _need(2, total_params, 0, (num_gpus_per_node, num_nodes), cpu_offload)
    return int(host * additional_buffer_factor), int(accelerator)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    machine = (num_gpus_per_node, num_nodes)
    needs = {f"offload_optimizer={_PLACES[one]}": _need(2, total_params, 0, machine, one) for one in (True, False)}
    _print_needs(f"{int(total_params / 1e6)}M total params", machine, additional_buffer_factor, needs)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    estimate_zero2_model_states_mem_needs_all_cold(
        number_of_parameters(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs(
    total_params: float, largest_layer_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, cpu_offload: bool = True,
    cpu_offload_params: bool = True, zero_init: bool = True, additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:  # fmt: skip
    """Return the bytes of model states at stage 3: in a machine's CPU memory, on a rank's accelerator, and of the largest layer."""
    machine = (num_gpus_per_node, num_nodes)
    offloads_parameters = cpu_offload and cpu_offload_params
    host, accelerator = _need(
        3, total_params, largest_layer_params, machine, cpu_offload, offloads_parameters, zero_init
    )
    return int(host * additional_buffer_factor), int(accelerator), int(4 * largest_layer_params)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float, largest_layer_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:  # fmt: skip
    machine = (num_gpus_per_node, num_nodes)
    needs = {}
    for optimizer, parameters in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            places = f"offload_param={_PLACES[parameters]}, offload_optimizer={_PLACES[optimizer]}"
            needs[f"{places}, zero_init={int(zero_init)}"] = _need(
                3, total_params, largest_layer_params, machine, optimizer, parameters, zero_init
            )
    model = f"{int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params"
    _print_needs(model, machine, additional_buffer_factor, needs)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    total, largest = model_to_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )
