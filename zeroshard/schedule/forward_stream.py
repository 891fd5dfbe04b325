"""Owns the stream on which a model runs, and the way of work from other streams to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

_NOWHERE = nullcontext()
"""The context of work that stays on its stream."""


class ForwardStream:
    """The stream that a model runs on, which the user may have made. A CPU has none, and its methods do nothing.

    Autograd runs a node on the stream of its forward, but adds up gradients where the parameter was first seen, and ends where the
    backward was called. Scratch and units come and go in the order of one stream: that of the forward.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_only_one = device.type == "cpu"
        self._stream: torch.Stream | None = None

    def begin(self) -> None:
        """Record the stream on which a forward starts."""
        if not self.is_only_one:
            self._stream = torch.accelerator.current_stream(self._device)

    def here(self) -> AbstractContextManager[None]:
        """Run the work inside on the forward's stream: after earlier work of that stream, and before later work."""
        if self._stream is None:
            return _NOWHERE
        now = torch.accelerator.current_stream(self._device)
        return _NOWHERE if now == self._stream else self._between(now, self._stream)

    @contextmanager
    def _between(self, now: torch.Stream, stream: torch.Stream) -> Iterator[None]:
        # no test can miss this wait: on the simulated device autograd works on the forward's stream alone. Another device's
        # may add up gradients on another stream, whose sums the work inside reads.
        stream.wait_stream(now)  # type: ignore[attr-defined]
        try:
            with stream:
                yield
        finally:  # also after an error: what was begun goes on there
            now.wait_stream(stream)  # type: ignore[attr-defined]
