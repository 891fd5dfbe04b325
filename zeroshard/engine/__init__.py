"""Training with a config, through an object with the methods of DeepSpeed's engine.

Names are imported at their first use: `engine.config` reads configs without torch, whose import takes seconds.
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {"Engine": "engine", "StepReport": "progress"}


def __getattr__(name: str) -> Any:
    """Import a name from its module, at its first use (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
