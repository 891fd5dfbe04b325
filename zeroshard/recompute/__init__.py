"""Activation checkpointing."""

from zeroshard.recompute import checkpointing

__all__ = ["checkpointing"]
