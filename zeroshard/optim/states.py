"""Owns facts about known optimizers: their states, whether they need whole parameters, and which are refused."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zeroshard.errors import UsageError
from zeroshard.optim.several import Several, optimizers_of


@dataclass(frozen=True)
class Known:
    """Facts about an optimizer class.

    Attributes:
        states: the maximum number of state tensors of a parameter's size, with default options (SGD: with momentum).
            For a matrix, Adafactor keeps only a row and a column.
        elementwise: whether the update of an element depends only on that element's own history. Otherwise it depends
            on the whole parameter, but on no other parameter.
        starts_at_zero: whether its first states are zeros, at any learning rate.
    """

    states: int
    elementwise: bool = True
    starts_at_zero: bool = True


KNOWN = {
    "ASGD": Known(1, starts_at_zero=False),
    "Adadelta": Known(2),
    "Adafactor": Known(1, elementwise=False, starts_at_zero=False),
    "Adagrad": Known(1),
    "Adam": Known(2),
    "AdamW": Known(2),
    "Adamax": Known(2),
    "Lion": Known(1),
    "Muon": Known(1, elementwise=False),
    "NAdam": Known(2),
    "RAdam": Known(2),
    "RMSprop": Known(1),
    "Rprop": Known(2, starts_at_zero=False),
    "SGD": Known(1),
}
"""The optimizers of torch.optim and zeroshard that sharding supports, by class name."""

_UNKNOWN = 2
"""The number of states that is assumed for other optimizers: most of them resemble Adam."""


def states_per_parameter(optimizer: torch.optim.Optimizer) -> int:
    """Return the maximum number of state tensors of a parameter's size, with this optimizer's options."""
    most = 0
    for member in optimizers_of(optimizer):
        name = next((base.__name__ for base in type(member).__mro__ if base.__name__ in KNOWN), None)
        if name is None:
            most = max(most, _UNKNOWN)
            continue
        for group in member.param_groups:
            options = [group.get("amsgrad"), group.get("centered"), name == "RMSprop" and group["momentum"]]
            most = max(most, KNOWN[name].states + sum(bool(option) for option in options))
    return most


REFUSED = {
    "LBFGS": "uses all parameters at once",
    "SparseAdam": "needs sparse gradients",
    **dict.fromkeys(
        ("Prodigy", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"),
        "estimates one step size from all parameters at once",
    ),
}
"""Class names of optimizers that sharding cannot support, with the reasons."""


COLLECTIVES = {
    "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all",
    "all_to_all_single", "broadcast", "reduce_scatter", "reduce_scatter_tensor",
}  # fmt: skip
"""The names of torch.distributed's operations that an optimizer which divides its work over ranks calls."""


_NEAREST = 10
"""The number of stack frames to check: torch's wrappers of `step` and `state_dict` add some."""

_FUNCTIONS = "torch.distributed.checkpoint.state_dict"
_CHECKPOINTS = (_FUNCTIONS, f"{_FUNCTIONS}_saver", f"{_FUNCTIONS}_loader")


def wants_whole_states(modules: Sequence[str] = (_FUNCTIONS,)) -> bool:
    """Return whether one of these modules is calling, by default torch.distributed.checkpoint.state_dict.

    That module assumes that parameters are whole. Before `state_dict()`, it creates missing states by a step with learning
    rates of 0. After an error, it does not restore the learning rates. Looking at the stack takes a microsecond.
    """
    frame = inspect.currentframe()
    for _ in range(_NEAREST):
        if frame is None:
            return False
        if frame.f_globals.get("__name__") in modules:
            return True
        frame = frame.f_back
    return False


def refuse_whole_states(remedy: str, *, is_part: bool) -> None:
    """Raise `UsageError` if the caller requests the states of whole parameters.

    Args:
        remedy: the end of the message.
        is_part: whether other ranks have other states. If so, `dcp.save` and `dcp.load` of an optimizer raise, too.
    """
    if wants_whole_states(_CHECKPOINTS if is_part else (_FUNCTIONS,)):
        raise UsageError(
            "torch.distributed.checkpoint takes a rank's shards for states of whole parameters, so it would save them under "
            f"wrong names, and one rank's in place of all. {remedy}"
        )


def refuse_what_cannot_be_sharded(cls: type[torch.optim.Optimizer]) -> None:
    """Raise for an optimizer class that would compute different values on shards or wait forever.

    Raises:
        UsageError: the class is one of `REFUSED`.
        TypeError: it is not a class.
    """
    if not isinstance(cls, type):
        raise TypeError(
            f"optimizer_class is an object of class {type(cls).__name__}. Pass a class, such as torch.optim.Adam."
        )
    for base in cls.__mro__:
        if base.__name__ in REFUSED:
            raise UsageError(
                f"{cls.__name__} {REFUSED[base.__name__]}, but zeroshard shards dense parameters over ranks: the "
                f"results would be wrong. Use one of {', '.join(KNOWN)}."
            )
    called = set[str]()
    for base in cls.__mro__:
        if base.__module__.startswith(("torch.optim", "zeroshard.optim", "builtins")):
            continue
        for method in filter(callable, vars(base).values()):
            code = getattr(inspect.unwrap(method), "__code__", None)
            if code is not None:
                called |= COLLECTIVES.intersection(code.co_names)
    if called:
        raise UsageError(
            f"{cls.__name__} calls {', '.join(sorted(called))}: it divides its work over ranks itself, but under zeroshard each "
            "rank has other tensors in it, so it would add up parts of different parameters, or wait forever. Use its version for "
            "a single process."
        )


def _refuse_own_blocks(optimizer: torch.optim.Optimizer, elementwise: bool | None) -> None:
    """Raise for a class of bitsandbytes or torchao that keeps states in few bits: its blocks begin where its tensors do.

    torchao's states are tensors of classes that cannot be divided, so no checkpoint takes them.
    """
    # By package, the nearest class: a user's own class keeps the states of the one that it extends.
    classes = {base.__module__.partition(".")[0]: base.__name__ for base in reversed(type(optimizer).__mro__)}
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
    few_bits = {
        package for package, kind in classes.items() if bits == 8 or kind.lower().endswith(("8bit", "4bit", "fp8"))
    }
    name = type(optimizer).__name__
    better = "the class of torch.optim with Precision(state_dtype=torch.uint8) (in a config, data_types.state_dtype)"
    if "torchao" in few_bits:
        raise UsageError(
            f"{name} keeps states in torchao's own classes of tensors, which no checkpoint can take. Use {better}."
        )
    if "bitsandbytes" in few_bits and elementwise is not False:
        raise UsageError(
            f"{name} keeps states in blocks that would begin where this rank's shards do, so results would depend on the number of "
            f"ranks. Use {better}, or pass elementwise=False: no parameter is then cut."
        )


def looks_at_whole_parameters(cls: type[torch.optim.Optimizer]) -> bool | None:
    """Return whether optimizers of this class need whole parameters; None if that is unknown.

    A subclass of a class in `KNOWN` counts as that class, unless its `step` is different.
    """
    for base in cls.__mro__:
        if base.__module__.startswith(("torch.optim", "zeroshard.optim")) and base.__name__ in KNOWN:
            # torch wraps a class's step when the first instance is created.
            has_own_step = inspect.unwrap(cls.step) is not inspect.unwrap(base.step)  # type: ignore[attr-defined]
            return None if has_own_step else not KNOWN[base.__name__].elementwise
    return None


def needs_whole_parameters(optimizer: torch.optim.Optimizer, elementwise: bool | None = None) -> bool:
    """Return whether this optimizer needs whole parameters, each in one shard.

    Args:
        optimizer: the optimizer.
        elementwise: the user's argument, which overrides the list of classes.

    Raises:
        UsageError: the class is refused, or unknown without `elementwise`, or `elementwise` is True for a class of
            `KNOWN` that uses whole parameters.
    """
    if isinstance(optimizer, Several):
        whole = [needs_whole_parameters(one, elementwise) for one in optimizer.members]  # each call may raise
        return any(whole)
    refuse_what_cannot_be_sharded(type(optimizer))
    _refuse_own_blocks(optimizer, elementwise)
    if optimizer.defaults.get("max_grad_norm"):
        raise UsageError(
            f"{type(optimizer).__name__}(max_grad_norm={optimizer.defaults['max_grad_norm']}) clips by the norm of the gradients "
            "that one call gets, which may be a part of them. Pass max_grad_norm=None, and call clip_grad_norm_ before step."
        )
    known = looks_at_whole_parameters(type(optimizer))
    if elementwise and known and type(optimizer).__name__ in KNOWN:
        raise UsageError(
            f"elementwise=True, but {type(optimizer).__name__} uses whole parameters: its updates of shards would be wrong. Leave "
            "elementwise out."
        )
    moves = all(callable(getattr(type(optimizer), name, None)) for name in ("train", "eval"))
    if moves:
        raise UsageError(
            f"{type(optimizer).__name__}.train() and eval() move the parameters with the optimizer's states, which zeroshard keeps "
            "in shards: they would find none, and change nothing. Use an optimizer without them, and a learning rate schedule."
        )
    if elementwise is not None:
        return not elementwise
    if known is not None:
        return known
    name = type(optimizer).__name__
    raise UsageError(
        f"zeroshard cuts parameters into shards, and {name} may need whole parameters. If its update of an element uses only "
        "that element's gradient and state, pass elementwise=True. If it uses the whole parameter (its norm, its rows), pass "
        'elementwise=False, or set "zero_allow_untested_optimizer": true in a config: no parameter is then cut. If it uses '
        "all parameters at once (a norm of all gradients), neither is right: turn that off. "
        f"Or use one of {', '.join(KNOWN)}."
    )
