"""Owns the few states that exist: of a unit, and of a model between two `zero_grad`, with the moves that are legal there.

One backward and another (microbatches) lead from GRADIENTS back to it; a step ends in STEPPED, where only `zero_grad` leads
on to new
gradients. A backward that broke off with an exception leaves BROKEN: some of its gradients are in the mean already, and cannot
be told from those of the microbatches before.
"""

from __future__ import annotations

import enum

from zeroshard.errors import UsageError


class State(enum.Enum):
    """Where a unit's parameters are, see unit.py."""

    SHARDED = "sharded"
    ARRIVING = "arriving"
    UNSHARDED = "unsharded"
    OFFLOADED = "offloaded"
    PARKED = "parked"


class StepState(enum.Enum):
    """See the module's docstring."""

    CLEAN = "no gradient has arrived since zero_grad"
    BACKWARD = "a backward is under way"
    GRADIENTS = "gradients wait for a step"
    STEPPED = "a step has used the gradients"
    BROKEN = "a backward broke off"


class Move(enum.Enum):
    """What may happen to a model."""

    GRADIENT = "a backward"
    END_BACKWARD = "the end of a backward"
    BREAK_OFF = "an exception in a backward"
    STEP = "a step, or a gradient norm,"
    STEPPED = "the end of a step"
    ZERO_GRAD = "zero_grad()"


_BROKE_OFF = (
    "a backward of this step broke off with an exception, so its gradients are incomplete and some are summed already. "
    "Call zero_grad() (with a config, engine.zero_grad()), and run the step's microbatches again."
)
_NO_ZERO_GRAD = (
    "a backward began after optimizer.step() without optimizer.zero_grad(): gradients of two steps cannot "
    "be summed, since those of the first are already averaged over ranks. Call zero_grad() after each step."
)

S, M = StepState, Move
MOVES: dict[StepState, dict[Move, StepState | str]] = {
    S.CLEAN: {M.GRADIENT: S.BACKWARD, M.END_BACKWARD: S.GRADIENTS, M.BREAK_OFF: S.CLEAN, M.STEP: S.CLEAN,
              M.STEPPED: S.STEPPED, M.ZERO_GRAD: S.CLEAN},
    S.BACKWARD: {M.GRADIENT: S.BACKWARD, M.END_BACKWARD: S.GRADIENTS, M.BREAK_OFF: S.BROKEN, M.STEP: _BROKE_OFF,
                 M.STEPPED: _BROKE_OFF, M.ZERO_GRAD: S.CLEAN},
    S.GRADIENTS: {M.GRADIENT: S.BACKWARD, M.END_BACKWARD: S.GRADIENTS, M.BREAK_OFF: S.GRADIENTS, M.STEP: S.GRADIENTS,
                  M.STEPPED: S.STEPPED, M.ZERO_GRAD: S.CLEAN},
    S.STEPPED: {M.GRADIENT: _NO_ZERO_GRAD, M.END_BACKWARD: _NO_ZERO_GRAD, M.BREAK_OFF: S.STEPPED, M.STEP: S.STEPPED,
                M.STEPPED: S.STEPPED, M.ZERO_GRAD: S.CLEAN},
    S.BROKEN: {M.GRADIENT: _BROKE_OFF, M.END_BACKWARD: _BROKE_OFF, M.BREAK_OFF: S.BROKEN, M.STEP: _BROKE_OFF,
               M.STEPPED: _BROKE_OFF, M.ZERO_GRAD: S.CLEAN},
}  # fmt: skip
"""Where each move leads from each state; a sentence is the error of a move that is refused."""


def after(state: StepState, move: Move) -> StepState:
    """The state after a move.

    Raises:
        UsageError: the move is not legal in this state; says what to do.
    """
    there = MOVES[state][move]
    if isinstance(there, str):
        raise UsageError(there)
    return there
