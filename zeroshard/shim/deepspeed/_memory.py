"""DeepSpeed's tables of the memory of model states, with zeroshard's figures; and the memory in use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from deepspeed.accelerator import get_accelerator
from zeroshard import Policy, Precision
from zeroshard.observe.memory import formula

_GB = 2**30


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print the use of the accelerator's memory, on rank 0; nothing without `force`."""
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
    """Return (the number of parameters, that of the largest layer)."""
    layers = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
    return number_of_parameters(model), max(layers)


def number_of_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@dataclass(frozen=True)
class _Need:
    """The bytes needed on each rank's accelerator, and in each machine's CPU memory."""

    accelerator: float
    host: float


def _need(
    stage: int, total: float, largest: float, machine: tuple[int, int], optimizer: bool, parameters: bool = False,
    born: bool = False,
) -> _Need:  # fmt: skip
    """Return the needs of training in bf16 with Adam, without activations and communication buffers.

    Args:
        largest: parameters of the largest layer: at stage 3 it is whole, with its gradient, while it runs.
        machine: (ranks on each, machines).
        optimizer, parameters: are on the CPU.
        born: the model is born sharded; else every rank builds the whole in fp32, in CPU memory.
    """
    per_machine, machines = machine
    dtypes = Precision(torch.bfloat16).resolve(torch.bfloat16)
    nbytes = formula(Policy.stage(stage), dtypes, total, per_machine * machines)
    on_host = {"parameters"} if parameters else set()
    if optimizer:
        on_host |= {"optimizer", "gradients"}  # sharded ones go with the optimizer
    host = sum(nbytes[state] for state in on_host)
    accelerator = sum(nbytes.values()) - host
    if stage == 3:
        accelerator += 4 * largest
    start = 4 * largest if born else 4 * total
    return _Need(accelerator, max(host, start) * per_machine)


def _print_head(model: str, machine: tuple[int, int]) -> None:
    per_machine, machines = machine
    print(
        "Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {machines} {'nodes' if machines > 1 else 'node'}, "
        f"{per_machine} {'GPUs' if per_machine > 1 else 'GPU'} per node.\n"
        f"SW: Model with {model}.\n"
        "  per CPU  |  per GPU |   Options"
    )


def _print_line(need: _Need, factor: float, options: str) -> None:
    print(f" {need.host * factor / _GB:7.2f}GB | {need.accelerator / _GB:6.2f}GB | {options}")


def _place(offloaded: bool) -> str:
    return "cpu " if offloaded else "none"


def estimate_zero2_model_states_mem_needs(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:  # fmt: skip
    """Return Return (bytes of a machine's CPU memory, of a rank's accelerator).."""
    need = _need(2, total_params, 0, (num_gpus_per_node, num_nodes), cpu_offload)
    return int(need.host * additional_buffer_factor), int(need.accelerator)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    machine = (num_gpus_per_node, num_nodes)
    _print_head(f"{int(total_params / 1e6)}M total params", machine)
    for offload in (True, False):
        need = _need(2, total_params, 0, machine, offload)
        _print_line(need, additional_buffer_factor, f"offload_optimizer={_place(offload)}")


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
    """Return Return (bytes of a machine's CPU memory, of a rank's accelerator, and of these of the largest layer).."""
    machine = (num_gpus_per_node, num_nodes)
    need = _need(
        3, total_params, largest_layer_params, machine, cpu_offload, cpu_offload and cpu_offload_params, zero_init
    )
    return int(need.host * additional_buffer_factor), int(need.accelerator), int(4 * largest_layer_params)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float, largest_layer_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:  # fmt: skip
    machine = (num_gpus_per_node, num_nodes)
    largest = f"{int(largest_layer_params / 1e6)}M largest layer params"
    _print_head(f"{int(total_params / 1e6)}M total params, {largest}", machine)
    for optimizer, parameters in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            need = _need(3, total_params, largest_layer_params, machine, optimizer, parameters, zero_init)
            places = f"offload_param={_place(parameters)}, offload_optimizer={_place(optimizer)}"
            _print_line(need, additional_buffer_factor, f"{places}, zero_init={int(zero_init)}")


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    total, largest = model_to_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )
