"""Owns the loading of values into models before `shard`, from files or initialisers: every rank reads its own part.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    zeroshard.materialise(model, initialise=model._init_weights)   # for values that the file lacks
    zeroshard.load_pretrained(model, "folder with model.safetensors.index.json")
    sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), Policy.stage(3))

Parameters are sharded as they are created (see born.py), so no rank ever holds the full model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroshard.checkpoint.conversions import REMEDY, NotOnlyMoved, is_ignored, targets_in_model, transformers_model
from zeroshard.checkpoint.display import Display
from zeroshard.checkpoint.hugging_face import INDEX, SINGLE
from zeroshard.checkpoint.live_model import persistent_buffers
from zeroshard.checkpoint.loading import some_of
from zeroshard.checkpoint.safetensors_file import HeaderEntry, SafetensorsReader
from zeroshard.core.blocks import Copy, Target
from zeroshard.core.named_parameter import name_of, refuse_distributed
from zeroshard.errors import CheckpointError, UsageError
from zeroshard.model.born import Births, BornShard, BornSharded, born, cut_parameter, shard_of
from zeroshard.torch_private import own_buffers, own_parameters


def load_pretrained(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, rename: Callable[[str], str] | None = None,
    device: torch.device | str | None = None, group: dist.ProcessGroup | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> tuple[list[str], list[str]]:  # fmt: skip
    """Load a model's values from safetensors files.

    If a floating-point parameter was created inside `sharded_init` or is on the meta device, each rank reads only its
    own part, 1/world_size of the parameter. Other parameters, and buffers, are read whole. Non-persistent buffers stay
    on the meta device: call `materialise` first.

    A model of transformers 5 takes files as its `from_pretrained` does: with other names, or with one tensor for each
    expert where the model has all of a layer in one.

    Args:
        model: a model that is not sharded yet. Its parameters may be whole, created inside `sharded_init`, or on the
            meta device. They keep their dtypes. Parameters on the meta device are created on `device`. Tied parameters
            are found under any of their names.
        path: a file, an index (`*.index.json`), or a folder with `model.safetensors` or `model.safetensors.index.json`.
        strict: whether to raise an error for missing and unexpected names.
        rename: a function from a name in the model to the name in the file; it replaces transformers' conversion.
        device: default: torch's default device.
        group: the data-parallel process group. Every rank of it must call the function.
        folder: see `sharded_init`.

    Returns:
        The model's names that the files lack, and the files' names that the model lacks.

    Raises:
        CheckpointError: a file is missing, damaged or of a different model. The message names the file and the
            parameter.
        UsageError: the model has DTensors.
        StorageError: `folder` cannot hold the parts.
    """
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = model.module  # files have the names of the model inside
    refuse_distributed(model.named_parameters(), "load_pretrained()")
    births = Births(group, torch.device(device or torch.get_default_device()), folder)
    with ExitStack() as stack:
        readers = [stack.enter_context(SafetensorsReader(file)) for file in _files(Path(path))]
        # Other programs may have saved wrapped modules. Each name without its wrappers, with the file and the name there.
        home = {name_of(name): _FilePlace(reader, name) for reader in readers for name in reader.entries}
        total = sum(entry.nbytes for reader in readers for entry in reader.entries.values())
        display = Display(speaks=not dist.is_initialized() or dist.get_rank() == 0)
        row = stack.enter_context(display.task(f'loading "{path}"', total))
        named: dict[int, tuple[list[str], Tensor]] = {}  # each tensor once, with all its names
        buffers = persistent_buffers(model, all_names=True)
        for fqn, tensor in (*model.named_parameters(remove_duplicate=False), *buffers):
            named.setdefault(id(tensor), ([], tensor))[0].append(fqn)
        sources, conversions = _sources(model, path, home, is_renamed=rename is not None)
        missing: list[str] = []
        used: set[str] = set()
        for fqns, tensor in named.values():
            names = [name_of(fqn if rename is None else rename(name_of(fqn))) for fqn in fqns]
            found = [sources[name] for name in names if name in sources]
            if not found:
                missing.append(name_of(fqns[0]))
                continue
            used.update(names if rename is not None else (block.source for one in found for block in one.blocks))
            _read(model, fqns, tensor, found[0], home, births)
            row.advance(sum(home[one].entry.nbytes for one in {block.source for block in found[0].blocks}))
        if conversions:  # as from_pretrained: a later save reverts the same ones
            transformers_model(model)._weight_conversions = conversions
    unexpected = sorted(one.name for name, one in home.items() if name not in used and not is_ignored(model, name))
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"{path} is of a different model: it lacks {some_of(missing)}, and {type(model).__name__} lacks "
            f"{some_of(unexpected)}. Pass strict=False to load the tensors that both have."
        )
    return missing, unexpected


def materialise(
    model: nn.Module, initialise: Callable[[nn.Module], object] | None = None, *, device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None, folder: str | os.PathLike[str] | None = None,
) -> None:  # fmt: skip
    """Initialise a model on the meta device, sharding each module as soon as it is initialised. Every rank must call it.

    Args:
        model: the model. Modules without a tensor of their own on the meta device do not change.
        initialise: a function that fills a module's own parameters and buffers; default: the module's `reset_parameters`. Random
            numbers must be the same on all ranks. (For a transformers model: `model._init_weights`.)
        device: default: torch's default device.
        group: the data-parallel process group.
        folder: see `sharded_init`.

    Raises:
        UsageError: a module has no `reset_parameters`, and `initialise` is None.
        StorageError: `folder` cannot hold the parts.
    """
    births = Births(group, torch.device(device or torch.get_default_device()), folder)
    made: dict[int, nn.Parameter] = {}
    for fqn, module in model.named_modules():
        own = {name: one for name, one in own_parameters(module).items() if one is not None and one.is_meta}
        buffers = {name: one for name, one in own_buffers(module).items() if one is not None and one.is_meta}
        if not own and not buffers:
            continue
        fresh = []
        for name, before in own.items():
            if id(before) not in made:
                made[id(before)] = nn.Parameter(torch.empty_like(before, device=births.device), before.requires_grad)
                fresh.append(made[id(before)])
            own_parameters(module)[name] = made[id(before)]
        for name, buffer in buffers.items():
            own_buffers(module)[name] = torch.empty_like(buffer, device=births.device)
        if initialise is None and not hasattr(module, "reset_parameters"):
            raise UsageError(
                f"{name_of(fqn) or 'the model'} ({type(module).__name__}) is on the meta device and has no reset_parameters: "
                "pass materialise(initialise=...), a function that fills a module's own parameters."
            )
        with torch.no_grad():
            if initialise is not None:
                initialise(module)
            else:
                module.reset_parameters()
        for parameter in fresh:
            cut_parameter(parameter, births)


class _FilePlace(NamedTuple):
    """A tensor's file, and its name there."""

    reader: SafetensorsReader
    name: str

    @property
    def entry(self) -> HeaderEntry:
        return self.reader.entries[self.name]


def _sources(
    model: nn.Module, path: str | os.PathLike[str], home: Mapping[str, _FilePlace], *, is_renamed: bool
) -> tuple[dict[str, Target], list[Any]]:
    """Find, by name in the model, the parts of files of which a tensor is made, and transformers' conversions used for it."""
    shapes = {name: place.entry.shape for name, place in home.items()}
    found = None
    try:
        if not is_renamed:
            found = targets_in_model(model, shapes)
    except NotOnlyMoved as error:
        raise CheckpointError(f"{path} cannot be read range by range: {error}. {REMEDY}") from error
    if found is None:
        return {name: Target.whole(name, name, shape) for name, shape in shapes.items()}, []
    return found


def _read(
    model: nn.Module, fqns: list[str], tensor: Tensor, source: Target, home: Mapping[str, _FilePlace], births: Births
) -> None:  # fmt: skip
    if source.shape != tuple(tensor.shape):
        reader, name = home[source.blocks[0].source]
        raise CheckpointError(
            f"{reader.path}: {name} has shape {source.shape}, and the model's {fqns[0]} has {tuple(tensor.shape)}. "
            "Build the model with the shapes of the file."
            if len(source.blocks) == 1
            else f"{reader.path}: {name} and the others of {fqns[0]} have together shape {source.shape}, and the model's "
            f"has {tuple(tensor.shape)}. Build the model with the shapes of the file."
        )
    if isinstance(tensor, BornSharded):
        _read_part(home, source, shard_of[tensor], shard_of[tensor].own)
    elif not tensor.is_meta:
        whole = tensor.detach().contiguous()
        _read_into(home, source, 0, whole.view(-1))
        if not tensor.is_contiguous():
            tensor.detach().copy_(whole)
    elif isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
        shard = BornShard(tensor.shape, births)
        _read_part(home, source, shard, births.room(shard.numel, tensor.dtype, births.device))
        _replace(model, fqns, born(shard, tensor.shape, tensor.requires_grad))
    else:  # whole on every rank
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=births.device)
        _read_into(home, source, 0, whole.view(-1))
        if isinstance(tensor, nn.Parameter):
            whole = nn.Parameter(whole, False)
        _replace(model, fqns, whole)


def _read_part(home: Mapping[str, _FilePlace], source: Target, shard: BornShard, own: Tensor) -> None:
    start, stop = shard.range
    _read_into(home, source, start, own[: stop - start])
    shard.own = own


def _read_into(home: Mapping[str, _FilePlace], source: Target, start: int, out: Tensor) -> None:
    """Read elements of a target from its sources, beginning at `start`, into 1-D memory."""
    if source.is_whole:
        reader, name = home[source.blocks[0].source]
        reader.read_into(name, start, out)
        return
    for block in source.blocks:
        reader, name = home[block.source]
        for part in Copy.from_source(block, source.shape).reversed().within(start, start + out.numel()):
            for place, values in part.runs(out, start):
                read = values if values.is_contiguous() else torch.empty(values.shape, dtype=values.dtype)
                reader.read_into(name, place, read)
                if read is not values:
                    values.copy_(read)


def _replace(model: nn.Module, fqns: list[str], tensor: Tensor) -> None:
    """Put a tensor into the model under each of its names."""
    for fqn in fqns:
        prefix, _, name = fqn.rpartition(".")
        module = model.get_submodule(prefix)
        if name in own_parameters(module):
            own_parameters(module)[name] = tensor  # type: ignore[assignment]
        else:
            own_buffers(module)[name] = tensor


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist. Name a safetensors file, an index, or a folder with {SINGLE} or {INDEX}."
        )
    if path.is_dir():
        found = [path / name for name in (INDEX, SINGLE) if (path / name).is_file()]
        if not found:
            raise CheckpointError(
                f"{path} holds neither {SINGLE} nor {INDEX}. Name the folder of a model that was saved as safetensors."
            )
        path = found[0]
    if not path.name.endswith(".json"):
        return [path]
    try:
        weights = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return [path.parent / file for file in dict.fromkeys(weights.values())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not an index of safetensors files ({error!r}). Copy it again from the saved model."
        ) from None
