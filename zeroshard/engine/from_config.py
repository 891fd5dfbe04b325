"""Owns the creation of the optimizer and the loss scaler that a config names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from zeroshard.core.bucketing import find_units
from zeroshard.engine.config.fields import check_arguments, nearest
from zeroshard.engine.config.load import Config
from zeroshard.engine.config.schema import OptimizerBlock
from zeroshard.errors import ConfigError
from zeroshard.optim.lion import Lion
from zeroshard.optim.loss_scaler import DynamicLossScaler, LossScaler, StaticLossScaler
from zeroshard.optim.several import Several, tensors_of
from zeroshard.optim.states import REFUSED

_NAMES = {
    "adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad,
    "lion": Lion, "muon": torch.optim.Muon,
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
    make: Callable[..., torch.optim.Optimizer] = cls
    if cls is torch.optim.Muon:
        make = _muon_and_adamw
        params = _muon(params)
        parameters = _muon_groups(parameters, model)
    elif cls in (torch.optim.Adam, torch.optim.AdamW):
        cls = make = _adam(cls, params)
    elif cls is Lion:
        params = {"lr": 1e-3, "betas": (0.9, 0.999)} | params
    if "max_grad_norm" in params:
        raise ConfigError("optimizer.params.max_grad_norm: the engine clips gradients. Set gradient_clipping instead.")
    check_arguments(make, params, "optimizer", cls.__name__)
    for key in ("betas", "adam_betas"):
        if isinstance(params.get(key), list):
            params[key] = tuple(params[key])
    if "fused" in inspect.signature(make).parameters:
        params.setdefault("fused", True)
    try:
        made: torch.optim.Optimizer = make(parameters, **params)
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
    """Return the arguments of `_muon_and_adamw` for DeepSpeed's arguments of Muon, with DeepSpeed's defaults."""
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
    return {**rates, **given}


def _muon_and_adamw(
    groups: dict[bool, list[dict[str, Any]]], lr: float = 1e-3, weight_decay: float = 0.0, *, muon_lr: float | None = None,
    adam_lr: float | None = None, momentum: float = 0.95, nesterov: bool = True, ns_steps: int = 5,
    adjust_lr_fn: str | None = "original", betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-10, fused: bool = True,
) -> torch.optim.Optimizer:  # fmt: skip
    """Create torch's Muon for `groups[True]` and AdamW for `groups[False]`; only one of them if the other has no groups."""
    made: list[torch.optim.Optimizer] = []
    if groups[True]:
        rate = lr if muon_lr is None else muon_lr
        made.append(
            torch.optim.Muon(
                groups[True], rate, weight_decay, momentum, nesterov, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn
            )
        )
    if groups[False] or not made:
        rate = lr if adam_lr is None else adam_lr
        made.append(torch.optim.AdamW(groups[False], rate, betas, eps, weight_decay, fused=fused))
    return made[0] if len(made) == 1 else Several(made)


def _muon_groups(parameters: Iterable[Any], model: nn.Module | None) -> dict[bool, list[dict[str, Any]]]:
    """Return the param groups of Muon (True) and of AdamW (False).

    Muon gets the matrices inside the model's blocks (without a model or blocks: all), unless `use_muon` in a group decides.
    """
    inside = {id(p) for _, block in find_units(model) for p in block.parameters()} if model is not None else set()
    given = list(parameters)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    parted: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for group in groups:
        members = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
        chosen: dict[bool, list[Any]] = {True: [], False: []}
        for one, parameter in zip(members, tensors_of(members), strict=True):
            is_matrix = parameter.ndim == 2 and (not inside or id(parameter) in inside)
            chosen[bool(group.get("use_muon", is_matrix))].append(one)
        for use_muon, own in chosen.items():
            if own:
                parted[use_muon].append({**group, "params": own, "use_muon": use_muon})
    return parted
