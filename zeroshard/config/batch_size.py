"""Owns the arithmetic of batch sizes: train_batch_size = micro batch * accumulation steps * ranks. Called by config.load."""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.config.schema import Schema
from zeroshard.errors import ConfigError


@dataclass(frozen=True)
class BatchSize:
    """The resolved trio. `train == micro * accumulation * world_size`."""

    train: int
    micro: int
    accumulation: int
    world_size: int


def resolve_batch_size(schema: Schema, world_size: int) -> BatchSize:
    """Complete what the config gives, as DeepSpeed does; with no batch size at all, a microbatch counts as one sample.

    Raises:
        ConfigError: with the equation and the numbers, where they do not agree.
    """
    train, micro = schema.train_batch_size, schema.train_micro_batch_size_per_gpu
    accumulation = schema.gradient_accumulation_steps
    told = (train, micro, accumulation)
    if train is not None:
        if micro is None and accumulation is None:
            accumulation = 1
        if micro is None and accumulation is not None:
            micro = train // (world_size * accumulation)
        elif accumulation is None and micro is not None:
            accumulation = train // (world_size * micro)
    micro = 1 if micro is None else micro
    accumulation = 1 if accumulation is None else accumulation
    if train is None:
        train = micro * accumulation * world_size
    if micro < 1 or accumulation < 1 or train != micro * accumulation * world_size:
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        set_here = ", ".join(f"{name}={value}" for name, value in zip(names, told, strict=True) if value is not None)
        raise ConfigError(
            "batch sizes do not agree: train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps "
            f"* ranks, but {train} != {micro} * {accumulation} * {world_size} (the config sets {set_here}). "
            "Change one of them, or leave one out to have it computed."
        )
    return BatchSize(train, micro, accumulation, world_size)
