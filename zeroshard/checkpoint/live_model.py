"""Owns the view of a model for checkpoints and exports: its parts, and the files that describe it to other programs.

Those files are the config, the generation config and the adapters' configs. Transformers and PEFT models are recognised
by their attributes; these libraries are not imported for other models.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from zeroshard.checkpoint.conversions import (
    REMEDY,
    ConvertedRow,
    NotOnlyMoved,
    rows_of,
    targets_in_files,
    transformers_model,
)
from zeroshard.checkpoint.manifest import ANOTHER, is_folder_name
from zeroshard.core.blocks import Target
from zeroshard.core.context import Context
from zeroshard.core.model_states import Held, ModelStates
from zeroshard.core.named_parameter import NamedParameter, name_of
from zeroshard.core.quantised import scales_of
from zeroshard.core.schedule import Schedule
from zeroshard.core.sharded_step import ShardedStep
from zeroshard.core.transport.base import Collectives
from zeroshard.core.unit import Unit
from zeroshard.core.users_optimizer import NoOptimizer
from zeroshard.errors import CheckpointError
from zeroshard.torch_private import is_saved, own_buffers

CONFIG = "config.json"
GENERATION = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
STATE_DTYPE = "state_dtype"
"""The key, in a manifest's policy, of the dtype in which optimizer states rested that are wider in a step; None if they did not."""
_PEFT_PREFIX = "base_model.model."
"""PEFT's prefix, in adapter files, for names in the wrapped model."""


@dataclass(frozen=True)
class LiveModel:
    """A sharded model with its optimizer. Its properties are always current."""

    model: nn.Module
    schedule: Schedule
    step: ShardedStep
    context: Context
    adapter_names: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)
    """The names in adapters' files that PEFT chose; see `_adapter_names`."""
    file_targets: dict[tuple[Any, ...], list[Target] | None] = field(default_factory=dict)
    """What `save_pretrained` writes; see `targets`."""

    @property
    def collectives(self) -> Collectives:
        """The collectives of all ranks that hold a part of the model."""
        return self.context.everyone

    @property
    def rank(self) -> int:
        return self.collectives.rank

    @property
    def mesh(self) -> dict[str, int] | None:
        """The number of ranks that shard the model, and the number that divide its tensors; None if no tensors are divided."""
        context = self.context
        if context.experts is not None:
            experts = context.experts.others.world_size
            return {"data_parallel": context.collectives.world_size, "expert_parallel": experts}
        if context.others.world_size == 1:
            return None
        return {"data_parallel": context.collectives.world_size, "tensor_parallel": context.others.world_size}

    def entries(self) -> list[tuple[Unit, NamedParameter]]:
        """List all parameters with their units, in the order that they would have if none were DTensors."""
        everything = [(unit, entry) for unit in self.units for entry in unit.named]
        if not any(unit.group.kind for unit in self.units):
            return everything
        number = {id(parameter): number for number, parameter in enumerate(self.model.parameters())}
        families: dict[tuple[nn.Module, str, torch.dtype], list[tuple[Unit, NamedParameter]]] = {}
        for unit, entry in everything:
            families.setdefault((unit.module, unit.group.label, entry.parameter.dtype), []).append((unit, entry))
        for family in families.values():
            family.sort(key=lambda pair: number[id(pair[1].parameter)])
        return [pair for family in families.values() for pair in family]

    def targets(self) -> list[Target] | None:
        """List the tensors that transformers' `save_pretrained` would write; None if the model is not of transformers 5.

        Raises:
            NotOnlyMoved: transformers' conversion cannot be followed.
        """
        shapes = {entry.fqn: tuple(entry.placement.shape) for _, entry in self.entries()}
        shapes |= {name: tuple(buffer.shape) for name, buffer in self.buffers.items()}
        conversions = getattr(transformers_model(self.model), "_weight_conversions", None)
        key = (id(conversions), *shapes.items())
        if key not in self.file_targets:
            self.file_targets.clear()
            self.file_targets[key] = targets_in_files(self.model, shapes)
        return self.file_targets[key]

    def writes(self, held: Held) -> bool:
        """Return whether this rank writes a span to files. If several ranks hold the span, only one writes it."""
        is_first = self.context.others.rank == 0 or not held.named.placement.is_whole
        return is_first and held.is_own

    @property
    def units(self) -> Sequence[Unit]:
        return self.schedule.units

    @property
    def states(self) -> ModelStates:
        """The model states by name, computed at each use."""
        return ModelStates(self.schedule.units, self.step, self.context.collectives)

    @property
    def inner(self) -> torch.optim.Optimizer | None:
        """The optimizer that updates this rank's shards; None if the model has no optimizer."""
        if isinstance(self.step.inner, NoOptimizer):
            return None
        return self.step.inner

    @property
    def group_names(self) -> list[list[str]]:
        """The first names of each param group's parameters."""
        fqn_of: Mapping[int, str] = {id(entry.parameter): entry.fqn for unit in self.units for entry in unit.named}
        return [[fqn_of[parameter] for parameter in group if parameter in fqn_of] for group in self.step.groups.ids]

    @property
    def modules_with_extra_states(self) -> dict[str, nn.Module]:
        """The modules with their own `get_extra_state`, by name. A shared module occurs once."""
        default = nn.Module.get_extra_state
        named = self.model.named_modules()
        return {name_of(name): module for name, module in named if type(module).get_extra_state is not default}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers that a state dict holds, by name, and scales of quantised parameters. Those of a shared module occur once."""
        found = {name_of(fqn): buffer.detach() for fqn, buffer in persistent_buffers(self.model)}
        return found | dict(scales_of(self.model))


def name_of_state_dtype(live: LiveModel) -> str | None:
    """Return `Precision.state_dtype` as manifests name it, such as "bfloat16"."""
    dtype = live.context.precision.state_dtype
    return None if dtype is None else str(dtype).removeprefix("torch.")


def persistent_buffers(model: nn.Module, *, all_names: bool = False) -> list[tuple[str, Tensor]]:
    """List the buffers that a state dict holds. Buffers of a shared module occur once, or, with `all_names`, under all names."""
    found = []
    for prefix, module in model.named_modules(remove_duplicate=not all_names):
        for name, buffer in own_buffers(module).items():
            if buffer is not None and is_saved(module, name):
                found.append((f"{prefix}.{name}".lstrip("."), buffer))
    return found


# ---------------------------------------------------------------------- files that describe the model


def _is_subfolder(name: str) -> bool:
    """Return whether a name is "" or a plain folder name with a trailing slash."""
    return name == "" or (name.endswith("/") and is_folder_name(name.removesuffix("/")))


def _file_of_an_export(name: str) -> str:
    folder, slash, file = name.rpartition("/")
    if file not in (CONFIG, GENERATION, ADAPTER_CONFIG) or not _is_subfolder(folder + slash):
        raise ValueError("it names a file that no export writes, or one outside of the export's folder")
    return name


def _folder_of_an_export(name: str) -> str:
    if not _is_subfolder(name):
        raise ValueError("it names a folder outside the export")
    return name


class Description(BaseModel):
    """A description of the model. The manifest stores it as JSON, in `values["description"]`.

    An export writes files under its names, so each name is verified: manifests are not trusted.

    Attributes:
        files: the contents of JSON files beside the weights, by name.
        adapters: for a PEFT model, a dict from each adapter's folder ("" or one that ends in "/") to a dict from the
            names in its file to fqns; otherwise None.
        weights: what an export of a transformers model writes, in its order; None: the tensors as they are in the model.
        total_parameters: the number of a transformers model's parameters, for the index; otherwise None.
        problem: the reason why the model cannot be exported, or None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    files: dict[Annotated[str, AfterValidator(_file_of_an_export)], Any] = {}
    adapters: dict[Annotated[str, AfterValidator(_folder_of_an_export)], dict[str, str]] | None = None
    weights: list[ConvertedRow] | None = None
    total_parameters: int | None = None
    problem: str | None = None

    def content(self) -> dict[str, Any]:
        """Return the description for a manifest. Only a transformers model has the keys `weights` and `total_parameters`."""
        content = self.model_dump(exclude={"weights", "total_parameters"})
        if self.weights is not None:
            content["weights"] = [row.model_dump(exclude_defaults=True) for row in self.weights]
            content["total_parameters"] = self.total_parameters
        return content

    @classmethod
    def of(cls, found: Any) -> Description:
        """Create a description from a manifest.

        Raises:
            CheckpointError: `found` is not a description or names a file or folder that no export writes.
        """
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise CheckpointError(
                "the manifest's description of the model is damaged or malicious: "
                f"{reason[0].lower()}{reason[1:]}. {ANOTHER}"
            ) from None


def describe(live: LiveModel) -> Description:
    """Describe the model as it is now. If that fails, saves still succeed, and only `export` raises an error.

    Every rank must call it: PEFT calls `state_dict()` on modules, which gathers units.
    """
    adapters = getattr(live.model, "peft_config", None)
    try:
        if isinstance(adapters, Mapping) and adapters:
            return _describe_adapters(live, adapters)
        targets = live.targets()
        if targets is None:
            return Description(files=_configs(live.model))
        total = sum(math.prod(entry.placement.shape) for _, entry in live.entries())
        return Description(files=_configs(live.model), weights=rows_of(targets), total_parameters=total)
    except NotOnlyMoved as error:
        return Description(problem=f"transformers converts its weights for files, and {error}. {REMEDY}")
    except Exception as error:  # a library's error about the user's config
        return Description(problem=f"the model's config cannot be written: {type(error).__name__}: {error}")


def _configs(model: nn.Module) -> dict[str, Any]:
    """Return the configs as transformers' `save_pretrained` writes them, without a dtype: the export sets it."""
    config: Any = getattr(model, "config", None)
    if not callable(getattr(config, "to_json_string", None)):
        return {}
    content = json.loads(config.to_json_string())
    content["architectures"] = [type(model).__name__]
    content["dtype" if hasattr(config, "dtype") else "torch_dtype"] = None
    files = {CONFIG: content}
    generation: Any = getattr(model, "generation_config", None)
    can_generate = getattr(model, "can_generate", None)
    if callable(getattr(generation, "to_json_string", None)) and (not callable(can_generate) or can_generate()):
        files[GENERATION] = json.loads(generation.to_json_string())
    return files


# ---------------------------------------------------------------------- PEFT


def adapter_parameters(model: nn.Module) -> list[nn.Parameter]:
    """List the parameters of a PEFT model that are trained or belong to an adapter; none for other models."""
    adapters = [f".{name}." for name in getattr(model, "peft_config", ())]
    found: dict[nn.Parameter, None] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if adapters and (parameter.requires_grad or any(adapter in f".{name}." for adapter in adapters)):
            found[parameter] = None
    return list(found)


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
            problem=f"{lost[0]} is trained and in no PEFT adapter ({len(lost)} such parameters): adapters' files would lack it. "
            "List its module in modules_to_save, or freeze it."
        )
    return Description(files=files, adapters=names)


def _adapter_config(model: nn.Module, config: Any) -> Any:
    """Return an adapter's config as PEFT writes it."""
    config = copy.deepcopy(config)
    config.inference_mode = True
    wrapped = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(wrapped, "name_or_path", None) or None
    kind = None
    if config.task_type is None:
        kind = {"base_model_class": type(wrapped).__name__, "parent_library": type(wrapped).__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=kind)
        return json.loads((Path(folder) / ADAPTER_CONFIG).read_text(encoding="utf-8"))


def _adapter_names(live: LiveModel, adapter: str, config: Any) -> dict[str, str]:
    """Map the names in an adapter's file to fqns.

    PEFT chooses and renames them. It receives a state dict of empty tensors, and the identity of each tensor reveals
    the origin of its name.
    """
    first = {name: entry.fqn for unit in live.units for entry in unit.named for name in entry.fqns}
    first_of: dict[int, str] = {}  # by the buffer's id
    for fqn, buffer in persistent_buffers(live.model, all_names=True):
        first[name_of(fqn)] = first_of.setdefault(id(buffer), name_of(fqn))
    key = (adapter, *first)
    # PEFT may query the Hub about the vocabulary's size: call PEFT once, whether the query succeeds or not.
    if key not in live.adapter_names:
        live.adapter_names[key] = {}
        stand_ins = {name: torch.empty(0, device="meta") for name in first}
        source = {id(tensor): first[name] for name, tensor in stand_ins.items()}
        peft = importlib.import_module("peft")
        chosen = peft.get_peft_model_state_dict(live.model, state_dict=stand_ins, adapter_name=adapter)
        prefix = "" if hasattr(live.model, "get_base_model") else _PEFT_PREFIX
        if all(id(tensor) in source for tensor in chosen.values()):
            live.adapter_names[key] = {prefix + name: source[id(tensor)] for name, tensor in chosen.items()}
    if not live.adapter_names[key]:
        raise ValueError(
            f"the adapter {adapter!r} ({config.peft_type}) is empty, or has values that are not parameters"
        )
    return live.adapter_names[key]
