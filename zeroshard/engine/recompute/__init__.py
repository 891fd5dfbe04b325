"""Activation checkpointing."""

from zeroshard.engine.recompute import checkpointing

__all__ = ["checkpointing"]
