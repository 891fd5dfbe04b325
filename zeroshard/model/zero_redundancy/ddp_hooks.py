"""Owns the step inside DDP's backward: communication hooks that update parameters as their gradients are reduced.

    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=1e-3)
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, ddp, zero))

Each hook steps on a separate thread, since waiting for DDP's buckets must not block autograd's thread. DDP's backward
ends when all parameters are current. Updates begin with the first step (with torch's class, after two or three steps).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from zeroshard.errors import UsageError
from zeroshard.model.zero_redundancy.gathered_bucket import is_dense
from zeroshard.model.zero_redundancy.optimizer import ZeroRedundancyOptimizer

CommHook = Callable[[Any, Any], "torch.futures.Future[Tensor]"]
"""A communication hook of DDP: a function of a state and a `GradBucket` that returns a future of the reduced buffer."""


def hook_with_zero_step(
    hook: CommHook,
    ddp: DistributedDataParallel,  # noqa: ARG001 (torch's signature)
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,  # noqa: ARG001
) -> CommHook:
    """Create a DDP hook that runs `hook` on each bucket and steps when the last bucket of the backward is reduced.

    Args:
        hook: a hook that reduces a bucket, such as torch's `allreduce_hook`.
        ddp: accepted for compatibility with torch.
        zero: the optimizer, created with `overlap_with_ddp=True`.
        shard_buckets: accepted for compatibility with torch; it has no effect.

    Raises:
        UsageError: the optimizer was created without `overlap_with_ddp=True`.
    """
    return _StepInBackward(hook, zero, interleaved=False).on_bucket


def hook_with_zero_step_interleaved(
    hook: CommHook,
    ddp: DistributedDataParallel,  # noqa: ARG001 (torch's signature)
    zero: ZeroRedundancyOptimizer,
    shard_buckets: bool = False,  # noqa: ARG001
) -> CommHook:
    """Create a hook like `hook_with_zero_step` that updates and gathers parameters as soon as their gradients are reduced."""
    return _StepInBackward(hook, zero, interleaved=True).on_bucket


class _StepInBackward:
    def __init__(self, hook: CommHook, zero: ZeroRedundancyOptimizer, *, interleaved: bool) -> None:
        if not zero.overlap_with_ddp:
            raise UsageError("the hook steps inside DDP's backward: make the optimizer with overlap_with_ddp=True.")
        self._hook = hook
        self._zero = zero
        self._interleaved = interleaved
        self._thread = ThreadPoolExecutor(1, "zero-step")
        self._gradients: dict[int, Tensor] = {}
        self._stepped: set[int] = set()
        self._waits: list[Callable[[], None]] = []

    # DDP requires that `bucket` is annotated with DDP's own class, or not at all.
    def on_bucket(self, state, bucket):  # type: ignore[no-untyped-def]
        """Run the user's hook and return a future of the buffer. The last bucket's future is done once parameters are current."""
        reduced = self._hook(state, bucket)
        buffer = bucket.buffer()
        devices = None
        if buffer.device.type != "cpu":
            devices = [buffer.device]
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        gradients = {}
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            gradients[id(parameter)] = gradient
            # DDP stores a gradient in its parameter's layout, such as channels last, but `gradients()` returns it as if
            # contiguous.
            if is_dense(parameter):
                shown = gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())
                gradients[id(parameter)] = shown
        self._thread.submit(self._finish, reduced, buffer, gradients, bucket.is_last(), done)
        return done

    def _finish(
        self, reduced: torch.futures.Future[Tensor], buffer: Tensor, gradients: dict[int, Tensor], is_last: bool,
        done: torch.futures.Future[Tensor],
    ) -> None:  # fmt: skip
        """Wait for one of DDP's buckets and step. One thread takes all buckets in DDP's order, which is the same on all ranks."""
        try:
            value = reduced.wait()
            if value.data_ptr() != buffer.data_ptr():
                buffer.copy_(value)  # the gradients are views of the buffer
            self._gradients |= gradients
            with torch.no_grad():
                if self._interleaved or is_last:
                    self._step(is_last)
                if is_last:
                    self._end()
            done.set_result(buffer)
        except Exception as error:
            with suppress(Exception):  # the first error counts
                self._end()
            done.set_exception(error)  # type: ignore[arg-type]

    def _end(self) -> None:
        """Wait for the gathers and drop the backward's gradients."""
        waits = list(self._waits)
        self._waits.clear()
        self._gradients.clear()
        self._stepped.clear()
        for wait in waits:
            wait()

    def _step(self, is_last: bool) -> None:
        ready = [
            bucket
            for bucket in self._zero.buckets
            if bucket.number not in self._stepped
            and (is_last or all(id(p) in self._gradients for p in bucket.members if p.requires_grad))
        ]
        self._stepped |= {bucket.number for bucket in ready}
        if ready:
            self._waits.append(self._zero.step_buckets(ready, lambda parameter: self._gradients.get(id(parameter))))
