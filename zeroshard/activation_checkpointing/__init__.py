"""Activation checkpointing on top of torch's own: where its saved inputs rest, and what it costs."""
