"""Owns the question which operations of torch tell of a tensor without its values. Called by unit and sharded_init."""

from __future__ import annotations

METADATA = {
    "is_floating_point", "is_complex", "numel", "size", "dim", "stride", "element_size", "ndimension", "is_contiguous",
    "_has_compatible_shallow_copy_type", "__hash__", "__len__", "is_signed", "__get__", "__set__", "get_device", "requires_grad_",
    "register_hook", "register_post_accumulate_grad_hook", "grad", "backward",
}  # fmt: skip
"""Names of functions; getters and setters of attributes among them."""
VALUES = {"data", "T", "H", "mT", "mH", "real", "imag"}
"""Attributes that show values, where all others tell of the tensor."""
