"""Owns the version, which checkpoints name too."""

__version__ = "0.1.0"
