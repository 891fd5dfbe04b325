"""LAMB, which is not offered."""

from __future__ import annotations

from deepspeed._missing import missing, refused

FusedLamb = refused("FusedLamb", "Its trust ratio needs whole layers: use AdamW, Lion or Muon.")
__all__ = ["FusedLamb"]
__getattr__ = missing(__name__)
