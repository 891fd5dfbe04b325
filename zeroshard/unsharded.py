"""Owns `unsharded`: parameters that are whole for a while; and the way from a parameter to the unit that it lies in."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zeroshard.errors import UsageError
from zeroshard.schedule.hooks import Hooks
from zeroshard.schedule.states import State
from zeroshard.schedule.unit import Unit

_home_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
# A phone book, not state: it lets `unsharded` find a parameter's unit without an attribute hung on the parameter.


def register(units: Iterable[Unit], hooks: Hooks) -> None:
    """Note where the parameters of these units are to be found."""
    for unit in units:
        home = (weakref.ref(unit), weakref.ref(hooks))
        for entry in unit.named:
            _home_of[entry.parameter] = home


def unregister(units: Iterable[Unit]) -> None:
    """Their parameters are the user's own again."""
    for unit in units:
        for entry in unit.named:
            _home_of.pop(entry.parameter, None)


def is_taken(parameter: Tensor) -> bool:
    """Whether some model that was sharded holds it."""
    return parameter in _home_of


@contextmanager
def unsharded(target: nn.Module | Tensor | Iterable[Tensor], modifier_rank: int | None = None) -> Iterator[None]:
    """Inside, the parameters of a module, or those given, are whole and current, under every policy.

    They stay so while the model runs: inside, ranks may run it as often as each likes (to generate, say). Where parameters
    are sharded at rest, and wherever there is a modifier rank, every rank must enter and leave it.

    Args:
        target: a module, a parameter or parameters. What shares a unit with them is whole too.
        modifier_rank: rank of the data-parallel group whose in-place changes count: they become every rank's parameters and
            master weights on leaving. None is for reading.

    Raises:
        UsageError: parameters were changed without a modifier rank. Under sharded parameters the change is gone.
    """
    if isinstance(target, nn.Module):
        wanted: Iterable[Tensor] = target.parameters()
    else:
        wanted = [target] if isinstance(target, Tensor) else target
    homes = [home for home in (_home_of.get(parameter) for parameter in wanted) if home is not None]
    units = list(dict.fromkeys(unit for unit, _ in ((ref(), hooks) for ref, hooks in homes) if unit is not None))
    hooks = list(dict.fromkeys(hooks for hooks in (ref() for _, ref in homes) if hooks is not None))
    for unit in units if modifier_rank is not None else ():
        unit.refuse_parked("a change of")
    at_rest = [unit for unit in units if unit.state is State.SHARDED]
    offloaded = [unit for unit in units if unit.state is State.OFFLOADED]
    written, pinned = list[str](), list[Unit]()
    try:
        with _operation(units, "unsharded"):
            for unit in at_rest:
                unit.start_unshard()
            for unit in units:
                unit.unshard()
                unit.pin()
                pinned.append(unit)
                unit.write_back()  # what was written before is no change inside
        before = [unit.appearance.versions() for unit in units]
        with ExitStack() as stack:
            for one in hooks:
                stack.enter_context(one.whole(units))
            yield
        with _operation(units, "the end of unsharded"):
            written = _take_changes(units, before, modifier_rank)
    finally:
        for unit in pinned:
            unit.unpin()
        for unit in at_rest:
            unit.reshard()
        for unit in offloaded:
            unit.offload()
    if written:
        raise UsageError(
            f"parameters were changed inside unsharded() without a modifier rank: {', '.join(written)}. The ranks, and the "
            "master weights, would no longer agree: pass modifier_rank=0 to keep rank 0's change, or copy what you want to change."
        )


def _operation(units: Sequence[Unit], name: str) -> AbstractContextManager[None]:
    """What the waits for other ranks inside belong to."""
    return units[0].collectives.operation(name) if units else nullcontext()


def _take_changes(units: Sequence[Unit], before: Sequence[Sequence[int]], modifier_rank: int | None) -> list[str]:
    """The modifier rank's values become everybody's. Without one: the fqns of what was changed all the same."""
    written = list[str]()
    for unit, versions in zip(units, before, strict=True):
        if modifier_rank is not None:
            unit.take_parameters(modifier_rank)
        else:
            written += unit.written_since(versions)
    return written
