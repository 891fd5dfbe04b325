"""Owns the check for 16-bit dtypes for which a CPU has no instructions, so that torch multiplies element by element."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn

_QUESTIONS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
"""The operator with which torch tests each dtype before it passes a product to oneDNN."""


def is_emulated(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether matrix products in a dtype take tens of times as long as in fp32.

    The result is False for accelerators, and for CPUs on which torch has no oneDNN.
    """
    question = _QUESTIONS.get(dtype)
    if device.type != "cpu" or question is None or not torch.backends.mkldnn.is_available():
        return False
    answer = getattr(torch.ops.mkldnn, question, None)
    return answer is not None and not answer()


def warn_if_emulated(
    model: nn.Module, group: dist.ProcessGroup | None = None, autocast_dtype: torch.dtype | None = None
) -> None:
    """Warn on a group's first rank about each emulated dtype: `autocast_dtype` if given, otherwise the parameters' dtypes."""
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
