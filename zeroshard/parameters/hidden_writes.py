"""Owns the look for writes through `.data` on an accelerator: nothing tells of them but the values. Called by schedule and unit.

The device is not asked whether there was one, since that would stop it: master weights follow what is shown, many buckets in few
launches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack

import torch
from torch import Tensor

from zeroshard.parameters.parameter_bucket import ParameterBucket

LOOK_NUMEL = 1 << 24
"""Elements that are looked at together, or one bucket: what is cast for it takes 6 bytes each."""

_Shown = tuple[Tensor, AbstractContextManager[Tensor]]


def follow_hidden_writes(buckets: Iterable[ParameterBucket]) -> None:
    """A master weight keeps its digits where the value in the parameter's own dtype is what it was; else it takes that value."""
    for shown in _together(one for bucket in buckets for one in bucket.masters_shown()):
        with ExitStack() as stack:
            rows = [row for row, _ in shown]
            masters = [stack.enter_context(opened) for _, opened in shown]
            were, new = [torch.empty_like(row) for row in rows], [torch.empty_like(master) for master in masters]
            torch._foreach_copy_(were, masters)
            torch._foreach_copy_(new, rows)
            for row, was, master, value in zip(rows, were, masters, new, strict=True):
                torch.where(row == was, master, value, out=master)


def _together(shown: Iterable[_Shown]) -> Iterator[list[_Shown]]:
    """At most `LOOK_NUMEL` elements each, of one dtype each."""
    part, numel = list[_Shown](), 0
    for one in shown:
        row = one[0]
        if part and (numel + row.numel() > LOOK_NUMEL or row.dtype != part[0][0].dtype):
            yield part
            part, numel = [], 0
        part.append(one)
        numel += row.numel()
    if part:
        yield part
