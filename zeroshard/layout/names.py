"""Owns the names of parameters and buffers: those of the model without `torch.compile`.

`torch.compile(module)` is another module, which holds the first under `_orig_mod`. Readers of a checkpoint or an export do not
care: files load whether or not the model is compiled, and PEFT and transformers know the names.
"""

from __future__ import annotations

_WRAPPED = "_orig_mod"


def name_of(fqn: str) -> str:
    """Remove from a dotted name of torch's the parts that `torch.compile` put into it."""
    if _WRAPPED not in fqn:
        return fqn
    return ".".join(part for part in fqn.split(".") if part != _WRAPPED)
