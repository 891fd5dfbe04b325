"""Owns what transformers leaves open when it loads or initialises a model under zero.Init.

transformers loads into parameters that rank 0 has gathered, and only rank 0 sees that a size differs from the file's: it alone
would raise an error, or it would not honour `ignore_mismatched_sizes`. It also initialises gathered parameters on rank 0 and marks
their module there: if a later constructor initialises what has no mark, other ranks would read parameters that rank 0 does not.
The variables of transformers' functions are the same on every rank.

It also records all conversions of names and tensors that the model's class knows, not those that the file needed, and a save
reverts what is recorded. So a file that is read and written again would get names of an older format.

Where transformers builds a model, it skips the initialisers of torch, and calls the model's own method afterwards. What that
method leaves out has the values that the memory had. Such memory is filled with NaN, and `initialize` names the parameters.

In releases with other variables, nothing changes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zeroshard.core.named_parameter import named_parameters
from zeroshard.model.born import BornSharded
from zeroshard.model.parameter_states import parameter_states

_INITIALISER = "_apply_zero3"
_LOADER = "_load_state_dict_into_zero3_model"
_VARIABLES = {"state_dict", "named_parameters", "missing_keys", "error_msgs"}


def follow_loader(depth: int) -> None:
    """Complete what transformers' loader does now, if it is the caller. Every rank must call it.

    Parameters of other sizes are taken from what it loads. With `ignore_mismatched_sizes`, transformers then initialises them.
    Otherwise every rank raises the error for all of them. Conversions that no name in the file needed are not recorded, as
    without zero.Init.

    Args:
        depth: the number of calls between this function and the loader's.
    """
    frame: Any = sys._getframe(depth)
    if frame.f_code.co_name != "load" or not frame.f_locals.keys() >= _VARIABLES:
        return
    found = frame.f_locals
    while frame is not None and frame.f_code.co_name != _LOADER:
        frame = frame.f_back
    if frame is None:
        return
    model = frame.f_locals.get("model_to_load")
    conversions = getattr(model, "_weight_conversions", None)
    if conversions and all(hasattr(one, "was_used") for one in conversions):
        model._weight_conversions = [one for one in conversions if one.was_used()]
    ignores = bool(getattr(frame.f_locals.get("load_config"), "ignore_mismatched_sizes", False))
    for name, parameter in found["named_parameters"].items():
        saved = found["state_dict"].get(name)
        if saved is None or saved.shape == parameter.shape:
            continue
        del found["state_dict"][name]
        if ignores:
            parameter._is_hf_initialized = False
            found["missing_keys"].add(name)
            warnings.warn(
                f"{name} has shape {tuple(saved.shape)} in the file and {tuple(parameter.shape)} in the model: it is initialised.",
                stacklevel=depth + 1,
            )
        else:
            found["error_msgs"].append(
                f"size mismatch for {name}: copying a param with shape {saved.shape} from checkpoint, the shape in current model "
                f"is {parameter.shape}."
            )


@contextmanager
def without_arbitrary_values() -> Iterator[None]:
    """Fill new memory with NaN in this context if torch's initialisers have no effect now."""
    fills = nn.init.normal_.__name__ != "normal_" and not torch.are_deterministic_algorithms_enabled()
    if fills:  # torch has no narrower public switch for `torch.utils.deterministic.fill_uninitialized_memory`
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        if fills:
            torch.use_deterministic_algorithms(False)


def warn_of_missing_values(model: nn.Module) -> None:
    """Warn on rank 0 of parameters that were created sharded, and that nothing has initialised."""
    born = [(name, one) for name, one in named_parameters(model) if isinstance(one, BornSharded)]
    if not born or dist.get_rank():
        return
    parts = ((name, parameter_states(one).flat()) for name, one in born)
    names = [name for name, part in parts if part is not None and part.numel() and bool(part.isnan().all())]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"{names[0]}{more} are NaN: they were built under zero.Init, and nothing has initialised them. transformers skips what "
            "constructors do there. Load a checkpoint, or initialise them in GatheredParameters(..., modifier_rank=0).",
            stacklevel=3,
        )


def module_that_is_initialised(depth: int) -> Any:
    """Return the module whose parameters transformers gathers to initialise them on rank 0, or None.

    Args:
        depth: the number of calls between this function and transformers'.
    """
    frame: Any = sys._getframe(depth)
    return frame.f_locals.get("model_or_module") if frame.f_code.co_name == _INITIALISER else None


def mark_as_initialised(module: Any) -> None:
    """Mark a module on every rank, as transformers does on the rank that has initialised it."""
    if module is not None:
        module._is_hf_initialized = True
