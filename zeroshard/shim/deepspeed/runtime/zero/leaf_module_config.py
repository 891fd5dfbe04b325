"""The block `leaf_module`."""

from __future__ import annotations

from deepspeed._missing import missing
from zeroshard.config.zero_block import LeafModuleBlock as DeepSpeedZeroLeafModuleConfig
from zeroshard.layout.bucketing import MIXTURES

__all__ = [
    "DEFAULT_LEAF_MODULE_CLASSES",
    "DEFAULT_LEAF_MODULE_NAMES", "DEFAULT_LEAF_MODULE_NAME_SUFFIXES", "DeepSpeedZeroLeafModuleConfig",
]  # fmt: skip
__getattr__ = missing(__name__)
DEFAULT_LEAF_MODULE_CLASSES = list(MIXTURES)
DEFAULT_LEAF_MODULE_NAMES: list[str] = []
DEFAULT_LEAF_MODULE_NAME_SUFFIXES: list[str] = []
