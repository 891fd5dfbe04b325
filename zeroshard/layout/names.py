"""Owns the names of parameters and buffers: those of the model without `torch.compile`.

`torch.compile(module)` is another module, which holds the first under `_orig_mod`. Names in checkpoints and exports lack that part,
so files load into compiled and plain models, and have the names that PEFT and transformers use.
"""

from __future__ import annotations

_WRAPPED = "_orig_mod"


def name_of(fqn: str) -> str:
    """Remove the parts of a dotted name that `torch.compile` inserted."""
    if _WRAPPED not in fqn:
        return fqn
    return ".".join(part for part in fqn.split(".") if part != _WRAPPED)
