"""The position of a part in a whole tensor, compared with torch's own slices."""

from __future__ import annotations

from functools import partial
from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor

from zeroshard.checkpoint.loading import plan_for, requests_for
from zeroshard.checkpoint.manifest import (
    BucketRecord,
    FileRecord,
    Manifest,
    ParameterRecord,
    RangeRecord,
    ShardsRecord,
    StateRecord,
    dtype_of,
)
from zeroshard.checkpoint.places import Places, spans_of
from zeroshard.core.layout import Span, lay_out
from zeroshard.core.placement import Placement, Runs

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


@pytest.mark.parametrize("shape", [(6,), (5, 3), (2, 4, 3), (4, 6)], ids=str)
def test_what_two_placements_share(shape: tuple[int, ...]) -> None:
    """Of every two parts of a whole, cut over one number of ranks or another, along one dimension or another."""
    numel = prod(shape)
    cuts = [(dim, size) for dim in range(len(shape)) for size in (1, 2, 3)]
    for (dim, size), (other_dim, other_size) in product(cuts, repeat=2):
        mine = Placement.chunk(shape, dim, 0, size)
        stop = prod(mine.local_shape)
        for start, rank in product((0, 1, stop // 2), range(other_size)):
            other = Placement.chunk(shape, other_dim, rank, other_size)
            count = 0
            for own, their in product(mine.runs(start, stop), other.runs(0, prod(other.local_shape))):
                places, others = elements(own, numel), elements(their, numel)
                shared: list[int] = []
                for common in own.common(their):
                    count += 1
                    for row, column in product(range(common.count), range(common.numel)):
                        place = places[common.here + row * common.every + column]
                        assert place == others[common.there + row * common.other_every + column]
                        shared.append(place)
                assert sorted(shared) == sorted({*places} & {*others})
            assert count <= 9 or dim != other_dim


def elements(runs: Runs, numel: int) -> list[int]:
    return [place for low, high, _ in runs.between(0, numel) for place in range(low, high)]


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 2), (2, 1), (1, 2), (2, 4), (4, 2)])
def test_matrices_that_are_cut_by_rows_take_few_requests(saved_on: int, loaded_on: int) -> None:
    """From files that are read chunk by chunk, whose edges lie in the middle of rows."""
    shape = (64, 12)
    whole = torch.arange(prod(shape), dtype=torch.int32)
    ranges, files = [], []
    for rank in range(saved_on):
        placement = Placement.chunk(shape, 1, rank, saved_on)
        (runs,) = placement.runs(0, prod(placement.local_shape))
        pattern = {"numel": runs.numel, "stride": runs.stride} if saved_on > 1 else {}
        ranges.append(RangeRecord(start=runs.start, stop=runs.stop, file=rank, offset=8, **pattern))
        files.append(torch.cat([torch.zeros(2, dtype=torch.int32), placement.part(whole.view(shape)).flatten()]))
    state = StateRecord(dtype="int32", ranges=ranges)
    for rank in range(loaded_on):
        placement = Placement.chunk(shape, 1, rank, loaded_on)
        part = placement.part(whole.view(shape)).flatten()
        for start in (0, 5):
            out = torch.full((len(part) - start,), -1, dtype=torch.int64)
            plan = plan_for(state.over, Span("weight", start, len(part)), placement)
            requests = requests_for(plan, dtype_of(state.dtype), out)
            assert len(requests) <= 3 * saved_on
            taken = 0
            for request in requests:
                file = files[request.file].view(torch.uint8)
                for chunk in range(0, len(file), 20):
                    if chunk < request.stop and request.offset < chunk + 20:
                        taken += request.take(file[chunk : chunk + 20].clone(), chunk)
            assert torch.equal(out, part[start:].long()) and taken == 4 * len(out)


@pytest.mark.quick(4)
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_ranges_follow_from_a_layout(dim: int | None, parts: int, shards: int) -> None:
    """Every element is in one place, whichever dimension was divided, and in buckets that end inside parameters."""
    shapes = {"weight": (9, 40), "bias": (9,), "embedding": (5, 16)}
    dims = {"weight": dim, "bias": None, "embedding": 0 if dim is not None else None}
    records = {
        name: ParameterRecord(
            shape=list(shape),
            names=[name],
            trained=True,
            dim=dims[name],
            states={"exp_avg": StateRecord(dtype="int32")},
        )
        for name, shape in shapes.items()
    }
    wholes = {name: torch.arange(prod(shape), dtype=torch.int32) + 1000 * len(name) for name, shape in shapes.items()}
    manifest = Manifest(
        tag="a", created=0.0, written_by={}, world_size=parts * shards, policy={}, optimizer=None, chunk_nbytes=1 << 22,
        mesh={"data_parallel": shards, "tensor_parallel": parts}, parameters=records,
        files=[FileRecord(name=f"rank_{number:05d}.0.safetensors", nbytes=1 << 20, checksum=0) for number in range(parts * shards)],
    )  # fmt: skip
    files: list[dict[str, Tensor]] = [{} for _ in range(parts * shards)]
    for part in range(parts):
        placements = {name: record.placement(part, parts) for name, record in records.items()}
        own = {name: placement for name, placement in placements.items() if placement is not None}
        layout = lay_out([prod(placement.local_shape) for placement in own.values()], shards, 16 * shards * 2)
        buckets = []
        for bucket in layout.buckets:
            names = list(own)
            pieces = [(names[one.index], one.parameter_start, one.start, one.numel) for one in bucket.pieces]
            buckets.append(BucketRecord(shard_numel=bucket.shard_numel, pieces=pieces))
        numbers = [shard * parts + part for shard in range(shards)]
        for shard, number in enumerate(numbers):
            for name, start, stop in spans_of(buckets, shard):
                local = own[name].part(wholes[name].view(shapes[name])).flatten()
                files[number][f"exp_avg/{name}/{start}"] = local[start:stop]
        manifest.layouts.append(buckets)
        manifest.shards.append(ShardsRecord(layout=part, part=part, files=numbers))
    asked = set()

    def offset_of(file: int, name: str, dtype: str, numel: int) -> int:
        assert dtype == "int32" and len(files[file][name]) == numel
        asked.add(file)
        return 4 * sum(len(files[file][one]) for one in list(files[file])[: list(files[file]).index(name)])

    places = Places(manifest, offset_of)
    for name, shape in shapes.items():
        whole = Placement.whole(shape)
        for start in range(0, prod(shape), 7):
            for stop in {start + 1, min(start + 30, prod(shape)), prod(shape)}:
                asked.clear()
                plan = plan_for(partial(places.over, name, "exp_avg"), Span(name, start, stop), whole)
                out = torch.zeros(stop - start, dtype=torch.int32)
                for request in requests_for(plan, torch.int32, out):
                    joined = torch.cat(list(files[request.file].values()))
                    request.take(joined.view(torch.uint8), 0)
                assert torch.equal(out, wholes[name][start:stop])
                assert asked == places.files_over(name, Runs(start, stop - start, stop - start))
        for part in range(parts):  # ranks of the same mesh open only files of their own part
            placement = records[name].placement(part, parts)
            if placement is not None:
                numel = prod(placement.local_shape)
                plan = plan_for(partial(places.over, name, "exp_avg"), Span(name, 0, numel), placement)
                opened = {found.file for _, ranges in plan for found, _ in ranges}
                assert {file % parts for file in opened} == {part}
                assert {file for runs, _ in plan for file in places.files_over(name, runs)} == opened
