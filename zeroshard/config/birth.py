"""Owns what a config says of models that are born sharded, before it is whole. Called by whoever opens `sharded_init` for one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeroshard.config.fields import AUTO
from zeroshard.config.load import read
from zeroshard.errors import ConfigError
from zeroshard.policy import Place

_PLACES = {"cpu": Place.CPU, "nvme": Place.DISK}


@dataclass(frozen=True)
class Birth:
    """What a config says of models that are born sharded.

    Attributes:
        dtype: of their parameters; None: whatever they are made in.
        place: where their parts rest until the model is sharded.
        folder: on the disk, where that is the place.
    """

    dtype: torch.dtype | None = None
    place: Place = Place.ACCELERATOR
    folder: Path | None = None


def load_birth(config: str | os.PathLike[str] | Mapping[str, Any]) -> Birth:
    """Read it. Keys that are "auto" say nothing yet.

    Raises:
        ConfigError: fp16 and bf16 are both enabled.
    """
    raw = read(config)
    on = {name for name in ("fp16", "bf16", "bfloat16") if _block(raw, name).get("enabled") is True}
    if "fp16" in on and len(on) > 1:
        raise ConfigError("fp16 and bf16 are both enabled: a model trains in one precision. Enable one of them.")
    offload = _block(_block(raw, "zero_optimization"), "offload_param")
    place = _PLACES.get(str(offload.get("device")), Place.ACCELERATOR)
    folder = offload.get("nvme_path")
    dtype = (torch.float16 if "fp16" in on else torch.bfloat16) if on else None
    return Birth(dtype, place, Path(folder) if place is Place.DISK and folder not in (None, AUTO) else None)


def _block(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    block = raw.get(name)
    return block if isinstance(block, Mapping) else {}
