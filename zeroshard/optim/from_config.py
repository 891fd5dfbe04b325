"""Owns the creation of the optimizer and the loss scaler that a config names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zeroshard.config.fields import check_arguments, nearest
from zeroshard.config.load import Config
from zeroshard.config.schema import OptimizerBlock
from zeroshard.errors import ConfigError
from zeroshard.layout.bucketing import find_units
from zeroshard.optim.lion import Lion
from zeroshard.optim.loss_scaler import DynamicLossScaler, LossScaler, StaticLossScaler
from zeroshard.optim.muon import MuonWithAdamW
from zeroshard.optim.states import REFUSED

_NAMES = {
    "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad,
    "lion": Lion, "muon": MuonWithAdamW,
}  # fmt: skip
_UNSUPPORTED = {
    "lamb": "its trust ratio needs whole layers", "onebitadam": "it compresses gradients", "onebitlamb": "it compresses gradients",
    "zerooneadam": "it compresses gradients", "muadam": "it needs the mup package", "muadamw": "it needs the mup package",
    "musgd": "it needs the mup package",
}  # fmt: skip


def create_optimizer(
    block: OptimizerBlock, parameters: Iterable[Any], model: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Create the optimizer that a config block names.

    "Adam" is AdamW unless `adam_w_mode` is false, as in DeepSpeed. The defaults match the classes in
    DeepSpeed 0.19.8: without `torch_adam`, Adam and AdamW have no weight decay. Fused kernels are the default.

    Args:
        block: the optimizer's type and arguments.
        parameters: tensors or param groups.
        model: for Muon: the model. Matrices outside its blocks (embeddings, heads) get AdamW.

    Raises:
        ConfigError: the optimizer does not exist, or it does not accept these arguments.
    """
    params = dict(block.params)
    cls: Any = _class_of(block)
    if cls is MuonWithAdamW:
        params = _muon(params)
        if model is not None:
            parameters = _muon_groups(parameters, model)
    elif cls in (torch.optim.Adam, torch.optim.AdamW):
        cls = _adam(cls, params)
    elif cls is Lion:
        params = {"lr": 1e-3, "betas": (0.9, 0.999)} | params
    if "max_grad_norm" in params:
        raise ConfigError("optimizer.params.max_grad_norm: the engine clips gradients. Set gradient_clipping instead.")
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
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise ConfigError(f"optimizer.params: {cls.__name__} does not accept them: {error}") from error
    return made


def _class_of(block: OptimizerBlock) -> type[torch.optim.Optimizer]:
    """Return the class that a config block names. Raise ConfigError if there is none or if it cannot be sharded."""
    name = block.type.lower()
    if name in _UNSUPPORTED:
        raise ConfigError(
            f"optimizer.type: {block.type} is not supported ({_UNSUPPORTED[name]}). Choose Adam, AdamW, SGD, "
            "Adagrad, Lion, Muon or another class of torch.optim, or pass an optimizer of your own to `initialize`."
        )
    cls = _NAMES.get(name) or getattr(torch.optim, block.type, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        known = [name for name, value in vars(torch.optim).items() if isinstance(value, type)] + ["Lion", "Muon"]
        raise ConfigError(
            f"optimizer.type: torch.optim has no {block.type!r}{nearest(block.type, known)} Choose Adam, "
            "AdamW, SGD, Adagrad, Lion, Muon, or another class of torch.optim."
        )
    if cls.__name__ in REFUSED:
        raise ConfigError(
            f"optimizer.type: {cls.__name__} {REFUSED[cls.__name__]}, but zeroshard shards dense parameters over ranks. "
            "Choose Adam, AdamW, SGD, Adagrad, Lion, Muon, or another class of torch.optim."
        )
    return cls


def create_loss_scaler(config: Config) -> LossScaler:
    """Create the loss scaler that the `fp16` block describes, with a scale of 1 if the loss is not scaled."""
    block = config.schema.fp16
    if not config.scales_loss:
        return StaticLossScaler()
    if block.loss_scale:
        return StaticLossScaler(block.loss_scale)
    return DynamicLossScaler(
        2.0**block.initial_scale_power,
        block.loss_scale_window,
        block.hysteresis,
        block.consecutive_hysteresis,
        block.min_loss_scale,
    )


def _adam(cls: type[torch.optim.Optimizer], params: dict[str, Any]) -> type[torch.optim.Optimizer]:
    """Translate DeepSpeed's arguments of Adam to torch's arguments, in place. Return the class to use."""
    if not params.pop("bias_correction", True):
        raise ConfigError(
            "optimizer.params.bias_correction = false is not supported: torch's Adam always corrects the bias. Leave it out."
        )
    if not params.pop("torch_adam", False):
        params.setdefault("weight_decay", 0.0)  # the default of DeepSpeed's own kernels; torch's AdamW has 0.01
    decays_apart = params.pop("adam_w_mode", True)
    return torch.optim.AdamW if decays_apart else cls


def _muon(params: dict[str, Any]) -> dict[str, Any]:
    """Return MuonWithAdamW's arguments for DeepSpeed's arguments of Muon, with DeepSpeed's defaults and scale of updates."""
    given = {key: value for key, value in params.items() if key not in ("torch_adam", "adam_w_mode")}
    if "ns_method" in given:
        raise ConfigError(
            "optimizer.params.ns_method is not supported: torch's Muon has one Newton-Schulz iteration. Leave it out."
        )
    if not params.get("adam_w_mode", True):
        raise ConfigError(
            "optimizer.params.adam_w_mode = false is not supported with Muon: its Adam is AdamW. Leave it out."
        )
    rates = {} if "lr" in given else {"muon_lr": 0.02, "adam_lr": 3e-4}
    return {"weight_decay": 0.0, "eps": 1e-10, "adjust_lr_fn": "original", **rates, **given}


def _muon_groups(parameters: Iterable[Any], model: nn.Module) -> list[Any]:
    """Split param groups without `use_muon` into matrices inside the model's blocks and all other parameters."""
    inside = {id(p) for _, block in find_units(model) for p in block.parameters()}
    given = list(parameters)
    if not inside:
        return given
    groups = [item for item in given if isinstance(item, dict)]
    loose = [item for item in given if not isinstance(item, dict)]
    if loose:
        groups.append({"params": loose})
    parted = []
    for group in groups:
        if "use_muon" in group:
            parted.append(group)
            continue
        members = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        for use_muon in (True, False):
            chosen = [p for p in members if (p.ndim == 2 and id(p) in inside) is use_muon]
            if chosen:
                parted.append({**group, "params": chosen, "use_muon": use_muon})
    return parted
