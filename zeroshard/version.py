"""Owns zeroshard's version, which checkpoints record."""

__version__ = "0.2.0"
