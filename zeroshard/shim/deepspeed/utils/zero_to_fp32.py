"""Whole models out of checkpoints, zeroshard's or DeepSpeed's. Also a script, with DeepSpeed's arguments."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__" and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(
        Path(__file__).resolve().parents[2]
    )  # a script's own folder goes first, and this one holds a torch.py

import torch
from torch import Tensor, nn

from deepspeed._missing import missing
from zeroshard.cli.options import nbytes_of
from zeroshard.formats import consolidated, hugging_face

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict", "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint", "load_state_dict_from_zero_checkpoint",
]  # fmt: skip

_INSTEAD = (
    "Checkpoints here have one format: get_fp32_state_dict_from_zero_checkpoint and `zeroshard consolidate` read them."
)
__getattr__ = missing(__name__, get_model_state_file=_INSTEAD, get_optim_files=_INSTEAD)

Folder = str | os.PathLike[str]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Folder,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """The whole model, for `model.load_state_dict`, in fp32 on the CPU (also with `lazy_mode`)."""
    return consolidated.state_dict_of(checkpoint_dir, tag, exclude_frozen=exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Folder, tag: str | None = None) -> nn.Module:
    """Load it into a model, on the CPU."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write it to a folder: with torch.save, or as safetensors."""
    wanted: Any = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    limit = float("inf") if max_shard_size is None else nbytes_of(str(max_shard_size))
    with consolidated.open_any(checkpoint_dir, tag) as reader:
        if safe_serialization and not exclude_frozen_parameters:
            hugging_face.export(reader, output_dir, wanted, max_shard_nbytes=limit)
        else:
            consolidated.write_files(
                reader, output_dir, dtype=wanted, max_shard_nbytes=limit,
                exclude_frozen=exclude_frozen_parameters, safe=safe_serialization,
            )  # fmt: skip


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder,
    output_dir: Folder,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """The same, in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint_dir", help="the folder of checkpoints")
    parser.add_argument("output_dir", help="the folder to write to")
    parser.add_argument("--max_shard_size", default="5GB", help="a larger model is spread over files of this size")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint; default: what `latest` names")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="(says nothing more)")
    told = parser.parse_args()
    convert_zero_checkpoint_to_fp32_state_dict(
        told.checkpoint_dir,
        told.output_dir,
        told.max_shard_size,
        told.safe_serialization,
        told.tag,
        told.exclude_frozen_parameters,
    )


if __name__ == "__main__":
    main()
