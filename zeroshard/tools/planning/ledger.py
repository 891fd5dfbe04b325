"""Owns the count of live bytes of a dry run: every storage, by category and place.

On an accelerator, a storage takes a block of the allocator (see segments.py). In CPU memory it takes its own bytes.

The ledger intercepts each operation below autograd. It counts a storage from the operation that first returns it until
torch drops it. Code that resizes a storage calls `resized`. The category of a tensor comes from `purpose` or `name`,
otherwise from the phase that allocated it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroshard.tools.planning.fakes import Repeats
from zeroshard.tools.planning.segments import MemoryBlock, Segments
from zeroshard.torch_private import FakeTensor, TorchDispatchMode, storage_id, tree_leaves

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
BUFFERS = "communication buffers"
ACTIVATIONS = "activations"
TEMPORARIES = "temporaries"
INPUTS = "model buffers and inputs"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, BUFFERS, ACTIVATIONS, TEMPORARIES, INPUTS)
"""The categories of device memory. Temporaries are live tensors that start-up, a backward or a step allocated."""

aten: Any = torch.ops.aten


@dataclass(slots=True)
class _Live:
    nbytes: int
    category: str
    on_host: bool
    block: MemoryBlock | None = None
    watch: Any = None


@dataclass
class Peak:
    """The peak of live bytes: the total, the bytes by category (`parts`), and the phase and module in which it occurred."""

    nbytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    phase: str = ""
    module: str = ""


class Ledger(TorchDispatchMode):
    """A mode that counts the live bytes of each operation that is not a view.

    Inside a FakeTensorMode, it also answers reads of values from tensors without values: True, 1, or, for floats in a step, 0.5.

    Attributes:
        phase, module: the current phase and module of the model, which a peak records.
        born: the category of new memory outside `purpose`.
        peak, host_peak: the peaks on the device, and in the host's CPU memory.
        peak_by_phase: the device's peak in bytes, by phase.
        peak_together: the peak of the sum of both memories.
        has_dropout: whether an operation has chosen elements at random.
    """

    def __init__(self, repeats: Repeats, *, in_segments: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._repeats = repeats
        self._segments = Segments() if in_segments else None
        self.phase = ""
        self.module = ""
        self.born = TEMPORARIES
        self.has_dropout = False
        self._live: dict[int, _Live] = {}
        # By `on_host`: False is the device's memory, True is the host's CPU memory.
        self._now: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
        self._total = {False: 0, True: 0}
        self._peaks = {False: Peak(), True: Peak()}
        self.peak_by_phase: Counter[str] = Counter()
        self.peak_together = 0
        self._purpose: list[tuple[str, bool]] = []

    @property
    def peak(self) -> Peak:
        return self._peaks[False]

    @property
    def host_peak(self) -> Peak:
        return self._peaks[True]

    @property
    def reserved(self) -> int:
        """The bytes that the accelerator's allocator has taken from the driver; 0 on a CPU."""
        return 0 if self._segments is None else self._segments.reserved

    def parts(self, *, on_host: bool = False) -> dict[str, int]:
        """Return the current live bytes by category, on the device or, with `on_host`, in the host's CPU memory."""
        return {category: nbytes for category, nbytes in self._now[on_host].items() if nbytes}

    def forget_peaks(self) -> None:
        """Drop the peaks so far and start new ones at the current live bytes."""
        self._peaks = {host: Peak(self._total[host], dict(now), self.phase) for host, now in self._now.items()}
        self.peak_by_phase.clear()
        self.peak_together = sum(self._total.values())

    # ------------------------------------------------------------------ categories

    def enter(self, phase: str, born: str) -> None:
        """Begin a phase. Its new memory is of the category `born`, except inside `purpose`."""
        self.phase = phase
        self.born = born

    @contextmanager
    def purpose(self, category: str, *, on_host: bool = False) -> Iterator[None]:
        """Assign memory that is allocated inside the context to a category, and to the device or the host's CPU memory."""
        self._purpose.append((category, on_host))
        try:
            yield
        finally:
            self._purpose.pop()

    def name(self, tensors: Iterable[Tensor], category: str) -> None:
        """Assign existing memory to a category. Recorded peaks keep their categories."""
        for tensor in tensors:
            live = self._live.get(storage_id(tensor))
            if live is not None:
                self._now[live.on_host][live.category] -= live.nbytes
                self._now[live.on_host][category] += live.nbytes
                live.category = category

    def resized(self, tensor: Tensor) -> None:
        """Record that the storage of a tensor was resized."""
        live = self._live.get(storage_id(tensor))
        if live is not None:
            self._resize(live, tensor.untyped_storage().nbytes())

    # ------------------------------------------------------------------ live storages

    def _see(self, tensor: Tensor, *, on_host: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage_id(tensor)
        nbytes = storage.nbytes()
        is_meta = isinstance(tensor, FakeTensor) and tensor.fake_device.type == "meta"  # created only for its shape
        if key in self._live or not nbytes or is_meta:
            return
        category = self.born
        if self._purpose:
            category, on_host = self._purpose[-1]
        live = self._live[key] = _Live(0, category, on_host)
        live.watch = weakref.ref(storage, partial(self._gone, key))
        self._resize(live, nbytes)

    def _gone(self, key: int, _: object) -> None:
        self._resize(self._live.pop(key), 0)

    def _resize(self, live: _Live, nbytes: int) -> None:
        """Set the size of a storage to `nbytes`. Update its block, the live bytes and the peaks."""
        before = live.nbytes
        on_host = live.on_host
        live.nbytes = nbytes
        if self._segments is not None and not on_host:
            if live.block is not None:
                self._segments.give_back(live.block)
                live.block = None
            if nbytes:
                live.block = self._segments.take(nbytes)
                live.nbytes = live.block.nbytes
        more = live.nbytes - before
        self._now[on_host][live.category] += more
        total = self._total[on_host] = self._total[on_host] + more
        if more > 0:
            self.peak_together = max(self.peak_together, total + self._total[not on_host])
            if total > self._peaks[on_host].nbytes:
                self._peaks[on_host] = Peak(total, self.parts(on_host=on_host), self.phase, self.module)
        if not on_host and total > self.peak_by_phase[self.phase]:
            self.peak_by_phase[self.phase] = total

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the host's CPU memory, and not on the device."""
        live = self._live.get(storage_id(tensor))
        return live is not None and live.on_host

    # ------------------------------------------------------------------ dispatch

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap each operation, which takes as long as most: nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # two thirds of all calls
            return args[0].fake_device
        kwargs = kwargs or {}
        if id(func) in _ASKS and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return self._answer(args[0], func)
        out, made = self._repeats.run(func, args, kwargs)
        if id(func) in _DROPOUTS:
            self.has_dropout = True
        if made:
            self._note(args, kwargs, made)
        return out

    def _answer(self, tensor: Tensor, func: Any) -> Any:
        if func is aten.equal.default or tensor.dtype is torch.bool:
            return True
        if not tensor.dtype.is_floating_point:
            return 1
        if self.phase == "step":  # NAdam divides by 1 - a product that it reads
            return 0.5
        return 1.0

    def _note(self, args: Any, kwargs: Any, made: Sequence[Tensor]) -> None:
        on_host = False
        if self._total[True]:  # the place of the first tensor with more than one element decides
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Tensor) and tensor.numel() > 1 and storage_id(tensor) in self._live:
                    on_host = self.is_on_host(tensor)
                    break
        for tensor in made:
            self._see(tensor, on_host=on_host)


_DEVICE = torch.ops.prim.device.default
# By identity, since torch hashes an operation in Python.
_DROPOUTS = {
    id(one) for one in (aten.bernoulli_.float, aten.bernoulli.p, aten.bernoulli.default, aten.native_dropout.default)
}
_ASKS = {id(one) for one in (aten._local_scalar_dense.default, aten.equal.default)}
