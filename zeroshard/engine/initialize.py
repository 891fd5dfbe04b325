"""Owns `initialize(config) -> Engine`, which creates everything that a config names."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset

from zeroshard.core.named_parameter import EP, divides_experts
from zeroshard.core.transport.members import group_of
from zeroshard.engine.config.document import listing
from zeroshard.engine.config.load import (
    Config,
    expert_parallel_ranks,
    load_config,
    read,
    refuse_without_batch_size,
    tensor_parallel_ranks,
    without_training,
)
from zeroshard.engine.config.schema import Schema
from zeroshard.engine.engine import Engine
from zeroshard.engine.engine_optimizer import EngineOptimizer
from zeroshard.engine.from_config import create_optimizer
from zeroshard.engine.recompute.checkpointer import Checkpointer
from zeroshard.engine.schedulers import create_scheduler
from zeroshard.errors import UsageError
from zeroshard.launch import join_ranks, local_device
from zeroshard.model.emulation import warn_if_emulated
from zeroshard.model.expert_parallel import divide_experts, expert_mesh
from zeroshard.model.meshes import mesh_of, refuse_unfit_policy
from zeroshard.model.shard import BACKEND, Backend, free_for_sharding, shard_on
from zeroshard.model.tensor_parallel import (
    divide,
    mesh_around,
    replace_parameters,
    tensor_mesh,
)
from zeroshard.optim.lr_schedules import floored
from zeroshard.optim.states import looks_at_whole_parameters
from zeroshard.policy import refuse_uneven


def initialize(
    args: Any = None, model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None, training_data: Dataset[Any] | None = None, lr_scheduler: Any = None,
    collate_fn: Callable[..., Any] | None = None, config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dist_init_required: bool | None = None, auto: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None, attributes: type | None = None,
) -> tuple[Engine, EngineOptimizer, DataLoader[Any] | None, Any]:  # fmt: skip
    """Create an engine from a DeepSpeed config. Every rank must call it.

    Args:
        args: an argparse namespace; its `deepspeed_config` is the config if `config` is not given.
        model: the module to train. `initialize` moves it to this rank's accelerator.
        optimizer: a torch optimizer, or a callable that creates an optimizer from parameters. It replaces the config's
            block. Without an optimizer here or in the config, the engine is for evaluation only, and the config's
            scheduler has no effect.
        model_parameters: parameters or param groups for the config's optimizer or the callable; default: all that
            require a gradient. It has no effect if `optimizer` is a torch optimizer.
        training_data: a dataset; `initialize` returns a loader over this rank's part of it.
        lr_scheduler: a scheduler, or a callable that creates a scheduler from an optimizer. It replaces the config's block.
        collate_fn: the loader's function that collates samples into a batch.
        config: a path, a dict or any other Mapping.
        dist_init_required: whether to initialise torch.distributed; default: only if the launcher's environment
            names several ranks. With False, the caller must have initialised it.
        auto: values for "auto" keys of the config that zeroshard cannot derive, such as `auto={"lr": 3e-4,
            "total_num_steps": 1000}`. If the config names no batch size, add `"train_micro_batch_size_per_gpu": 8`.
        group: the data-parallel process group; default: all ranks. If the model is divided (by DTensors, or by the
            config's `tensor_parallel.autotp_size`), the default is the ranks that hold the same part. For divided experts
            (`expert_parallel.autoep_size`), it is the mesh that `shard` describes.
        attributes: a class whose properties the parameters gain; see `shard`.

    Returns:
        (engine, optimizer, loader or None, scheduler or None)

    Raises:
        ConfigError, UsageError: the config or an argument cannot be used. The message names the value and the remedy.
        StorageError: a folder cannot hold model states.
        CollectiveError: some ranks did not call it.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialize(model=...) takes a torch.nn.Module, not {type(model).__name__}. Pass the model.")
    if not (optimizer is None or isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer)):
        raise UsageError(
            f"initialize(optimizer=...) is a {type(optimizer).__name__}. Pass a torch optimizer, a callable that makes one from a "
            'list of parameters, or None with an optimizer in the config: "optimizer": {"type": "AdamW"}.'
        )
    if config is None:
        config = getattr(args, "deepspeed_config", None)
    if config is None:
        raise UsageError("initialize needs a config: pass config=PATH or a dict, or set args.deepspeed_config.")
    device = local_device()
    join_ranks(device, dist_init_required)
    free_for_sharding(model)
    mesh = mesh_of(model)
    ranks, ranks_of_experts = _ranks_that_divide(config, mesh, group)
    world_size = dist.get_world_size(group_of(group)) if dist.is_initialized() else 1
    if group is None:
        refuse_uneven(ranks, world_size)
        world_size //= ranks
    resolved = load_config(_without_schedule(config, optimizer), world_size, model, auto)
    if resolved.schema.dump_state:
        console = Console(quiet=dist.is_initialized() and dist.get_rank() != 0)
        console.print(listing(resolved, console.width), soft_wrap=True, highlight=False)
    if any(given is not None for given in (optimizer, resolved.schema.optimizer, training_data)):
        refuse_without_batch_size(resolved)
    if mesh is not None:
        group = group or _group_around(mesh)
    elif max(ranks, ranks_of_experts) > 1:
        group, made = _divide(model.to(device), ranks, ranks_of_experts, resolved)
        if isinstance(optimizer, torch.optim.Optimizer):
            replace_parameters(optimizer.param_groups, made)
        if model_parameters is not None:
            model_parameters = replace_parameters(list(model_parameters), made)
    engine = make_engine(resolved, model, device, optimizer, model_parameters, lr_scheduler, group, attributes)
    engine.client_optimizer = optimizer
    warn_if_emulated(model, group_of(group), resolved.autocast_dtype)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _without_schedule(config: Any, optimizer: Any) -> Any:
    """Return the config; if nothing names an optimizer, without its scheduler."""
    if optimizer is None and read(config).get("optimizer") is None:
        return without_training(config)
    return config


def _divide(
    model: nn.Module, ranks: int, ranks_of_experts: int, config: Config
) -> tuple[DeviceMesh, Mapping[nn.Parameter, nn.Parameter]]:
    """Divide a model, or its experts, over ranks. Return `group` for `shard`, and the new parameters by those they replace."""
    device = next(model.parameters()).device
    if ranks > 1:
        mesh = tensor_mesh(ranks, device.type)
        made = divide(model, mesh, config.precision)
        return _group_around(mesh), made
    refuse_unfit_policy(config.policy)
    whole = expert_mesh(ranks_of_experts, device.type)
    made = divide_experts(model, whole, config.precision)
    return whole["dp", EP], made


def _group_around(mesh: DeviceMesh) -> DeviceMesh:
    """Return `group` for `shard`, for a model that is divided over the ranks of this mesh. Every rank of the job must call it."""
    whole = mesh_around(mesh)
    return whole if divides_experts(mesh) else whole["dp"]


def _ranks_that_divide(
    config: Any, mesh: DeviceMesh | None, group: dist.ProcessGroup | DeviceMesh | None
) -> tuple[int, int]:
    """Return the numbers of ranks that divide the model, and that divide its experts, or will divide them.

    Raises:
        UsageError: the config and the model's DTensors disagree, or both the config and `group` choose the ranks.
    """
    named = {
        "tensor_parallel.autotp_size": tensor_parallel_ranks(config),
        "expert_parallel.autoep_size": expert_parallel_ranks(config),
    }
    of_model, of_experts = named
    if min(named.values()) > 1:
        raise UsageError(
            f"{of_model} and {of_experts} are both above 1, and zeroshard divides either the model or its experts over ranks. "
            "Leave one of them out."
        )
    if mesh is not None:
        divided, other = (of_experts, of_model) if divides_experts(mesh) else (of_model, of_experts)
        if named[divided] not in (1, mesh.size()) or named[other] > 1:
            key = divided if named[other] == 1 else other
            raise UsageError(
                f"{key} is {named[key]}, but the model is already divided over {mesh.size()} ranks. "
                + (f"Set it to {mesh.size()}, or leave it out." if key == divided else "Leave it out.")
            )
        return (1, mesh.size()) if divided == of_experts else (mesh.size(), 1)
    for key, size in named.items():
        if size > 1 and group is not None:
            raise UsageError(
                f"{key} = {size} determines the data-parallel ranks itself: leave group= (mpu, sp_size) "
                "out. To use both, divide the model with parallelize_module first."
            )
    return named[of_model], named[of_experts]


def make_engine(
    config: Config, model: nn.Module, device: torch.device, optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None, lr_scheduler: Any = None,
    group: dist.ProcessGroup | DeviceMesh | None = None, attributes: type | None = None, backend: Backend = BACKEND,
) -> Engine:  # fmt: skip
    """Create the engine for a resolved config on a backend. The other arguments are those of `initialize`."""
    if any(tensor.device != device for tensor in chain(model.parameters(), model.buffers())):
        model.to(device)
    _warn_of_unused_blocks(config.schema, {"optimizer": optimizer, "scheduler": lr_scheduler})
    checkpointing = Checkpointer.of(config, model)
    sharded = None
    try:
        optimizer = _choose_optimizer(config, model, optimizer, model_parameters)
        elementwise = None
        if config.schema.zero_allow_untested_optimizer:
            elementwise = looks_at_whole_parameters(type(optimizer)) is False
        sharded = shard_on(
            backend, model, optimizer, config.policy, config.precision, group=group, attributes=attributes, elementwise=elementwise,
            **config.shard_arguments,
        )  # fmt: skip
        schema = config.schema
        if lr_scheduler is None and schema.scheduler is not None:
            lr_scheduler = create_scheduler(schema.scheduler, sharded.optimizer, schema.min_lr)
        elif lr_scheduler is not None:
            if not hasattr(lr_scheduler, "step"):
                lr_scheduler = lr_scheduler(sharded.optimizer)
            lr_scheduler = floored(lr_scheduler, sharded.optimizer, schema.min_lr)
        engine = Engine(sharded, config, lr_scheduler, device, checkpointing)
    except BaseException:  # the next call may get the same model
        if checkpointing is not None:
            checkpointing.remove()
        if sharded is not None:
            sharded.remove_alone()
        raise
    if optimizer is None:  # for evaluation only: it ends when the model gets an engine that trains
        sharded.remove_before_next_sharding(engine.destroy)
    return engine


def _warn_of_unused_blocks(schema: Schema, given: Mapping[str, Any]) -> None:
    """Warn on rank 0 if an object was passed whose block the config has too, as when a DeepSpeed config is reused."""
    for key, passed in given.items():
        block = getattr(schema, key)
        if passed is not None and block is not None and not (dist.is_initialized() and dist.get_rank()):
            warnings.warn(
                f"the {key} that was passed is used, and the config's block `{key}` ({block.type}) has no effect. Leave one of "
                "them out.",
                stacklevel=4,
            )


def _choose_optimizer(
    config: Config, model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None
) -> torch.optim.Optimizer | None:
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if model_parameters is None:
        model_parameters = (parameter for parameter in model.parameters() if parameter.requires_grad)
    parameters = list(model_parameters)
    if optimizer is not None:
        made = optimizer(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(
                f"the optimizer callable returned {type(made).__name__}, not a torch optimizer. Return one."
            )
        return made
    if config.schema.optimizer is None:
        return None
    return create_optimizer(config.schema.optimizer, parameters, model)
