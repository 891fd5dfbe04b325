"""Owns the optimizer that a config's `optimizer` block names. Called by engine."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zeroshard.config.arguments import check_arguments, nearest
from zeroshard.config.schema import OptimizerBlock
from zeroshard.errors import ConfigError
from zeroshard.layout.bucketing import find_units
from zeroshard.optim.lion import Lion
from zeroshard.optim.muon import MuonWithAdamW

_NAMES = {
    "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad,
    "lion": Lion, "muon": MuonWithAdamW,
}  # fmt: skip
_NOT_OFFERED = {
    "lamb": "its trust ratio needs whole layers", "onebitadam": "it compresses gradients", "onebitlamb": "it compresses gradients",
    "zerooneadam": "it compresses gradients", "muadam": "it needs the mup package", "muadamw": "it needs the mup package",
    "musgd": "it needs the mup package",
}  # fmt: skip


def create_optimizer(
    block: OptimizerBlock, parameters: Iterable[Any], model: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Make the torch optimizer that the block names over `parameters` (tensors, or param groups).

    "Adam" means AdamW's mathematics unless `adam_w_mode` is false, as in DeepSpeed. Fused kernels are the default.

    Args:
        model: tells Muon which matrices lie inside blocks; those outside (embeddings, heads) go to AdamW.
    """
    params, name = dict(block.params), block.type.lower()
    if name in _NOT_OFFERED:
        raise ConfigError(
            f"optimizer.type: {block.type} is not offered ({_NOT_OFFERED[name]}). Known here: Adam, AdamW, SGD, Adagrad, "
            "Lion, Muon, and any class of torch.optim; or give `initialize` an optimizer of your own."
        )
    cls: Any = _NAMES.get(name) or getattr(torch.optim, block.type, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise ConfigError(
            f"optimizer.type: torch.optim has no {block.type!r}{nearest(block.type, _known())} Known here: Adam, AdamW, SGD, "
            "Adagrad, Lion, Muon, and any class of torch.optim."
        )
    if cls in (torch.optim.Adam, torch.optim.AdamW, MuonWithAdamW):
        params.pop("torch_adam", None)  # DeepSpeed's: whose kernels
    if cls in (torch.optim.Adam, torch.optim.AdamW):
        cls = _adam(cls, params)
    if cls is MuonWithAdamW and model is not None:
        parameters = _muon_groups(parameters, model)
    if "max_grad_norm" in params:
        raise ConfigError(
            "optimizer.params.max_grad_norm: clipping is the optimizer's neighbour: set gradient_clipping."
        )
    check_arguments(cls, params, "optimizer")
    for key in ("betas", "adam_betas"):
        if isinstance(params.get(key), list):
            params[key] = tuple(params[key])
    if "fused" in inspect.signature(cls).parameters:
        params.setdefault("fused", True)
    try:
        made: torch.optim.Optimizer = cls(parameters, **params)
    except ConfigError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"optimizer.params: {cls.__name__} refuses them: {error}") from error
    return made


def _known() -> list[str]:
    return [name for name, value in vars(torch.optim).items() if isinstance(value, type)] + ["Lion", "Muon"]


def _adam(cls: type[torch.optim.Optimizer], params: dict[str, Any]) -> type[torch.optim.Optimizer]:
    """DeepSpeed's arguments of Adam that are none of torch's."""
    if not params.pop("bias_correction", True):
        raise ConfigError("optimizer.params.bias_correction = false is not offered: torch's Adam always corrects.")
    decays_apart = params.pop("adam_w_mode", True)
    if cls is torch.optim.Adam and decays_apart:
        params.setdefault("weight_decay", 0.0)  # DeepSpeed's Adam decays nothing by default; torch's AdamW 0.01
        return torch.optim.AdamW
    return cls


def _muon_groups(parameters: Iterable[Any], model: nn.Module) -> list[Any]:
    """Loose parameters, parted into matrices inside the model's blocks and all others."""
    inside = {id(p) for _, block in find_units(model) for p in block.parameters()}
    given = list(parameters)
    if any(isinstance(item, dict) for item in given) or not inside:
        return given
    matrices = [p for p in given if p.ndim == 2 and id(p) in inside]
    others = [p for p in given if p.ndim != 2 or id(p) not in inside]
    groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
    return [group for group in groups if group["params"]]
