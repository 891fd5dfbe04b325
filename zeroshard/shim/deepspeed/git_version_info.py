"""The version of DeepSpeed whose names this package has."""

from __future__ import annotations

import torch

__all__ = ["accelerator_name", "compatible_ops", "git_branch", "git_hash", "installed_ops", "torch_info", "version"]
version = "0.19.8"
git_hash = git_branch = "zeroshard"
installed_ops: dict[str, bool] = {}
compatible_ops: dict[str, bool] = {}
accelerator_name = ""
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
    "bf16_support": True,
}
