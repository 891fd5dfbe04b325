"""Owns the waiting gradients of one unit, which their buckets take together.

The way of one gradient through hooks, schedule, unit and bucket takes a CPU as long as the copy of some 10,000 elements. So small
gradients go that way together. The first that waits goes through all but the bucket; those that follow join it by a short way, in
which they are only kept. Whatever happens beside (the unit's last gradient, the end of the backward, a second gradient of a
parameter, `zero_grad`) finds them here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zeroshard.torch_private import GRAD, never_compiled

TAKEN_AT_ONCE = 1 << 16
"""The most elements that wait: these are still in a core's cache when they are copied."""


class Waiting:
    """The waiting gradients by parameter, and the parameters that have one. See the module's docstring.

    A parameter's hook refers to this object, so it holds no parameters, buckets or units, which own the parameter.

    Args:
        count: parameters that the unit has.
        limit: elements that may wait.
    """

    __slots__ = ("_backward", "_count", "_limit", "_numel", "gradients", "received")

    def __init__(self, count: int, limit: float) -> None:
        self.gradients: dict[int, Tensor] = {}
        self.received: set[int] = set()
        """Parameters that gave a gradient in this backward, of the module's last call."""
        self._count = count
        self._limit = limit
        self._numel = 0
        self._backward: Callable[[], object] = lambda: None

    def add(self, index: int, gradient: Tensor) -> bool:
        """Keep the gradient of parameter `index`. Return whether it is time to take all waiting gradients."""
        self.gradients[index] = gradient
        self.received.add(index)
        self._numel += gradient.numel()
        return self._numel >= self._limit or len(self.received) == self._count

    def let_join(self, backward: Callable[[], object]) -> None:
        """Let gradients join until `backward` returns None, when that backward can no longer end."""
        self._backward = backward

    def joining(
        self, index: int, otherwise: Callable[[Tensor], None], ordinary: type[nn.Parameter]
    ) -> Callable[[Tensor], None]:
        """Return a hook for parameter `index` that adds its gradient to the waiting ones, if no other code must handle it.

        Args:
            otherwise: the hook that handles other gradients: the first of several, the unit's last, one that makes enough, a
                second one of a parameter, or one that is refused.
            ordinary: the class of parameters whose values are here.
        """
        gradients = self.gradients
        received = self.received
        ahead_of_last = self._count - 1
        take_out = GRAD.__get__
        put = GRAD.__set__
        strided = torch.strided

        def join(parameter: Tensor) -> None:
            # One frame, with all that it needs at hand: between two hooks a backward empties the caches of the interpreter.
            is_open = gradients and type(parameter) is ordinary and self._backward() is not None
            if is_open and len(received) < ahead_of_last:
                gradient = take_out(parameter)
                # A parameter may wait that is not in `received` any longer: its module's next call has begun.
                is_first = index not in received and index not in gradients
                if is_first and gradient is not None and gradient.layout is strided:
                    numel = self._numel + gradient.numel()
                    if numel < self._limit:
                        put(parameter, None)
                        gradients[index] = gradient
                        received.add(index)
                        self._numel = numel
                        return
            otherwise(parameter)

        never_compiled(join)  # a backward may run inside of a compiled function
        return join

    def take(self) -> dict[int, Tensor]:
        taken = dict(self.gradients)
        self.gradients.clear()
        self._numel = 0
        self._backward = lambda: None
        return taken
