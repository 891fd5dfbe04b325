"""A name of expert parallelism, for isinstance."""

from __future__ import annotations

from deepspeed._missing import missing, refused

MoE = refused("MoE", "Experts of transformers' models (Mixtral and its kin) are sharded as all parameters are.")
__all__ = ["MoE"]
__getattr__ = missing(__name__)
