"""The host's work around its device: threads, groups that would hang, and saves that wait for nothing."""

from __future__ import annotations

import pytest
import torch
from simgpu import host, server

pytestmark = pytest.mark.full


def test_a_group_of_some_ranks_beside_a_bound_world_is_refused() -> None:
    """torch would split the communicator of all ranks for it, which waits for the third."""
    said = server.call(host.group_beside_a_bound_world, ranks=3, splits=True)
    assert said[0] == said[1]
    assert "group= has 2 of 3 ranks" in said[0]
    assert "device_id" in said[0]
    assert server.call(host.group_beside_a_bound_world, ranks=3, splits=False) == ["sharded", "sharded", ""]


def test_threads_take_the_device_of_their_rank() -> None:
    assert server.call(host.threads_that_took_the_device)[0] >= {
        "zeroshard watch",
        "zeroshard disk",
        "zeroshard checkpoint",
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_an_asynchronous_save_waits_for_no_copy(stage: int) -> None:
    """The right values are saved: see the body `asynchronous_checkpoints`."""
    for save in server.call(host.asynchronous_save, mode="all late", stage=stage)[0]["saves"]:
        assert save == {"waits": {}, "pageable": {}}


def test_the_host_waits_once_for_the_digests_of_all_gradients() -> None:
    assert sum(server.call(host.digests_of_gradients)[0].values()) == 1


def test_norms_are_summed_where_the_gradients_lie() -> None:
    """With the optimizer in CPU memory, unsharded gradients lie on the device: stage 2's bits, and no wait for a copy."""
    whole, sharded = (
        server.call(host.norms_with_the_optimizer_in_cpu_memory, mode="all late", stage=stage)[0] for stage in (1, 2)
    )
    assert whole["waits"] == sharded["waits"] == 0
    assert whole["norms"] == sharded["norms"]
    assert torch.equal(whole["parameters"], sharded["parameters"])


def test_memory_that_a_user_keeps_is_counted() -> None:
    for normal, with_alias in server.call(host.memory_that_is_kept, stage=3):
        assert normal == 0
        assert with_alias > 0
    assert server.call(host.memory_that_is_kept, stage=2)[0][0] == 0


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_state_dict_has_a_storage_for_each_tensor(stage: int, offloaded: bool) -> None:
    found = server.call(host.state_dict_in_storages, mode="all late", stage=stage, offloaded=offloaded)
    assert found == [[True, True], [True, True]]


@pytest.mark.parametrize("stage", [1, 2])
def test_memory_whose_copies_are_over_early_is_freed(stage: int) -> None:
    """A copy that ends before somebody waits for it holds its memory no longer."""
    assert server.call(host.memory_of_parameters_in_cpu_memory_that_is_kept, mode="at once", stage=stage) == [0, 0]
