"""Owns activation checkpointing with DeepSpeed's calls.

    zeroshard.checkpointing.configure(deepspeed_config="zero2.json")
    x = zeroshard.checkpointing.checkpoint(block, x)

These calls share one `Checkpointer` in the process. To avoid that, create a `Checkpointer`, or set
`"activation_checkpointing": {"checkpoint_units": "auto"}` in the config, which does not require a change to the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from zeroshard.engine.config.load import load_checkpointing
from zeroshard.engine.recompute.checkpointer import Checkpointer, Checkpointing, warn_without_effect

__all__ = ["Checkpointer", "Checkpointing", "checkpoint", "configure", "configured", "is_configured", "reset"]

_configured: list[Checkpointer] = []
_DEFAULT = Checkpointer()


def configure(
    mpu_: Any = None,  # noqa: ARG001  DeepSpeed's callers pass it
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None, contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None, checkpoint_in_cpu: bool | None = None, synchronize: bool | None = None,
    profile: bool | None = None,
) -> Checkpointer:  # fmt: skip
    """Set the options of `checkpoint` for this process.

    Args:
        mpu_: accepted as in DeepSpeed, without effect.
        deepspeed_config: a config whose `activation_checkpointing` block supplies the arguments that are None.
        partition_activations: accepted as in DeepSpeed, without effect. A warning says so.
        contiguous_checkpointing: see `partition_activations`.
        num_checkpoints: see `partition_activations`.
        checkpoint_in_cpu: as `cpu_checkpointing` in `Checkpointing`.
        synchronize: as `synchronize_checkpoint_boundary` in `Checkpointing`.
        profile: as in `Checkpointing`.

    Returns:
        The checkpointer that `checkpoint` uses from now on.

    Raises:
        ConfigError: the config cannot be used.
    """
    options = Checkpointing()
    if deepspeed_config is not None:
        options = Checkpointing.of(load_checkpointing(deepspeed_config))
    warn_without_effect(
        {
            "partition_activations": partition_activations,
            "contiguous_checkpointing": contiguous_checkpointing,
            "num_checkpoints": num_checkpoints,
        }
    )
    given: dict[str, Any] = {
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    said = {key: value for key, value in given.items() if value is not None}
    reset()
    _configured.append(Checkpointer(replace(options, **said)))
    return configured()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)` and recompute its activations in the backward instead of keeping them."""
    return configured().checkpoint(function, *args, **kwargs)


def configured() -> Checkpointer:
    """Return the checkpointer that `checkpoint` uses. Its `costs` and `table()` show the cost of each checkpoint."""
    return next(iter(_configured), _DEFAULT)


def is_configured() -> bool:
    """Return whether `configure` was called since the last `reset`."""
    return bool(_configured)


def reset() -> None:
    """Reset all options to their defaults."""
    _configured.clear()
