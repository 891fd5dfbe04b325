"""Owns the division of the experts of a transformers model over ranks, by the model's own plan.

A plan (`model.ep_plan`) names the experts' modules and parameters: `{"model.layers.*.mlp.experts": "ep_dispatch_experts",
"model.layers.*.mlp.experts.down_proj": "grouped_gemm", ...}`. transformers' `apply_expert_parallelism` makes the parameters
DTensors, and has each rank send its tokens to the ranks of their experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zeroshard.core.bucketing import kept_in_fp32
from zeroshard.core.named_parameter import EP, name_of, named_parameters
from zeroshard.core.transport.base import Collectives
from zeroshard.core.transport.choose import create_collectives
from zeroshard.errors import UsageError
from zeroshard.model.born import BornSharded
from zeroshard.model.tensor_parallel import agreed_size, pattern_of
from zeroshard.policy import Precision
from zeroshard.torch_private import is_distributed

EXPERTS, WEIGHTS = "ep_dispatch_experts", "grouped_gemm"
"""The styles of a plan: of a module of experts, and of its parameters."""
_ARGUMENTS = ("model", "ep_mesh", "tp_mesh", "plan", "ep_implementation")
_REMEDY = (
    "Leave expert_parallel out of the config, or first divide the experts yourself (docs/mixtures_of_experts.md, In your own "
    "loop)."
)


class UnevenExperts(UsageError):
    """The ranks cannot divide the experts of a layer evenly."""


def plan_of_experts(model: nn.Module, size: int) -> dict[str, str]:
    """Return the styles that a model's plan gives to experts' modules and parameters, by full name.

    Raises:
        UsageError: the model has no plan, or one that `size` ranks cannot use.
    """
    kind = type(model).__name__
    if hasattr(model, "peft_config"):
        raise UsageError(
            f"experts of a PEFT model ({kind}) cannot be divided by the config: adapters may change them. Leave expert_parallel "
            "out of it."
        )
    plan: Mapping[str, str] = getattr(model, "ep_plan", None) or {}
    if not plan:
        raise UsageError(f"{kind} has no plan for expert parallelism (transformers' `model.ep_plan`). {_REMEDY}")
    styles: dict[str, str] = {}
    experts = dict(named_parameters(model, all_names=True))
    for name in [*experts, *(name_of(fqn) for fqn, _ in model.named_modules())]:
        style = plan.get(pattern_of(name))
        if style is None:
            continue
        if style not in (EXPERTS, WEIGHTS):
            raise UsageError(f'the plan of {kind} divides {name} as "{style}", which is not supported. {_REMEDY}')
        if style == WEIGHTS and experts[name].shape[0] % size:
            raise UnevenExperts(
                f"{name} has {experts[name].shape[0]} experts, which {size} ranks (expert_parallel.autoep_size) cannot divide "
                f"evenly: choose a divisor of {experts[name].shape[0]}."
            )
        styles[name] = style
    if not {EXPERTS, WEIGHTS} <= {*styles.values()}:
        raise UsageError(f"the plan of {kind} names no experts that can be divided. {_REMEDY}")
    return styles


def expert_mesh(size: int, device_type: str) -> DeviceMesh:
    """Create a mesh of all ranks whose last dimension is of one rank: ("dp", "ep", "tp"). Every rank of the job must call it.

    Raises:
        UsageError: `size` does not divide the number of ranks, or differs between ranks.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world % size:
        raise UsageError(
            f"expert_parallel.autoep_size = {size} does not divide the {world} ranks of the job: choose a divisor."
        )
    agreed_size(size, device_type, "ranks that divide experts")
    return mesh_of_experts(size, device_type)


def mesh_of_experts(size: int, device_type: str) -> DeviceMesh:
    """Create the mesh of `expert_mesh`, whose checks were made."""
    return init_device_mesh(device_type, (dist.get_world_size() // size, size, 1), mesh_dim_names=("dp", EP, "tp"))


def divide_experts(
    model: nn.Module,
    mesh: DeviceMesh,
    precision: Precision,
    collectives: Collectives | None = None,
    exchange: str = "auto",
) -> dict[nn.Parameter, nn.Parameter]:
    """Divide a model's experts over the dimension "ep" of an `expert_mesh`, in place, by its plan. Every rank must call it.

    Experts get rank 0's values, and the dtypes of `precision`. Other parameters and buffers keep theirs.

    Args:
        collectives: those of all ranks; default: new ones, of the default process group.
        exchange: the name of the exchange of tokens in transformers' registry.

    Returns:
        The new parameters, keyed by those that they replace.

    Raises:
        UsageError: the plan cannot be used (see `plan_of_experts`), this transformers cannot apply it, the model is already
            divided, or a parameter has no values.
    """
    apply = _apply_expert_parallelism()
    styles = plan_of_experts(model, mesh[EP].size())
    for name, parameter in named_parameters(model):
        if is_distributed(parameter):
            raise UsageError(f"parameter {name} is already a DTensor: divide a model only once.")
        if isinstance(parameter, BornSharded) or parameter.is_meta:
            raise UsageError(
                f"parameter {name} has no values here (it was born sharded, or is on the meta device), but expert parallelism "
                "divides whole parameters: build the model without zero.Init and sharded_init."
            )
    before = {name: one for name, one in model.named_parameters() if styles.get(name_of(name)) == WEIGHTS}
    in_fp32 = kept_in_fp32(model, precision)
    device = next(iter(before.values())).device
    used = collectives or create_collectives(None, device, what="expert parallelism", lasting=False)
    try:
        for parameter in before.values():
            wanted = precision.resolve(parameter.dtype, in_fp32=id(parameter) in in_fp32).param
            parameter.data = parameter.data.to(wanted).contiguous()
            used.broadcast(parameter.data.view(-1).view(torch.uint8))
    finally:
        if collectives is None:
            used.close()
    full_names = {name_of(fqn): fqn for fqn, _ in model.named_modules()} | {name_of(fqn): fqn for fqn in before}
    apply(model, mesh[EP], mesh["tp"], {full_names[name]: style for name, style in styles.items()}, exchange)
    return {parameter: model.get_parameter(fqn) for fqn, parameter in before.items()}


def register_exchange(name: str, run: Callable[..., Tensor]) -> str:
    """Register an exchange of tokens with transformers. Return its name, for `divide_experts`.

    Args:
        run: called with a module of experts' own forward, and its arguments: tokens, [T, h], and the experts of each token and
            their weights, [T, k]. Returns [T, h].
    """
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

    class Exchange(EPImplementation):  # type: ignore[misc]
        def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return run(self.experts_forward, hidden_states, top_k_index, top_k_weights)

    EPImplementationInterface.register(name, Exchange)
    return name


def _apply_expert_parallelism() -> Callable[..., Any]:
    try:
        from transformers.distributed.expert_parallel import apply_expert_parallelism
    except ImportError:
        found = None
    else:
        found = apply_expert_parallelism
    if found is None or not {*_ARGUMENTS} <= {*inspect.signature(found).parameters}:
        raise UsageError(
            "this transformers cannot divide experts as zeroshard expects (transformers.distributed.expert_parallel."
            f"apply_expert_parallelism with {', '.join(_ARGUMENTS)}): install transformers 5.24. {_REMEDY}"
        )
    return found
