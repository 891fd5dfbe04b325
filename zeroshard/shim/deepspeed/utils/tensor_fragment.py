"""Model states by parameter: `zeroshard.parameter_states` under DeepSpeed's names. They work under every stage.

`full` is the whole of a state, on every rank; `local` this rank's elements, 1-D. Both are copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

import zeroshard
from zeroshard import UsageError

_PARAMETERS = "parameters"
_GRADIENTS = "gradients"


def _trained(param: Tensor) -> zeroshard.ParameterStates | None:
    """Return the parameter's states; None if no engine trains it."""
    try:
        states = zeroshard.parameter_states(param)
    except UsageError:
        return None
    return states if states.is_trained else None


def _full(param: Tensor, state: str) -> Tensor | None:
    states = _trained(param)
    value = states.get(state) if states is not None else None
    return value.float() if value is not None and value.is_floating_point() else value


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    return _full(param, _PARAMETERS)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    return _full(param, optim_state_key)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return a parameter's whole mean gradient, on every rank; outside of an engine, its `grad`.

    If a step's microbatches are not reduced yet, as inside `no_sync`, it is this rank's sum.
    """
    states = _trained(param)
    if states is None:
        return param.grad
    own = states.own_gradient()
    return own.float() if own is not None else _full(param, _GRADIENTS)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    zeroshard.parameter_states(param).set(value, _PARAMETERS)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    zeroshard.parameter_states(param).set(value, optim_state_key)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    zeroshard.parameter_states(param).set(value, _GRADIENTS)


def _local(param: nn.Parameter, state: str) -> Tensor | None:
    states = _trained(param)
    value = states.flat(state) if states is not None else None
    return value.float() if value is not None else None


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return a copy of this rank's elements of a parameter's master weights, 1-D."""
    return _local(param, _PARAMETERS)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return a copy of this rank's elements of a parameter's gradient, 1-D. Every rank must call it."""
    zeroshard.parameter_states(param).get(_GRADIENTS)  # what is on its way arrives
    return _local(param, _GRADIENTS)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a copy of this rank's elements of a state of the optimizer, 1-D."""
    return _local(param, optim_state_key)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    zeroshard.parameter_states(param).set_flat(value, _PARAMETERS)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    zeroshard.parameter_states(param).set_flat(value, _GRADIENTS)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    zeroshard.parameter_states(param).set_flat(value, optim_state_key)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Any]
) -> None:
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))
