"""DeepSpeed's estimates of the memory that model states need, computed with zeroshard's formula."""

from __future__ import annotations

from itertools import product

import torch
from torch import nn

from zeroshard import Policy, Precision
from zeroshard.model.memory import formula

_GB = 2**30
_PLACES = {True: "cpu ", False: "none"}
"""DeepSpeed's name of a place, by whether states are offloaded."""


def number_of_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Return the number of elements in all parameters, and in the largest layer."""
    layers = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
    return number_of_parameters(model), max(layers)


def _need(
    stage: int, total: float, largest: float, gpus: int, nodes: int, factor: float, optimizer: bool, parameters: bool = False,
    born: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """Return the bytes of bf16 training with Adam: in each machine's CPU memory, and on each accelerator.

    Activations and communication buffers are not included.

    Args:
        largest: the number of elements of the largest layer. At stage 3, the layer and its gradient are unsharded while it runs.
        factor: a factor for the bytes in CPU memory.
        optimizer: whether optimizer states and sharded gradients are in CPU memory.
        parameters: whether parameters are in CPU memory.
        born: whether the model is born sharded. Otherwise every rank builds the full model in fp32 in CPU memory.
    """
    dtypes = Precision(torch.bfloat16).resolve(torch.bfloat16)
    nbytes = formula(Policy.stage(stage), dtypes, total, gpus * nodes)
    host = parameters * nbytes["parameters"] + optimizer * (nbytes["optimizer"] + nbytes["gradients"])
    accelerator = sum(nbytes.values()) - host
    if stage == 3:
        accelerator += 4 * largest
    start = 4 * largest if born else 4 * total
    return int(max(host, start) * gpus * factor), int(accelerator)


def _print_needs(stage: int, total: float, largest: float, gpus: int, nodes: int, factor: float) -> None:
    """Print the memory with each set of options that a stage has."""
    layer = f", {int(largest / 1e6)}M largest layer params" if stage == 3 else ""
    print(
        "Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {nodes} {'nodes' if nodes > 1 else 'node'}, {gpus} {'GPUs' if gpus > 1 else 'GPU'} per node.\n"
        f"SW: Model with {int(total / 1e6)}M total params{layer}.\n"
        "  per CPU  |  per GPU |   Options"
    )
    for optimizer, parameters, born in product([True, False], repeat=3):
        if (parameters and not optimizer) or (stage == 2 and (parameters or born)):
            continue
        host, accelerator = _need(stage, total, largest, gpus, nodes, factor, optimizer, parameters, born)
        options = f"offload_optimizer={_PLACES[optimizer]}"
        if stage == 3:
            options = f"offload_param={_PLACES[parameters]}, {options}, zero_init={int(born)}"
        print(f" {host / _GB:7.2f}GB | {accelerator / _GB:6.2f}GB | {options}")


def estimate_zero2_model_states_mem_needs(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:  # fmt: skip
    """Return the bytes of model states at stage 2: in a machine's CPU memory, and on a rank's accelerator."""
    return _need(2, total_params, 0, num_gpus_per_node, num_nodes, additional_buffer_factor, cpu_offload)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    _print_needs(2, total_params, 0, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    _print_needs(2, number_of_parameters(model), 0, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs(
    total_params: float, largest_layer_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, cpu_offload: bool = True,
    cpu_offload_params: bool = True, zero_init: bool = True, additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:  # fmt: skip
    """Return the bytes of model states at stage 3: in a machine's CPU memory, on a rank's accelerator, and in the largest layer."""
    host, accelerator = _need(
        3, total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor, cpu_offload,
        cpu_offload and cpu_offload_params, zero_init,
    )  # fmt: skip
    return host, accelerator, int(4 * largest_layer_params)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float, largest_layer_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:  # fmt: skip
    _print_needs(3, total_params, largest_layer_params, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    _print_needs(3, *model_to_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor)
