"""Sharded checkpoints (complete or absent) and model files, read range by range."""
