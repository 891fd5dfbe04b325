"""Owns the way from a path, a dict or any Mapping to a resolved `Config`. Called by engine and cli."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import json5
import torch
from pydantic import BaseModel, ValidationError
from torch import nn

from zeroshard.config.arguments import nearest
from zeroshard.config.auto import Facts, resolve_auto
from zeroshard.config.batch_size import BatchSize, resolve_batch_size
from zeroshard.config.fields import AUTO, DTYPE_NAMES, Effect
from zeroshard.config.keys import KEYS, block_of, walk
from zeroshard.config.schema import ActivationCheckpointingBlock, Schema
from zeroshard.config.zero_block import LeafModuleBlock, OffloadOptimizerBlock, OffloadParamBlock, ZeroBlock
from zeroshard.errors import ConfigError, PolicyError
from zeroshard.policy import Offload, Place, Policy, Precision, Units, Wire, largest_shard_numel

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, known) for name, known in DTYPE_NAMES.items()}
_PLACES = {"none": None, "cpu": Place.CPU, "nvme": Place.DISK}


@dataclass(frozen=True)
class Entry:
    """One key of a resolved config."""

    path: str
    value: Any
    origin: str
    """The file, a default, "auto", or computed (batch sizes)."""
    effect: Effect


@dataclass(frozen=True)
class Config:
    """A config with every question answered."""

    schema: Schema
    batch: BatchSize
    auto: frozenset[str] = frozenset()
    """Paths of the keys that were "auto"."""
    document: Mapping[str, Any] = field(default_factory=dict)
    """The JSON as it was read, with values in the place of "auto"."""

    @property
    def names_batch_size(self) -> bool:
        """Whether the config, or "auto", says how many samples a microbatch or a step has; else `batch` counts microbatches."""
        return self.schema.train_batch_size is not None or self.schema.train_micro_batch_size_per_gpu is not None

    @property
    def stage(self) -> int:
        """The preset of the policy."""
        return int(self.schema.zero_optimization.stage)

    @cached_property
    def policy(self) -> Policy:
        """Where model states rest.

        Raises:
            ConfigError: what the stage and the offload blocks ask for has no meaning.
        """
        try:
            return self._policy()
        except PolicyError as error:
            raise ConfigError(f"zero_optimization with stage {self.stage}: {error}") from error

    def _policy(self) -> Policy:
        zero = self.schema.zero_optimization
        # The old keys and none of the new: {"device": "cpu"}.
        parameters = zero.offload_param or OffloadParamBlock(device="cpu" if zero.cpu_offload_param else "none")
        optimizer = zero.offload_optimizer or OffloadOptimizerBlock(device="cpu" if zero.cpu_offload else "none")
        aio = self.schema.aio
        common = Offload(
            sub_group_numel=max(zero.sub_group_size, 1),
            block_nbytes=aio.block_size,
            requests=aio.queue_depth * (aio.thread_count or aio.intra_op_parallelism),
        )
        of_parameters = replace(_offload(parameters, common), max_in_cpu_numel=parameters.max_in_cpu)
        of_optimizer = replace(
            _offload(optimizer, common),
            ratio=optimizer.ratio,
            read_ahead=optimizer.pipeline_read is not False,
            write_behind=optimizer.pipeline_write is not False,
        )
        within = _ranks_of_a_host(zero, self.batch.world_size)
        policy = Policy.stage(self.stage, within=within, wire=_wire(zero)).offloaded(
            parameters=_PLACES[parameters.device], offload=of_parameters
        )
        policy = policy.offloaded(optimizer=_PLACES[optimizer.device], offload=of_optimizer)
        return replace(
            policy,
            prefetch_numel=zero.stage3_prefetch_bucket_size,
            max_live_numel=zero.stage3_max_live_parameters,
            max_reuse_numel=zero.stage3_max_reuse_distance,
        )

    @property
    def units(self) -> Units:
        """Which parameters are brought together at once. The same under every stage, so that the bits are."""
        zero = self.schema.zero_optimization
        leaves = zero.leaf_module or LeafModuleBlock()
        return Units(
            leaves.classes,
            leaves.names,
            leaves.name_suffixes,
            min_numel=zero.stage3_module_granularity_threshold,
            persistent_numel=zero.stage3_param_persistence_threshold,
            max_persistent_numel=zero.stage3_model_persistence_threshold,
        )

    @cached_property
    def precision(self) -> Precision:
        """The dtypes of the run. With one microbatch a step there is nothing to sum, so gradients keep their dtype."""
        schema, types = self.schema, self.schema.data_types
        wire = _dtype(schema.communication_data_type)
        param = _dtype(types.param_dtype)
        if param is None and (schema.fp16.enabled or schema.bf16.enabled):
            param = torch.float16 if schema.fp16.enabled else torch.bfloat16
        accumulate = _dtype(types.grad_accum_dtype)
        if accumulate is None and param is not None and self.batch.accumulation == 1:
            accumulate = wire or param
        world_size = self.batch.world_size
        return Precision(
            param,
            reduce_dtype=wire,
            accumulate_dtype=accumulate,
            buffer_dtype=_dtype(types.buffer_dtype),
            predivide_factor=world_size if schema.prescale_gradients else schema.gradient_predivide_factor,
        )

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype that torch.autocast runs in, or None."""
        block = self.schema.torch_autocast
        return _DTYPES[block.dtype] if block.enabled else None

    @property
    def scales_loss(self) -> bool:
        """Whether gradients pass through fp16."""
        return self.precision.param_dtype is torch.float16 or self.autocast_dtype is torch.float16

    @property
    def skips_steps_that_are_not_finite(self) -> bool:
        """Always, but under bf16 where the config says that it may go on."""
        return not self.schema.bf16.enabled or self.schema.bf16.check_grad_overflow

    @property
    def bucket_numel(self) -> int:
        """Elements of the largest bucket. A shard of what rests on disk fits into the buffers that the config allows."""
        zero = self.schema.zero_optimization
        numel = min(zero.reduce_bucket_size, zero.allgather_bucket_size)
        if self.policy.optimizer.place is Place.DISK:
            numel = min(numel, self.batch.world_size * largest_shard_numel(self.policy.offload_optimizer))
        if self.policy.parameters.place is Place.DISK:
            numel = min(numel, self.batch.world_size * self.policy.offload_parameters.buffer_numel)
        return max(numel, 1)

    @property
    def overlap(self) -> bool:
        """Whether collectives run behind the computation."""
        return self.schema.zero_optimization.overlap_comm is not False

    def entries(self) -> Iterator[Entry]:
        """Every key, in the order of the schema, with what it came to."""
        batch = {
            "train_batch_size": self.batch.train,
            "train_micro_batch_size_per_gpu": self.batch.micro,
            "gradient_accumulation_steps": self.batch.accumulation,
        }
        for path, value, is_set, effect in walk(self.schema):
            arguments = value if path in ("optimizer.params", "scheduler.params") else {}
            for key, argument in arguments.items():
                yield Entry(f"{path}.{key}", argument, self._origin(f"{path}.{key}", "file"), effect)
            if path in batch and value is None:
                yield Entry(path, batch[path], self._origin(path, "computed"), effect)
            elif not arguments:
                yield Entry(path, value, self._origin(path, "file" if is_set else "default"), effect)

    def _origin(self, path: str, otherwise: str) -> str:
        return '"auto"' if path in self.auto else otherwise


def load_config(
    config: str | os.PathLike[str] | Mapping[str, Any],
    world_size: int,
    model: nn.Module | None = None,
    auto: Mapping[str, Any] | None = None,
) -> Config:
    """Read and resolve a DeepSpeed config.

    Args:
        config: a path to JSON (comments and trailing commas are fine), a dict, or any Mapping.
        world_size: data-parallel ranks, for the batch sizes.
        model: tells its hidden size and dtype to keys that are "auto".
        auto: values for keys that are "auto", by key path or by its last part; batch sizes also where the config names none.

    Raises:
        ConfigError: names the key path, what was expected and what came.
    """
    written = _in_full(read(config))
    raw, paths = resolve_auto(_with_batch_size(written, auto or {}), Facts.of(model, auto), KEYS)
    try:
        schema = Schema.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None
    _refuse_unknown(schema)
    for path, value, _, effect in walk(schema):
        if effect.refuses(value):
            raise ConfigError(f"{path} = {value!r} is not offered: {effect.text} Leave it out to train without it.")
    _refuse_conflicts(schema)
    batch = resolve_batch_size(schema, world_size)
    resolved = Config(schema, batch, frozenset(_canonical(path) for path in paths), raw)
    _ = resolved.policy  # now is the time to refuse what has no meaning
    return resolved


def refuse_without_batch_size(config: Config) -> None:
    """As DeepSpeed does: a step whose samples nobody counts is one whose learning rate nobody chose.

    Raises:
        ConfigError: neither the config nor "auto" names a batch size.
    """
    if not config.names_batch_size:
        raise ConfigError(
            "the config names no batch size: set train_micro_batch_size_per_gpu (samples of one forward on one rank) or "
            "train_batch_size (of one step), or give initialize(..., auto={'train_micro_batch_size_per_gpu': loader.batch_size})."
        )


def load_checkpointing(config: str | os.PathLike[str] | Mapping[str, Any]) -> ActivationCheckpointingBlock:
    """Read the block `activation_checkpointing` of a DeepSpeed config alone."""
    block = read(config).get("activation_checkpointing", {})
    try:
        return ActivationCheckpointingBlock.model_validate(block)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def _ranks_of_a_host(zero: ZeroBlock, world_size: int) -> int | None:
    """What ZeRO++ and MiCS call by names of their own."""
    said = {
        "zero_hpz_partition_size": zero.zero_hpz_partition_size if zero.zero_hpz_partition_size > 1 else None,
        "mics_shard_size": zero.mics_shard_size if zero.mics_shard_size > 0 else None,
    }
    given = {key: ranks for key, ranks in said.items() if ranks is not None}
    if len(set(given.values())) > 1:
        raise ConfigError(f"zero_optimization says two numbers of ranks of a host: {given}. Leave one of them out.")
    for key, ranks in given.items():
        if world_size % ranks:
            raise ConfigError(
                f"zero_optimization.{key} = {ranks} does not divide the {world_size} ranks: give the number of ranks of a host, or "
                "a divisor of it."
            )
    return next(iter(given.values()), None)


def _wire(zero: ZeroBlock) -> Wire:
    """What ZeRO++ calls qwZ and qgZ."""
    gradients = zero.zero_quantized_gradients
    return Wire(
        weights="int8" if zero.zero_quantized_weights else None,
        gradients=gradients if isinstance(gradients, str) else "int8" if gradients else None,
    )


def _offload(block: OffloadParamBlock | OffloadOptimizerBlock, common: Offload) -> Offload:
    """What the two blocks say alike."""
    return replace(
        common,
        path=block.nvme_path,
        pin_memory=block.pin_memory,
        buffer_count=block.buffer_count,
        buffer_numel=block.buffer_size,
    )


def _dtype(name: str | None) -> torch.dtype | None:
    return _DTYPES[name] if name else None


def _canonical(path: str) -> str:
    return path.replace("bfloat16.", "bf16.", 1) if path.startswith("bfloat16.") else path


def _with_batch_size(raw: dict[str, Any], auto: Mapping[str, Any]) -> dict[str, Any]:
    """A batch size that the config leaves out, and the caller knows, is as one that is "auto"."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu")
    if all(raw.get(key) is None for key in keys):
        return {**raw, **{key: AUTO for key in keys if key in auto}}
    return raw


def _in_full(raw: dict[str, Any]) -> dict[str, Any]:
    """Keys as the schema has them, of those that are written shorter, as DeepSpeed's Python names, or longer, as TRL's paths.

    `prefetch_bucket_size` for `stage3_prefetch_bucket_size`; `zero_optimization.reduce_bucket_size` at the top level, which counts
    where the block does not say it.
    """
    paths = [path for path in raw if path.count(".") == 1 and path in KEYS]
    zero = raw.get("zero_optimization")
    known = ZeroBlock.model_fields
    if isinstance(zero, dict):
        short = {key for key in zero if key not in known and f"stage3_{key}" in known and f"stage3_{key}" not in zero}
        raw = {**raw, "zero_optimization": {f"stage3_{key}" if key in short else key: zero[key] for key in zero}}
    for path in paths:
        raw = {**raw}
        value, (block, _, key) = raw.pop(path), path.partition(".")
        raw[block] = {key: int(value) if isinstance(value, float) else value, **raw.get(block, {})}
    return raw


def _refuse_unknown(schema: Schema) -> None:
    """A misspelt block would train with its defaults: nobody would see it."""
    unknown = [key for key in schema.model_extra or {} if key not in schema.ignored_keys]
    if unknown:
        lines = "".join(f"\n  {key}: unknown key{nearest(key, Schema.model_fields)}" for key in unknown)
        raise ConfigError(
            f"the config cannot be used:{lines}\nA key that another program keeps here goes into a list: "
            f'"ignored_keys": {json.dumps(unknown)}.'
        )


def _refuse_conflicts(schema: Schema) -> None:
    on = [name for name in ("fp16", "bf16", "torch_autocast") if getattr(schema, name).enabled]
    if len(on) > 1:
        raise ConfigError(f"{' and '.join(on)} are both enabled: a model trains in one precision. Enable one of them.")


def read(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The mapping that a file holds, or a copy of one, with nothing resolved."""
    if isinstance(config, Mapping):
        return _plain(config)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"a config is a path or a mapping, not {type(config).__name__}.")
    path = Path(config)
    if not path.is_file():
        raise ConfigError(f"{path} is a folder, not a config file." if path.is_dir() else f"no config file at {path}.")
    try:
        data = json5.loads(path.read_text(encoding="utf-8"), allow_duplicate_keys=False)
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold one JSON object, not {type(data).__name__}.")
    return data


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings of other libraries (OmegaConf) as dicts, all the way down."""
    strangers = [key for key in config if not isinstance(key, str)]
    if strangers:
        raise ConfigError(f"the keys of a config are strings, not {strangers[0]!r} ({type(strangers[0]).__name__}).")
    return {key: _plain(value) if isinstance(value, Mapping) else value for key, value in config.items()}


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(
                f"{path}: unknown key{nearest(str(problem['loc'][-1]), _block_at(problem['loc'][:-1]).model_fields)}"
            )
        else:
            lines.append(f"{path}: {problem['msg']} (it is {problem['input']!r:.80})")
    return "the config cannot be used:\n  " + "\n  ".join(dict.fromkeys(lines))


def _block_at(path: tuple[int | str, ...]) -> type[BaseModel]:
    block: type[BaseModel] = Schema
    for part in path:
        key = "bf16" if part == "bfloat16" else str(part)
        block = block_of(block, key) or block
    return block
