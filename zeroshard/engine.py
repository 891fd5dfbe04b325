"""Owns `initialize(config) -> Engine`: the road with a JSON config, in the shape that DeepSpeed users know.

The engine is a thin layer over `shard`: it reads the config, counts microbatches, and calls the plain road.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from zeroshard.config.load import Config, load_config
from zeroshard.errors import UsageError
from zeroshard.optim.from_config import create_optimizer
from zeroshard.optim.lr_schedules import create_scheduler
from zeroshard.optim.sharded_optimizer import ShardedOptimizer
from zeroshard.shard import Sharded, shard


class Engine:
    """Trains one model: `loss = engine(batch); engine.backward(loss); engine.step()` for each microbatch.

    Attributes:
        module: the user's own model.
        optimizer, lr_scheduler: what the config or the caller named.
        global_steps, micro_steps, global_samples, skipped_steps: counters since the start.
    """

    def __init__(self, sharded: Sharded, config: Config, lr_scheduler: Any, device: torch.device) -> None:
        self.module = sharded.model
        self.optimizer: ShardedOptimizer = sharded.optimizer
        self.lr_scheduler = lr_scheduler
        self.config = config
        self.device = device
        self.local_rank = int(os.environ.get("LOCAL_RANK", 0))
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self._sharded = sharded
        self._grad_norm: float | None = None
        self._backward_done = False

    # ------------------------------------------------------------------ one microbatch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Compute this microbatch's gradients. Returns the loss divided by the accumulation steps.

        Args:
            loss: a scalar that depends on the model.
            scale_wrt_gas: divide by gradient_accumulation_steps, so that a step takes the mean over microbatches.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UsageError(f"engine.backward takes a scalar loss tensor, not {what}.")
        if self._backward_done:
            raise UsageError(
                "engine.backward was called twice for one microbatch: call engine.step() after each backward."
            )
        scaled = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        with self._sharded.accumulate(not self.is_gradient_accumulation_boundary()):
            if scaled.requires_grad:
                scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            elif torch.is_grad_enabled() and self.optimizer.views:
                raise UsageError(
                    "the loss does not require a gradient: was it computed under torch.no_grad(), or detached?"
                )
            self._sharded.finish_backward()
        self._backward_done = True
        return scaled.detach()

    def step(self) -> None:
        """End the microbatch; at the last one of a step, clip, update the parameters and move the schedule."""
        if not self._backward_done:
            raise UsageError("engine.step() was called without a backward: call engine.backward(loss) first.")
        self._backward_done = False
        if self.is_gradient_accumulation_boundary():
            clipping = self.config.gradient_clipping
            self._grad_norm = self._sharded.clip_grad_norm_(clipping) if clipping else self.optimizer.grad_norm()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the present microbatch is the last of its step."""
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    # ------------------------------------------------------------------ what it knows

    def get_global_grad_norm(self) -> float | None:
        """The global L2 norm of the last step's gradients before clipping; None before the first step."""
        return self._grad_norm

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def train_batch_size(self) -> int:
        """Samples of one optimizer step, over all ranks and microbatches."""
        return self.config.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of one forward on one rank."""
        return self.config.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Microbatches per optimizer step."""
        return self.config.batch.accumulation

    def zero_optimization_stage(self) -> int:
        """The stage that the config names."""
        return self.config.stage

    def memory_report(self) -> dict[str, int]:
        """Bytes of live storage on this rank: `parameters`, `gradients`, `optimizer`, `buffers` (communication scratch)."""
        return self._sharded.memory_report()

    def memory_formula(self) -> dict[str, float]:
        """What the ZeRO paper's formulas give for this model, policy and world size, with Adam."""
        return self._sharded.memory_formula()

    def comm_report(self) -> dict[str, int]:
        """Bytes that this rank sent since the last call, by collective, counted as they are sent."""
        return self._sharded.comm_report()

    def train(self, mode: bool = True) -> Engine:
        """As `module.train`."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """As `module.eval`."""
        return self.train(False)

    def destroy(self) -> None:
        """Take zeroshard off: the module is whole and ordinary again. Every rank must call it."""
        self._sharded.remove()


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
    group: dist.ProcessGroup | None = None,
) -> tuple[Engine, ShardedOptimizer, DataLoader[Any] | None, Any]:
    """Make an engine from a DeepSpeed config. Every rank must call it.

    Args:
        args: an argparse namespace; its `deepspeed_config` is the config where `config` is not given.
        model: the module to train; it is moved to this rank's accelerator.
        optimizer: a torch optimizer, or what makes one from parameters; takes the place of the config's block.
        model_parameters: parameters or param groups for the config's optimizer; default: all that require a gradient.
        training_data: a dataset; a loader over this rank's part of it is returned.
        lr_scheduler: a scheduler, or what makes one from an optimizer; takes the place of the config's block.
        collate_fn: for the loader.
        config: a path, a dict or any Mapping.
        dist_init_required: initialise torch.distributed; default: where the launcher's environment asks for it.
        group: the data-parallel process group; default: all ranks.

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
    device = _device()
    _join_ranks(dist_init_required, device)
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    resolved = load_config(config, world_size)
    model.to(device)
    sharded = shard(
        model,
        _choose_optimizer(resolved, model, optimizer, model_parameters),
        resolved.policy,
        precision=resolved.precision,
        bucket_numel=resolved.bucket_numel,
        overlap=resolved.overlap,
        group=group,
    )
    if lr_scheduler is None:
        block = resolved.schema.scheduler
        lr_scheduler = create_scheduler(block, sharded.optimizer) if block is not None else None
    elif not hasattr(lr_scheduler, "step"):
        lr_scheduler = lr_scheduler(sharded.optimizer)
    loader = _loader(training_data, resolved, collate_fn, group) if training_data is not None else None
    return Engine(sharded, resolved, lr_scheduler, device), sharded.optimizer, loader, lr_scheduler


def _device() -> torch.device:
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _join_ranks(required: bool | None, device: torch.device) -> None:
    launched = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if not dist.is_initialized() and (launched if required is None else required):
        dist.init_process_group(dist.get_default_backend_for_device(device))


def _choose_optimizer(
    config: Config, model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None
) -> torch.optim.Optimizer:
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
        raise UsageError("there is no optimizer: give initialize one, or the config an `optimizer` block.")
    return create_optimizer(config.schema.optimizer, parameters)


def _loader(
    data: Dataset[Any], config: Config, collate_fn: Callable[..., Any] | None, group: dist.ProcessGroup | None
) -> DataLoader[Any]:
    world_size, rank = config.batch.world_size, dist.get_rank(group) if dist.is_initialized() else 0
    sampler: DistributedSampler[Any] = DistributedSampler(
        data, world_size, rank, drop_last=config.schema.dataloader_drop_last
    )
    return DataLoader(
        data, config.batch.micro, sampler=sampler, collate_fn=collate_fn, drop_last=config.schema.dataloader_drop_last
    )
