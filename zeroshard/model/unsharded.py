"""Owns `unsharded`, which unshards parameters inside a block, and the map from a parameter to its unit."""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zeroshard.core.hooks import Hooks
from zeroshard.core.module_hooks import Hook
from zeroshard.core.sharded_step import ShardedStep
from zeroshard.core.transport.members import refuse_no_rank
from zeroshard.core.unit import Unit, UnitState, refuse_kept_data
from zeroshard.errors import CollectiveError, UsageError
from zeroshard.model.born import BornShard, BornSharded, is_shown, shard_of
from zeroshard.torch_private import version_of


@dataclass(frozen=True)
class Home:
    """The home of a parameter: its unit, with that unit's hooks and step.

    Attributes:
        number: its number in the order in which parameters were sharded, the same on every rank.
        index: its index in its unit.
    """

    number: int
    index: int
    unit: weakref.ref[Unit]
    hooks: weakref.ref[Hooks]
    step: weakref.ref[ShardedStep]


_numbers = itertools.count()
_home_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The home of each parameter, in a map, so that the user's parameters need no attribute."""


def register(units: Iterable[Unit], hooks: Hooks, step: ShardedStep) -> None:
    """Add the parameters of these units to the map."""
    for unit in units:
        refs = (weakref.ref(unit), weakref.ref(hooks), weakref.ref(step))
        for index, entry in enumerate(unit.named):
            before = _home_of.get(entry.parameter)
            number = next(_numbers) if before is None else before.number
            _home_of[entry.parameter] = Home(number, index, *refs)


def unregister(units: Iterable[Unit]) -> None:
    """Remove the parameters of these units from the map."""
    for unit in units:
        for entry in unit.named:
            _home_of.pop(entry.parameter, None)


def home_of(parameter: Tensor) -> Home | None:
    """Return the home of a parameter, or None if no sharded model holds it."""
    home: Home | None = _home_of.get(parameter)
    return home


@contextmanager
def unsharded(
    target: nn.Module | Tensor | Iterable[nn.Module | Tensor | None],
    modifier_rank: int | None = None,
    *,
    undo: bool = False,
) -> Iterator[None]:
    """Unshard the parameters of a module, or given parameters, inside the block.

    This works under every policy, and for parameters created under `sharded_init`. Parameters stay unsharded while the
    model runs, so each rank may run it any number of times inside the block, for example to generate. If parameters are
    sharded at rest, or if there is a modifier rank, every rank must enter and leave the block. Blocks may be nested. If
    an exception leaves the block, changes to parameters that are sharded at rest are lost. Others keep the modifier
    rank's changes, on every rank.

    Args:
        target: a module, a parameter, or several modules and parameters. Other parameters of their units are unsharded
            too. None, and tensors outside of sharded models, are ignored.
        modifier_rank: the data-parallel rank whose in-place changes count. At the end of the block, they
            reach every rank's parameters and master weights. With None, the block is read-only.
        undo: not supported any more.

    Raises:
        UsageError: the target has an unsupported type, its parameters are parked, or `modifier_rank` is not a rank of
            the group. Without a modifier rank, the block also raises it at its end, on each rank that wrote to parameters.
            Changes to sharded parameters are then lost. Writes through `.data`
            are not errors: of sharded parameters they are lost, with a warning (but for DTensors).
    """
    if undo:
        raise UsageError(
            "unsharded(undo=True) does not exist any more. Change a copy (parameter.detach().clone()); for a model with merged "
            "adapters, call sharded.named_weights(merge_adapters=True)."
        )
    wanted = list[Tensor]()
    for one in [target] if isinstance(target, nn.Module | Tensor) else target:
        if isinstance(one, nn.Module):
            wanted += one.parameters()
        elif isinstance(one, Tensor):
            wanted.append(one)
        elif one is not None:
            raise UsageError(f"unsharded() got a {type(one).__name__} in its target. Pass modules and parameters.")
    with _born_whole(wanted, modifier_rank), _units_whole(wanted, modifier_rank):
        yield


def borrow(module: nn.Module, parameters: Tensor | Iterable[Tensor]) -> Borrowed:
    """Unshard parameters of other blocks while `module` runs its forward, and its backward if that needs them.

    Call it, before or after the model is sharded, for a module that uses a parameter of another block. Every rank must
    run the module the same number of times.

    Returns:
        A handle whose `remove()` ends the borrowing.
    """
    return Borrowed(module, [parameters] if isinstance(parameters, Tensor) else list(parameters))


class Borrowed:
    """The handle that `borrow` returns. Its `remove` ends the borrowing."""

    def __init__(self, module: nn.Module, parameters: Sequence[Tensor]) -> None:
        self._borrowed = [weakref.ref(parameter) for parameter in parameters]
        self._open: list[AbstractContextManager[None]] = []
        self._handles = [
            module.register_forward_pre_hook(Hook(self._enter)),
            module.register_forward_hook(Hook(self._leave), always_call=True),
        ]

    def _enter(self, *_: object) -> None:
        whole = _units_whole([one for one in (ref() for ref in self._borrowed) if one is not None], None, changes=False)
        whole.__enter__()
        self._open.append(whole)

    def _leave(self, *_: object) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def remove(self) -> None:
        """End the borrowing: the module runs as before."""
        for handle in self._handles:
            handle.remove()


# ---------------------------------------------------------------------- of models that were sharded


@contextmanager
def _units_whole(wanted: Iterable[Tensor], modifier_rank: int | None, *, changes: bool = True) -> Iterator[None]:
    """Unshard units, as `unsharded` does. Without `changes`, writes count like writes in a forward of the units' own modules."""
    homes = [home for home in map(home_of, wanted) if home is not None]
    # The caller's order may differ between ranks, as in a set.
    ordered = sorted(homes, key=lambda home: home.number)
    units = list(dict.fromkeys(unit for unit in (home.unit() for home in ordered) if unit is not None))
    hooks = list(dict.fromkeys(one for one in (home.hooks() for home in ordered) if one is not None))
    _refuse(units, modifier_rank)
    at_rest = [unit for unit in units if unit.state is UnitState.AT_REST]
    written: dict[Unit, set[int]] = {}
    pinned: list[Unit] = []
    looks: list[tuple[Unit, list[int]]] = []
    is_over = False
    try:
        with _operation(units, "unsharded"):
            for unit in at_rest:
                unit.start_unshard()
            for unit in units:
                unit.unshard()
                is_outermost = not unit.checked
                unit.pin(1, checks=changes, decides=modifier_rank is not None)
                pinned.append(unit)  # at once: what follows may raise, and `_leave` must then count this pin
                # Earlier writes are not changes inside this block. Those of an outer block are for that one to take or report.
                if is_outermost:
                    unit.write_back()
                else:
                    unit.writes.adopt_new_data()
                looks.append((unit, unit.writes.versions()))
        with ExitStack() as stack:
            for one in hooks:
                stack.enter_context(one.whole(units))
            yield
        with _operation(units, "the end of unsharded"):
            if changes:
                written = _take_changes(looks, modifier_rank)
        is_over = True
    except Exception as error:
        if changes and modifier_rank is not None and not isinstance(error, CollectiveError):
            with suppress(CollectiveError), _operation(units, "the end of unsharded"):
                # Values that stay whole keep their changes, as outside of the block: on all ranks, not only on the modifier rank.
                _take_changes([look for look in looks if not look[0].sharded_at_rest], modifier_rank)
        raise
    finally:
        hidden = {unit: unit.pin(-1, checks=changes, decides=modifier_rank is not None) for unit in pinned}
        lost = [unit for unit in written if unit.sharded_at_rest]
        if changes and not is_over:
            lost = _forget_changes(pinned, modifier_rank)
        _leave(list(dict.fromkeys([*at_rest, *lost])))
    _report(hidden, written)


def _refuse(units: Sequence[Unit], modifier_rank: int | None) -> None:
    """Raise if a block of access to these units may not begin."""
    for unit in units:
        if modifier_rank is not None:
            refuse_no_rank(f"unsharded(modifier_rank={modifier_rank})", modifier_rank, unit.data_world_size)
            unit.refuse_parked("a change of")
    refuse_kept_data((unit for unit in units if not unit.checked), "unsharded()")


def _forget_changes(units: Sequence[Unit], modifier_rank: int | None) -> list[Unit]:
    """Do not store changes before an exception. Return the units to reshard: those that may show other values on each rank."""
    unwanted = [unit for unit in units if unit.sharded_at_rest]
    for unit in unwanted:
        if not unit.is_away:
            unit.writes.collect()
    return [] if modifier_rank is None else unwanted


def _report(hidden: Mapping[Unit, Iterable[int]], written: Mapping[Unit, Iterable[int]]) -> None:
    """Warn of lost writes through `data`, and raise for other writes without a modifier rank."""
    if any(hidden.values()):
        warnings.warn(
            "parameters were changed through `data` inside unsharded() without a modifier rank, and have their values from "
            f"before again: {_names(hidden)}. To keep rank 0's change, pass modifier_rank=0.",
            stacklevel=3,
        )
    if written:
        raise UsageError(
            f"parameters were changed inside unsharded() without a modifier rank: {_names(written)}. The ranks, and the "
            "master weights, would no longer agree: pass modifier_rank=0 to keep rank 0's change, or change a copy."
        )


def _names(indices: Mapping[Unit, Iterable[int]]) -> str:
    return ", ".join(unit.named[index].fqn for unit, some in indices.items() for index in sorted(some))


def _operation(units: Sequence[Unit], name: str) -> AbstractContextManager[None]:
    """Name the operation, for errors about waits for other ranks inside the block."""
    return units[0].collectives.operation(name) if units else nullcontext()


def _take_changes(looks: Sequence[tuple[Unit, list[int]]], modifier_rank: int | None) -> dict[Unit, set[int]]:
    """Copy the modifier rank's values to all ranks. Without one, return the parameters that this rank wrote to, by unit."""
    if modifier_rank is None:
        written = {unit: unit.writes.since(versions) for unit, versions in looks}
        return {unit: indices for unit, indices in written.items() if indices}
    refuse_kept_data((unit for unit, _ in looks), "the end of unsharded()")
    for unit, versions in looks:
        unit.writes.spread_from(modifier_rank)
        unit.writes.accept(versions)
    return {}


def _leave(to_reshard: Sequence[Unit]) -> None:
    """Restore the states that the units had before the block, or reshard those with refused writes. This needs no other rank."""
    for unit in to_reshard:
        if not unit.is_pinned:
            unit.is_held = False  # by torch.func inside the block, whose graph keeps the memory that it may still read
        unit.reshard()


# ---------------------------------------------------------------------- of models that were born sharded


@contextmanager
def _born_whole(wanted: Iterable[Tensor], modifier_rank: int | None) -> Iterator[None]:
    found = {id(one): one for one in wanted if isinstance(one, BornSharded) or is_shown(one)}
    born: list[tuple[nn.Parameter, BornShard]] = sorted(
        ((one, shard_of[one]) for one in found.values() if isinstance(one, nn.Parameter)),
        key=lambda pair: pair[1].number,
    )
    shown = list[tuple[nn.Parameter, BornShard, int]]()
    written = list[str]()
    outside = {shard.number for _, shard in born if shard.shows}
    """Those of an outer block, which decides whether their changes count. One rank alone may enter this block for them."""
    if born and modifier_rank is not None:
        world_size = born[0][1].births.collectives(born[0][0].device).world_size
        refuse_no_rank(f"unsharded(modifier_rank={modifier_rank})", modifier_rank, world_size)
    try:
        for parameter, shard in born:
            shard.show(parameter)
            shown.append((parameter, shard, version_of(parameter)))
        yield
        if modifier_rank is None:
            written = [
                f"number {number} of shape {tuple(parameter.shape)}"
                for number, (parameter, shard, version) in enumerate(shown)
                if shard.number not in outside and shard.is_written(parameter, version)
            ]
        elif born:
            _keep_changes(born, modifier_rank)
    finally:
        for parameter, shard, _ in shown:
            shard.hide(parameter)
    if written:
        raise UsageError(
            "parameters that were born sharded were changed inside unsharded() without a modifier rank: "
            f"{', '.join(written)}. The changes are lost. Pass modifier_rank=0 to keep rank 0's."
        )


def _keep_changes(born: Sequence[tuple[nn.Parameter, BornShard]], modifier_rank: int) -> None:
    """Copy the modifier rank's values to all ranks.

    These parameters have no names: errors identify them by their numbers among the given ones.
    """
    collectives = born[0][1].births.collectives(born[0][0].device)
    own = [[list(parameter.shape), str(parameter.dtype)] for parameter, _ in born]
    with collectives.operation("the end of unsharded"):
        everyone = collectives.exchange_json(own, "the shapes of changed parameters")
        different = next((n for n in range(len(born)) if any(rank[n] != everyone[0][n] for rank in everyone)), None)
        if different is not None:
            raise UsageError(
                f"parameter number {different} does not have the same shape and dtype on every rank. Set its data to one "
                "shape and dtype on every rank, inside unsharded(modifier_rank=...)."
            )
        for parameter, shard in born:
            parameter.data = parameter.data.contiguous()
            shard.births.collectives(parameter.device).broadcast(parameter.data, modifier_rank)
            shard.keep(parameter)
