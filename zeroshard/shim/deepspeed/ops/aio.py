"""The builder of DeepSpeed's handle for files, by which scripts ask whether offload to disk works here: it does, and needs none."""

from __future__ import annotations

from deepspeed._missing import missing
from deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
__getattr__ = missing(__name__)
