"""Owns zeroshard's version, which checkpoints record."""

__version__ = "0.1.0"
