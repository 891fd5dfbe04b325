"""Stages 1 and 2: what they take."""

from __future__ import annotations

from torch import nn

from deepspeed._missing import missing, refused
from deepspeed.runtime.zero import estimates

__all__ = [
    "DeepSpeedZeroOptimizer", "estimate_zero2_model_states_mem_needs", "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live", "model_to_params",
]  # fmt: skip
__getattr__ = missing(__name__)
DeepSpeedZeroOptimizer = refused("DeepSpeedZeroOptimizer", "deepspeed.initialize makes the engine's optimizer.")


def model_to_params(model: nn.Module) -> int:
    """The number of parameters."""
    total: int = estimates.model_to_params(model)[0]
    return total


def estimate_zero2_model_states_mem_needs(
    total_params: float,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(bytes of a machine's CPU memory, of a rank's accelerator)"""
    machine = (num_gpus_per_node, num_nodes)
    need = estimates.needs(2, total_params, 0, machine, optimizer=cpu_offload, parameters=False, zero_init=False)
    return int(need.host * additional_buffer_factor), int(need.accelerator)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: float, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print a table of what model states take at stage 2."""
    machine = (num_gpus_per_node, num_nodes)
    estimates.print_head(f"{int(total_params / 1e6)}M total params", machine)
    for offload in (True, False):
        need = estimates.needs(2, total_params, 0, machine, optimizer=offload, parameters=False, zero_init=False)
        estimates.print_line(need, additional_buffer_factor, f"offload_optimizer={'cpu ' if offload else 'none'}")


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the table of a model."""
    estimate_zero2_model_states_mem_needs_all_cold(
        model_to_params(model), num_gpus_per_node, num_nodes, additional_buffer_factor
    )
