"""Small messages that one rank collects from all, and sends to all, over every transport for small messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from file_transport import FOLDER, Files
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh

from zeroshard.core.transport.base import Alone, Collectives
from zeroshard.core.transport.choose import create_collectives
from zeroshard.core.transport.composed import Everyone
from zeroshard.core.transport.members import Members
from zeroshard.core.transport.tree import FIRST_NBYTES, collect, spread
from zeroshard.core.transport.watch import Watch

CPU = torch.device("cpu")


def all_over(control: Collectives) -> None:
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
    all_over(control)
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
        all_over(control)
        control.close()
        everyone.close()


def test_a_transport_without_messages_between_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int) -> None:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv(FOLDER, str(tmp_path))
            assert dist.group.WORLD is not None
            members = Members.of(dist.group.WORLD, CPU)
            all_over(Files(members, CPU, Watch(members.root, members.ranks, members.own, 30.0)))

    on_ranks(body, 3)
