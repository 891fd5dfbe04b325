"""The tables of legal moves, walked: every state is reached by a real model, and each move from there ends where the table says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzing import Boom, Setting
from fuzzing_sides import Sharded

from zeroshard.errors import UsageError
from zeroshard.gradients.gradient_bucket import MOVES as BUCKET_MOVES
from zeroshard.gradients.gradient_bucket import GradientBucket, Holds
from zeroshard.schedule.states import MOVES, Move, StepState, after


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
    for state in StepState:  # whatever happened, zero_grad leads on
        assert after(state, Move.ZERO_GRAD) is StepState.CLEAN
    assert reachable(dict(BUCKET_MOVES), Holds.NOTHING) == set(Holds)
    assert all(BUCKET_MOVES["forget", holds] is Holds.NOTHING for holds in Holds)


@pytest.mark.parametrize("move", Move)
@pytest.mark.parametrize("state", StepState)
def test_after_is_the_table(state: StepState, move: Move) -> None:
    there = MOVES[state][move]
    if isinstance(there, str):
        with pytest.raises(UsageError, match=re.escape(there)):
            after(state, move)
    else:
        assert after(state, move) is there


# ------------------------------------------------------------------ a real model


def break_off(side: Sharded) -> None:
    with pytest.raises(Boom):
        side.broken_backward(2)  # the first block's: others have given gradients before


def lead_to(side: Sharded, state: StepState) -> None:
    """What a user does to get there. A graph for a later backward is made first."""
    side.forward(1)
    if state in (StepState.GRADIENTS, StepState.STEPPED):
        side.train(2)
    if state is StepState.STEPPED:
        side.step(0)
        side.losses.clear()
        side.forward(1)
    if state in (StepState.BACKWARD, StepState.BROKEN):
        break_off(side)
    if state is StepState.BROKEN:
        side.evaluate(3)  # the next forward notices


def no_gradient(side: Sharded) -> None:
    """A backward that breaks off before it has given a gradient, and the forward that notices."""
    if side.sharded._schedule.state is not StepState.BACKWARD:  # it is one that broke off, and only to be noticed
        with pytest.raises(Boom):
            side.broken_loss(2)
    side.evaluate(3)


DONE: dict[Move, Callable[[Sharded], object]] = {
    Move.GRADIENT: lambda side: side.backward(0),  # and its end
    Move.END_BACKWARD: lambda side: side.sharded.finish_backward(),  # the loss touched no parameter
    Move.BREAK_OFF: no_gradient,
    Move.STEP: lambda side: side.clip(0),
    Move.STEPPED: lambda side: side.step(0),  # after STEP
    Move.ZERO_GRAD: lambda side: side.zero_grad(0),
}
"""What a user does that makes a move."""


def expected(state: StepState, move: Move) -> StepState | str:
    """Where the move of a user's ends: some are several of the table."""
    before, then = {
        Move.GRADIENT: (Move.GRADIENT, Move.END_BACKWARD),
        Move.STEPPED: (Move.STEP, Move.STEPPED),
    }.get(move, (move, None))
    if move is Move.GRADIENT and state is StepState.BACKWARD:
        # That one is over, as only the next can tell: it broke off first.
        there = MOVES[state][Move.BREAK_OFF]
        assert isinstance(there, StepState)
        state = there
    there = MOVES[state][before]
    if isinstance(there, str):
        return there
    if before is Move.STEP and there is StepState.CLEAN:  # no gradient came: the other ranks hear so
        there = StepState.GRADIENTS
    return there if then is None else MOVES[there][then]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("move", Move)
@pytest.mark.parametrize("state", StepState)
def test_a_real_model_moves_as_the_table_says(state: StepState, move: Move, stage: int, tmp_path: Path) -> None:
    side = Sharded(Setting(stage), tmp_path)
    lead_to(side, state)
    schedule = side.sharded._schedule
    assert schedule.state is state
    if move is Move.END_BACKWARD and schedule._backward_ended:
        side.sharded.finish_backward()  # of the backward that ended; the next one counts
    there = expected(state, move)
    if isinstance(there, str):
        with pytest.raises(UsageError, match=re.escape(there)):
            DONE[move](side)
        assert schedule.state in (state, StepState.BROKEN)
    else:
        DONE[move](side)
        assert schedule.state is there
    side.zero_grad(0)
    assert schedule.state is StepState.CLEAN
    side.train(4)
    side.step(0)  # and training goes on
    assert schedule.state is StepState.STEPPED


def test_states_in_the_middle_of_a_backward(tmp_path: Path) -> None:
    side = Sharded(Setting(2), tmp_path)
    seen: list[StepState] = []
    first = dict(side.named)["first.bias"]
    first.register_post_accumulate_grad_hook(lambda _: seen.append(side.sharded._schedule.state))
    side.train(1)
    assert seen == [StepState.BACKWARD]


def test_real_buckets_make_every_move_of_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[tuple[str, Holds]] = set()
    move = GradientBucket._move

    def watched(bucket: GradientBucket, event: str) -> None:
        made.add((event, bucket.holds))
        move(bucket, event)
        assert bucket.holds is BUCKET_MOVES[event, made_from]

    def noting(bucket: GradientBucket, event: str) -> None:
        nonlocal made_from
        made_from = bucket.holds
        watched(bucket, event)

    made_from = Holds.NOTHING
    monkeypatch.setattr(GradientBucket, "_move", noting)
    for stage in (1, 2):
        side = Sharded(Setting(stage), tmp_path)
        for ending in (None, side.clip, side.step):  # forgotten in flight, as a mean, after a step
            for first in (side.accumulate, side.train):
                first(1)
                if first == side.accumulate:
                    side.zero_grad(0)
                    first(1)
                side.train(2)
                if ending is not None:
                    ending(0)
                    side.zero_grad(0)
                    continue
                side.zero_grad(0)
                side.train(1)
                side.zero_grad(0)
    assert made == set(BUCKET_MOVES)
