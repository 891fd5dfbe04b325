"""Owns `initialize(config) -> Engine`: everything that a config names, made and put together. Called by users."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, Dataset

from zeroshard.config.load import Config, load_config, refuse_without_batch_size
from zeroshard.config.table import config_table
from zeroshard.data import StatefulLoader
from zeroshard.emulation import warn_if_emulated
from zeroshard.engine import Engine
from zeroshard.errors import UsageError
from zeroshard.launch import join_ranks, local_device
from zeroshard.optim.from_config import create_optimizer
from zeroshard.optim.lr_schedules import Floor, create_scheduler
from zeroshard.recompute.checkpointer import Checkpointer, Checkpointing
from zeroshard.shard import BACKEND, Backend, refuse_sharded, shard_on
from zeroshard.sharded import Sharded
from zeroshard.step.sharded_optimizer import ShardedOptimizer


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dist_init_required: bool | None = None,
    auto: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    attributes: type | None = None,
) -> tuple[Engine, ShardedOptimizer, DataLoader[Any] | None, Any]:
    """Make an engine from a DeepSpeed config. Every rank must call it.

    Args:
        args: an argparse namespace; its `deepspeed_config` is the config where `config` is not given.
        model: the module to train; it is moved to this rank's accelerator.
        optimizer: a torch optimizer, or what makes one from parameters; takes the place of the config's block. Without
            either, the engine is for evaluation alone.
        model_parameters: parameters or param groups for the config's optimizer; default: all that require a gradient.
        training_data: a dataset; a loader over this rank's part of it is returned.
        lr_scheduler: a scheduler, or what makes one from an optimizer; takes the place of the config's block.
        collate_fn: for the loader.
        config: a path, a dict or any Mapping.
        dist_init_required: initialise torch.distributed; default: where a launcher's environment names several ranks, see `launch`.
        auto: values for keys that are "auto" in the config and that only you know: `auto={"lr": 3e-4, "total_num_steps": 1000}`.
            A batch size also where the config names none, which is an error otherwise: `{"train_micro_batch_size_per_gpu": 8}`.
        group: the data-parallel process group; default: all ranks.
        attributes: a class whose properties the parameters show beside their own, see `shard`.

    Returns:
        (engine, optimizer, loader or None, scheduler or None)

    Raises:
        ConfigError, UsageError: say what was expected, what came, and what to do.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialize(model=...) takes a torch.nn.Module, not {type(model).__name__}.")
    config = config if config is not None else getattr(args, "deepspeed_config", None)
    if config is None:
        raise UsageError("initialize needs a config: config=PATH, a dict, or args.deepspeed_config.")
    device = local_device()
    join_ranks(device, dist_init_required)
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    resolved = load_config(config, world_size, model, auto)
    _show(resolved)
    if any(given is not None for given in (optimizer, resolved.schema.optimizer, training_data)):
        refuse_without_batch_size(resolved)
    refuse_sharded(model)
    engine = make_engine(resolved, model, device, optimizer, model_parameters, lr_scheduler, group, attributes)
    warn_if_emulated(model, group, resolved.autocast_dtype)
    loader = _loader(training_data, resolved, collate_fn, group) if training_data is not None else None
    engine.training_dataloader = loader
    return engine, engine.optimizer, loader, engine.lr_scheduler


def make_engine(
    config: Config,
    model: nn.Module,
    device: torch.device,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    group: dist.ProcessGroup | None = None,
    attributes: type | None = None,
    backend: Backend = BACKEND,
) -> Engine:
    """The engine of a resolved config. Arguments are as those of `initialize`; `backend`: what it runs on."""
    if any(tensor.device != device for tensor in chain(model.parameters(), model.buffers())):
        model.to(device)
    checkpointing = _checkpoint_units(config, model)
    optimizer = _choose_optimizer(config, model, optimizer, model_parameters)
    sharded = _shard(config, model, optimizer, group, attributes, backend)
    lr_scheduler = _choose_scheduler(config, sharded.optimizer, lr_scheduler)
    return Engine(sharded, config, lr_scheduler, device, checkpointing)


def _show(config: Config) -> None:
    if config.schema.dump_state:
        Console(quiet=dist.is_initialized() and dist.get_rank() != 0).print(config_table(config))


def _shard(
    config: Config,
    model: nn.Module,
    optimizer: Any,
    group: dist.ProcessGroup | None,
    attributes: type | None,
    backend: Backend,
) -> Sharded:
    return shard_on(
        backend,
        model,
        optimizer,
        config.policy,
        precision=config.precision,
        bucket_numel=config.bucket_numel,
        overlap=config.overlap,
        units=config.units,
        group=group,
        attributes=attributes,
    )


def _checkpoint_units(config: Config, model: nn.Module) -> Checkpointer | None:
    block = config.schema.activation_checkpointing
    if block.checkpoint_units is None:
        return None
    checkpointer = Checkpointer(Checkpointing.of(block))
    checkpointer.checkpoint_units(model, block.checkpoint_units, config.units)
    return checkpointer


def _choose_optimizer(
    config: Config, model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None
) -> torch.optim.Optimizer | None:
    parameters = (
        list(model_parameters) if model_parameters is not None else [p for p in model.parameters() if p.requires_grad]
    )
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if optimizer is not None:
        made = optimizer(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(f"the optimizer callable returned {type(made).__name__}, not a torch optimizer.")
        return made
    if config.schema.optimizer is None:
        return None
    return create_optimizer(config.schema.optimizer, parameters, model)


def _choose_scheduler(config: Config, optimizer: ShardedOptimizer, scheduler: Any) -> Any:
    block, floor = config.schema.scheduler, config.schema.min_lr
    if scheduler is not None and not hasattr(scheduler, "step"):
        scheduler = scheduler(optimizer)
    elif scheduler is None and block is not None:
        scheduler = create_scheduler(block, optimizer)
    return Floor(scheduler, optimizer, floor) if scheduler is not None and floor else scheduler


def _loader(
    data: Dataset[Any], config: Config, collate_fn: Callable[..., Any] | None, group: dist.ProcessGroup | None
) -> DataLoader[Any]:
    if isinstance(data, DataLoader):
        raise UsageError(
            "training_data is a dataset, not a DataLoader, whose batches cannot be cut by ranks: give "
            "training_data=loader.dataset and auto={'train_micro_batch_size_per_gpu': loader.batch_size}, "
            "or iterate over the loader yourself."
        )
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UsageError(
            f"training_data ({type(data).__name__}) has no length or cannot be indexed, so it cannot be cut by ranks: iterate "
            "over it yourself, a part of it on each rank."
        )
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    drop_last = config.schema.dataloader_drop_last
    return StatefulLoader(
        data, config.batch.micro, rank, config.batch.world_size, drop_last=drop_last, collate_fn=collate_fn
    )
