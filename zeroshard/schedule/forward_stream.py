"""Owns the stream that a model runs on, which may be one of the user's own, and brings the work of hooks there. Called by hooks.

Autograd runs a node on the stream of its forward, but adds up gradients where the parameter was first seen, and ends where the
backward was called. Scratch and units come and go in the order of one stream: that of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ForwardStream:
    """See the module's docstring. On a CPU there is none, and nothing happens."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None

    def begin(self) -> None:
        """A forward starts here."""
        if self._device.type != "cpu":
            self._stream = torch.accelerator.current_stream(self._device)

    @contextmanager
    def here(self) -> Iterator[None]:
        """What is started inside runs on that stream: after what was started before, and before what will be."""
        stream = self._stream
        if stream is None or stream == (now := torch.accelerator.current_stream(self._device)):
            yield
            return
        stream.wait_stream(now)  # type: ignore[attr-defined]
        try:
            with stream:
                yield
        finally:  # also after an error: what was begun goes on there
            now.wait_stream(stream)  # type: ignore[attr-defined]
