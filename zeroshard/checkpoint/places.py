"""Owns the rule for the places of model states: a manifest has the buckets of a layout, not the ranges of each rank.

A bucket consists of one shard for each rank that follows the layout (4 ranks, shards of 6 elements, p = padding):

    bucket     |      weight, 0 to 16      |  bias  |pp|
    shards     | rank 0 | rank 1 | rank 2 | rank 3 |

Each rank's file has one tensor for each state of each piece in its shard. The tensor's name has the first element, here
`parameters/weight/12` and `parameters/bias/0` on rank 2. So a reader computes the files and names, and opens only those files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from math import prod

from zeroshard.checkpoint.manifest import BucketRecord, Manifest, RangeRecord, dtype_of
from zeroshard.core.placement import Placement, Runs

OWN_VALUES = "values"
"""The tensor in each rank's file with the rank's own packed values, as JSON."""
OffsetOf = Callable[[int, str, str, int], int]
"""Returns the offset in a file of the tensor with this name, dtype and number of elements: (file, name, dtype, numel)."""


def tensor_name(state: str, fqn: str, start: int) -> str:
    """Return the name of a span of a state in its rank's file."""
    return f"{state}/{fqn}/{start}"


def digest_of(layout: Sequence[BucketRecord]) -> str:
    """Return a short digest, by which ranks compare their layouts."""
    text = json.dumps([[one.shard_numel, one.pieces] for one in layout], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def spans_of(layout: Sequence[BucketRecord], shard: int) -> Iterator[tuple[str, int, int]]:
    """Yield (parameter, start, stop) of each piece in one shard of every bucket."""
    for bucket in layout:
        for name, first, begin, numel in bucket.pieces:
            start, stop = _in_shard(bucket.shard_numel, first, begin, numel, shard)
            if start < stop:
                yield name, start, stop


def _in_shard(shard_numel: int, first: int, begin: int, numel: int, shard: int) -> tuple[int, int]:
    """Return the parameter's elements, start to stop, of a piece that are in a shard of its bucket."""
    low = first + shard * shard_numel - begin
    return max(first, low), min(first + numel, low + shard_numel)


class Places:
    """The ranges of a manifest's parameters, computed when they are needed."""

    def __init__(self, manifest: Manifest, offset_of: OffsetOf) -> None:
        self._manifest = manifest
        self._offset_of = offset_of
        self._pieces: list[dict[str, list[tuple[int, int, int, int]]]] = []
        """By layout and parameter: the number of the bucket's elements in a shard, and the piece without its name."""
        for layout in manifest.layouts:
            found: dict[str, list[tuple[int, int, int, int]]] = {}
            for bucket in layout:
                for name, first, begin, numel in bucket.pieces:
                    found.setdefault(name, []).append((bucket.shard_numel, first, begin, numel))
            self._pieces.append(found)

    def over(self, fqn: str, state: str, runs: Runs) -> list[RangeRecord]:
        """Return the ranges of a state that may have some of these elements of the flattened parameter.

        Raises:
            CheckpointError: a file with some of the elements is missing or damaged, or lacks them.
        """
        saved = self._manifest.parameters[fqn].states[state]
        found = saved.over(runs)
        for file, placement, first, last in self._shards_with(fqn, runs):
            offset = self._offset_of(file, tensor_name(state, fqn, first), saved.dtype, last - first)
            found += ranges_of(placement, first, last, file, offset, saved.dtype)
        return found

    def files_over(self, fqn: str, runs: Runs) -> set[int]:
        """Return the files that may have some of these elements in any state, without opening them."""
        found = {file for file, *_ in self._shards_with(fqn, runs)}
        for saved in self._manifest.parameters[fqn].states.values():
            found |= {one.file for one in saved.over(runs)}
        return found

    def _shards_with(self, fqn: str, runs: Runs) -> Iterator[tuple[int, Placement, int, int]]:
        """Yield (file, part, start, stop) of each tensor in a file that has some of these elements of a parameter."""
        record = self._manifest.parameters[fqn]
        for shards in self._manifest.shards:
            placement = record.placement(shards.part, self._manifest.parts)
            if placement is None:
                continue
            low, high = _of_part(placement, runs.start, runs.stop)
            for shard_numel, first, begin, numel in self._pieces[shards.layout].get(fqn, ()):
                lowest, highest = max(low, first), min(high, first + numel)
                if lowest >= highest:
                    continue
                lowest_shard = (lowest - first + begin) // shard_numel
                highest_shard = (highest - 1 - first + begin) // shard_numel
                for shard in range(lowest_shard, highest_shard + 1):
                    file = shards.files[shard]
                    start, stop = _in_shard(shard_numel, first, begin, numel, shard)
                    # A file without a number is of a rank that lists its ranges. Between two rows of one part are those of others.
                    if file is not None and _meet(placement, start, stop, runs):
                        yield file, placement, start, stop


def ranges_of(placement: Placement, start: int, stop: int, file: int, offset: int, dtype: str) -> Iterator[RangeRecord]:
    """Yield the ranges, in the whole parameter, of one tensor with elements `start` to `stop` of a part."""
    for runs in placement.runs(start, stop):
        pattern = {}
        if runs.count > 1 and runs.stride > runs.numel:
            pattern = {"numel": runs.numel, "stride": runs.stride}
        yield RangeRecord(start=runs.start, stop=runs.stop, file=file, offset=offset, **pattern)
        offset += runs.numel * runs.count * dtype_of(dtype).itemsize


def _meet(placement: Placement, start: int, stop: int, runs: Runs) -> bool:
    """Return whether elements `start` to `stop` of a part, which lie between the first and the last run, are in a run."""
    if placement.is_whole and runs.count == 1:
        return True
    return any(True for own in placement.runs(start, stop) for _ in runs.common(own))


def _of_part(placement: Placement, start: int, stop: int) -> tuple[int, int]:
    """Return the part's elements that are between `start` and `stop` of the whole parameter."""
    if placement.is_whole:
        return start, stop
    (runs,) = placement.runs(0, prod(placement.local_shape))
    return _before(runs, start), _before(runs, stop)


def _before(runs: Runs, position: int) -> int:
    """Return the number of a pattern's elements before a position."""
    whole, rest = divmod(max(position - runs.start, 0), runs.stride)
    return min(whole * runs.numel + min(rest, runs.numel), runs.numel * runs.count)
