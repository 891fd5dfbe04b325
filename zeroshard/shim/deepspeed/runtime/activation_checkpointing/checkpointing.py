"""`zeroshard.checkpointing` under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed._missing import missing
from zeroshard import checkpointing as _checkpointing

configure, is_configured, reset = _checkpointing.configure, _checkpointing.is_configured, _checkpointing.reset
_TORCH = "torch's random state of every device is kept and put back by checkpoint() itself."
__getattr__ = missing(
    __name__,
    get_cuda_rng_tracker=_TORCH,
    model_parallel_cuda_manual_seed=_TORCH,
    model_parallel_reconfigure_tp_seed=_TORCH,
    partition_activations_in_checkpoint="Use configure(None, partition_activations=True).",
    set_num_layers="Use configure(None, num_checkpoints=...).",
    CheckpointFunction="Use checkpoint(function, *args).",
)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, whose activations are computed again in the backward instead of being kept."""
    if not kwargs:
        return _checkpointing.checkpoint(function, *args)
    # As arguments by position: tensors among them take part in the gradients.
    return _checkpointing.checkpoint(partial(_call, function, len(args), tuple(kwargs)), *args, *kwargs.values())


def _call(function: Callable[..., Any], count: int, names: tuple[str, ...], *values: Any) -> Any:
    return function(*values[:count], **dict(zip(names, values[count:], strict=True)))


non_reentrant_checkpoint = checkpoint
