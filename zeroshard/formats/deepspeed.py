"""Owns the way in from DeepSpeed: a checkpoint of ZeRO stage 1, 2 or 3 becomes one of ours. Called by cli.

DeepSpeed pickles. The files are read with torch's `weights_only`, which runs no code of theirs; for the few classes that they
name there are stand-ins here, so DeepSpeed need not be installed. Nothing is put together: each rank's flat partitions are mapped
into memory, and their fragments become ranges of our files.

Where an element lies (as DeepSpeed 0.19 writes it): under stages 1 and 2 `param_slice_mappings` gives each rank's fragments; under
stage 3 every parameter is cut into world_size pieces of ceil(numel / world_size), one after another in the order of `param_shapes`.
"""

from __future__ import annotations

import os
import pickle
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.manifest import ParameterRecord
from zeroshard.checkpoint.saving import Where, finish_save, write_part
from zeroshard.checkpoint.snapshot import Copied, Outline, Part
from zeroshard.checkpoint.values import Packer
from zeroshard.errors import CheckpointError
from zeroshard.observe.display import Advance, Display
from zeroshard.policy import Policy
from zeroshard.step.model_states import PARAMETERS

_STANDARD = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "autotp_config", "autoep_layers",
    "checkpoint_parallel_dimensions",
}  # fmt: skip
"""What is not client state in a model file."""


class _LossScaler:
    """Stands for DeepSpeed's loss scalers: attributes alone."""


class _Fragment:
    """Stands for deepspeed.utils.tensor_fragment.fragment_address."""

    numel: int
    start: int

    def __init__(self, numel: int = 0, start: int = 0) -> None:
        self.numel, self.start = numel, start


def _stage(value: int) -> int:
    """Stands for ZeroStageEnum."""
    return value


_STAND_INS: list[Any] = [
    (_LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_LossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


@dataclass(frozen=True)
class _Flat:
    """What one rank holds of one param group (or sub-group): 1-D tensors of one length, and its step count."""

    states: dict[str, Tensor]
    values: dict[str, Any]


def import_deepspeed(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tag: str | None = None,
    *,
    display: Display | None = None,
) -> Path:
    """Turn a DeepSpeed checkpoint into one that `load_checkpoint` takes, at any world size and stage.

    Args:
        folder: that of DeepSpeed's tags, or of one of them.
        out: the folder of checkpoints to write to; the tag stays.
        tag: default: what `latest` names.
        display: where it shows how far it has come; default: nowhere.

    Returns:
        The new checkpoint's folder.

    Raises:
        CheckpointError: a file is missing or holds what no DeepSpeed ZeRO checkpoint holds; names it.
    """
    source = _find(Path(folder), tag)
    models, optimizers = _files(source)
    shown = display or Display(speaks=False)
    with shown.task(f'importing "{source}"', sum(path.stat().st_size for path in optimizers)) as row:
        return _convert(models, optimizers, Where(Path(out), source.name), row.advance)


def _convert(models: Sequence[Path], optimizers: Sequence[Path], where: Where, advance: Advance) -> Path:
    """Write the files and the manifest of a checkpoint; returns its folder."""
    model = _load(models[0])
    shapes: list[Mapping[str, torch.Size]] = list(model["param_shapes"])
    aliases: dict[str, list[str]] = {}
    for alias, name in (model.get("shared_params") or {}).items():
        aliases.setdefault(name, []).append(alias)
    world_size, save = len(optimizers), uuid.uuid4().hex[:12]
    target = where.folder / where.tag
    target.mkdir(parents=True, exist_ok=True)
    parameters = {
        name: ParameterRecord(shape=list(shape), names=[name, *aliases.get(name, [])], trained=True, states={})
        for group in shapes
        for name, shape in group.items()
    }
    frozen = _frozen(model, parameters)
    for name, shape in frozen.items():
        parameters[name] = ParameterRecord(
            shape=list(shape), names=[name, *aliases.get(name, [])], trained=False, states={}
        )
    reports, shared, groups, done = [], dict[str, Any](), list[dict[str, Any]](), dict[str, int]()
    for rank, path in enumerate(optimizers):
        saved = _load(path)["optimizer_state_dict"]
        stage = int(saved.get("zero_stage", 1))
        own = model if rank == 0 else _load(models[rank]) if stage == 3 else {}
        packer = Packer(f"rank_{rank:05d}/")
        pieces, values = _pieces(saved, shapes, rank, world_size, done, path)
        pieces += _frozen_pieces(own, frozen, rank, world_size if stage == 3 else 1)
        if rank == 0:
            shared = {key: packer.pack(value, key) for key, value in _shared(model, saved).items()}
            groups = _groups(saved, shapes, packer)
        buffers = {name: model["module"][name] for name in model.get("buffer_names") or []} if rank == 0 else {}
        part = Part(pieces, values, tensors=packer.tensors, buffers=buffers)
        file = target / f"rank_{rank:05d}.{save}.safetensors"
        reports.append(write_part(part, file, where.tag, rank, list(buffers), advance))
    outline = Outline(parameters, [], groups, None, Policy.stage(stage), shared)
    finish_save(outline, where, save, reports)
    return target


# ---------------------------------------------------------------------- files


def _find(folder: Path, tag: str | None) -> Path:
    source = folder / tag if tag is not None else folder
    if tag is None and not list(source.glob("*_optim_states.pt")):
        source = folder / files.latest_tag(folder)
    if not list(source.glob("*_optim_states.pt")):
        raise CheckpointError(f"{source} holds no *_optim_states.pt: it is no DeepSpeed ZeRO checkpoint.")
    return source


def _files(source: Path) -> tuple[list[Path], list[Path]]:
    """Model files and optimizer files, in the order of ranks."""
    found: dict[int, Path] = {}
    for path in source.glob("*_optim_states.pt"):
        match = re.fullmatch(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt", path.name)
        if match is None or int(match[2]) != 0:
            raise CheckpointError(
                f"{path} is of a model-parallel run, or of no ZeRO run: only data-parallel ones are imported."
            )
        found[int(match[1])] = path
    if sorted(found) != list(range(len(found))):
        raise CheckpointError(f"{source} lacks the file of rank {min(set(range(len(found))) - set(found))}.")
    sharded = [source / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(len(found))]
    models = sharded if sharded[0].is_file() else [source / "mp_rank_00_model_states.pt"]
    missing = [path for path in models if not path.is_file()]
    if missing:
        raise CheckpointError(f"{missing[0]} is missing.")
    return models, [found[rank] for rank in range(len(found))]


def _load(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise CheckpointError(f"{path} cannot be read without running its code, or is damaged: {reason}") from None


# ---------------------------------------------------------------------- model states


def _pieces(
    saved: Mapping[str, Any],
    shapes: Sequence[Mapping[str, torch.Size]],
    rank: int,
    world_size: int,
    done: dict[str, int],
    path: Path,
) -> tuple[list[Copied], dict[str, dict[str, Any]]]:
    pieces: list[Copied] = []
    values: dict[str, dict[str, Any]] = {}
    if "param_slice_mappings" in saved:
        fragments = _fragments_of_slices(saved, done)
    elif "fp32_flat_groups" in saved:
        fragments = _fragments_of_stage3(saved, shapes, rank, world_size)
    else:
        raise CheckpointError(f"{path} is of a version of DeepSpeed that says not where its parameters lie; 0.19 does.")
    for name, start, low, numel, flat in fragments:
        values[name] = flat.values
        if numel:
            pieces += [Copied(tensor[low : low + numel], name, state, start) for state, tensor in flat.states.items()]
    return pieces, values


Fragment = tuple[str, int, int, int, _Flat]
"""(name, where it starts in the flattened parameter, where in the flat tensors, elements, the tensors)."""


def _fragments_of_slices(saved: Mapping[str, Any], done: dict[str, int]) -> Iterator[Fragment]:
    """Stages 1 and 2: a parameter's fragments follow one another over the ranks. `done` counts what the ranks before hold."""
    base = saved["base_optimizer_state"]
    for number, mapping in enumerate(saved["param_slice_mappings"]):
        flat = _flat(saved["single_partition_of_fp32_groups"][number], base, number)
        for name, fragment in mapping.items():
            start = done.get(name, 0)
            done[name] = start + fragment.numel
            yield name, start, fragment.start, fragment.numel, flat


def _fragments_of_stage3(
    saved: Mapping[str, Any], shapes: Sequence[Mapping[str, torch.Size]], rank: int, world_size: int
) -> Iterator[Fragment]:
    base, partitions = saved["optimizer_state_dict"], saved["fp32_flat_groups"]
    flats = [_flat(partition, base, number) for number, partition in enumerate(partitions)]
    number, offset = 0, 0
    for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
        each = -(-shape.numel() // world_size)
        while each and offset + each > partitions[number].numel():  # the next sub-group
            number, offset = number + 1, 0
        start = min(rank * each, shape.numel())
        yield name, start, offset, min(each, shape.numel() - start), flats[number]
        offset += each


def _flat(partition: Tensor, base: Mapping[str, Any], number: int) -> _Flat:
    kept = base["state"].get(number, {})
    along = {
        name: value for name, value in kept.items() if isinstance(value, Tensor) and value.numel() == partition.numel()
    }
    rest = {name: value for name, value in kept.items() if name not in along}
    group = base["param_groups"][min(number, len(base["param_groups"]) - 1)]
    if "step" not in rest and "step" in group:  # DeepSpeed's own Adam counts in the group
        rest["step"] = group["step"]
    packed = {name: {"$scalar": ["float32", float(value)]} for name, value in rest.items()}
    return _Flat({PARAMETERS: partition.view(-1), **{name: value.view(-1) for name, value in along.items()}}, packed)


def _frozen(model: Mapping[str, Any], trained: Mapping[str, ParameterRecord]) -> dict[str, torch.Size]:
    """The parameters that are not trained. Under stages 1 and 2 they are whole in the module, and may be named nowhere else."""
    known = {*trained, *(model.get("shared_params") or {}), *(model.get("buffer_names") or [])}
    listed = dict(model.get("frozen_param_shapes") or {})
    return listed or {name: tensor.shape for name, tensor in model["module"].items() if name not in known}


def _frozen_pieces(
    model: Mapping[str, Any], frozen: Mapping[str, torch.Size], rank: int, world_size: int
) -> list[Copied]:
    """What one model file holds of them: with `world_size` 1 all, else this rank's fragment."""
    fragments = model.get("frozen_param_fragments") or {}
    pieces = []
    for name, shape in frozen.items() if model else ():
        flat = (fragments[name] if name in fragments else model["module"][name]).detach().reshape(-1)
        start = rank * flat.numel() if world_size > 1 else 0
        numel = min(flat.numel(), shape.numel() - start)
        if numel > 0:
            pieces.append(Copied(flat[:numel], name, PARAMETERS, start))
    return pieces


# ---------------------------------------------------------------------- the rest


def _groups(
    saved: Mapping[str, Any], shapes: Sequence[Mapping[str, torch.Size]], packer: Packer
) -> list[dict[str, Any]]:
    base = saved.get("base_optimizer_state") or saved["optimizer_state_dict"]
    return [
        {
            "names": list(names),
            "options": packer.pack({k: v for k, v in group.items() if k not in ("params", "step")}, "group"),
        }
        for group, names in zip(base["param_groups"], shapes, strict=False)
    ]


def _shared(model: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "engine": {key: model[key] for key in ("global_steps", "global_samples", "skipped_steps") if key in model},
        "lr_scheduler": model.get("lr_scheduler"),
        "loss_scaler": _loss_scaler(saved.get("loss_scaler")),
        "data": None,
        "client_state": {key: value for key, value in model.items() if key not in _STANDARD},
    }


def _loss_scaler(scaler: Any) -> dict[str, Any]:
    """The fields of our loss scaler, see optim.loss_scaler."""
    told = vars(scaler) if scaler is not None else {}
    if "cur_iter" not in told:
        return {"scale": float(told.get("cur_scale", 1.0))}
    return {
        "scale": float(told["cur_scale"]),
        "window": told["scale_window"],
        "hysteresis": told["delayed_shift"],
        "consecutive_hysteresis": told["consecutive_hysteresis"],
        "min_scale": told["min_scale"],
        "_left": told["cur_hysteresis"],
        "_step": told["cur_iter"],
        "_last_overflow": told["last_overflow_iter"],
    }
