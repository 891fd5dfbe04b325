"""Owns the backend that accelerate needs to know, and does not ask for; and refuses its tensor parallelism.

On a CPU, accelerate knows no backend for DeepSpeed: it lets `deepspeed.comm.init_distributed(None)` join the ranks, and then takes
"no backend" for "one process" (accelerate/state.py, `PartialState.__init__`): every rank would load all data and write all files.
"""

from __future__ import annotations

import sys

import torch.distributed as dist

from zeroshard.errors import UsageError


def tell_backend() -> None:
    """Give accelerate's state the backend of the ranks that are joined, where it has none. Does nothing without accelerate.

    Its state is one for all of its instances, and is filled while the first one is made: that one asks for the ranks.
    """
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    if state is None or not dist.is_initialized():
        return
    attributes = state._shared_state
    is_being_made = "backend" in attributes and "num_processes" not in attributes
    if is_being_made and attributes["backend"] is None:
        state().backend = dist.get_backend()


def refuse_tensor_parallel() -> None:
    """Raise where accelerate was given `ParallelismConfig(tp_size=...)`. Does nothing without accelerate."""
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    config = None if state is None else state._shared_state.get("parallelism_config")
    size = getattr(config, "tp_size", 1)
    if size > 1:
        raise UsageError(
            f"ParallelismConfig(tp_size={size}) is not offered under a trainer: leave it out, and use stage 3. Or divide the "
            "model in a loop of your own, with parallelize_module and zeroshard.shard (docs: Composing)."
        )
