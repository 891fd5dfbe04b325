"""Owns the conversion of a transformers `config.json` to the arguments of a plan: a factory, and batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.errors import UsageError

_HEADS = ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")
"""The endings of the names of models that compute a loss."""


@dataclass(frozen=True)
class Subject:
    """A model to plan.

    Attributes:
        factory: a function that builds the model.
        batch: a function from a number of samples to the arguments of one call.
        sequence: the number of tokens of a sample, if the caller chose it.
        own_samples: after a call of `batch`, the number of samples that the model's own batch has, if it has one.
    """

    factory: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    sequence: int | None = None
    own_samples: list[int] = field(default_factory=list)


def from_config_file(path: Path, sequence: int) -> Subject:
    """Return the model that a transformers `config.json` describes, without reading weights or using the network.

    Args:
        path: the file, or its folder.
        sequence: the number of tokens of a sample.

    Raises:
        UsageError: the file is missing or does not describe a model, or transformers is missing or lacks the
            architecture.
    """
    file = path
    if path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise UsageError(f"no config.json in {path}. Name a folder of a transformers model.")
    elif not file.is_file():
        raise UsageError(f"no file at {path}. Check the path.")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is not readable as JSON: {error}") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise UsageError(f"{file} names no model_type: name the config.json of a transformers model.")
    config = _config(file, values)
    cls = _class_of(file, values, config)

    def build() -> nn.Module:
        return cls._from_config(config, dtype=torch.float32)  # type: ignore[no-any-return]

    def batch(samples: int) -> dict[str, torch.Tensor]:
        tokens = torch.zeros(samples, sequence, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}

    return Subject(build, batch, sequence)


def _config(file: Path, values: dict[str, Any]) -> Any:
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        raise UsageError(
            "reading a config.json needs transformers, which is not installed: pip install transformers."
        ) from error
    kind = values["model_type"]
    if kind not in CONFIG_MAPPING:
        raise UsageError(
            f"{file}: the installed transformers has no architecture {kind!r}: install a release that has it, or "
            "name a factory, package.module:function."
        )
    try:
        config: Any = AutoConfig.for_model(**values)
    except Exception as error:
        raise UsageError(f"transformers refuses {file}: {str(error).splitlines()[0]}") from error
    config.use_cache = False
    return config


def _class_of(file: Path, values: dict[str, Any], config: Any) -> Any:
    import transformers

    named = (values.get("architectures") or [""])[0]
    if named.endswith(_HEADS) and hasattr(transformers, named):
        return getattr(transformers, named)
    autos: list[Any] = [transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM]
    if config.is_encoder_decoder:
        autos.insert(0, transformers.AutoModelForSeq2SeqLM)
    for auto in autos:
        known = auto._model_mapping.get(type(config), None)
        if known is not None:
            return known[0] if isinstance(known, tuple) else known
    raise UsageError(
        f"{file}: {values['model_type']} has no language model in transformers: name a factory, "
        "package.module:function, that returns (module, batch)."
    )
