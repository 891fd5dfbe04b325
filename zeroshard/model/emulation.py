"""Owns the check for 16-bit dtypes for which a CPU has no instructions, so that torch multiplies element by element."""

from __future__ import annotations

import os
import warnings

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.errors import UsageError

VARIABLE = "ZEROSHARD_EMULATED_DTYPES"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_QUESTIONS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
"""The operator with which torch tests each dtype before it passes a product to oneDNN."""


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether matrix products in a dtype take tens of times as long as in fp32.

    The result is False for accelerators. For a CPU, the dtypes in ZEROSHARD_EMULATED_DTYPES replace torch's answer, which is
    False for CPUs on which torch has no oneDNN.
    """
    question = _QUESTIONS.get(dtype)
    if device.type != "cpu" or question is None:
        return False
    given = _given()
    if given is not None:
        return dtype in given
    if not torch.backends.mkldnn.is_available():
        return False
    answer = getattr(torch.ops.mkldnn, question, None)
    return answer is not None and not answer()


def _given() -> list[torch.dtype] | None:
    """Return the dtypes in ZEROSHARD_EMULATED_DTYPES, or None if it is not set."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    names = [] if text == "none" else text.split(",")
    if not set(names) <= _DTYPES.keys():
        raise UsageError(f"{VARIABLE} is {text!r}: give bf16, fp16, both as bf16,fp16, or none.")
    return [_DTYPES[name] for name in names]


def warn_if_emulated(
    model: nn.Module, group: dist.ProcessGroup | None = None, autocast_dtype: torch.dtype | None = None
) -> None:
    """Warn on a group's first rank about each emulated dtype: `autocast_dtype` if given, otherwise the parameters' dtypes."""
    _given()  # every rank refuses a wrong value
    if dist.is_initialized() and dist.get_rank(group) > 0:
        return
    for dtype, device in dict.fromkeys((autocast_dtype or one.dtype, one.device) for one in model.parameters()):
        if not is_emulated(dtype, device):
            continue
        name = str(dtype).removeprefix("torch.")
        better = "bf16" if dtype is torch.float16 and not is_emulated(torch.bfloat16, device) else "fp32"
        warnings.warn(
            f"this CPU has no instructions for {name}: matrix products take tens of times as long as in fp32. Train in "
            f"{better} here, or on an accelerator.",
            stacklevel=3,
        )
