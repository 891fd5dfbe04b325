"""Expert parallelism, which is not offered: names for isinstance."""

from __future__ import annotations

from deepspeed._missing import missing
from deepspeed.moe import layer, utils

__all__ = ["layer", "utils"]
__getattr__ = missing(__name__)
