"""Parameters of sharded models: `zero.Init`, `GatheredParameters`, and the attributes and states of parameters."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

import zeroshard
from deepspeed.accelerator import get_accelerator
from deepspeed.comm import init_distributed
from zeroshard import UsageError
from zeroshard.engine.config.load import Birth, expert_parallel_ranks, load_birth, tensor_parallel_ranks
from zeroshard.integrations.transformers_loading import (
    follow_loader,
    mark_as_initialised,
    module_that_is_initialised,
    without_arbitrary_values,
)

ZeroParamType = enum.Enum("ZeroParamType", ["NORMAL", "PARTITIONED", "REMOTE"])
ZeroParamStatus = enum.Enum("ZeroParamStatus", ["AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"])


def _states(parameter: Any) -> zeroshard.ParameterStates:
    try:
        return zeroshard.parameter_states(parameter)
    except UsageError as error:
        raise AttributeError(str(error)) from None


class DeepSpeedParameter:
    """The `ds_` attributes of parameters while their model is sharded at stage 3."""

    ds_id = property(lambda self: _states(self).number)
    ds_shape = property(lambda self: self.shape)
    ds_numel = property(lambda self: self.numel())
    ds_active_sub_modules = property(lambda _: set())
    ds_persist = property(lambda self: not _states(self).is_sharded)
    ds_param_type = property(lambda _: ZeroParamType.PARTITIONED)

    @property
    def ds_status(self) -> ZeroParamStatus:
        states = _states(self)
        if states.is_arriving:
            return ZeroParamStatus.INFLIGHT
        return ZeroParamStatus.AVAILABLE if states.is_here else ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_tensor(self) -> Tensor:
        """A copy of this rank's part of the parameter, 1-D; empty if this rank has none."""
        part = _states(self).flat()
        return torch.empty(0) if part is None else part


def is_zero_param(parameter: Any) -> bool:
    return isinstance(parameter, Tensor) and hasattr(parameter, "ds_id")


def zero_wrapper_for_fp_tensor_constructor(fn: Any, target_fp_dtype: Any = None, target_device: Any = None) -> Any:
    """Return `fn` itself, since zeroshard does not wrap torch's functions."""
    return fn


# ---------------------------------------------------------------------- zero.Init

_BORN: Any = {"attributes": DeepSpeedParameter, "detached_stay_cut": True}


class Init:
    """The context `zeroshard.sharded_init` with rank 0's values. With `module` it calls `zeroshard.cut` instead."""

    def __init__(
        self, module: nn.Module | None = None, data_parallel_group: Any = None, mem_efficient_linear: bool = True,
        remote_device: str | None = None, pin_memory: bool = False, config_dict_or_path: Any = None, config: Any = None,
        enabled: bool = True, dtype: torch.dtype | None = None, mpu: Any = None, zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False, zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None, param_swapper: Any = None, tensor_overrides: Any = None,
    ) -> None:  # fmt: skip
        if zero_param_parallel_group is not None:
            raise UsageError(
                "zero.Init(zero_param_parallel_group=...) is not supported. Set zero_hpz_partition_size in the config instead."
            )
        said = config_dict_or_path if config_dict_or_path is not None else config
        # Do not shard for tensor or expert parallelism: `tp_model_init` or `initialize` later divides whole parameters.
        is_divided_later = said is not None and max(tensor_parallel_ranks(said), expert_parallel_ranks(said)) > 1
        self.enabled = enabled and not is_divided_later
        birth = load_birth(said) if said is not None else Birth()
        self.dtype = dtype if dtype is not None else birth.dtype
        self._folder = birth.folder
        where = remote_device if remote_device not in (None, "none") else birth.device
        self._device = torch.device("cpu" if where in ("cpu", "nvme") else get_accelerator().current_device_name())
        group = data_parallel_group if data_parallel_group is not None else sequence_data_parallel_group
        self.ds_process_group = group if group is not None or mpu is None else mpu.get_data_parallel_group()
        self._open: list[ExitStack] = []
        if not self.enabled:
            return
        init_distributed()
        if module is not None:
            if self.dtype is not None:
                module.to(self.dtype)
            zeroshard.cut(module.to(self._device), self.ds_process_group, self._folder, **_BORN)

    def __enter__(self) -> Init:
        stack = ExitStack()
        if self.enabled:
            if self._device.type != "cpu":
                stack.enter_context(self._device)
            born = zeroshard.sharded_init(self.ds_process_group, self._folder, dtype=self.dtype, source=0, **_BORN)
            stack.enter_context(born)
            stack.enter_context(without_arbitrary_values())
        self._open.append(stack)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


# ---------------------------------------------------------------------- zero.GatheredParameters


class GatheredParameters:
    """The context `zeroshard.unsharded`."""

    def __init__(
        self, params: Tensor | Iterable[Any], modifier_rank: int | None = None, fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:  # fmt: skip
        follow_loader(2)
        self._initialised = module_that_is_initialised(2)
        self.enabled = enabled
        self._rank = modifier_rank
        given = [params] if isinstance(params, Tensor) else list(params) if isinstance(params, Iterable) else []
        self.params = [
            one for one in given if is_zero_param(one) or (modifier_rank is not None and isinstance(one, Tensor))
        ]
        self._open: list[AbstractContextManager[None]] = []
        if fwd_module is not None and enabled:
            for one in self.params:
                register_external_parameter(fwd_module, one)  # type: ignore[arg-type]

    def __enter__(self) -> None:
        whole = zeroshard.unsharded(self.params if self.enabled else [], self._rank)
        whole.__enter__()
        self._open.append(whole)

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)
        mark_as_initialised(self._initialised)


_external: WeakKeyDictionary[nn.Module, WeakIdKeyDictionary] = WeakKeyDictionary()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Unshard a parameter during each forward of a module, and in its backward if that needs the parameter."""
    if not isinstance(module, nn.Module):
        raise RuntimeError(
            f"register_external_parameter needs a module as its first argument, not {type(module).__name__}. Pass one."
        )
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError(
            f"register_external_parameter needs a parameter as its second argument, not {type(parameter).__name__}. Pass one."
        )
    known = _external.setdefault(module, WeakIdKeyDictionary())
    if parameter not in known:
        known[parameter] = zeroshard.borrow(module, parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    borrowed = _external.get(module, WeakIdKeyDictionary()).pop(parameter, None)
    if borrowed is None:
        raise RuntimeError(f"this parameter is not registered with {type(module).__name__}. Register it first.")
    borrowed.remove()


# ---------------------------------------------------------------------- model states by parameter, at every stage

# `full` means a whole state, on every rank, and `local` this rank's elements, 1-D. Both are copies in fp32.


def _trained(param: Tensor) -> zeroshard.ParameterStates | None:
    """Return the states of a parameter, or None if no engine trains it."""
    try:
        states = zeroshard.parameter_states(param)
    except UsageError:
        return None
    return states if states.is_trained else None


def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    states = _trained(param)
    value = states.get(optim_state_key) if states is not None else None
    return value.float() if value is not None and value.is_floating_point() else value


def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    states = _trained(param)
    value = states.flat(optim_state_key) if states is not None else None
    return value.float() if value is not None else None


def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    zeroshard.parameter_states(param).set(value, optim_state_key)


def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    zeroshard.parameter_states(param).set_flat(value, optim_state_key)


safe_get_full_fp32_param = partial(safe_get_full_optimizer_state, optim_state_key="parameters")
safe_get_local_fp32_param = partial(safe_get_local_optimizer_state, optim_state_key="parameters")
safe_set_full_fp32_param = partial(safe_set_full_optimizer_state, optim_state_key="parameters")
safe_set_local_fp32_param = partial(safe_set_local_optimizer_state, optim_state_key="parameters")
safe_set_full_grad = partial(safe_set_full_optimizer_state, optim_state_key="gradients")
safe_set_local_grad = partial(safe_set_local_optimizer_state, optim_state_key="gradients")


def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """Return a parameter's whole mean gradient on every rank, or its `grad` outside an engine.

    Before the gradients are reduced, as inside `no_sync`, it is this rank's sum over microbatches.
    """
    states = _trained(param)
    if states is None:
        return param.grad
    own = states.own_gradient()
    return own.float() if own is not None else safe_get_full_optimizer_state(param, "gradients")


def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """Return this rank's elements of a gradient. Every rank must call it."""
    zeroshard.parameter_states(param).get("gradients")  # wait for reductions that still run
    return safe_get_local_optimizer_state(param, "gradients")


def safe_update_full_grad_vectorized(
    param_list: Iterable[Tensor], update_func: Callable[[Tensor, Tensor], Any]
) -> None:
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))
