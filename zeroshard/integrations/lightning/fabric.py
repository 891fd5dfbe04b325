"""Owns `FabricZeroStrategy`: zeroshard under `lightning.Fabric`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from zeroshard.errors import UsageError
from zeroshard.integrations.lightning import folders
from zeroshard.integrations.lightning.sharding import ShardingFacts, ShardingStrategy, fabric_class
from zeroshard.model.born import sharded_init
from zeroshard.model.sharded import Sharded
from zeroshard.optim.several import optimizers_of
from zeroshard.policy import Policy, Units

_DDPStrategy: Any = fabric_class("strategies", "DDPStrategy")


class FabricZeroStrategy(ShardingStrategy, _DDPStrategy):  # type: ignore[misc]
    """A strategy that trains models with ZeRO, on any number of processes, on CPUs and accelerators.

        fabric = lightning.Fabric(strategy=FabricZeroStrategy(stage=3), devices=2)
        model, optimizer = fabric.setup(model, optimizer)

    Importing `zeroshard.integrations.lightning` registers it as "zeroshard" (stage 2) and "zeroshard_stage_1" to
    "zeroshard_stage_3". `fabric.setup(model)` without an optimizer is for evaluation. If the policy shards parameters,
    modules that are built inside `fabric.init_module()` are sharded as they are built.

    `fabric.save(path, {"model": model, "optimizer": optimizer, ...})` writes a folder, to which each rank writes its
    part. `fabric.load` reads the folder with any number of processes and at any stage. `write_single_file(path, out)`
    converts it to one file of weights.

    The arguments are those of `ZeroStrategy`.
    """

    _precision_argument = "precision"

    def __init__(
        self, stage: int | None = None, config: str | os.PathLike[str] | Mapping[str, Any] | None = None, *,
        policy: Policy | None = None, units: Units | None = None, auto: Mapping[str, Any] | None = None, **ddp: Any,
    ) -> None:  # fmt: skip
        super().__init__(stage, config, policy=policy, units=units, auto=auto, **ddp)
        self._models: list[Sharded] = []
        self._backward_sync_control = self

    def sharded(self, model: nn.Module) -> Sharded:
        """Return the `Sharded` of a model that was set up: its `states`, `export`, `remove` and so on."""
        if type(model).__name__ == "_FabricModule":
            model = model.module  # type: ignore[assignment]
        for one in self._models:
            if one.model is model:
                return one
        raise UsageError(
            f"this {type(model).__name__} was not set up by fabric.setup. Call fabric.setup(model, optimizer) first."
        )

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return the context of `fabric.no_backward_sync`. Fabric calls this method of its `_backward_sync_control`."""
        return self.sharded(module).accumulate(enabled)

    # ------------------------------------------------------------------ set up

    def _facts(self) -> ShardingFacts:
        return ShardingFacts(str(self.precision.precision))

    def _set_up(self, module: nn.Module, optimizers: list[Any]) -> None:
        one = self._shard(module, optimizers, self._facts())
        self._models = [other for other in self._models if other.model is not module]  # its sharding may have ended
        self._models.append(one)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Set a model up for evaluation. For training, set it up together with its optimizer."""
        if any(True for _ in module.parameters()):
            self._set_up(module, [])
        return module

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[Any, ...]:
        self._set_up(module, optimizers)
        return module, optimizers, scheduler

    def setup_optimizer(self, optimizer: Any) -> Any:
        raise UsageError(
            "FabricZeroStrategy sets a model up together with its optimizer. Call fabric.setup(model, optimizer)."
        )

    def module_init_context(self, empty_init: bool | None = None) -> ExitStack:
        stack: ExitStack = super().module_init_context(empty_init)
        if self._shards_parameters(self._facts()):
            stack.enter_context(sharded_init())
        return stack

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any | None = None, filter: Any | None = None
    ) -> None:
        """Write a folder or, if the state has no model, one ordinary file. Every rank must call it.

        Args:
            path: the path of the folder or file.
            state: at most one model, optionally its optimizer, and other values, of which rank 0 saves its own.
            storage_options, filter: not supported.
        """
        if storage_options is not None or filter is not None:
            raise UsageError(
                "FabricZeroStrategy does not support storage_options and filter. Leave them out; to save less, leave "
                "keys out of the state."
            )
        sharded, rest = self._the_model(state)
        if sharded is None:
            super().save_checkpoint(path, state)
            return
        for key, value in rest.items():
            if hasattr(value, "state_dict"):
                rest[key] = value.state_dict()
        folders.save_sharded(sharded, self.broadcast(path), rest, self.barrier)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder, or another strategy's file of weights, into `state`. Return the other values. Every rank must call it."""
        path = self.broadcast(path)
        if not folders.is_sharded(path):
            folders.refuse_what_is_none(path)
            values = [state]
            if isinstance(state, dict):
                values = list(state.values())
            if any(isinstance(value, torch.optim.Optimizer) for value in values):
                raise UsageError(
                    f"{path} is one file: it holds no optimizer state that can be sharded. Leave the optimizer out."
                )
            loaded: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return loaded
        if isinstance(state, nn.Module):
            state = {"model": state}
        sharded, rest = self._the_model(state or {})
        if sharded is None:
            raise UsageError(f'{path} is a sharded checkpoint: pass the model to fabric.load, {{"model": model, ...}}.')
        takes_states = any(isinstance(value, torch.optim.Optimizer) for value in state.values())
        remainder = folders.load_sharded(
            sharded, path, weights_only, strict=strict, optimizer_states=takes_states, random=takes_states
        )
        missing = [key for key in rest if key not in remainder]
        if missing and strict:
            raise UsageError(
                f"{path} has no {missing[0]!r}, which the state has: pass strict=False to leave it as it is."
            )
        for key in rest:
            if key in remainder and hasattr(rest[key], "load_state_dict"):
                rest[key].load_state_dict(remainder.pop(key))
            elif key in remainder:
                state[key] = remainder.pop(key)
        return remainder

    def _the_model(self, state: Mapping[str, Any]) -> tuple[Sharded | None, dict[str, Any]]:
        """Return the sharded model of a state, and the other values without its optimizer."""
        models = [self.sharded(value) for value in state.values() if isinstance(value, nn.Module)]
        optimizers = [value for value in state.values() if isinstance(value, torch.optim.Optimizer)]
        if len(models) > 1:
            raise UsageError(f"a checkpoint holds one model, not {len(models)}: save each to a separate path.")
        known = optimizers_of(models[0].optimizer) if models else []
        if any(all(one is not other for other in known) for one in optimizers):
            raise UsageError("the state holds an optimizer without its model: save and load them together.")
        rest = {k: v for k, v in state.items() if not isinstance(v, nn.Module | torch.optim.Optimizer)}
        return next(iter(models), None), rest
