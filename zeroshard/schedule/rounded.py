"""Owns what becomes of writes to parameters that came rounded (the policy's `wire`): they are refused by name. Called by unit."""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.errors import UsageError
from zeroshard.layout.bucketing import NamedParameter
from zeroshard.parameters.parameter_bucket import ParameterBucket
from zeroshard.schedule.appearance import Appearance
from zeroshard.schedule.states import State


def lost_writes(state: State, buckets: Sequence[ParameterBucket], appearance: Appearance) -> set[int]:
    """Which parameters were written to since this was last asked, where what rests cannot follow: its digits are not here."""
    is_rounded = state is State.UNSHARDED and any(bucket.is_rounded for bucket in buckets)
    return appearance.take_written() if is_rounded else set()


def refuse_lost(lost: set[int], named: Sequence[NamedParameter]) -> None:
    """Raise where there are any."""
    if lost:
        raise UsageError(
            f"{named[min(lost)].fqn} was written to while it showed values that were rounded on their way (Wire(weights=...); "
            "in a config, zero_quantized_weights). The write is lost: make it inside "
            "`with zeroshard.unsharded(module, modifier_rank=0):`."
        )
