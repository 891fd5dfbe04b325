"""Stage 3: generation, and what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

import zeroshard
from deepspeed._missing import missing, refused
from deepspeed.runtime.zero.estimates import model_to_params, needs, print_head, print_line

__all__ = [
    "DeepSpeedZeroOptimizer_Stage3", "estimate_zero3_model_states_mem_needs", "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live", "model_to_params", "unwrap_model_for_generation",
]  # fmt: skip
__getattr__ = missing(__name__)
DeepSpeedZeroOptimizer_Stage3 = refused(
    "DeepSpeedZeroOptimizer_Stage3", "deepspeed.initialize makes the engine's optimizer."
)


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Inside, the engine's parameters are whole, and each rank may generate as much as it likes."""
    with zeroshard.unsharded(model.parameters()):
        yield model


def estimate_zero3_model_states_mem_needs(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(bytes of a machine's CPU memory, of a rank's accelerator, and of these of the largest layer)"""
    need = needs(
        3, total_params, largest_layer_params, (num_gpus_per_node, num_nodes),
        optimizer=cpu_offload, parameters=cpu_offload_params and cpu_offload, zero_init=zero_init,
    )  # fmt: skip
    return int(need.host * additional_buffer_factor), int(need.accelerator), int(4 * largest_layer_params)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: float,
    largest_layer_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print a table of what model states take at stage 3."""
    machine = (num_gpus_per_node, num_nodes)
    print_head(
        f"{int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer params", machine
    )
    for optimizer, parameters in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            need = needs(
                3,
                total_params,
                largest_layer_params,
                machine,
                optimizer=optimizer,
                parameters=parameters,
                zero_init=zero_init,
            )
            places = (
                f"offload_param={'cpu ' if parameters else 'none'}, offload_optimizer={'cpu ' if optimizer else 'none'}"
            )
            print_line(need, additional_buffer_factor, f"{places}, zero_init={int(zero_init)}")


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of a model."""
    total, largest = model_to_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )
