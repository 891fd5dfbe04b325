"""Owns "auto": the values that replace it without a Trainer, before the schema reads the config."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeroshard.engine.config.fields import AUTO
from zeroshard.engine.config.schema import KEYS
from zeroshard.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

DEFAULT = object()
"""The result of a rule that leaves the key out. Its value is then the default, or computed from other batch sizes."""
UNKNOWN = object()
"""The result of a rule whose value only the user can supply."""


@dataclass(frozen=True)
class Facts:
    """The values from which "auto" can be resolved.

    Attributes:
        supplied: the user's `auto={...}`, by key path, by its last part, or by block (`fp16` for `fp16.enabled`).
        hidden_size: the model's hidden size, if it has one.
        dtype: the dtype of the model's first parameter, if there is a model.
    """

    supplied: Mapping[str, Any]
    hidden_size: int | None
    dtype: torch.dtype | None


def _hidden_size(config: Any) -> int | None:
    """Find the hidden size as transformers does: `hidden_size` or the largest of `hidden_sizes`, also in `text_config`."""
    for candidate in (config, getattr(config, "text_config", None)):
        size = getattr(candidate, "hidden_size", None) or max(getattr(candidate, "hidden_sizes", None) or [0])
        if isinstance(size, int) and size:
            return size
    return None


@dataclass(frozen=True)
class Rule:
    """A rule for one key's "auto": a function of the facts and the partly resolved config, with a description."""

    resolve: Callable[[Facts, Mapping[str, Any]], Any]
    text: str


def _constant(value: Any) -> Rule:
    shown = value if isinstance(value, str) else json.dumps(value)
    return Rule(lambda _facts, _config: value, f"`{shown}`")


def _of_hidden_size(size: Callable[[int], int], text: str) -> Rule:
    return Rule(
        lambda facts, _: size(facts.hidden_size) if facts.hidden_size else DEFAULT,
        f"{text}, if the model has a `hidden_size`",
    )


def _is_dtype(name: str) -> Rule:
    return Rule(lambda facts, _: str(facts.dtype) == name, "true if the model's parameters have that dtype")


def _micro_batch(_: Facts, config: Mapping[str, Any]) -> Any:
    if config.get("train_batch_size") is None:
        return UNKNOWN
    return DEFAULT


def _accumulation(_: Facts, config: Mapping[str, Any]) -> Any:
    if config.get("train_batch_size") is None or config.get("train_micro_batch_size_per_gpu") is None:
        return 1
    return DEFAULT


def _optimizer_lr(facts: Facts, config: Mapping[str, Any]) -> Any:
    optimizer = config.get("optimizer")
    if isinstance(optimizer, Mapping) and isinstance(optimizer.get("params"), Mapping):
        return optimizer["params"].get("lr", UNKNOWN)
    return facts.supplied.get("lr", UNKNOWN)


_ONLY_YOU = Rule(lambda _facts, _config: UNKNOWN, "pass the value to `initialize`")
_DEFAULT = Rule(lambda _facts, _config: DEFAULT, "the default")

RULES: dict[str, Rule] = {
    # The order matters: keys that a rule reads are resolved before it.
    "train_batch_size": Rule(lambda _facts, _config: DEFAULT, "computed"),
    "train_micro_batch_size_per_gpu": Rule(
        _micro_batch, "computed if `train_batch_size` is set; otherwise pass the value to `initialize`"
    ),
    "gradient_accumulation_steps": Rule(_accumulation, "computed if both other batch sizes are set; otherwise `1`"),
    "gradient_clipping": _constant(1.0),
    "optimizer.type": _ONLY_YOU,
    "optimizer.params.lr": _ONLY_YOU,
    "optimizer.params.betas": _constant((0.9, 0.999)),
    "optimizer.params.eps": _constant(1e-8),
    "optimizer.params.weight_decay": _constant(0.0),
    "optimizer.params.momentum": _constant(0.0),
    "optimizer.params.adam_w_mode": _constant(True),
    "optimizer.params.torch_adam": _constant(False),
    "scheduler.type": _ONLY_YOU,
    "scheduler.params.warmup_min_lr": _constant(0.0),
    "scheduler.params.warmup_max_lr": Rule(_optimizer_lr, "`optimizer.params.lr`"),
    "scheduler.params.warmup_num_steps": _constant(1),
    "scheduler.params.warmup_type": _constant("log"),
    "scheduler.params.warmup_min_ratio": _constant(0.0),
    "scheduler.params.cos_min_ratio": _constant(1e-4),
    "scheduler.params.last_batch_iteration": _constant(-1),
    "scheduler.params.total_num_steps": _ONLY_YOU,
    "fp16.enabled": _is_dtype("torch.float16"),
    "bf16.enabled": _is_dtype("torch.bfloat16"),
    "bfloat16.enabled": _is_dtype("torch.bfloat16"),
    "activation_checkpointing.checkpoint_units": _constant("auto"),
    "zero_optimization.reduce_bucket_size": _of_hidden_size(lambda size: size * size, "hidden size squared"),
    "zero_optimization.allgather_bucket_size": _of_hidden_size(lambda size: size * size, "hidden size squared"),
    "zero_optimization.stage3_prefetch_bucket_size": _of_hidden_size(
        lambda size: int(0.9 * size * size), "0.9 x hidden size squared"
    ),
    "zero_optimization.stage3_param_persistence_threshold": _of_hidden_size(lambda size: 10 * size, "10 x hidden size"),
}
"""The rules for "auto", by key path. Sizes from `hidden_size`, and AdamW's arguments except `lr`, follow transformers' Trainer."""


def resolve_auto(
    config: dict[str, Any], model: nn.Module | None, supplied: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """Return a copy of the config with "auto" resolved, and the key paths that had it. Unknown keys keep "auto".

    `supplied` has the user's values; see `Facts`.

    Raises:
        ConfigError: the user must supply some values, which the message lists, or has supplied an unknown key.
    """
    dtype = None
    if model is not None:
        dtype = getattr(next(model.parameters(), None), "dtype", None)
    facts = Facts(supplied, _hidden_size(getattr(model, "config", None)), dtype)
    resolved = copy.deepcopy(config)
    order = {path: number for number, path in enumerate(RULES)}
    found = []
    for path, block, key in _leaves(resolved):
        if isinstance(block[key], str) and block[key] == AUTO and (path in KEYS or _is_argument(path)):
            found.append((path, block, key))
    found.sort(key=lambda one: order.get(one[0], len(order)))
    paths = [path for path, _, _ in found]
    _refuse_unknown(supplied, paths)
    # A batch size that is still "auto" cannot be used to compute the others.
    for _, block, key in found:
        block[key] = None
    unresolved = []
    for path, block, key in found:
        parent, _, short = path.rpartition(".")
        if short == "enabled":
            short = parent
        value = supplied.get(path, supplied.get(short, UNKNOWN))
        if value is UNKNOWN:
            value = rule_of(path).resolve(facts, resolved)
        if value is UNKNOWN:
            unresolved.append(path)
        elif value is DEFAULT:
            del block[key]
        else:
            block[key] = value
    if unresolved:
        names = [path.rpartition(".")[2] for path in unresolved]
        options = " ".join(f"--auto {name}=..." for name in names)
        arguments = ", ".join(f"{name!r}: ..." for name in names)
        raise ConfigError(
            f'"auto" cannot be resolved from the config: {", ".join(unresolved)}.\n'
            f"Pass the values as {options} on the command line, or as initialize(..., auto={{{arguments}}}); "
            "or set them in the config."
        )
    return resolved, set(paths)


def rule_of(path: str) -> Rule:
    """Return the rule for this key's "auto"."""
    if path not in RULES and _is_argument(path):
        return _ONLY_YOU
    return RULES.get(path, _DEFAULT)


def without_effect(config: Mapping[str, Any], supplied: Mapping[str, Any]) -> dict[str, Any]:
    """Return, by name in `supplied`, the config's own values of keys that are not "auto": the supplied values have no effect."""
    found = {}
    for path, block, key in _leaves(dict(config)):
        for name in {path, path.rpartition(".")[2]} & supplied.keys():
            if block[key] != AUTO:
                found[name] = block[key]
    return found


def _leaves(block: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (path, enclosing block, key) for each key whose value is not a block."""
    for key, value in block.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", block, key


def _is_argument(path: str) -> bool:
    """Return whether a path is an argument of an optimizer or scheduler, which its class checks, not the schema."""
    return path.startswith(("optimizer.params.", "scheduler.params."))


def _refuse_unknown(supplied: Mapping[str, Any], paths: list[str]) -> None:
    """Raise for a name in `auto` that is not a config key. Names of all keys that are "auto" in this config are allowed."""
    every = {*KEYS, *RULES, *paths}
    names = every | {path.rpartition(".")[2] for path in every} | {"fp16", "bf16", "bfloat16"}
    for name in supplied:
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            hint = "".join(f" Did you mean {one!r}?" for one in near)
            raise ConfigError(f"auto[{name!r}] is not the name of a config key.{hint} Leave it out, or correct it.")
