"""Owns the facts of one step: from one `zero_grad` to the next, which throws them away.

A fact about a step ("was any gradient clamped?") is an attribute of `Step`, which the core reaches as `live.step` (`Live` in
`core/context.py`). `zero_grad` makes the next object, so no fact of an earlier step is left, and nothing counts to learn whether
something has changed since then: a different object answers.
"""

from __future__ import annotations

import enum
from collections import defaultdict
from typing import Any, NamedTuple

from torch import Tensor

from zeroshard.errors import UsageError


class StepState(enum.Enum):
    """The states of a model between two calls of `zero_grad`.

    The backward of another microbatch leads from GRADIENTS back to GRADIENTS. A step ends in STEPPED, which only `zero_grad`
    leaves for new gradients. A backward before `zero_grad` drops its gradients, as loops that train two models against each
    other expect. It leads to UNWANTED, in which a step is refused. An exception after a backward's first gradient leads to
    BROKEN: the mean may contain some of that backward's gradients. They cannot be separated from the gradients of earlier
    microbatches.
    """

    __hash__ = object.__hash__  # Enum's own is a call in Python

    CLEAN = "no gradient has arrived since zero_grad"
    BACKWARD = "a backward is under way"
    GRADIENTS = "gradients wait for a step"
    STEPPED = "a step has used the gradients"
    UNWANTED = "a backward came after a step, before zero_grad"
    BROKEN = "a backward was aborted"


class Move(enum.Enum):
    """A move of a model from one `StepState` to another."""

    __hash__ = object.__hash__  # Enum's own is a call in Python

    GRADIENT = "a backward"
    END_BACKWARD = "the end of a backward"
    BREAK_OFF = "an exception in a backward"
    STEP = "a step, or a gradient norm,"
    STEPPED = "the end of a step"


_BROKE_OFF = (
    "a backward of this step was aborted by an exception, so its gradients are incomplete and some are summed already. "
    "Call zero_grad() (with a config, engine.zero_grad()), and run the step's microbatches again."
)
_NO_ZERO_GRAD = (
    "a backward began after optimizer.step() without optimizer.zero_grad(): gradients of two steps cannot be summed, "
    "since those of the first are already averaged over ranks. Call zero_grad() of each optimizer between a step and the "
    "next backward."
)

S = StepState
M = Move
MOVES: dict[StepState, dict[Move, StepState | str]] = {
    S.CLEAN: {M.GRADIENT: S.BACKWARD, M.END_BACKWARD: S.GRADIENTS, M.BREAK_OFF: S.CLEAN, M.STEP: S.CLEAN,
              M.STEPPED: S.STEPPED},
    S.BACKWARD: {M.GRADIENT: S.BACKWARD, M.END_BACKWARD: S.GRADIENTS, M.BREAK_OFF: S.BROKEN, M.STEP: _BROKE_OFF,
                 M.STEPPED: _BROKE_OFF},
    S.GRADIENTS: {M.GRADIENT: S.BACKWARD, M.END_BACKWARD: S.GRADIENTS, M.BREAK_OFF: S.GRADIENTS, M.STEP: S.GRADIENTS,
                  M.STEPPED: S.STEPPED},
    S.STEPPED: {M.GRADIENT: S.UNWANTED, M.END_BACKWARD: S.UNWANTED, M.BREAK_OFF: S.STEPPED, M.STEP: S.STEPPED,
                M.STEPPED: S.STEPPED},
    S.UNWANTED: {M.GRADIENT: S.UNWANTED, M.END_BACKWARD: S.UNWANTED, M.BREAK_OFF: S.UNWANTED, M.STEP: _NO_ZERO_GRAD,
                 M.STEPPED: _NO_ZERO_GRAD},
    S.BROKEN: {M.GRADIENT: _BROKE_OFF, M.END_BACKWARD: _BROKE_OFF, M.BREAK_OFF: S.BROKEN, M.STEP: _BROKE_OFF,
               M.STEPPED: _BROKE_OFF},
}  # fmt: skip
"""For each state, the state to which each move leads; a sentence is the error message of a refused move."""


def after(state: StepState, move: Move) -> StepState:
    """Return the state after a move.

    Raises:
        UsageError: the move is not legal in this state. The message names the remedy.
    """
    there = MOVES[state][move]
    if isinstance(there, str):
        raise UsageError(there)
    return there


class Agreement(NamedTuple):
    """The answers on which ranks have agreed, until another gradient arrives.

    Attributes:
        used: for each trainable parameter, whether any rank used it.
        by_all: for each of them, the flags that every rank has set.
    """

    used: tuple[bool, ...]
    by_all: bytes


class Step:
    """The facts of one step.

    Attributes:
        state: the step's progress.
        used: by unit, the parameters that received a gradient on this rank.
        replaced: by unit, the parameters in `used` whose `grad` the user has set after the gradient was taken.
        operations: torch's operations on `grad`, once there was one; a `GradientOperations`, of a higher package.
        agreement: the parameters that ranks used; None until they agree.
        dropped: the numbers of the parameters whose mean gradient was dropped, since the user has set `grad` to None.
        dropped_by: the optimizers whose `zero_grad` has dropped their gradients, while others have not.
        factors: the factors of all gradients that are applied when the optimizer gets them.
        keeps_sums: whether means that rest elsewhere stay on the accelerator until the last microbatch; None: not decided.
        backward: the last backward that has ended; a new object for each.
        arrival: the last event of a backward; a new object for each.
    """

    def __init__(self) -> None:
        self.state = StepState.CLEAN
        self.used: defaultdict[Any, set[int]] = defaultdict(set)
        self.replaced: defaultdict[Any, set[int]] = defaultdict(set)
        self.operations: Any = None
        self.agreement: Agreement | None = None
        self.dropped: set[int] = set()
        self.dropped_by: list[Any] = []
        self.factors: list[float | Tensor] = []
        self.keeps_sums: bool | None = None
        self.backward = object()
        self.arrival = object()

    def move(self, move: Move) -> None:
        """Change the state. Raise a UsageError if the move is not legal now."""
        self.state = after(self.state, move)
        if move is Move.GRADIENT:
            self.arrival = object()
        elif move is Move.END_BACKWARD:
            self.backward = object()

    def forget(self, unit: Any) -> None:
        """Forget a unit that is replaced."""
        self.used.pop(unit, None)
        self.replaced.pop(unit, None)

    def gradients_arrived(self) -> None:
        """Forget what was learned of the gradients, since others have arrived on this rank."""
        self.agreement = None
        self.gradients_replaced()

    def gradients_replaced(self) -> None:
        """Forget what torch's operations have learned, since the user has set a `grad`. Ranks agree on it in the step."""
        if self.operations is not None:
            self.operations.restart()
