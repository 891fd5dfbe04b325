"""Owns the names of parameters and buffers: those that they have in the model that nobody compiled. Called by all.

`torch.compile(module)` is another module, which holds the first under `_orig_mod`. To whoever reads a checkpoint or an export
that is of no interest: they load whether or not the model is compiled, and PEFT and transformers know the names.
"""

from __future__ import annotations

_WRAPPED = "_orig_mod"


def name_of(fqn: str) -> str:
    """A dotted name, as torch gives it, without what `torch.compile` put into it."""
    return ".".join(part for part in fqn.split(".") if part != _WRAPPED) if _WRAPPED in fqn else fqn
