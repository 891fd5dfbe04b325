"""Sequence parallelism, which is not offered."""

from deepspeed._missing import missing

__getattr__ = missing(__name__)
