"""Read whole models from checkpoints of zeroshard or DeepSpeed. It is also a script, with DeepSpeed's arguments."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint import consolidated, hugging_face
from zeroshard.tools.options import nbytes_of

Folder = str | os.PathLike[str]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Folder, tag: str | None = None, exclude_frozen_parameters: bool = False, lazy_mode: bool = False
) -> dict[str, Tensor]:
    """Return the full model for `model.load_state_dict`, in fp32 on the CPU. `lazy_mode` has no effect."""
    return consolidated.state_dict_of(checkpoint_dir, tag, exclude_frozen=exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(model: nn.Module, checkpoint_dir: Folder, tag: str | None = None) -> nn.Module:
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: Folder, output_dir: Folder, dtype: torch.dtype | str = torch.float32, max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False, tag: str | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    """Write the full model of a checkpoint to a folder, with torch.save or as safetensors."""
    wanted: Any = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    limit = float("inf") if max_shard_size is None else nbytes_of(str(max_shard_size))
    write = hugging_face.export if safe_serialization else consolidated.write_files
    with consolidated.open_any(checkpoint_dir, tag) as reader:
        write(reader, output_dir, dtype=wanted, max_shard_nbytes=limit, exclude_frozen=exclude_frozen_parameters)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: Folder, output_dir: Folder, max_shard_size: str | int | None = "5GB", safe_serialization: bool = False,
    tag: str | None = None, exclude_frozen_parameters: bool = False,
) -> None:  # fmt: skip
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("checkpoint_dir", help="the folder of checkpoints")
    add("output_dir", help="the folder to write to")
    add("--max_shard_size", default="5GB", help="the maximum size of a file; a larger model has several")
    add("--safe_serialization", action="store_true", help="write safetensors")
    add("-t", "--tag", default=None, help="the checkpoint's tag; default: the tag in `latest`")
    add("--exclude_frozen_parameters", action="store_true", help="leave out parameters that were not trained")
    add("-d", "--debug", action="store_true", help="(has no effect)")
    arguments = vars(parser.parse_args())
    del arguments["debug"]
    convert_zero_checkpoint_to_fp32_state_dict(**arguments)


if __name__ == "__main__":
    main()
