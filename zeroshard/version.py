"""Owns zeroshard's version, which checkpoints record."""

__version__ = "0.3.0"
