"""The tables of legal moves: a real model reaches every state, and each move ends in the state that the table names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzing import Boom, Setting
from fuzzing_sides import Sharded
from insides import has_noticed_the_end, schedule

from zeroshard.core.gradient_bucket import MOVES as BUCKET_MOVES
from zeroshard.core.gradient_bucket import Holds
from zeroshard.core.step import MOVES, Move, Step, StepState
from zeroshard.errors import UsageError


def reachable(moves: dict[tuple[object, object], object], start: object) -> set[object]:
    found, new = {start}, {start}
    while new:
        new = {there for (_, state), there in moves.items() if state in new} - found
        found |= new
    return found


def test_every_move_from_every_state_is_decided_and_every_state_is_reached() -> None:
    assert set(MOVES) == set(StepState)
    assert all(set(moves) == set(Move) for moves in MOVES.values())
    legal = {
        (move, state): there
        for state, moves in MOVES.items()
        for move, there in moves.items()
        if not isinstance(there, str)
    }
    assert reachable(legal, StepState.CLEAN) == set(StepState)
    assert Step().state is StepState.CLEAN  # zero_grad makes another step, whatever happened
    assert reachable(dict(BUCKET_MOVES), Holds.NOTHING) == set(Holds)
    assert all(BUCKET_MOVES["forget", holds] is Holds.NOTHING for holds in Holds)


# ------------------------------------------------------------------ a real model


def abort(side: Sharded) -> None:
    with pytest.raises(Boom):
        side.broken_backward(2)  # the first block's: others have given gradients before


def lead_to(side: Sharded, state: StepState) -> None:
    """Do what a user does to get there. A graph for a later backward is made first."""
    side.forward(1)
    if state in (StepState.GRADIENTS, StepState.STEPPED, StepState.UNWANTED):
        side.train(2)
    if state in (StepState.STEPPED, StepState.UNWANTED):
        side.step(0)
        if state is StepState.UNWANTED:
            side.train(2)
        side.losses.clear()
        side.forward(1)
    if state in (StepState.BACKWARD, StepState.BROKEN):
        abort(side)
    if state is StepState.BROKEN:
        side.evaluate(3)  # the next forward notices


def no_gradient(side: Sharded) -> None:
    """Break a backward off before it has given a gradient; the next forward notices."""
    if schedule(side.sharded).state is not StepState.BACKWARD:  # it is one that was aborted, and only to be noticed
        with pytest.raises(Boom):
            side.broken_loss(2)
    side.evaluate(3)


DONE: dict[Move, Callable[[Sharded], object]] = {
    Move.GRADIENT: lambda side: side.backward(0),  # and its end
    Move.END_BACKWARD: lambda side: side.sharded.finish_backward(),  # the loss touched no parameter
    Move.BREAK_OFF: no_gradient,
    Move.STEP: lambda side: side.clip(0),
    Move.STEPPED: lambda side: side.step(0),  # after STEP
}
"""What a user does that makes a move."""


def expected(state: StepState, move: Move) -> StepState | str:
    """Return where a user's move ends: some are several of the table."""
    before, then = {
        Move.GRADIENT: (Move.GRADIENT, Move.END_BACKWARD),
        Move.STEPPED: (Move.STEP, Move.STEPPED),
    }.get(move, (move, None))
    if move is Move.END_BACKWARD and state is StepState.BACKWARD:
        before = Move.STEP  # a user can call it only after a backward that was aborted
    if move is Move.GRADIENT and state is StepState.BACKWARD:
        # That one is over, as only the next can tell: it was aborted first.
        there = MOVES[state][Move.BREAK_OFF]
        assert isinstance(there, StepState)
        state = there
    there = MOVES[state][before]
    if isinstance(there, str):
        return there
    if before is Move.STEP and there is StepState.CLEAN:  # no gradient came: the other ranks hear so
        if then is Move.STEPPED:  # on no rank did one come, so there is none to drop
            return StepState.CLEAN
        there = StepState.GRADIENTS
    return there if then is None else MOVES[there][then]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("move", Move)
@pytest.mark.parametrize("state", StepState)
def test_a_real_model_moves_as_the_table_says(state: StepState, move: Move, stage: int, tmp_path: Path) -> None:
    side = Sharded(Setting(stage), tmp_path)
    lead_to(side, state)
    moves = schedule(side.sharded)
    assert moves.state is state
    if move is Move.END_BACKWARD and has_noticed_the_end(side.sharded):
        side.sharded.finish_backward()  # of the backward that ended; the next one counts
    there = expected(state, move)
    if isinstance(there, str):
        with pytest.raises(UsageError, match=re.escape(there)):
            DONE[move](side)
        assert moves.state in (state, StepState.BROKEN)
    else:
        DONE[move](side)
        assert moves.state is there
    before = moves.live.step
    side.zero_grad(0)
    assert moves.state is StepState.CLEAN and moves.live.step is not before
    side.train(4)
    side.step(0)  # and training goes on
    assert moves.state is StepState.STEPPED
