"""Owns the arithmetic of the global gradient norm and of clipping.

Each shard's squares are summed in the same order under every policy, and then the shards' sums in one tree by their numbers
(`core/transport/rounds.py`), in fp64.
So the norm, and with it a clipped step, is bit-identical whichever rank holds a shard.

Values that an accelerator computes stay on it, as tensors of shape []: only a read of them waits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zeroshard.torch_private import foreach_mul_, foreach_norm

ROW_NUMEL = 1024
"""The number of elements in a row. A CPU sums the squares of a row in fp32 and adds the rows in fp64. One fp32 sum over 16 M
elements is off by 6e-4, the sum of rows of 1024 by 1e-10, at the same speed."""


def sums_of_squares(flats: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of squares of each of several 1-D tensors, as fp64 of shape []."""
    found: dict[int, Tensor] = {}
    for alike in _by_kind(flats):
        sums: Iterable[Tensor]
        if alike[0].device.type == "cpu":
            sums = _sums_on_cpu(alike)
        else:
            # A few launches for all tensors. Each block of threads sums few elements, so fp32 is exact enough.
            norms = foreach_norm(alike, 2, dtype=torch.promote_types(alike[0].dtype, torch.float32))
            sums = torch.stack(norms).double().square().unbind()
        found |= zip(map(id, alike), sums, strict=True)
    return [found[id(flat)] for flat in flats]


def sum_of_squares(flat: Tensor) -> Tensor:
    """Return the sum of squares of one gradient."""
    return sums_of_squares([flat])[0]


def _sums_on_cpu(flats: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of squares of each tensor. Those of less than a row are summed in one call, to the same bits."""
    short = [flat for flat in flats if 0 < flat.numel() < ROW_NUMEL]
    if not short:
        return [_sum_on_cpu(flat) for flat in flats]
    norms = foreach_norm(short, 2, dtype=torch.promote_types(short[0].dtype, torch.float32))
    squares = iter(torch.stack(norms).double().square().unbind())
    return [next(squares) if 0 < flat.numel() < ROW_NUMEL else _sum_on_cpu(flat) for flat in flats]


def _sum_on_cpu(flat: Tensor) -> Tensor:
    dtype = torch.promote_types(flat.dtype, torch.float32)
    rest_numel = flat.numel() % ROW_NUMEL
    whole, rest = flat.split([flat.numel() - rest_numel, rest_numel])
    norms: Tensor = torch.linalg.vector_norm(whole.view(-1, ROW_NUMEL), dim=1, dtype=dtype)
    total = norms.double().square().sum()
    if rest_numel:
        total = total + torch.linalg.vector_norm(rest, dtype=dtype).double().square()
    return total


def _by_kind(flats: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by device and dtype, since a kernel takes tensors of one kind."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for flat in flats:
        found.setdefault((flat.device, flat.dtype), []).append(flat)
    return list(found.values())


def clip_coefficient(total_norm: float, max_norm: float) -> float:
    """Return the factor that limits the gradients' norm to `max_norm`, as in torch.nn.utils.clip_grad_norm_."""
    return min(max_norm / (total_norm + 1e-6), 1.0)


def norm_of(squares: Tensor) -> float | Tensor:
    """Return the norm, from the sum of squares, fp64 of shape []. On an accelerator it is a tensor of shape []."""
    return math.sqrt(squares.item()) if squares.device.type == "cpu" else squares.sqrt()


def coefficient_of(norm: float | Tensor, max_norm: float | None, loss_scale: float) -> float | Tensor:
    """Return the factor that removes the loss scale from gradients and clips them as torch.nn.utils.clip_grad_norm_ does.

    `norm` is the norm without the loss scale. The factor is 1 if it is not finite. With `max_norm` None, nothing is clipped.
    """
    if isinstance(norm, Tensor):
        clip = torch.ones_like(norm) if max_norm is None else (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return torch.where(norm.isfinite(), clip / loss_scale, 1.0)
    if not math.isfinite(norm):
        return 1.0
    return (1.0 if max_norm is None else clip_coefficient(norm, max_norm)) / loss_scale


def scale_(flats: Sequence[Tensor], coefficient: float | Tensor) -> None:
    """Multiply tensors in place, except by the number 1. A tensor coefficient has shape [] and is on the tensors' device."""
    if not isinstance(coefficient, Tensor) and coefficient == 1.0:
        return
    for alike in _by_kind(flats):
        if alike[0].device.type == "cpu":
            for flat in alike:
                flat.mul_(coefficient)
        elif isinstance(coefficient, Tensor):
            foreach_mul_(alike, coefficient.to(alike[0].dtype))
        else:
            foreach_mul_(alike, coefficient)


def sum_of_parts(parts: Sequence[Tensor]) -> Tensor:
    """Add the sums of squares of a shard's parts, in the order of the parts. An offload ratio below 1 puts parts on two devices."""
    device = parts[0].device
    return torch.stack([part.to(device) for part in parts]).sum()
