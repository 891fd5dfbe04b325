"""Owns what a model says of itself for those who load its files: config, generation config, adapters. Called by snapshot, formats.

Models of transformers and PEFT are known by what they have; nothing of those libraries is imported for any other model.
"""

from __future__ import annotations

import copy
import importlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.checkpoint.live_model import LiveModel

CONFIG, GENERATION, ADAPTER_CONFIG = "config.json", "generation_config.json", "adapter_config.json"
_PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the names of the model that it wraps, in adapter files."""


@dataclass(frozen=True)
class Description:
    """JSON, and kept in the manifest under the key `description`.

    Attributes:
        files: contents of JSON files that lie beside the weights, by name.
        adapters: of a PEFT model, by the folder ("" or one that ends in "/"): the names in the adapter's file, to fqns.
        problem: why the model cannot be exported, or None.
    """

    files: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, dict[str, str]] | None = None
    problem: str | None = None

    def as_json(self) -> dict[str, Any]:
        """For `of`."""
        return asdict(self)

    @staticmethod
    def of(told: Mapping[str, Any] | None) -> Description:
        """What was written; of a checkpoint that says nothing, nothing."""
        return Description(**(told or {}))


def describe(live: LiveModel) -> Description:
    """What the model says now; what it cannot say is a problem for the export, not for a save.

    Every rank must call it: PEFT asks modules for state dicts, for which parameters are brought together.
    """
    adapters = getattr(live.model, "peft_config", None)
    try:
        if isinstance(adapters, Mapping) and adapters:
            return _describe_adapters(live, adapters)
        return Description(_configs(live.model))
    except Exception as error:  # a library's own, about the user's config
        return Description(problem=f"the model's config cannot be written: {type(error).__name__}: {error}")


def _configs(model: nn.Module) -> dict[str, Any]:
    """As `save_pretrained` of transformers writes them; the dtype is the export's."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return {}
    told = json.loads(config.to_json_string())
    told["architectures"] = [type(model).__name__]
    told["dtype" if hasattr(config, "dtype") else "torch_dtype"] = None
    files = {CONFIG: told}
    generation: Any = getattr(model, "generation_config", None)
    can_generate = getattr(model, "can_generate", None)
    if callable(getattr(generation, "to_json_string", None)) and (not callable(can_generate) or can_generate()):
        files[GENERATION] = json.loads(generation.to_json_string())
    return files


# ---------------------------------------------------------------------- PEFT


def _describe_adapters(live: LiveModel, adapters: Mapping[str, Any]) -> Description:
    files: dict[str, Any] = {}
    names: dict[str, dict[str, str]] = {}
    for adapter, config in adapters.items():
        folder = "" if adapter == "default" else f"{adapter}/"
        files[folder + ADAPTER_CONFIG] = _adapter_config(live.model, config)
        names[folder] = _adapter_names(live, adapter, config)
    kept = {fqn for one in names.values() for fqn in one.values()}
    lost = [entry.fqn for unit in live.units if unit.trainable for entry in unit.named if entry.fqn not in kept]
    if lost:
        return Description(
            problem=f"{lost[0]} is trained and in no PEFT adapter ({len(lost)} such parameters): files of adapters would lose it. "
            "List its module in modules_to_save, or freeze it."
        )
    return Description(files, names)


def _adapter_config(model: nn.Module, config: Any) -> Any:
    """As PEFT writes it."""
    config = copy.deepcopy(config)
    config.inference_mode = True
    wrapped = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(wrapped, "name_or_path", None) or None
    kind = {"base_model_class": type(wrapped).__name__, "parent_library": type(wrapped).__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=kind if config.task_type is None else None)
        return json.loads((Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8"))


def _adapter_names(live: LiveModel, adapter: str, config: Any) -> dict[str, str]:
    """PEFT chooses and renames: it is given a state dict of tensors without content, which tell where each came from."""
    first = {name: entry.fqn for unit in live.units for entry in unit.named for name in entry.fqns}
    first |= {name: name for name in live.buffers}
    key = (adapter, *first)
    if (
        key not in live.adapter_names
    ):  # it may look at the Hub, whether the vocabulary has grown: once, however that ends
        live.adapter_names[key] = {}
        stand_ins = {name: torch.empty(0, device="meta") for name in first}
        source = {id(tensor): first[name] for name, tensor in stand_ins.items()}
        peft = importlib.import_module("peft")
        chosen = peft.get_peft_model_state_dict(live.model, state_dict=stand_ins, adapter_name=adapter)
        prefix = "" if hasattr(live.model, "get_base_model") else _PEFT_PREFIX
        strange = [name for name, tensor in chosen.items() if id(tensor) not in source]
        if not strange:
            live.adapter_names[key] = {prefix + name: source[id(tensor)] for name, tensor in chosen.items()}
    if not live.adapter_names[key]:
        raise ValueError(
            f"the adapter {adapter!r} ({config.peft_type}) holds what is no parameter as it is, or nothing"
        )
    return live.adapter_names[key]
