"""Tables of what model states take, in DeepSpeed's shape, with zeroshard's own figures."""

from __future__ import annotations

from torch import nn

from zeroshard import Place, Policy
from zeroshard.observe.estimate import Need, estimate

_GIB = 2**30


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """(parameters, those of the largest layer)"""
    layers = [sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules()]
    return sum(parameter.numel() for parameter in model.parameters()), max(layers)


def needs(
    stage: int,
    total: float,
    largest: float,
    machine: tuple[int, int],
    *,
    optimizer: bool,
    parameters: bool,
    zero_init: bool,
) -> Need:
    """Args: machine: (ranks on each, machines). optimizer, parameters: whether they are offloaded to the CPU."""
    policy = Policy.stage(stage)
    if optimizer or parameters:
        cpu, here = Place.CPU, Place.ACCELERATOR
        policy = policy.offloaded(optimizer=cpu if optimizer else here, parameters=cpu if parameters else here)
    per_machine, machines = machine
    return estimate(
        policy,
        total,
        ranks=per_machine * machines,
        ranks_per_machine=per_machine,
        largest=largest,
        whole_at_start=not zero_init,
    )


def print_head(model: str, machine: tuple[int, int]) -> None:
    """Print the lines above the table."""
    per_machine, machines = machine
    print(
        "Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {machines} {'nodes' if machines > 1 else 'node'}, "
        f"{per_machine} {'GPUs' if per_machine > 1 else 'GPU'} per node.\n"
        f"SW: Model with {model}."
    )
    print("  per CPU  |  per GPU |   Options")


def print_line(need: Need, factor: float, options: str) -> None:
    """Print one line of the table."""
    print(f" {need.host * factor / _GIB:7.2f}GB | {need.accelerator / _GIB:6.2f}GB | {options}")
