"""Small messages that one rank collects from all, and sends to all, over every transport for small messages."""

from __future__ import annotations

import json

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from zeroshard.core.transport.base import Alone, Collectives
from zeroshard.core.transport.choose import create_collectives
from zeroshard.core.transport.composed import Everyone
from zeroshard.core.transport.tree import FIRST_NBYTES, collect, spread

CPU = torch.device("cpu")


def collect_and_spread(control: Collectives) -> None:
    """Collect messages of many lengths, at every root, and spread them."""
    rank, size = control.rank, control.world_size

    def merge(own: bytes, other: bytes) -> bytes:
        return json.dumps(json.loads(own) + json.loads(other)).encode()

    for root in range(size):
        for length in (1, FIRST_NBYTES - 12, FIRST_NBYTES - 11, 1000 * (rank + 1), 200_000):
            own = json.dumps([f"{rank}".ljust(length)]).encode()
            found = collect(control, own, merge, "messages", root)
            assert (found is None) == (rank != root)
            everyone = json.loads(spread(control, found, root))
            assert sorted(int(one) for one in everyone) == list(range(size))
            assert max(map(len, everyone)) >= length
        assert spread(control, b"" if rank == root else None, root) == b""
        assert spread(control, None, root) == b""


@pytest.mark.ranks("size")
@pytest.mark.quick(4)
@pytest.mark.parametrize("transport", ["shared memory", "gloo"], indirect=True)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_every_root_and_length(rank: int, size: int, transport: str) -> None:
    collectives = create_collectives(None, CPU)
    control = collectives.control()
    collect_and_spread(control)
    before = control.sent.copy()
    collect(control, b"short", lambda own, other: own + other, "messages")
    messages = (control.sent["transfer"] - before["transfer"]) // FIRST_NBYTES
    assert messages == (rank > 0), "one to the parent"
    control.close()
    collectives.close()


@pytest.mark.ranks(4)
def test_the_ranks_of_a_mesh(rank: int, transport: str) -> None:
    """In which global ranks are in another order than places."""
    for shape in ((2, 2), (4, 1), (1, 4)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        dimensions = [
            create_collectives(mesh[name].get_group(), CPU) if size > 1 else Alone()
            for name, size in zip(("dp", "tp"), shape, strict=True)
        ]
        everyone = Everyone(*dimensions)
        control = everyone.control()
        assert control.rank == rank
        collect_and_spread(control)
        control.close()
        everyone.close()
