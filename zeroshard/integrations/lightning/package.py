"""Owns where Lightning's classes come from: `lightning`, or `pytorch_lightning` and `lightning_fabric`. Called by strategies."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from zeroshard.errors import UsageError


def _names() -> tuple[str, str]:
    """The package that the script has imported; where that says nothing, the one that is installed."""
    unified, apart = ("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric")
    imported = {name for name in ("lightning", "pytorch_lightning") if name in sys.modules}
    if imported == {"pytorch_lightning"}:
        return apart
    if find_spec("lightning") is not None:
        return unified
    if find_spec("pytorch_lightning") is not None:
        return apart
    raise UsageError("zeroshard.integrations.lightning needs Lightning, which is not installed: pip install lightning.")


_TRAINER, _FABRIC = _names()


def trainer_class(module: str, name: str) -> Any:
    """A class or object of lightning.pytorch."""
    return getattr(import_module(f"{_TRAINER}.{module}"), name)


def fabric_class(module: str, name: str) -> Any:
    """A class or object of lightning.fabric."""
    return getattr(import_module(f"{_FABRIC}.{module}"), name)
