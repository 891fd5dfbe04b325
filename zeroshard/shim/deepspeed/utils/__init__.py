"""Logging, groups, and the reading and writing of parameters that are sharded."""

from __future__ import annotations

from torch.distributed import is_initialized

from deepspeed._missing import missing
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.utils import groups, logging
from deepspeed.utils.init_on_device import OnDevice
from deepspeed.utils.logging import log_dist, log_dist_once, logger, set_log_level_from_string
from deepspeed.utils.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from deepspeed.utils.z3_leaf_module import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
    z3_leaf_parameter,
)

__all__ = [
    "OnDevice", "RepeatingLoader", "get_z3_leaf_modules", "groups", "is_initialized", "log_dist", "log_dist_once", "logger",
    "logging",
    "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state", "safe_get_local_fp32_param",
    "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_full_fp32_param", "safe_set_full_grad",
    "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_grad", "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized", "set_log_level_from_string", "set_z3_leaf_module", "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module", "z3_leaf_parameter",
]  # fmt: skip
__getattr__ = missing(__name__, instrument_w_nvtx="torch.profiler sees everything.")
