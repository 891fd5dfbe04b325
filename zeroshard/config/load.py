"""Owns the way from a path, a dict or any Mapping to a resolved `Config`. Called by engine and cli."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import json5
import torch
from pydantic import BaseModel, ValidationError

from zeroshard.config.batch_size import BatchSize, resolve_batch_size
from zeroshard.config.schema import AUTO, Effect, Kind, Schema
from zeroshard.errors import ConfigError
from zeroshard.policy import Policy, Precision

_DTYPES = {
    "fp32": torch.float32, "float32": torch.float32, "fp16": torch.float16, "float16": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """A config with every question answered."""

    schema: Schema
    batch: BatchSize

    @property
    def stage(self) -> int:
        """The preset of the policy."""
        return int(self.schema.zero_optimization.stage)

    @property
    def policy(self) -> Policy:
        """Where model states rest."""
        return Policy.stage(self.stage)

    @property
    def precision(self) -> Precision:
        """The dtypes of the run. With one microbatch a step there is nothing to sum, so gradients keep their dtype."""
        wire = self.schema.communication_data_type
        reduce = _DTYPES[wire] if wire else None
        if self.schema.bf16.enabled is not True:
            return Precision(reduce_dtype=reduce)
        accumulate = (reduce or torch.bfloat16) if self.batch.accumulation == 1 else torch.float32
        return Precision(torch.bfloat16, reduce_dtype=reduce, accumulate_dtype=accumulate)

    @property
    def bucket_numel(self) -> int:
        """Elements of the largest bucket."""
        zero = self.schema.zero_optimization
        sizes = (zero.reduce_bucket_size, zero.allgather_bucket_size)
        return min(500_000_000 if size == AUTO else int(size) for size in sizes)

    @property
    def overlap(self) -> bool:
        """Whether collectives run behind the computation."""
        return self.schema.zero_optimization.overlap_comm is not False

    @property
    def gradient_clipping(self) -> float:
        """The largest norm, or 0."""
        clipping = self.schema.gradient_clipping
        return 1.0 if clipping == AUTO else float(clipping)


def load_config(config: str | os.PathLike[str] | Mapping[str, Any], world_size: int) -> Config:
    """Read and resolve a DeepSpeed config.

    Args:
        config: a path to JSON (comments and trailing commas are fine), a dict, or any Mapping.
        world_size: data-parallel ranks, for the batch sizes.

    Raises:
        ConfigError: names the key path, what was expected and what came.
    """
    raw = _read(config)
    try:
        schema = Schema.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None
    for key in schema.model_extra or {}:
        warnings.warn(f"unknown key at the top level of the config: {key!r}{_nearest(key, Schema)}", stacklevel=3)
    _refuse(schema, "")
    return Config(schema, resolve_batch_size(schema, world_size))


def _read(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return {key: _plain(value) for key, value in config.items()}
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"a config is a path or a mapping, not {type(config).__name__}.")
    path = Path(config)
    if not path.is_file():
        raise ConfigError(f"no config file at {path}.")
    try:
        data = json5.loads(path.read_text(encoding="utf-8"), allow_duplicate_keys=False)
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold one JSON object, not {type(data).__name__}.")
    return data


def _plain(value: Any) -> Any:
    """Mappings of other libraries (OmegaConf) as dicts, all the way down."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"{path}: unknown key{_nearest(str(problem['loc'][-1]), _block_at(problem['loc'][:-1]))}")
        else:
            lines.append(f"{path}: {problem['msg']} (it is {problem['input']!r})")
    return "the config cannot be used:\n  " + "\n  ".join(dict.fromkeys(lines))


def _block_at(path: tuple[int | str, ...]) -> type[BaseModel]:
    block: type[BaseModel] = Schema
    for part in path:
        field = block.model_fields.get(str(part))
        options = [] if field is None else [field.annotation, *getattr(field.annotation, "__args__", ())]
        block = next(
            (option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), block
        )
    return block


def _nearest(key: str, block: type[BaseModel]) -> str:
    near = difflib.get_close_matches(key, list(block.model_fields), n=1)
    return f"; did you mean {near[0]!r}?" if near else "."


def effect_of(block: type[BaseModel], key: str) -> Effect:
    """What a key does here."""
    return next(item for item in block.model_fields[key].metadata if isinstance(item, Effect))


def _refuse(block: BaseModel, prefix: str) -> None:
    """Raise for the first key that is set to something this program does not do."""
    for key, field in type(block).model_fields.items():
        value = getattr(block, key)
        if isinstance(value, BaseModel):
            _refuse(value, f"{prefix}{key}.")
            continue
        effect = effect_of(type(block), key)
        if effect.kind is Kind.REFUSED and value != AUTO and value != field.get_default():
            raise ConfigError(
                f"{prefix}{key} = {value!r} is not offered: {effect.text} Leave it out to train without it."
            )
