"""Owns the backend that accelerate needs to know, and does not ask for.

On a CPU, accelerate knows no backend for DeepSpeed: it lets `deepspeed.comm.init_distributed(None)` join the ranks, and then takes
"no backend" for "one process" (accelerate/state.py, `PartialState.__init__`): every rank would load all data and write all files.
"""

from __future__ import annotations

import sys

import torch.distributed as dist


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
