"""Owns the import from DeepSpeed, which converts a checkpoint of ZeRO stage 1, 2 or 3 to zeroshard's format.

DeepSpeed's checkpoints are pickled. torch's `weights_only` reads the files without running code from them. This module
has stubs of the few classes that the files name, so DeepSpeed need not be installed. Tensors are not merged: each
rank's flat partitions are mapped into memory, and their fragments become spans of new files.

The position of an element, as DeepSpeed 0.19 writes it: at stages 1 and 2, `param_slice_mappings` gives each rank's
fragments. At stage 3, every parameter is divided into world_size pieces of ceil(numel / world_size), in the order of
`param_shapes`.
"""

from __future__ import annotations

import os
import re
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.display import Display
from zeroshard.checkpoint.hugging_face import naming
from zeroshard.checkpoint.manifest import ParameterRecord
from zeroshard.checkpoint.node_local import Hosts
from zeroshard.checkpoint.safetensors_file import Source
from zeroshard.checkpoint.saving import Destination, Part, Report, SavedSpan, complete, file_name, finish, write_part
from zeroshard.checkpoint.values import Packer
from zeroshard.core.layout import Span
from zeroshard.core.model_states import PARAMETERS
from zeroshard.core.placement import Placement
from zeroshard.errors import CheckpointError, ZeroshardError
from zeroshard.policy import Policy

_STANDARD = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "autotp_config", "autoep_layers",
    "checkpoint_parallel_dimensions",
}  # fmt: skip
"""Keys of a model file that are not client state."""


class _LossScaler:
    """A stub of DeepSpeed's loss scalers, with only their attributes."""


class _Fragment:
    """A stub of deepspeed.utils.tensor_fragment.fragment_address."""

    def __init__(self, numel: int = 0, start: int = 0) -> None:
        self.numel = numel
        self.start = start


_EXTRA_STATE = "_extra_state"
"""The end of torch's name for the result of a module's `get_extra_state`."""

_STAND_INS: list[Any] = [
    (_LossScaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_LossScaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


@dataclass(frozen=True)
class _Flat:
    """A rank's part of one param group (or sub-group): 1-D tensors of one length, and other values, such as a step count."""

    states: dict[str, Tensor]
    values: dict[str, Any]


def import_deepspeed(
    folder: str | os.PathLike[str], out: str | os.PathLike[str], tag: str | None = None, *, display: Display | None = None
) -> Path:  # fmt: skip
    """Convert a DeepSpeed checkpoint to one that `load_checkpoint` loads, at any world size and stage.

    Args:
        folder: the folder of DeepSpeed's checkpoints, or of one of them.
        out: the folder of checkpoints to write to; the tag stays the same.
        tag: default: the tag in the file `latest`.
        display: the display of the progress; default: none.

    Returns:
        The new checkpoint's folder.

    Raises:
        CheckpointError: a file is missing, is not part of a DeepSpeed ZeRO checkpoint, or cannot be written. The message names
            the file.
    """
    source = files.folder_of(folder, tag)
    models, optimizers = _files(source)
    to = Destination(Path(out), source.name, Hosts([list(range(len(optimizers)))]))
    shown = display or Display(speaks=False)
    model = _read_model(models[0], len(optimizers))
    first, parts = _read_all(model, models, optimizers)
    packer = Packer("rank_00000/")
    content = model.content
    with _understood(models[0]):
        counters = ("global_steps", "global_samples", "skipped_steps")
        values = {
            "engine": {key: int(content[key]) for key in counters if key in content},
            "lr_scheduler": content.get("lr_scheduler"),
            "loss_scaler": _loss_scaler(first.content.get("loss_scaler")),
            "data": None,
            "client_state": {key: value for key, value in content.items() if key not in _STANDARD},
        }
        shared = {key: packer.pack(value, key) for key, value in values.items()}
    groups = []
    with _understood(first.path):
        base = first.content.get("base_optimizer_state") or first.content["optimizer_state_dict"]
        for group in base["param_groups"]:
            options = {key: value for key, value in group.items() if key not in ("params", "step")}
            # The group's flat tensors: one, or at stage 3 one for each sub-group.
            names = [name for number in group["params"] for name in model.shapes[number]]
            groups.append({"names": names, "options": packer.pack(options, "group")})
    outline = {
        "policy": asdict(Policy.stage(first.stage)),
        "optimizer": None,
        "parameters": model.parameters,
        "param_groups": groups,
        "values": {"shared": shared, "description": {}},
    }
    parts[0] = replace(parts[0], tensors=packer.tensors, buffers=model.buffers)
    save = uuid.uuid4().hex[:12]
    with naming(to.path):
        to.path.mkdir(parents=True, exist_ok=True)
    report = Report()
    with shown.task(f'importing "{source}"', sum(path.stat().st_size for path in optimizers)) as row:
        for rank, part in enumerate(parts):
            file = to.path / file_name(rank, save)
            report = report.merged(write_part(part, file, to.tag, rank, list(part.buffers), row.advance))
    finish(complete(outline, to.tag, files.next_time(to.folder), report), to, save)
    return to.path


def _read_all(
    model: _ModelFile, models: Sequence[Path], optimizers: Sequence[Path]
) -> tuple[_OptimizerFile, list[Part]]:
    """Return rank 0's optimizer file, and each rank's part, with tensors mapped from the files.

    Raises:
        CheckpointError: the files are of two stages, or their pieces do not cover every parameter exactly.
    """
    stages: dict[int, _OptimizerFile] = {}
    parts = []
    covered: dict[str, int] = {}
    for rank, path in enumerate(optimizers):
        saved = _read_optimizer(path, len(optimizers))
        spans, values = _saved_spans(saved, model, rank, covered)
        frozen = _frozen_spans(models, model, rank, saved.stage, len(optimizers))
        covered.update({one.span.name: one.span.stop for one in frozen})
        stages.setdefault(saved.stage, saved)
        parts.append(Part(spans + frozen, values))
    if len(stages) > 1:
        of = " and ".join(f"{saved.path.name} is of stage {stage}" for stage, saved in stages.items())
        raise CheckpointError(f"{optimizers[0].parent} mixes two runs: {of}. Remove the files of one of them.")
    for name, record in model.parameters.items():
        numel = prod(record.shape)
        if covered.get(name, 0) != numel:
            raise CheckpointError(
                f"{optimizers[0].parent} holds {covered.get(name, 0)} of the {numel} elements of {name}: a file is "
                "damaged, or from another run. Copy the checkpoint again."
            )
    return next(iter(stages.values())), parts


# ---------------------------------------------------------------------- files


def _files(source: Path) -> tuple[list[Path], list[Path]]:
    """List the model files (one, or at stage 3 one for each rank) and the optimizer files, in the order of ranks."""
    found: dict[int, Path] = {}
    for path in sorted(source.glob("*_optim_states.pt")):
        match = re.fullmatch(r"(?:bf16_)?zero_pp_rank_([0-9]+)_mp_rank_([0-9]+)_optim_states\.pt", path.name)
        if match is None or int(match[2]) != 0:
            raise CheckpointError(
                f"{path} is not from a data-parallel ZeRO run, and others cannot be imported. Save the model's weights "
                "with the program that trained it."
            )
        rank = int(match[1])
        if rank in found:
            raise CheckpointError(
                f"{source} holds two files of rank {rank}: {found[rank].name} and {path.name}. Remove the files of the other run."
            )
        found[rank] = path
    if not found:
        raise CheckpointError(
            f"{source} has no *_optim_states.pt, so it is not a DeepSpeed ZeRO checkpoint. Name the folder of all tags, "
            "or a tag's own folder."
        )
    first = _read_optimizer(found[min(found)])
    says = f"{first.path.name} was written by {first.world_size} ranks"
    ranks = set(range(first.world_size))
    missing = sorted(ranks - found.keys())
    if missing:
        raise CheckpointError(
            f"{source} lacks the file of rank {missing[0]} (files missing: {len(missing)}): {says}. Copy the "
            "checkpoint again."
        )
    extra = sorted(found.keys() - ranks)
    if extra:
        raise CheckpointError(
            f"{source} holds {found[extra[0]].name} (extra files: {len(extra)}): {says}. Remove the files of other runs."
        )
    names = ["mp_rank_00_model_states.pt"]
    if first.stage == 3:
        names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(first.world_size)]
    for name in names:
        if not (source / name).is_file():
            raise CheckpointError(f"{source / name} is missing. Copy it from the machine that wrote the checkpoint.")
    return [source / name for name in names], [found[rank] for rank in sorted(ranks)]


def _load(path: Path) -> Mapping[str, Any]:
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged pickle may raise any exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise CheckpointError(
            f"{path} cannot be read without running its code, or is damaged: {reason.rstrip('.')}. Import another tag, or save "
            "again with DeepSpeed without objects of your own in client_state."
        ) from None
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path} is not a file of a ZeRO checkpoint: it holds a {type(content).__name__}, not a dict. Copy the "
            "checkpoint again."
        )
    _refuse_tensors_without_memory(path, content)
    return content


def _refuse_tensors_without_memory(path: Path, content: Any) -> None:
    """Raise for a tensor whose values are not all in the file: a copy of it could take any amount of memory."""
    waiting = [content]
    seen: set[int] = set()  # a pickle may contain itself
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            if one.layout is not torch.strided or one.is_meta or one.nbytes > path.stat().st_size:
                raise CheckpointError(
                    f"{path} is not a file of a ZeRO checkpoint, or is damaged: it describes a tensor of {one.numel()} "
                    "elements, but does not hold them. Copy the checkpoint again."
                )
        elif isinstance(one, Mapping | list | tuple | set) and id(one) not in seen:
            seen.add(id(one))
            waiting += one.values() if isinstance(one, Mapping) else one


@contextmanager
def _understood(path: Path) -> Iterator[None]:
    """Turn an error from a file's contents into a `CheckpointError` that names the file."""
    try:
        yield
    except ZeroshardError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, KeyError):
            reason = f"it lacks {reason}"
        raise CheckpointError(
            f"{path} is not a file of a ZeRO checkpoint of DeepSpeed 0.19: {reason}.\n"
            "Copy the checkpoint again. If an older version wrote it, save it again with DeepSpeed 0.19."
        ) from error


@dataclass(frozen=True)
class _ModelFile:
    """The contents of rank 0's model file."""

    content: Mapping[str, Any]
    shapes: Sequence[Mapping[str, torch.Size]]  # of trained parameters, by param group (or sub-group)
    parameters: dict[str, ParameterRecord]  # trained and frozen
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class _OptimizerFile:
    """A rank's optimizer file, and the stage and number of ranks that it names."""

    path: Path
    content: Mapping[str, Any]
    stage: int
    world_size: int


def _read_model(path: Path, world_size: int) -> _ModelFile:
    content = _read_model_content(path, world_size)
    with _understood(path):
        shapes = [{name: torch.Size(shape) for name, shape in group.items()} for group in content["param_shapes"]]
        trained = {name: shape for group in shapes for name, shape in group.items()}
        aliases: dict[str, list[str]] = {}
        for alias, name in (content.get("shared_params") or {}).items():
            aliases.setdefault(name, []).append(alias)
        parameters = {}
        for name, shape in {**trained, **_frozen(content, trained)}.items():
            names = [name, *aliases.get(name, [])]
            parameters[name] = ParameterRecord(shape=list(shape), names=names, trained=name in trained, states={})
        buffers = {name: content["module"][name] for name in content.get("buffer_names") or []}
        for name, buffer in buffers.items():
            if not isinstance(buffer, Tensor):
                raise TypeError(f"the buffer {name} is not a tensor")
        left_out = [name for name in content.get("module") or () if name.endswith(_EXTRA_STATE)]
        if left_out:
            warnings.warn(
                f"the import leaves out what get_extra_state returned ({', '.join(left_out)}): call set_extra_state after it.",
                stacklevel=2,
            )
        return _ModelFile(content, shapes, parameters, buffers)


def _read_model_content(path: Path, world_size: int) -> Mapping[str, Any]:
    content = _load(path)
    with _understood(path):
        ranks = int(content["dp_world_size"])
    if ranks < 1 or world_size % ranks:  # sequence-parallel ranks share the states, too
        raise CheckpointError(
            f"{path} was written by {ranks} data-parallel ranks, and the optimizer's files beside it by {world_size}: "
            "they are from two runs. Copy the checkpoint again, or remove the files of the other run."
        )
    return content


def _read_optimizer(path: Path, world_size: int | None = None) -> _OptimizerFile:
    """Read one rank's file. If `world_size` is given, raise if a different number of ranks wrote the file."""
    content = _load(path)
    with _understood(path):
        content = content["optimizer_state_dict"]
        if not isinstance(content, Mapping):
            raise TypeError("its optimizer_state_dict is not a dict")
        stage = int(content["zero_stage"])
        counts = content["partition_count"]
        if not isinstance(counts, list):
            counts = [counts]
        ranks = max(map(int, counts))
        if stage not in (1, 2, 3) or ranks < 1:
            raise ValueError(f"it names stage {stage} and {ranks} ranks")
    world_size = world_size or ranks
    if any(int(count) != world_size for count in counts):
        raise CheckpointError(
            f"{path} was written by {ranks} ranks, and the files beside it by {world_size}: they are from two runs, or a "
            "part of the model is expert-parallel, which cannot be imported. Remove the files of other runs."
        )
    return _OptimizerFile(path, content, stage, world_size)


# ---------------------------------------------------------------------- model states


_Placed = tuple[Span, int, _Flat]
"""A span of a parameter, its start in the flat tensors, and the flat tensors."""


def _saved_spans(
    saved: _OptimizerFile, model: _ModelFile, rank: int, covered: dict[str, int]
) -> tuple[list[SavedSpan], dict[str, dict[str, Any]]]:
    """Return the spans in one optimizer file, and the optimizer's other values for each parameter.

    `covered` has the number of elements of each parameter that earlier ranks hold. This function adds this rank's elements.
    """
    spans: list[SavedSpan] = []
    values: dict[str, dict[str, Any]] = {}
    with _understood(saved.path):
        if "param_slice_mappings" in saved.content:
            fragments = _fragments_of_slices(saved.content, covered)
        elif "fp32_flat_groups" in saved.content:
            fragments = _fragments_of_stage3(saved.content, model.shapes, rank, saved.world_size)
        else:
            raise CheckpointError(
                f"{saved.path} is from a version of DeepSpeed that does not record the places of parameters. Save it "
                "again with DeepSpeed 0.19."
            )
        for span, start, flat in fragments:
            record = model.parameters.get(span.name)
            if record is None or not record.trained:
                raise ValueError(f"it holds {span.name}, which the model file does not list as trained")
            numel = prod(record.shape)
            if not covered.get(span.name, 0) == span.start <= span.stop <= numel:
                raise ValueError(f"it holds elements {span.start} to {span.stop} of {span.name}, which has {numel}")
            if not 0 <= start <= start + span.numel <= flat.states[PARAMETERS].numel():
                raise ValueError(f"it places {span.name} beyond its tensors")
            values[span.name] = flat.values
            covered[span.name] = span.stop
            if span.numel:
                placement = Placement.whole(record.shape)
                for state, tensor in flat.states.items():
                    spans.append(SavedSpan(span, state, Source.of(tensor[start : start + span.numel]), placement))
    return spans, values


def _fragments_of_slices(saved: Mapping[str, Any], covered: Mapping[str, int]) -> Iterator[_Placed]:
    """Yield the fragments of stages 1 and 2. A parameter's fragments follow one another in the order of ranks."""
    base = saved["base_optimizer_state"]
    for number, mapping in enumerate(saved["param_slice_mappings"]):
        flat = _flat(saved["single_partition_of_fp32_groups"][number], base, number)
        for name, fragment in mapping.items():
            start = covered.get(name, 0)
            yield Span(name, start, start + fragment.numel), fragment.start, flat


def _fragments_of_stage3(
    saved: Mapping[str, Any], shapes: Sequence[Mapping[str, torch.Size]], rank: int, world_size: int
) -> Iterator[_Placed]:
    """Yield the pieces of stage 3, which fill each flat tensor exactly."""
    partitions = saved["fp32_flat_groups"]
    flats = [_flat(partition, saved["optimizer_state_dict"], number) for number, partition in enumerate(partitions)]
    number = 0
    offset = 0
    for group in shapes:
        for name, shape in group.items():
            each = -(-shape.numel() // world_size)
            if each and number < len(flats) and offset == partitions[number].numel():  # the next sub-group
                number += 1
                offset = 0
            if number >= len(flats) or offset + each > partitions[number].numel():
                raise ValueError(f"it has too few elements for {name}")
            start = min(rank * each, shape.numel())
            yield Span(name, start, min(start + each, shape.numel())), offset, flats[number]
            offset += each
    if number != len(flats) - 1 or offset != partitions[number].numel():
        raise ValueError("it has more elements than the parameters of the model file")


def _flat(partition: Tensor, base: Mapping[str, Any], number: int) -> _Flat:
    states = {PARAMETERS: partition.view(-1)}
    rest = {}
    for name, value in base["state"].get(number, {}).items():
        if isinstance(value, Tensor) and value.numel() == partition.numel():
            states[name] = value.view(-1)
        else:
            rest[name] = value
    group = next(one for one in base["param_groups"] if number in one["params"])
    if "step" not in rest and "step" in group:  # DeepSpeed's own Adam keeps the count in the group
        rest["step"] = group["step"]
    return _Flat(states, {name: {"$scalar": ["float32", float(value)]} for name, value in rest.items()})


def _frozen(model: Mapping[str, Any], trained: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """Return the shapes of the frozen parameters. Stages 1 and 2 may list them only in the module, which has them complete."""
    listed = dict(model.get("frozen_param_shapes") or {})
    if listed:
        return {name: torch.Size(shape) for name, shape in listed.items()}
    if not trained.keys() <= model["module"].keys():
        raise ValueError(f"its module lacks {min(trained.keys() - model['module'].keys())}")
    known = {*trained, *(model.get("shared_params") or {}), *(model.get("buffer_names") or [])}
    return {
        name: value.shape
        for name, value in model["module"].items()
        if name not in known and not name.endswith(_EXTRA_STATE)
    }


def _frozen_spans(models: Sequence[Path], model: _ModelFile, rank: int, stage: int, world_size: int) -> list[SavedSpan]:
    """Return the spans of frozen parameters: all on rank 0, or, at stage 3, each rank's part."""
    frozen = {name: record.shape for name, record in model.parameters.items() if not record.trained}
    if not frozen or (rank and stage != 3):
        return []
    path = models[rank]
    content = model.content
    if rank:
        content = _read_model_content(path, world_size)
    spans = []
    with _understood(path):
        fragments = content.get("frozen_param_fragments") or {}
        for name, shape in frozen.items():
            flat = (fragments[name] if name in fragments else content["module"][name]).detach().reshape(-1)
            numel = prod(shape)
            each = numel
            if stage == 3:
                each = -(-numel // world_size)
            if flat.numel() != each:
                raise ValueError(f"it holds {flat.numel()} elements of {name}, not {each}")
            start = min(rank * each, numel)
            stop = min(start + each, numel)
            if start < stop:
                source = Source.of(flat[: stop - start])
                spans.append(SavedSpan(Span(name, start, stop), PARAMETERS, source, Placement.whole(shape)))
    return spans


def _loss_scaler(scaler: Any) -> dict[str, Any]:
    """Convert the fields of DeepSpeed's loss scaler to the fields in optim.loss_scaler."""
    fields: Mapping[str, Any] = {} if scaler is None else vars(scaler)
    if "cur_iter" not in fields:
        return {"scale": float(fields.get("cur_scale", 1.0))}
    return {
        "scale": float(fields["cur_scale"]),
        "window": fields["scale_window"],
        "hysteresis": fields["delayed_shift"],
        "consecutive_hysteresis": fields["consecutive_hysteresis"],
        "min_scale": fields["min_scale"],
        "_left": fields["cur_hysteresis"],
        "_step": fields["cur_iter"],
        "_last_overflow": fields["last_overflow_iter"],
    }
