"""The place of a part in a whole, held against torch's own slices."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from zeroshard.layout.placement import Placement

SHAPES = [(6,), (5, 3), (3, 5), (2, 4, 3), (1, 7), (4, 1, 2)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_range_of_a_part_is_found_in_the_whole(shape: tuple[int, ...], world_size: int) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    for dim in range(len(shape)):
        chunks = whole.chunk(world_size, dim)
        for rank, chunk in enumerate(chunks):
            placement = Placement.chunk(shape, dim, rank, world_size)
            assert placement.local_shape == chunk.shape and placement.is_whole == (chunk.numel() == whole.numel())
            assert torch.equal(placement.part(whole), chunk)
            assert placement.starts[dim] * whole.stride(dim) == chunk.flatten()[0]
            flat = chunk.flatten()
            for start, stop in product(range(len(flat) + 1), repeat=2):
                if start > stop:
                    continue
                found = torch.full((stop - start,), -1)
                for low, high, before in placement.pieces(start, stop):
                    found[before : before + high - low] = whole.flatten()[low:high]
                assert torch.equal(found, flat[start:stop])
                assert len(list(placement.runs(start, stop))) <= 3


def test_runs_between_two_elements() -> None:
    (runs,) = Placement.chunk((4, 6), 1, 1, 3).runs(0, 8)
    assert (runs.start, runs.numel, runs.stride, runs.count, runs.stop) == (2, 2, 6, 4, 22)
    assert list(runs.between(0, 24)) == [(2, 4, 0), (8, 10, 2), (14, 16, 4), (20, 22, 6)]
    assert list(runs.between(9, 15)) == [(9, 10, 3), (14, 15, 4)]
    assert not list(runs.between(4, 8))


def test_a_scalar_is_whole() -> None:
    placement = Placement.whole(())
    assert placement.is_whole and placement.local_shape == () and list(placement.pieces(0, 1)) == [(0, 1, 0)]
