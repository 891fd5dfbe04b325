"""Owns the rounds in which messages of all ranks become one on every rank: each rank sends at most log2(W) + 1 messages.

    number      0       1       2       3       4 = 0 + 4
    round 1   < 4                               > 0             the numbers above the last power of two send theirs first
    round 2   <> 1    <> 0    <> 3    <> 2
    round 3   <> 2    <> 3    <> 0    <> 1
    round 4   > 4                               < 0             and get the result last

The messages are merged in one tree, in the order of numbers: `merged` is its definition. So every rank gets the same bits, over
every transport, also from a merge that adds floating-point numbers. `tree.py` owns messages to one rank and from one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

Merge = Callable[[bytes, bytes], bytes]
"""Returns the message that stands for two; the first is of the lower numbers (in `tree.collect`: nearer to the root)."""
Swap = Callable[[bytes, int | None, int | None], bytes]
"""Sends a message to a rank, and returns one of equal length from a rank: (message, receiver, sender). None stands for no rank."""


def merged(messages: Sequence[bytes], merge: Merge) -> bytes:
    """Return the messages merged in the order of the tree."""
    power = _power_of_two(len(messages))
    rest = messages[power:]
    row = [*map(merge, messages, rest), *messages[len(rest) : power]]
    while len(row) > 1:
        row = list(map(merge, row[::2], row[1::2]))
    return row[0]


def combined(own: bytes, merge: Merge, number: int, count: int, swap: Swap) -> bytes:
    """Return the merged messages of `count` ranks, of which this is one. Every rank must call it, with messages of one length.

    `swap` addresses ranks by their numbers.
    """
    for receiver, sender in moves(number, count):
        found = swap(own, receiver, sender)
        if sender is None:
            continue
        if receiver is None and sender < number:
            return found  # the result
        own = merge(found, own) if sender < number else merge(own, found)
    return own


@cache
def moves(number: int, count: int) -> tuple[tuple[int | None, int | None], ...]:
    """Return a rank's messages in their order, each as (receiver, sender); None stands for no rank."""
    power = _power_of_two(count)
    if number >= power:
        return (number - power, None), (None, number - power)
    above = number + power if number + power < count else None
    swaps = [(number ^ 1 << bit, number ^ 1 << bit) for bit in range(power.bit_length() - 1)]
    return ((None, above), *swaps, (above, None)) if above is not None else tuple(swaps)


def partners_of(number: int, count: int) -> list[int]:
    """Return the ranks with which a rank exchanges messages in `combined`, and in the trees of `tree.py` with root 0."""
    return [other for bit in range((count - 1).bit_length()) if (other := number ^ 1 << bit) < count]


def _power_of_two(count: int) -> int:
    return 1 << count.bit_length() - 1
