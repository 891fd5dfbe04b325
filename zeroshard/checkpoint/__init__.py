"""Checkpoints and model files: sharded, whole or not at all, read range by range."""
