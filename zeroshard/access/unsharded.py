"""Owns `unsharded`, which unshards parameters inside a block, and the map from a parameter to its unit."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from zeroshard.collectives.members import refuse_no_rank
from zeroshard.construction.born import BornSharded, Shard, is_shown, shard_of
from zeroshard.errors import UsageError
from zeroshard.schedule.hooks import Hooks
from zeroshard.schedule.unit import Unit, UnitState
from zeroshard.step.sharded_step import ShardedStep


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
    an exception leaves the block, changes to parameters that are sharded at rest are lost. With `undo`, all other
    changes are lost too.

    Args:
        target: a module, a parameter, or several modules and parameters. Other parameters of their units are unsharded
            too. None, and tensors outside of sharded models, are ignored.
        modifier_rank: the data-parallel rank whose in-place changes count. At the end of the block, they
            reach every rank's parameters and master weights. With None, the block is read-only.
        undo: without a modifier rank, whether to undo changes at the end of the block instead of raising an error. This copies
            parameters that are unsharded at rest.

    Raises:
        UsageError: the target has an unsupported type, its parameters are parked, or `modifier_rank` is not a rank of
            the group. Without a modifier rank, the block also raises it if parameters were changed: at its end, unless
            `undo` is set, or when another block begins inside it. Changes to sharded parameters are then lost.
    """
    wanted = list[Tensor]()
    for one in [target] if isinstance(target, nn.Module | Tensor) else target:
        if isinstance(one, nn.Module):
            wanted += one.parameters()
        elif isinstance(one, Tensor):
            wanted.append(one)
        elif one is not None:
            raise UsageError(f"unsharded() got a {type(one).__name__} in its target. Pass modules and parameters.")
    undo = undo and modifier_rank is None
    with _born_whole(wanted, modifier_rank, undo=undo), _units_whole(wanted, modifier_rank, undo=undo):
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
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
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
def _units_whole(
    wanted: Iterable[Tensor], modifier_rank: int | None, *, undo: bool = False, changes: bool = True
) -> Iterator[None]:
    """Unshard units, as `unsharded` does. Without `changes`, writes count like writes in a forward of the units' own modules."""
    homes = [home for home in map(home_of, wanted) if home is not None]
    # The caller's order may differ between ranks, as in a set.
    ordered = sorted(homes, key=lambda home: home.number)
    units = list(dict.fromkeys(unit for unit in (home.unit() for home in ordered) if unit is not None))
    hooks = list(dict.fromkeys(one for one in (home.hooks() for home in ordered) if one is not None))
    for unit in units:
        if modifier_rank is not None:
            refuse_no_rank(f"unsharded(modifier_rank={modifier_rank})", modifier_rank, unit.collectives.world_size)
            unit.refuse_parked("a change of")
        if unit.appearance.has_changes_to_report:  # of an outer block; this block would store them when it begins
            raise UsageError(
                f"{unit.label} was changed inside unsharded() without a modifier rank, and another unsharded() begins there, which "
                "would store the change. Pass modifier_rank=0 to the outer block, or change the parameters in the inner one."
            )
    at_rest = [unit for unit in units if unit.state is UnitState.SHARDED]
    offloaded = [unit for unit in units if unit.state is UnitState.OFFLOADED]
    decides = undo or (changes and modifier_rank is not None)
    written: list[str] = []
    pinned: list[Unit] = []
    looks: list[tuple[Unit, list[int]]] = []
    kept: dict[Unit, Tensor] = {}
    is_over = False
    try:
        with _operation(units, "unsharded"):
            for unit in at_rest:
                unit.start_unshard()
            for unit in units:
                unit.unshard()
                unit.pins += 1
                unit.undecided += decides
                pinned.append(unit)  # at once: what follows may raise, and `_leave` must then count this pin
                unit.write_back()  # earlier writes are not changes inside the block
                look = unit.appearance.versions()
                if changes and modifier_rank is None:
                    look = unit.appearance.begin_look()
                looks.append((unit, look))
        kept = {unit: unit.flat.tensor.clone() for unit in units if undo and not unit.sharded_at_rest}
        with ExitStack() as stack:
            for one in hooks:
                stack.enter_context(one.whole(units))
            yield
        with _operation(units, "the end of unsharded"):
            if undo:
                _undo([one for one in looks if one[0] not in kept], at_rest)
            elif changes:
                written = _take_changes(looks, modifier_rank)
        is_over = True
    finally:
        for unit, look in looks:
            unit.appearance.end_look(look)
        _leave(pinned, at_rest, offloaded, kept, forget_writes=not is_over, decides=decides)
    if written:
        raise UsageError(
            f"parameters were changed inside unsharded() without a modifier rank: {', '.join(written)}. The ranks, and the "
            "master weights, would no longer agree: pass modifier_rank=0 to keep rank 0's change, or change a copy."
        )


def _operation(units: Sequence[Unit], name: str) -> AbstractContextManager[None]:
    """Name the operation, for errors about waits for other ranks inside the block."""
    return units[0].collectives.operation(name) if units else nullcontext()


def _take_changes(looks: Sequence[tuple[Unit, list[int]]], modifier_rank: int | None) -> list[str]:
    """Copy the modifier rank's values to all ranks. Without one, return the fqns of parameters that were changed."""
    written = list[str]()
    for unit, versions in looks:
        if modifier_rank is not None:
            unit.broadcast_from(modifier_rank)
        else:
            written += [unit.named[index].fqn for index in sorted(unit.written_since(versions))]
        unit.appearance.restart_looks()
    # Data-parallel ranks have the same names already, but ranks of the mesh's other dimension may not.
    if not looks or looks[0][0].others.world_size == 1:
        return written
    answers = looks[0][0].others.exchange_json(written, "the end of unsharded")
    return list(dict.fromkeys(itertools.chain.from_iterable(answers)))


def _undo(looks: Sequence[tuple[Unit, list[int]]], at_rest: Sequence[Unit]) -> None:
    """Undo writes to units that are sharded at rest, unless their values are freed after the block anyway."""
    for unit, versions in looks:
        if unit.pins > 1 or unit.state_dicts or unit not in at_rest:
            unit.written_since(versions)  # undoes the writes
        unit.appearance.collect_written()
        unit.appearance.restart_looks()


def _leave(
    pinned: Sequence[Unit], at_rest: Sequence[Unit], offloaded: Sequence[Unit], kept: Mapping[Unit, Tensor],
    *, forget_writes: bool, decides: bool,
) -> None:  # fmt: skip
    """Restore the states that the units had before the block, and the values in `kept`. This needs no other rank."""
    for unit, values in kept.items():
        unit.appearance.show_current()  # instead of tensors that the user assigned as `.data`
        unit.flat.tensor.copy_(values)
        unit.appearance.collect_written()
        unit.appearance.restart_looks()
    for unit in pinned:
        unit.pins -= 1
        unit.undecided -= decides
    for unit in at_rest:
        if not unit.is_pinned:
            unit.is_held = False  # by torch.func inside the block, whose graph keeps the memory that it may still read
        # Writes before an exception must not be stored.
        if forget_writes and unit.state is UnitState.UNSHARDED and not unit.is_pinned:
            unit.appearance.collect_written()
        unit.reshard()
    for unit in offloaded:
        unit.offload()


# ---------------------------------------------------------------------- of models that were born sharded


@contextmanager
def _born_whole(wanted: Iterable[Tensor], modifier_rank: int | None, *, undo: bool) -> Iterator[None]:
    found = {id(one): one for one in wanted if isinstance(one, BornSharded) or is_shown(one)}
    born: list[tuple[nn.Parameter, Shard]] = sorted(
        ((one, shard_of[one]) for one in found.values() if isinstance(one, nn.Parameter)),
        key=lambda pair: pair[1].number,
    )
    shown = list[tuple[nn.Parameter, Shard]]()
    written = list[str]()
    if born and modifier_rank is not None:
        world_size = born[0][1].births.collectives(born[0][0].device).world_size
        refuse_no_rank(f"unsharded(modifier_rank={modifier_rank})", modifier_rank, world_size)
    try:
        for parameter, shard in born:
            shard.show(parameter)
            shown.append((parameter, shard))
        yield
        if born and not undo:
            written = _keep_changes(born, modifier_rank)
        for parameter, shard in born:
            if shard.shows > 1 and (undo or written):
                shard.undo(parameter)
    finally:
        for parameter, shard in shown:
            shard.hide(parameter)
    if written:
        raise UsageError(
            "parameters that were born sharded were changed inside unsharded() without a modifier rank: "
            f"{', '.join(written)}. The changes are lost. Pass modifier_rank=0 to keep rank 0's."
        )


def _keep_changes(born: Sequence[tuple[nn.Parameter, Shard]], modifier_rank: int | None) -> list[str]:
    """Take changes, as `_take_changes` does.

    These parameters have no names: errors identify them by their numbers among the given ones, and by shape.
    """
    collectives = born[0][1].births.collectives(born[0][0].device)
    own = [[list(p.shape), str(p.dtype), modifier_rank is None and shard.differs(p)] for p, shard in born]
    with collectives.operation("the end of unsharded"):
        everyone = collectives.exchange_json(own, "what was changed")
        if modifier_rank is None:
            changed = [any(rank[number][2] for rank in everyone) for number in range(len(born))]
            return [f"number {n} of shape {tuple(born[n][0].shape)}" for n, one in enumerate(changed) if one]
        different = next(
            (n for n in range(len(born)) if any(rank[n][:2] != everyone[0][n][:2] for rank in everyone)), None
        )
        if different is not None:
            raise UsageError(
                f"parameter number {different} does not have the same shape and dtype on every rank. Set its data to one "
                "shape and dtype on every rank, inside unsharded(modifier_rank=...)."
            )
        for parameter, shard in born:
            parameter.data = parameter.data.contiguous()
            shard.births.collectives(parameter.device).broadcast(parameter.data, modifier_rank)
            shard.keep(parameter)
    return []
