"""Owns the loading of a config: from a path, a dict or any Mapping to a resolved `Config`."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import json5
from pydantic import BaseModel, TypeAdapter, ValidationError

from zeroshard.engine.config.auto import resolve_auto
from zeroshard.engine.config.fields import AUTO, DTYPE_NAMES, Effect, nearest
from zeroshard.engine.config.schema import KEYS, MONITORS, ActivationCheckpointingBlock, Schema, block_of, walk
from zeroshard.engine.config.zero_block import LeafModuleBlock, OffloadOptimizerBlock, OffloadParamBlock, ZeroBlock
from zeroshard.errors import ConfigError, PolicyError
from zeroshard.policy import Offload, Place, Policy, Precision, Units, largest_shard_numel

if TYPE_CHECKING:  # `zeroshard config check` resolves a config without torch, whose import takes seconds
    import torch
    from torch import nn

_MOST_PROBLEMS = 10
"""The maximum number of problems in one message, since each unknown key is compared with all known keys."""
_PLACES = {"none": None, "cpu": Place.CPU, "nvme": Place.DISK}


def _dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype with a name in configs. None stays None."""
    import torch

    return None if name is None else getattr(torch, DTYPE_NAMES.get(name, name))


@dataclass(frozen=True)
class BatchSize:
    """The three resolved batch sizes: `train == micro * accumulation * world_size`."""

    train: int
    micro: int
    accumulation: int
    world_size: int


@dataclass(frozen=True)
class Entry:
    """A key of a resolved config."""

    path: str
    value: Any
    origin: str
    """The source of the value: `file`, `default`, `"auto"`, or `computed` (batch sizes)."""
    effect: Effect


@dataclass(frozen=True)
class Config:
    """A resolved config: every key has a value."""

    schema: Schema
    batch: BatchSize
    auto: frozenset[str]
    """Paths of the keys that were "auto"."""
    document: Mapping[str, Any]
    """The config with full key names, and values instead of "auto"."""

    @property
    def names_batch_size(self) -> bool:
        """Whether the config or "auto" gives a batch size in samples; otherwise `batch` counts microbatches."""
        return self.schema.train_batch_size is not None or self.schema.train_micro_batch_size_per_gpu is not None

    @property
    def names_accumulation(self) -> bool:
        """Whether the config or "auto" determines the number of microbatches of a step."""
        return self.schema.gradient_accumulation_steps is not None or self.schema.train_batch_size is not None

    def with_accumulation(self, count: int) -> Config:
        """Return the config for steps of `count` microbatches, which a trainer decides."""
        return replace(self, batch=replace(self.batch, accumulation=count))

    @property
    def stage(self) -> int:
        """The ZeRO stage: the preset of the policy."""
        return int(self.schema.zero_optimization.stage)

    @cached_property
    def policy(self) -> Policy:
        """The residencies of model states."""
        zero = self.schema.zero_optimization
        parameters = zero.offload_param or OffloadParamBlock()
        optimizer = zero.offload_optimizer or OffloadOptimizerBlock()
        # The old keys count only where the new blocks are missing.
        if zero.cpu_offload_param and zero.offload_param is None:
            parameters = OffloadParamBlock(device="cpu")
        if zero.cpu_offload and zero.offload_optimizer is None:
            optimizer = OffloadOptimizerBlock(device="cpu")
        of_parameters = self._offload(parameters, max_in_cpu_numel=parameters.max_in_cpu)
        of_optimizer = self._offload(
            optimizer,
            ratio=optimizer.ratio,
            read_ahead=optimizer.pipeline_read is not False,
            write_behind=optimizer.pipeline_write is not False,
        )
        if zero.zero_quantized_gradients:
            warnings.warn(
                "zero_quantized_gradients has no effect: gradients are sent exactly. Leave it out.", stacklevel=2
            )
        policy = Policy.stage(self.stage, within=_ranks_of_a_host(zero, self.batch.world_size))
        if self.stage > 0:
            policy = policy.offloaded(parameters=_PLACES[parameters.device], offload=of_parameters)
        policy = policy.offloaded(optimizer=_PLACES[optimizer.device], offload=of_optimizer)
        return replace(
            policy,
            prefetch_numel=zero.stage3_prefetch_bucket_size,
            max_live_numel=zero.stage3_max_live_parameters,
            max_reuse_numel=zero.stage3_max_reuse_distance,
        )

    def _offload(self, block: OffloadParamBlock | OffloadOptimizerBlock, **own: Any) -> Offload:
        """Return the settings for transfers: keys of both offload blocks, `sub_group_size`, keys of `aio`, and `own`."""
        aio = self.schema.aio
        return Offload(
            path=block.nvme_path,
            pin_memory=block.pin_memory,
            buffer_count=block.buffer_count,
            buffer_numel=block.buffer_size,
            sub_group_numel=max(self.schema.zero_optimization.sub_group_size, 1),
            block_nbytes=aio.block_size,
            requests=aio.queue_depth * (aio.thread_count or aio.intra_op_parallelism),
            **own,
        )

    @property
    def units(self) -> Units:
        """The definition of units, the same at every stage, so that results are bit-identical."""
        zero = self.schema.zero_optimization
        leaves = zero.leaf_module or LeafModuleBlock()
        return Units(
            leaves.classes,
            leaves.names,
            leaves.name_suffixes,
            min_numel=zero.stage3_module_granularity_threshold or None,
            persistent_numel=zero.stage3_param_persistence_threshold,
            max_persistent_numel=zero.stage3_model_persistence_threshold,
        )

    @cached_property
    def precision(self) -> Precision:
        """The dtypes of the run."""
        schema = self.schema
        types = schema.data_types
        param = types.param_dtype
        if param is None and schema.fp16.enabled:
            param = "fp16"
        elif param is None and schema.bf16.enabled:
            param = "bf16"
        factor = schema.gradient_predivide_factor
        if schema.prescale_gradients:
            factor = self.batch.world_size
        precision = Precision(
            _dtype(param),
            reduce_dtype=_dtype(schema.communication_data_type),
            accumulate_dtype=_dtype(types.grad_accum_dtype),
            buffer_dtype=_dtype(types.buffer_dtype),
            predivide_factor=factor,
            keep_in_fp32=tuple(types.keep_in_fp32_modules or ()),
            state_dtype=self._state_dtype(),
            state_rounding=types.state_rounding,
        )
        count = self.batch.accumulation
        if not schema.managed_gradient_accumulation:
            count = 2  # or more: the caller decides
        return precision.over_microbatches(count)

    def _state_dtype(self) -> torch.dtype | None:
        name = self.schema.data_types.state_dtype
        narrow = self.schema.bf16.bf16_optimizer_states
        if narrow and name not in (None, "bf16", "bfloat16"):
            raise ConfigError(
                f"data_types.state_dtype is {name}, and bf16.bf16_optimizer_states is true: optimizer states rest in one dtype. "
                "Leave out one of the two keys."
            )
        if name in ("fp32", "float32"):
            return None
        return _dtype("bf16" if narrow else name)

    @property
    def shard_arguments(self) -> dict[str, Any]:
        """The arguments of `zeroshard.shard` that the config sets, other than the policy and the precision."""
        return {"bucket_numel": self.bucket_numel, "overlap": self.overlap, "units": self.units}

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of torch.autocast, or None if it is off."""
        block = self.schema.torch_autocast
        if not block.enabled:
            return None
        return _dtype(block.dtype)

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled: parameters or torch.autocast are in fp16."""
        float16 = _dtype("fp16")
        return self.precision.param_dtype is float16 or self.autocast_dtype is float16

    @property
    def skips_steps_that_are_not_finite(self) -> bool:
        """Whether steps with infinite or NaN gradients are skipped. Only a bf16 config can switch this off."""
        return not self.schema.bf16.enabled or self.schema.bf16.check_grad_overflow

    @property
    def bucket_numel(self) -> int:
        """The maximum size of a bucket, in elements. If shards are on disk, the config's buffers in CPU memory limit it."""
        zero = self.schema.zero_optimization
        numel = min(zero.reduce_bucket_size, zero.allgather_bucket_size)
        if self.policy.optimizer.place is Place.DISK:
            numel = min(numel, self.batch.world_size * largest_shard_numel(self.policy.offload_optimizer))
        if self.policy.parameters.place is Place.DISK:
            numel = min(numel, self.batch.world_size * self.policy.offload_parameters.buffer_numel)
        return numel

    @property
    def overlap(self) -> bool:
        """Whether collectives overlap with computation."""
        return self.schema.zero_optimization.overlap_comm is not False

    def entries(self) -> Iterator[Entry]:
        """Yield every key in the order of the schema, with its value, origin and effect."""
        batch = {
            "train_batch_size": self.batch.train,
            "train_micro_batch_size_per_gpu": self.batch.micro,
            "gradient_accumulation_steps": self.batch.accumulation,
        }
        for path, value, is_set, effect in walk(self.schema):
            found = {path: value}
            if path in ("optimizer.params", "scheduler.params") and value:
                found = {f"{path}.{key}": argument for key, argument in value.items()}
            origin = "file" if is_set else "default"
            if path in batch and value is None:
                found = {path: batch[path]}
                origin = "computed"
            for key, one in found.items():
                yield Entry(key, one, '"auto"' if key in self.auto else origin, effect)


def load_config(
    config: str | os.PathLike[str] | Mapping[str, Any],
    world_size: int,
    model: nn.Module | None = None,
    auto: Mapping[str, Any] | None = None,
) -> Config:
    """Read and resolve a DeepSpeed config.

    Args:
        config: a path to JSON (comments and trailing commas are fine), a dict, or any Mapping.
        world_size: the number of data-parallel ranks, from which batch sizes are computed.
        model: the model, whose hidden size and dtype replace "auto" in some keys.
        auto: values for keys that are "auto", by key path, by its last part, or by block (`fp16`); also batch sizes if
            the config names none.

    Raises:
        ConfigError: the config cannot be read, or its keys or values are wrong; the message names them.
    """
    supplied = dict(auto or {})
    raw = _in_full(read(config))
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu")
    if all(raw.get(key) is None for key in sizes):
        raw |= {key: AUTO for key in sizes if key in supplied}
    raw, paths = resolve_auto(raw, model, supplied)
    try:
        schema = Schema.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None
    unknown = [key for key in schema.model_extra or {} if key not in schema.ignored_keys]
    if unknown:  # a misspelt block would otherwise get its defaults
        lines = [f"{key}: unknown key{nearest(key, Schema.model_fields)}" for key in unknown[:_MOST_PROBLEMS]]
        raise ConfigError(
            f"{_listed(lines, len(unknown))}\nIf another program needs these keys, list them: "
            f'"ignored_keys": {json.dumps(unknown[:_MOST_PROBLEMS])}.'
        )
    for path, value, _, effect in walk(schema):
        if effect.refuses(value):
            raise ConfigError(f"{path} = {value!r} is not supported: {effect.text} Leave it out to train without it.")
    on = [name for name in ("fp16", "bf16", "torch_autocast") if getattr(schema, name).enabled]
    if len(on) > 1:
        raise ConfigError(f"{' and '.join(on)} are both enabled: a model trains in one precision. Enable one of them.")
    batch = _resolve_batch_size(schema, world_size)
    paths = {f"bf16.{path[9:]}" if path.startswith("bfloat16.") else path for path in paths}
    resolved = Config(schema, batch, frozenset(paths), raw)
    try:
        _ = resolved.policy
    except PolicyError as error:
        raise ConfigError(f"zero_optimization with stage {resolved.stage}: {error}") from error
    return resolved


def refuse_without_batch_size(config: Config) -> None:
    """Raise for a config without a batch size, as DeepSpeed does, since learning rates are tuned for one batch size.

    Raises:
        ConfigError: neither the config nor "auto" names a batch size.
    """
    if not config.names_batch_size:
        raise ConfigError(
            "the config names no batch size: set train_micro_batch_size_per_gpu (samples per forward on one rank) or "
            "train_batch_size (samples per step) in it. Or pass --auto train_micro_batch_size_per_gpu=... on the command line, "
            "or initialize(..., auto={'train_micro_batch_size_per_gpu': ...})."
        )


def refuse_tensor_parallel(config: Config, what: str) -> None:
    """Raise ConfigError if a config divides models or experts over ranks, since the caller (`what`) does not support that."""
    size = config.schema.expert_parallel.ranks
    if size > 1:
        raise ConfigError(
            f"expert_parallel.autoep_size = {size} is not supported by {what}: use zeroshard.initialize, or the stock Trainer "
            "under `zeroshard run`; or leave expert_parallel out."
        )
    size = config.schema.tensor_parallel.autotp_size
    if size > 1:
        raise ConfigError(
            f"tensor_parallel.autotp_size = {size} is not supported by {what}: use zeroshard.initialize, or the stock Trainer "
            "under `zeroshard run`; or leave tensor_parallel out."
        )


def load_checkpointing(config: str | os.PathLike[str] | Mapping[str, Any]) -> ActivationCheckpointingBlock:
    """Return only the block `activation_checkpointing` of a DeepSpeed config. Raise ConfigError if it is invalid."""
    block = _in_full(read(config)).get("activation_checkpointing", {})
    try:
        return ActivationCheckpointingBlock.model_validate(block)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def load_monitors(config: str | os.PathLike[str] | Mapping[str, Any]) -> Schema:
    """Return only the monitors' blocks of a config; a block without `enabled` is enabled. Raise ConfigError for wrong ones."""
    raw = _in_full(read(config))
    known = {*Schema.model_fields, "bfloat16", *(raw.get("ignored_keys") or ())}
    for key in raw:
        if key not in known:
            raise ConfigError(f"{key}: unknown key{nearest(key, MONITORS)} Name a monitor: {', '.join(MONITORS)}.")
    given = {key: raw[key] for key in MONITORS if key in raw}
    try:
        return Schema.model_validate({
            key: {"enabled": True, **block} if isinstance(block, Mapping) else block for key, block in given.items()
        })  # fmt: skip
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def tensor_parallel_ranks(config: str | os.PathLike[str] | Mapping[str, Any]) -> int:
    """Return only `tensor_parallel.autotp_size` of a DeepSpeed config; 1 if it is missing, below 1 or not a number."""
    size = _block(_in_full(read(config)), "tensor_parallel").get("autotp_size")
    try:
        return max(int(size or 1), 1)
    except (TypeError, ValueError, OverflowError):
        return 1  # `load_config` reports it


def expert_parallel_ranks(config: str | os.PathLike[str] | Mapping[str, Any]) -> int:
    """Return only `expert_parallel.autoep_size` of a DeepSpeed config; 1 if it is missing, not enabled, below 1 or not a number."""
    block = _block(_in_full(read(config)), "expert_parallel")
    try:
        return max(int(block.get("autoep_size") or 1), 1) if _is_true(block.get("enabled")) else 1
    except (TypeError, ValueError, OverflowError):
        return 1  # `load_config` reports it


def _resolve_batch_size(schema: Schema, world_size: int) -> BatchSize:
    """Compute the missing batch sizes as DeepSpeed does. Without any, a microbatch counts as one sample."""
    given = {
        "train_batch_size": schema.train_batch_size,
        "train_micro_batch_size_per_gpu": schema.train_micro_batch_size_per_gpu,
        "gradient_accumulation_steps": schema.gradient_accumulation_steps,
    }
    train, micro, accumulation = given.values()
    if train is None:
        micro = micro or 1
        accumulation = accumulation or 1
        train = micro * accumulation * world_size
    elif micro is None:
        accumulation = accumulation or 1
        micro = train // (world_size * accumulation)
    elif accumulation is None:
        accumulation = train // (world_size * micro)
    if micro < 1 or accumulation < 1 or train != micro * accumulation * world_size:
        more = ""
        if world_size == 1:
            more = " If there should be several ranks, start them with torchrun (for `config check`: --ranks)."
        set_here = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise ConfigError(
            "batch sizes do not agree: train_batch_size must be train_micro_batch_size_per_gpu * "
            f"gradient_accumulation_steps * ranks, but {train} != {micro} * {accumulation} * {world_size} (the config sets "
            f"{set_here}). Change one of them, or leave one out: zeroshard computes it.{more}"
        )
    return BatchSize(train, micro, accumulation, world_size)


def _ranks_of_a_host(zero: ZeroBlock, world_size: int) -> int | None:
    """Return the number of ranks per host, which ZeRO++ and MiCS configure under different names."""
    given = {}
    if zero.zero_hpz_partition_size > 1:
        given["zero_hpz_partition_size"] = zero.zero_hpz_partition_size
    if zero.mics_shard_size > 0:
        given["mics_shard_size"] = zero.mics_shard_size
    if len(set(given.values())) > 1:
        raise ConfigError(f"zero_optimization sets two numbers of ranks per host: {given}. Leave one of them out.")
    for key, ranks in given.items():
        if world_size % ranks:
            raise ConfigError(
                f"zero_optimization.{key} = {ranks} does not divide the {world_size} ranks: set it to the number of "
                "ranks per host, or to a divisor of that number."
            )
    return next(iter(given.values()), None)


def _in_full(raw: dict[str, Any]) -> dict[str, Any]:
    """Rename keys that are written in a short or long form.

    DeepSpeed's Python names are short: `prefetch_bucket_size` for `stage3_prefetch_bucket_size`. TRL's names are paths
    at the top level: `zero_optimization.reduce_bucket_size`. Fractional sizes under such paths are truncated. A path
    counts only if its block does not have the key.
    """
    raw = dict(raw)
    zero = raw.get("zero_optimization")
    known = ZeroBlock.model_fields
    if isinstance(zero, dict):
        raw["zero_optimization"] = full = {}
        for key, value in zero.items():
            is_short = key not in known and f"stage3_{key}" in known and f"stage3_{key}" not in zero
            full[f"stage3_{key}" if is_short else key] = value
    for path in [path for path in raw if path.count(".") == 1 and path in KEYS]:
        block, _, key = path.partition(".")
        inside = {} if raw.get(block) is None else raw[block]
        if isinstance(inside, dict):  # otherwise the schema refuses the block
            value = raw.pop(path)
            if block == "zero_optimization" and isinstance(value, float) and math.isfinite(value):
                value = int(value)
            raw[block] = {key: value, **inside}
    return raw


def _listed(lines: list[str], count: int) -> str:
    """Return the message about a config's `count` problems, of which `lines` describe the first."""
    more = ""
    if count > len(lines):
        more = f"\n  and {count - len(lines)} more"
    return "the config cannot be used:\n  " + "\n  ".join(lines) + more


def read(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Return a config from a file, or a copy of a mapping, unresolved. Raise ConfigError if the config cannot be read."""
    if isinstance(config, Mapping):
        return _plain(config)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"a config must be a path or a mapping, not {type(config).__name__}. Pass one of them.")
    path = Path(config)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder, not a config file. Pass the path of a file in it.")
    if not path.is_file():
        raise ConfigError(f"there is no config file at {path}. Check the path.")
    try:
        text = path.read_text(encoding="utf-8")
        data = _read_hjson(text) if path.suffix == ".hjson" else _parse(text)
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not readable as JSON: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold one JSON object, not {type(data).__name__}. Put the keys into {{...}}.")
    return data


def without_training(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """Read a config for evaluation only: without its optimizer and scheduler, whose "auto" values only a training run has."""
    return {key: value for key, value in read(config).items() if key not in ("optimizer", "scheduler")}


def _parse(text: str) -> Any:
    """Parse JSON, otherwise JSON5, whose parser is pure Python and takes minutes for a megabyte."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except ValueError:
        return json5.loads(text, allow_duplicate_keys=False)


def _read_hjson(text: str) -> Any:
    try:
        hjson = importlib.import_module("hjson")
    except ImportError:
        raise ValueError(
            "an .hjson file needs the package hjson: pip install hjson, or convert the file to JSON"
        ) from None
    return hjson.loads(text, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} appears twice")
        found[key] = value
    return found


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert mappings of other libraries (OmegaConf) to dicts, at every level."""
    plain = {}
    for key, value in config.items():
        if not isinstance(key, str):
            raise ConfigError(f"the config's key {key!r} is a {type(key).__name__}. Write it as a string.")
        plain[key] = _plain(value) if isinstance(value, Mapping) else value
    return plain


_OF_UNION = re.compile(r"(constrained-)?(bool|float|int|str)|literal\[.*|function-.*")
"""The names that pydantic appends to a key's path for the types that the key may have."""


def _explain(error: ValidationError) -> str:
    problems = error.errors()
    lines = []
    for problem in problems[:_MOST_PROBLEMS]:
        parts = [part for part in problem["loc"] if not _OF_UNION.fullmatch(str(part))]
        path = ".".join(str(part) for part in parts)
        block: type[BaseModel] = Schema
        for part in problem["loc"][:-1]:
            block = _block_at(block, part) or block
        last = str(problem["loc"][-1])
        if problem["type"] == "extra_forbidden":
            lines.append(f"{path}: unknown key{nearest(last, block.model_fields)}")
        elif problem["type"] in ("model_type", "model_attributes_type"):
            example = _example(str(parts[-1]), _block_at(block, last))
            lines.append(f"{path}: {problem['input']!r:.80} is not a block of keys. {example}")
        elif path == "zero_optimization.stage":
            lines.append(f"{path}: a ZeRO stage is 0, 1, 2 or 3, not {problem['input']!r:.80}. Choose one of these.")
        else:
            text = problem["msg"].removeprefix("Value error, ").replace("Input should be", "the value must be")
            text = text.replace(", unable to interpret input", "").replace(", unable to parse string as a number", "")
            lines.append(f"{path}: {text} (it is {problem['input']!r:.80})")
    more = max(len(problems) - _MOST_PROBLEMS, 0)
    lines = list(dict.fromkeys(lines))
    return _listed(lines, len(lines) + more)


def _block_at(block: type[BaseModel], key: int | str) -> type[BaseModel] | None:
    return block_of(block, "bf16" if key == "bfloat16" else str(key))


def _example(name: str, block: type[BaseModel] | None) -> str:
    """Return a sentence that shows how a block is written: with its first key, and the value that a user most likely means."""
    fields = {} if block is None else block.model_fields
    key = next(iter(fields), "")
    if not key:
        return "Write an object: {...}."
    values = {
        "enabled": "true",
        "stage": "2",
        "type": '"WarmupLR"' if name == "scheduler" else '"AdamW"',
        "device": '"cpu"',
    }
    return f'Write "{name}": {{"{key}": {values.get(key, "...")}}}.'


# ---------------------------------------------------------------------- models that are born sharded


@dataclass(frozen=True)
class Birth:
    """The settings of a config that a model needs while it is built and sharded, before the config is resolved.

    Attributes:
        dtype: the dtype of the parameters; None keeps the dtype in which they are created.
        device: the place of the shards until `shard` takes the model, as in `offload_param.device`.
        folder: the folder for shards on disk.
    """

    dtype: torch.dtype | None = None
    device: Any = None
    folder: Path | None = None


def load_birth(config: str | os.PathLike[str] | Mapping[str, Any]) -> Birth:
    """Return a config's settings for a model that is being built. A dtype or folder that is "auto" is None.

    Raises:
        ConfigError: the config cannot be read, or fp16 and bf16 are both enabled.
    """
    raw = _in_full(read(config))
    dtype = None
    if any(_is_true(_block(raw, name).get("enabled")) for name in ("bf16", "bfloat16")):
        dtype = _dtype("bf16")
    if _is_true(_block(raw, "fp16").get("enabled")):
        if dtype is not None:
            raise ConfigError("fp16 and bf16 are both enabled: a model trains in one precision. Enable one of them.")
        dtype = _dtype("fp16")
    zero = _block(raw, "zero_optimization")
    offload = _block(zero, "offload_param")
    if zero.get("offload_param") is None and _is_true(zero.get("cpu_offload_param")):
        offload = {"device": "cpu"}
    device, folder = offload.get("device"), offload.get("nvme_path")
    if device != "nvme" or folder in (None, AUTO):
        return Birth(dtype, device)
    return Birth(dtype, device, Path(folder))


def _is_true(value: Any) -> bool:
    """Return whether the schema reads a value as true. For "auto", and for values that the schema refuses, return False."""
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValidationError:
        return False


def _block(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    block = raw.get(name)
    if isinstance(block, Mapping):
        return block
    return {}
