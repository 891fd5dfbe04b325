"""Owns the way out: the Hugging Face layout, written with bounded memory, from a checkpoint or from a model that trains.

Called by checkpoints and cli. From a checkpoint one process streams. From a model each rank writes its own ranges to where they
belong in the files, and nothing is sent. `from_pretrained` of transformers loads the result: `model.safetensors`, or several files
and `model.safetensors.index.json`; tied parameters are stored once, under the first of their names.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint.checkpoints import Checkpoints
from zeroshard.checkpoint.chunks import Task
from zeroshard.checkpoint.description import CONFIG, Description, describe
from zeroshard.checkpoint.loading import Located, Reader, tasks_for
from zeroshard.checkpoint.manifest import Manifest, dtype_of
from zeroshard.errors import CheckpointError
from zeroshard.formats.model_files import (
    ADAPTER,
    BATCH_NBYTES,
    INDEX,
    MAX_SHARD_NBYTES,
    FilePlan,
    Source,
    begin,
    finish,
    index_of,
    make_folders,
    plan,
    write_ranges,
)
from zeroshard.observe.display import Advance, Display
from zeroshard.schedule.unit import Unit
from zeroshard.step.model_states import PARAMETERS
from zeroshard.storage.raw_memory import memory_of


def export(
    reader: Reader, out: str | os.PathLike[str], dtype: torch.dtype | None = None, *, max_shard_nbytes: float = MAX_SHARD_NBYTES,
    display: Display | None = None,
) -> list[Path]:  # fmt: skip
    """Write the model of a checkpoint as transformers does. Holds at most 64 MiB, whatever the model's size.

    Args:
        out: a folder; files of a former export there are replaced.
        dtype: of the floating-point tensors; None is that of the master weights (fp32).
        max_shard_nbytes: a larger model is spread over several files.
        display: where it shows how far it has come; default: nowhere.

    Raises:
        CheckpointError: a file of the checkpoint is damaged, or the folder cannot be written; or parameters were left out.
    """
    folder, description = Path(out), Description.of(reader.manifest.values.get("description"))
    excluded = reader.manifest.excluded if description.adapters is None else []  # an adapter needs no base
    if excluded:
        raise CheckpointError(
            f"{reader.folder} leaves out {len(excluded)} frozen parameters (one is {excluded[0]}): there is no whole model in it."
        )
    plans, texts = _contents(description, list(_sources(reader.manifest, dtype)), max_shard_nbytes)
    try:
        make_folders(folder, plans)
        shown = display or Display(speaks=False)
        with shown.task(f'writing "{folder}"', sum(one.nbytes for one in plans)) as row:
            for one in plans:
                _write(reader, one, folder / one.temporary, row.advance)
        return finish(folder, plans, texts)
    except (OSError, CheckpointError) as error:
        for one in plans:
            with suppress(OSError):
                (folder / one.temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}.") from error
        missing = [one.name for one in reader.manifest.files if not (reader.folder / one.name).is_file()]
        if missing:
            raise CheckpointError(
                f"{reader.folder} lacks {missing[0]}, one of {len(missing)} files that are missing. Where hosts save to folders of "
                "their own (node_local), bring the files of all of them together first."
            ) from error
        raise


def _write(reader: Reader, plan: FilePlan, path: Path, advance: Advance) -> None:
    """One file, flushed to the disk."""
    with path.open("wb") as file:
        file.write(plan.header)
        for source in plan.sources:
            for part in _stream(reader, source):
                file.write(memory_of(part))
                advance(part.nbytes)
        file.flush()
        os.fsync(file.fileno())


def _contents(
    description: Description, sources: Sequence[Source], max_shard_nbytes: float
) -> tuple[list[FilePlan], dict[str, Any]]:
    """The files of weights, and the contents of JSON files beside. Of a PEFT model, those of its adapters alone."""
    if description.problem is not None:
        raise CheckpointError(
            f"there are no files of this model that another program would load: {description.problem}"
        )
    texts = dict(description.files)
    if description.adapters is not None:
        by_fqn = {source.fqn: source for source in sources}
        plans = []
        for folder, names in description.adapters.items():
            left_out = [fqn for fqn in names.values() if fqn not in by_fqn]
            if left_out:
                raise CheckpointError(f"the adapter holds {left_out[0]}, which the checkpoint leaves out.")
            own = [replace(by_fqn[fqn], name=name) for name, fqn in names.items()]
            plans += plan(own, math.inf, folder + ADAPTER)
        return plans, texts
    plans = plan(sources, max_shard_nbytes)
    if len(plans) > 1:
        texts[INDEX] = index_of(plans)
    floating = [source.dtype for source in sources if source.dtype.is_floating_point]
    if CONFIG in texts and floating:
        dtype = {
            key: str(floating[0]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in texts[CONFIG]
        }
        texts[CONFIG] = {**texts[CONFIG], **dtype}
    return plans, texts


def export_live(
    checkpoints: Checkpoints, out: str | os.PathLike[str], dtype: torch.dtype | None = None,
    max_shard_nbytes: int = MAX_SHARD_NBYTES,
) -> None:  # fmt: skip
    """Write a model that trains, see `export`: each rank its own ranges. Every rank must call it.

    Raises:
        CheckpointError: on every rank, where any could not write.
    """
    checkpoints.wait_together()
    live, folder = checkpoints.live, Path(out)
    buffers = live.buffers
    description = describe(live).as_json()
    told = checkpoints.control.exchange_json(description if live.rank == 0 else None, "what the model says of itself")
    plans, texts = _contents(Description.of(told[0]), _live_sources(live.units, buffers, dtype), max_shard_nbytes)
    wanted = {source.fqn for one in plans for source in one.sources}
    mine = [held for held in live.states.held() if held.owner == live.rank and held.named.fqn in wanted]

    def parts() -> Iterator[tuple[str, int, Tensor]]:
        for held in mine:
            with held.shard.opened():
                yield held.named.fqn, held.start, held.value
        if live.rank == 0:
            yield from ((name, 0, buffer.reshape(-1)) for name, buffer in buffers.items() if name in wanted)

    checkpoints.together(lambda: begin(folder, plans) if live.rank == 0 else None)
    with checkpoints.display.task(
        f'exporting to "{folder}"', sum(held.numel * held.dtype.itemsize for held in mine)
    ) as row:
        checkpoints.together(lambda: write_ranges(folder, plans, parts(), row.advance))
    checkpoints.together(lambda: finish(folder, plans, texts) if live.rank == 0 else None)


def _live_sources(units: Sequence[Unit], buffers: Mapping[str, Tensor], dtype: torch.dtype | None) -> list[Source]:
    """What a model that trains would export: the same list on every rank."""
    found = []
    for unit in units:
        for entry in unit.named:
            own = unit.master_dtype
            found.append(Source(entry.fqn, tuple(entry.shape), _target(own, dtype), own, entry.fqn))
    for name, buffer in buffers.items():
        found.append(Source(name, tuple(buffer.shape), _target(buffer.dtype, dtype), buffer.dtype, name))
    return found


def _sources(manifest: Manifest, dtype: torch.dtype | None) -> Iterator[Source]:
    for record in manifest.parameters.values():
        state = record.states.get(PARAMETERS)
        saved = dtype_of(state.dtype) if state is not None else torch.float32  # none: it has no elements
        yield Source(record.names[0], tuple(record.shape), _target(saved, dtype), saved, record.names[0])
    for name, packed in _buffers(manifest).items():
        if "$scalar" in packed:
            saved = dtype_of(packed["$scalar"][0])
            yield Source(name, (), _target(saved, dtype), saved, name)
        else:
            tensor = manifest.tensors[packed["$tensor"]]
            saved = dtype_of(tensor.dtype)
            yield Source(name, tuple(tensor.shape), _target(saved, dtype), saved, name)


def _buffers(manifest: Manifest) -> Mapping[str, Any]:
    ranks = manifest.values.get("ranks", [])
    buffers: Mapping[str, Any] = ranks[0].get("buffers", {}) if ranks else {}
    return buffers


def _target(saved: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and saved.is_floating_point else saved


def _stream(reader: Reader, source: Source) -> Iterator[Tensor]:
    """The flattened tensor, piece by piece."""
    packed = _buffers(reader.manifest).get(source.fqn)
    if packed is not None and "$scalar" in packed:
        yield torch.tensor([packed["$scalar"][1]], dtype=source.dtype)
        return
    step = max(BATCH_NBYTES // source.saved.itemsize, 1)
    for start in range(0, source.numel, step):
        out = torch.empty(min(step, source.numel - start), dtype=source.saved)
        reader.read(list(_tasks(reader, source, packed, start, out)))
        yield out.to(source.dtype)


def _tasks(reader: Reader, source: Source, packed: Any, start: int, out: Tensor) -> Iterator[Located]:
    if packed is None:
        record = reader.parameter([source.fqn])
        assert record is not None
        yield from tasks_for(record.states[PARAMETERS], start, out, source.fqn)
    else:
        record_ = reader.manifest.tensors[packed["$tensor"]]
        yield Located(record_.file, Task(record_.offset + start * source.saved.itemsize, source.saved, out))
