"""Owns the optimizer that a config's `optimizer` block names. Called by engine."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from zeroshard.config.schema import OptimizerBlock
from zeroshard.errors import ConfigError

_ALIASES = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}


def create_optimizer(block: OptimizerBlock, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    """Make the torch optimizer that the block names over `parameters` (tensors, or param groups).

    "Adam" means AdamW's mathematics unless `adam_w_mode` is false, as in DeepSpeed. Fused kernels are the default.
    """
    params = dict(block.params)
    name = _ALIASES.get(block.type.lower(), block.type)
    params.pop("torch_adam", None)
    adam_w_mode = params.pop("adam_w_mode", True)
    if name == "Adam" and adam_w_mode:
        name = "AdamW"
        params.setdefault("weight_decay", 0.0)  # DeepSpeed's Adam decays nothing by default; torch's AdamW 0.01
    cls = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer.type: torch.optim has no {block.type!r}; known here: {', '.join(_ALIASES.values())}, "
                          "and any class of torch.optim.")  # fmt: skip
    accepted = inspect.signature(cls).parameters
    unknown = [key for key in params if key not in accepted]
    if unknown:
        raise ConfigError(f"optimizer.params.{unknown[0]}: {name} takes no such argument; it takes "
                          f"{', '.join(key for key in accepted if key != 'params')}.")  # fmt: skip
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    if "fused" in accepted:
        params.setdefault("fused", True)
    try:
        return cls(parameters, **params)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer.params: {name} refuses them: {error}") from error
