"""The launcher: `zeroshard run`, or torchrun."""

from __future__ import annotations

from deepspeed._missing import missing
from deepspeed.launcher import runner

__all__ = ["runner"]
__getattr__ = missing(__name__)
