"""Owns what a Trainer's loop holds in the place of model, optimizer and loss scaler. Called by transformers."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers.utils import logging

from zeroshard.errors import UsageError
from zeroshard.integrations.trainer_settings import Settings
from zeroshard.optim.loss_scaler import LossScaler
from zeroshard.sharded import Sharded

_logger = logging.get_logger(__name__)


class OuterModel(nn.DataParallel[nn.Module]):
    """The model as the training loop sees it. A DataParallel, of one device, to who unwraps models."""

    def __init__(self, module: nn.Module, sharded: Sharded | None, settings: Settings) -> None:
        nn.Module.__init__(self)
        self.module = module
        self._sharded, self._autocast_dtype = sharded, settings.autocast_dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own, under autocast where the config has it."""
        device = next(self.module.parameters()).device.type
        with nullcontext() if self._autocast_dtype is None else torch.autocast(device, self._autocast_dtype):
            return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the step."""
        if self._sharded is not None:
            self._sharded.optimizer.zero_grad()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class OuterOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """The sharded optimizer as the training loop sees it. A step whose gradients are not finite is not taken."""

    _is_accelerate_prepared = True

    def __init__(self, sharded: Sharded, scaler: LossScaler) -> None:
        super().__init__(sharded.optimizer, device_placement=False)
        self._sharded, self._loss_scaler = sharded, scaler
        self._norm: float | None = None

    def clip(self, max_norm: float | None) -> float:
        """Clip, and return the norm before."""
        self._norm = float(self._sharded.clip_grad_norm_(max_norm, self._loss_scaler.scale))
        return self._norm

    def step(self, closure: Any = None) -> None:
        """Update the parameters, once a step's microbatches are through."""
        if closure is not None:
            raise UsageError("a sharded optimizer takes no closure.")
        if not self.gradient_state.sync_gradients:
            return
        norm = self._norm if self._norm is not None else self.clip(None)
        self._norm = None
        self._is_overflow = not math.isfinite(norm)
        if self._is_overflow:
            names = ", ".join(self._sharded.optimizer.not_finite()[:3])
            _logger.warning(f"the step is skipped: gradients are not finite (norm {norm}; first in {names}).")
        else:
            self.optimizer.step()
        self._loss_scaler.update(self._is_overflow)


class LossScale:
    """A loss scaler as accelerate's backward and the Trainer's checkpoints see it."""

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler

    def scale(self, loss: Tensor) -> Tensor:
        """In fp32: a loss in half precision times 65536 is infinite."""
        return loss.float() * self._scaler.scale

    def state_dict(self) -> dict[str, Any]:
        """As torch's GradScaler."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As torch's GradScaler."""
        self._scaler.load_state_dict(state)


def whole_state_dict(sharded: Sharded, *, adapters_alone: bool = False) -> dict[str, Tensor]:
    """The model's state dict, for rank 0, in the dtypes it trains in. Every rank must call it.

    Sharded parameters come one at a time, into rank 0's CPU memory; unsharded ones are the model's own tensors.

    Args:
        adapters_alone: of a PEFT model, leave out the frozen base but for its embeddings.
    """
    model = sharded.model
    if not sharded.policy.parameters.sharded:
        return model.state_dict() if sharded.rank == 0 else {}
    kept = _embeddings(model) if adapters_alone else set[int]()
    adapters = [f".{name}" for name in getattr(model, "peft_config", ())]
    states, found, whole = sharded.states, dict[int, Tensor](), dict[str, Tensor]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        wanted = parameter.requires_grad or id(parameter) in kept or any(f"{part}." in f"{name}." for part in adapters)
        if adapters_alone and not wanted:
            continue
        if id(parameter) not in found:
            value = states.get(name)
            assert value is not None
            found[id(parameter)] = value.to("cpu", parameter.dtype) if sharded.rank == 0 else value.new_empty(0)
        whole[name] = found[id(parameter)]
    whole |= sharded.checkpoints.live.buffers
    return whole if sharded.rank == 0 else {}


def _embeddings(model: nn.Module) -> set[int]:
    """PEFT saves them with an adapter where they were changed."""
    modules = [getattr(model, get, lambda: None)() for get in ("get_input_embeddings", "get_output_embeddings")]
    return {id(p) for module in modules if isinstance(module, nn.Module) for p in module.parameters()}


def is_ours(folder: str | os.PathLike[str]) -> bool:
    """Whether a Trainer's checkpoint holds one of zeroshard's."""
    return Path(folder, "latest").is_file()
