"""Owns the commands that show checkpoints and convert them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroshard.errors import counted
from zeroshard.tools.options import dtype_name, input_folder, nbytes_of, output_folder

if TYPE_CHECKING:
    from zeroshard.checkpoint.loading import Reader

MIB = 2**20
_INDEX = re.compile(r"(?<![^.])\d+(?=\.)")
"""A block's number in a parameter's name."""
_Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's folder, or the folder of all checkpoints.")
]
_Tag = Annotated[str | None, typer.Option(help="The checkpoint's tag; default: the one that `latest` names.")]


def inspect(
    checkpoint: _Checkpoint,
    tag: _Tag = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    verify: Annotated[bool, typer.Option(help="Read every file and verify its checksums.")] = True,
) -> None:  # fmt: skip
    """Print whether a checkpoint is whole, and its step, ranks, sizes and parameters. --json lists each parameter.

    The exit status is 1 if a file is missing or damaged.
    """
    from zeroshard.checkpoint.display import Display
    from zeroshard.checkpoint.loading import open_checkpoint

    reader = open_checkpoint(input_folder(checkpoint, "CHECKPOINT"), tag)
    nbytes = None
    if verify:
        nbytes = sum(one.nbytes for one in reader.manifest.files)
    with Display().task("verifying", nbytes) as row:
        reader.advance = row.advance
        described = describe(reader, verify=verify)
    if as_json:
        print(json.dumps(described, indent=2))
    else:
        _print(described)
    if described["problems"]:
        raise typer.Exit(1)


def consolidate(
    checkpoint: _Checkpoint,
    out: Annotated[Path, typer.Argument(help="The folder to write, in transformers' layout.")],
    tag: _Tag = None,
    dtype: Annotated[str, typer.Option(
        parser=dtype_name, metavar="DTYPE", help="The dtype of floating-point tensors: fp32, bf16 or fp16.")] = "fp32",
    max_shard_size: Annotated[int | None, typer.Option(
        "--max-shard-size", "--max-shard-nbytes", parser=nbytes_of, metavar="BYTES",
        help="The largest size of a file, such as 5GB; a larger model has several files.")] = None,
) -> None:  # fmt: skip
    """Write the model of a checkpoint in the Hugging Face layout, with bounded memory, on any machine."""
    import torch

    from zeroshard.checkpoint.display import Display
    from zeroshard.checkpoint.hugging_face import MAX_SHARD_NBYTES, export
    from zeroshard.checkpoint.loading import open_checkpoint

    output_folder(out, "OUT")
    reader = open_checkpoint(input_folder(checkpoint, "CHECKPOINT"), tag)
    limit = max_shard_size or MAX_SHARD_NBYTES
    for path in export(reader, out, getattr(torch, dtype), max_shard_nbytes=limit, display=Display()):
        print(f"{path}  {_size(path.stat().st_size)}")


def import_from_deepspeed(
    folder: Annotated[Path, typer.Argument(help="The folder of DeepSpeed's checkpoints, or of one checkpoint.")],
    out: Annotated[Path, typer.Argument(help="The folder of checkpoints to write to.")],
    tag: _Tag = None,
) -> None:  # fmt: skip
    """Convert a DeepSpeed checkpoint of ZeRO 1, 2 or 3 to zeroshard's format, without running code from it."""
    from zeroshard.checkpoint import manifest as files
    from zeroshard.checkpoint.deepspeed import import_deepspeed
    from zeroshard.checkpoint.display import Display

    output_folder(out, "OUT")
    path = import_deepspeed(input_folder(folder, "FOLDER"), out, tag, display=Display())
    manifest = files.read_manifest(path)
    print(f"{path}: {counted(len(manifest.parameters), 'parameter')}, {counted(manifest.world_size, 'rank')}")


def describe(reader: Reader, *, verify: bool) -> dict[str, Any]:
    """Return the description of a checkpoint that `inspect --json` prints.

    Args:
        verify: whether to read every file and verify its checksums; otherwise only sizes are checked.
    """
    import torch

    from zeroshard.checkpoint.manifest import dtype_of
    from zeroshard.checkpoint.safetensors_file import damage_of

    manifest = reader.manifest
    states: dict[str, int] = {}
    for record in manifest.parameters.values():
        numel = torch.Size(record.shape).numel()
        for name, state in record.states.items():
            states[name] = states.get(name, 0) + numel * dtype_of(state.dtype).itemsize
    damages = [damage_of(reader.folder, one, verify=verify, advance=reader.advance) for one in manifest.files]
    shared = manifest.values.get("shared", {})
    step = shared.get("step")  # saved by the user's own loop
    if isinstance(shared.get("engine"), dict):
        step = shared["engine"].get("global_steps", step)
    return {
        "path": str(reader.folder),
        "tag": manifest.tag,
        "created": manifest.created,
        "written_by": manifest.written_by,
        "world_size": manifest.world_size,
        "mesh": manifest.mesh,
        "policy": manifest.policy,
        "optimizer": manifest.optimizer,
        "global_steps": step if isinstance(step, int) else None,
        "numel": sum(torch.Size(record.shape).numel() for record in manifest.parameters.values()),
        "state_nbytes": states,
        "excluded": manifest.excluded,
        "values": sorted(shared),
        "files": [{"name": one.name, "nbytes": one.nbytes} for one in manifest.files],
        "parameters": {
            name: {
                "shape": record.shape,
                "names": record.names,
                "trained": record.trained,
                "states": {state: saved.dtype for state, saved in record.states.items()},
            }
            for name, record in manifest.parameters.items()
        },
        "verified": verify,
        "problems": [damage for damage in damages if damage is not None],
    }


def _size(nbytes: int) -> str:
    if nbytes < MIB / 10:
        return f"{nbytes / 1024:.1f} KiB"
    return f"{nbytes / MIB:.1f} MiB"


def _sharding(policy: dict[str, Any]) -> str:
    from zeroshard.core.model_states import PARAMETERS

    names = {PARAMETERS: "parameters", "gradients": "gradients", "optimizer": "optimizer states"}
    known = {words: policy[state] for state, words in names.items() if isinstance(policy.get(state), dict)}
    if not known:
        return "sharding unknown"
    sharded = [words for words, residency in known.items() if residency.get("sharded")]
    return f"sharded: {', '.join(sharded) or 'nothing'}"


def folded(parameters: dict[str, dict[str, Any]]) -> list[tuple[str, int, dict[str, Any]]]:
    """Combine parameters that differ only in the block numbers of their names. Tied parameters stay separate.

    Returns:
        For each group: its name (`blocks.*.weight`), the number of its parameters, and the record of the first.
    """
    found: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {}
    for name, record in parameters.items():
        pattern = _INDEX.sub("*", name)
        if record["names"][1:]:
            pattern = name
        kind = json.dumps([record["shape"], record["trained"], record["states"]])
        number, first = found.get((pattern, kind), (0, {"name": name, **record}))
        found[pattern, kind] = (number + 1, first)
    return [
        (first["name"] if number == 1 else pattern, number, first) for (pattern, _), (number, first) in found.items()
    ]


def _print(described: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if described["problems"]:
        verdict = "[red]damaged[/red]: load another tag, or pass fall_back=True"
    elif described["verified"]:
        verdict = "[green]complete[/green]: all files are present and all checksums match"
    else:
        verdict = (
            "[green]complete[/green]: all files are present and have the expected sizes; checksums were not verified"
        )
    console.print(verdict)
    for problem in described["problems"]:
        console.print(problem, style="red", markup=False)
    programs = ", ".join(f"{name} {version}" for name, version in described["written_by"].items())
    sizes = ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in described["state_nbytes"].items())
    step = ""
    if described["global_steps"] is not None:
        step = f"step {described['global_steps']}, "
    ranks = counted(described["world_size"], "rank")
    if described["mesh"]:
        sizes_of_mesh = " x ".join(f"{name} {size}" for name, size in described["mesh"].items())
        ranks += f" (mesh: {sizes_of_mesh})"
    console.print(described["path"], style="bold", highlight=False, markup=False)
    console.print(
        f"{described['numel']:,} elements in {counted(len(described['parameters']), 'parameter')}; {sizes}\n"
        f"{step}{ranks}, {_sharding(described['policy'])}\n"
        f"optimizer: {described['optimizer'] or 'none'}; written by {programs}",
        highlight=False,
        markup=False,
    )
    rows = folded(described["parameters"])
    table = Table("parameter", "number", "shape", "states")
    table.columns[0].overflow = "fold"  # the end of a name identifies the parameter
    several = any(record["names"][1:] for _, _, record in rows)
    if several:
        table.add_column("also called")
    for name, number, record in rows:
        states = ", ".join(f"{state} {dtype}" for state, dtype in record["states"].items())
        shape = "x".join(map(str, record["shape"])) or "scalar"
        cells = [name + " (frozen)" * (not record["trained"]), str(number), shape, states]
        if several:
            cells.append(", ".join(record["names"][1:]))
        table.add_row(*map(escape, cells))
    console.print(table)
