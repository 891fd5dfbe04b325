"""The promise: ranks that diverge are named, with what each waited for, and nobody waits without end."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
import torch
from models import Stack, tokens
from ranks import run_until_all_end
from torch import Tensor
from twin import build, step

from zeroshard import CollectiveError
from zeroshard.core.transport.shared_memory import Neighbours
from zeroshard.testing import RankError, run_ranks


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_that_skips_a_block_is_named(stage: int) -> None:
    """Under stage 3 both ranks learn who waited for what; under 1 and 2 a skipped block counts as zeros."""

    class Skipping(Stack):
        skipped: int | None = None

        def run(self, x: Tensor) -> Tensor:
            for number, block in enumerate(self.blocks):
                if number != self.skipped:
                    x = block(x)
            return x

    def body(rank: int) -> str:
        model, sharded = build(stage, make_model=Skipping)
        try:
            for number in range(3):
                if rank == 1 and number == 1:
                    model.skipped = 1
                step(model, sharded, rank, number)
        except CollectiveError as error:
            return str(error)
        return "fine"

    messages = run_ranks(body, 2, timeout=60, collective_timeout=3)
    if stage < 3:
        assert messages == ["fine", "fine"]
        return
    for message in messages:
        assert "rank 0 waited for" in message
        assert "rank 1 waited for" in message
        assert "blocks" in message


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.full)])
def test_ranks_that_wait_in_a_circle_are_named_long_before_the_timeout(ranks: int) -> None:
    """No two of them wait for each other."""

    def body(rank: int) -> str:
        sockets = {}
        for other in range(ranks):
            if other != rank:
                sockets[other] = socket.fromfd(ends[rank, other].fileno(), socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in ends.values():
            end.close()
        neighbours = Neighbours(sockets, 600.0)
        for distance in range(1, ranks):
            neighbours.send((rank + distance) % ranks, 100 + rank, b"")
        with pytest.raises(RuntimeError) as caught:
            neighbours.receive((rank + 1) % ranks, 100 + rank, f"operation {rank}")
        neighbours.close()
        return str(caught.value)

    pairs = {pair: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for pair in combinations(range(ranks), 2)}
    ends = {(one, other): pair[0] for (one, other), pair in pairs.items()}
    ends |= {(other, one): pair[1] for (one, other), pair in pairs.items()}
    messages = run_ranks(body, ranks, timeout=60, initialise=False)  # each rank forks, so it has copies of the sockets
    for end in ends.values():
        end.close()
    found = [
        re.search(r"rank (\d) is itself waiting for this one, for operation (\d)", message) for message in messages
    ]
    assert any(found)
    assert all(match is None or match[1] == match[2] for match in found)


@pytest.mark.parametrize("alone", ["state_dict", "save", "states", "forward"])
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.quick(2)
def test_a_rank_alone_over_gloo_is_named_at_the_timeout(
    ranks: int, alone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that wait for each other in vain."""
    monkeypatch.setenv("ZEROSHARD_SHARED_MEMORY", "0")

    def body(rank: int) -> str:
        model, sharded = build(3)
        calls: dict[str, Callable[[], object]] = {
            "state_dict": model.state_dict,
            "save": lambda: sharded.save(tmp_path, "one"),
            "states": lambda: sharded.states.get("head.weight"),
            "forward": lambda: model(*tokens(rank, 9)),
        }
        with pytest.raises(CollectiveError) as caught:
            for number in range(3):
                if rank == 0 and number == 1:
                    calls[alone]()
                step(model, sharded, rank, number)
            sharded.sum_over_ranks(torch.zeros(1))
        return str(caught.value)

    messages = run_ranks(body, ranks, timeout=100, collective_timeout=4)
    assert any("Timed out" in message for message in messages), messages
    for message in messages:
        assert "rank 0 waited for" in message and "rank 1 waited for" in message, message


@pytest.mark.ranks(2, fresh=True, timeout=60, collective_timeout=2)
@pytest.mark.full
def test_a_rank_that_stays_behind_is_named(rank: int, tmp_path: Path) -> None:
    told = tmp_path / "told"
    model, sharded = build(2)
    if rank == 1:
        while not told.exists():  # in the user's own code, longer than the timeout
            time.sleep(0.02)
        return
    try:
        with pytest.raises(CollectiveError, match="rank 1 was not waiting for any rank"):
            model(*tokens(rank, 0)).backward()
            sharded.optimizer.step()
    finally:
        told.touch()


def test_a_killed_rank_is_an_error_at_once() -> None:
    """A wait for the timeout would be reported as hung."""

    def body(rank: int) -> None:
        model, sharded = build(2)
        for number in range(3):
            if rank == 1 and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            step(model, sharded, rank, number)

    with pytest.raises(
        RankError, match=r"(?s)--- rank 0 failed:.*CollectiveError.*--- rank 1 failed:\nended with exit status -9"
    ):
        run_until_all_end(body, 2)
