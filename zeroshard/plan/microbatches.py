"""Owns the microbatches of a dry step: those between the first and the last are alike, so one of them is run. Called by dry_run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroshard.config.load import Config
from zeroshard.plan.clock import Clock

MOST = 3
"""The first, the last, and one for all between them."""


@dataclass(frozen=True)
class Spent:
    """What a step took so far: seconds, where they went, bytes sent and calls by collective."""

    seconds: float
    where: Counter[str]
    sent: Counter[str]
    calls: Counter[str]

    def plus(self, times: int, begin: Spent, end: Spent) -> Spent:
        """With what was spent between two moments, so many times more."""
        return Spent(
            self.seconds + times * (end.seconds - begin.seconds),
            _plus(self.where, times, begin.where, end.where),
            _plus(self.sent, times, begin.sent, end.sent),
            _plus(self.calls, times, begin.calls, end.calls),
        )


def _plus(whole: Counter[str], times: int, begin: Counter[str], end: Counter[str]) -> Counter[Any]:
    return Counter({key: whole[key] + times * (end[key] - begin[key]) for key in whole})


class Microbatches:
    """Of one step.

    Args:
        ranks: what counts bytes and calls.
        left_out: how many are not run.
    """

    def __init__(self, clock: Clock, ranks: Any, left_out: int) -> None:
        self._clock, self._ranks, self._left_out = clock, ranks, left_out
        ranks.sent.clear()
        ranks.calls.clear()
        clock.reset()
        self._begin = clock.now
        self._seen: list[Spent] = []

    def is_over(self) -> None:
        """One of them is."""
        where = Counter(self._clock.computed)
        where.update(self._clock.waited)  # type: ignore[arg-type]
        seconds = self._clock.now - self._begin
        self._seen.append(Spent(seconds, where, Counter(self._ranks.sent), Counter(self._ranks.calls)))

    def all_told(self) -> Spent:
        """What the step takes with those that were left out."""
        last = self._seen[-1]
        return last.plus(self._left_out, self._seen[0], self._seen[1]) if self._left_out else last


def shortened(raw: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The same config with no more microbatches than tell of all."""
    batch = config.batch
    if batch.accumulation <= MOST:
        return dict(raw)
    made = {**raw, "train_micro_batch_size_per_gpu": batch.micro, "gradient_accumulation_steps": MOST}
    made.pop("train_batch_size", None)
    return made
