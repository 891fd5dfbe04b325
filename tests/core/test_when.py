"""The times at which parameters are unsharded: prefetched and kept units, the choice of units, and unchanged bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from twin import LARGE_BUCKETS, build, same, step, whole

from zeroshard import Policy, Units, UsageError
from zeroshard.engine.config.load import load_config
from zeroshard.testing import run_ranks

WIDTH, DEPTH = 16, 8
BLOCK = WIDTH * WIDTH
"""Elements of a block of `Deep`: at 2 ranks, without padding."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x))


class Deep(nn.Module):
    """Equal blocks; `order` says in which order they run."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.order = list(range(DEPTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens[:, :-1])
        for number in self.order:
            x = self.blocks[number](x)
        logits = x @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Ran(NamedTuple):
    losses: Tensor
    parameters: dict[str, Tensor]
    live: tuple[int, int]
    """The most elements that were whole at once in the last step, in the forward and in the backward."""
    sent: int
    """Bytes of gathers in the last step."""
    at_rest: int
    """Elements of parameters between steps."""


def run(
    rank: int, policy: Policy, units: Units | None, make: Callable[[], Any], steps: int, prepare: Callable[[Any, int], None]
) -> Ran:  # fmt: skip
    model, sharded = build(policy, make_model=make, units=units, bucket_numel=LARGE_BUCKETS)
    live = [0, 0]

    def look(phase: int) -> None:
        live[phase] = max(live[phase], sharded.memory_report()["parameters"] // 4 - at_rest)

    at_rest = sharded.memory_report()["parameters"] // 4
    for module in model.modules():
        if isinstance(module, Block):
            module.linear.register_forward_hook(lambda *_: look(0))
            module.linear.register_full_backward_pre_hook(lambda *_: look(1))
    losses, sent = [], 0
    for number in range(steps):
        prepare(model, number)
        live[:] = 0, 0
        sharded.comm_report()
        losses.append(step(model, sharded, rank, number))
        sent = sharded.comm_report().get("all_gather", 0)
    return Ran(torch.stack(losses), whole(model), (live[0], live[1]), sent, at_rest)


STAGE3 = Policy.stage(3)


def on_two_ranks(
    policy: Policy = STAGE3, units: Units | None = None, make: Callable[[], Any] = Deep, steps: int = 3,
    prepare: Callable[[Any, int], None] = lambda model, step: None,
) -> Ran:  # fmt: skip
    """Return rank 0's `run`, after both ranks agreed."""
    one, other = on_ranks(run, 2, policy, units, make, steps, prepare)
    assert same(one.parameters, other.parameters)
    return one


def expect_equal(one: Ran, other: Ran) -> None:
    assert torch.equal(one.losses, other.losses)
    assert same(one.parameters, other.parameters)


@pytest.fixture(scope="module")
def reference() -> Ran:
    return on_two_ranks(Policy.stage(0))


ROOT = 32 * WIDTH


@pytest.mark.parametrize(
    ("transport", "policy", "blocks"),
    [
        # The block that runs, and the next one on its way. Over gloo, this one has its memory.
        ("gloo", {}, 2),
        ("gloo", {"reshard_after_forward": False}, 8),
        # Nothing ahead: only the block that runs.
        ("gloo", {"prefetch_numel": 0}, 1),
        # Three ahead.
        ("gloo", {"prefetch_numel": 3 * BLOCK}, 4),
        ("gloo", {"prefetch_numel": 10**9}, 8),
        # As much ahead as fits into what may be alive: the root and four blocks.
        ("gloo", {"prefetch_numel": 10**9, "max_live_numel": ROOT + 4 * BLOCK}, 4),
        # The last three are kept: from the third last's forward to its backward, two blocks are used twice.
        ("gloo", {"prefetch_numel": 0, "max_reuse_numel": 4 * BLOCK}, 3),
        # What is kept makes room for what is needed.
        ("gloo", {"prefetch_numel": 0, "max_reuse_numel": 10**9, "max_live_numel": ROOT + 2 * BLOCK}, 2),
        ("shared memory", {"prefetch_numel": 1}, 2),
        ("shared memory", {"prefetch_numel": 10**9}, 8),
    ],
    indirect=["transport"],
)
def test_what_is_whole_at_once_is_bounded(transport: str, policy: dict[str, Any], blocks: int, reference: Ran) -> None:
    """The most unsharded elements alive are those of the root and of so many blocks, whatever the depth."""
    result = on_two_ranks(replace(STAGE3, **policy))
    assert result.live == (ROOT + blocks * BLOCK,) * 2
    expect_equal(result, reference)


def test_what_is_kept_is_not_gathered_again() -> None:
    fewer = on_two_ranks(replace(STAGE3, max_reuse_numel=10**9))
    more = on_two_ranks()
    # Half of each block is sent; all but the last block travel twice, or once.
    assert more.sent - fewer.sent == (DEPTH - 1) * BLOCK // 2 * 4


def test_an_order_that_changes_from_step_to_step_is_right() -> None:
    def shuffle(model: Deep, step: int) -> None:
        model.order = torch.randperm(DEPTH, generator=torch.Generator().manual_seed(step)).tolist()[: DEPTH - step]

    expected = on_two_ranks(Policy.stage(0), prepare=shuffle, steps=5)
    for policy in (STAGE3, replace(STAGE3, prefetch_numel=10**9)):
        expect_equal(on_two_ranks(policy, prepare=shuffle, steps=5), expected)


def test_small_parameters_stay_whole() -> None:
    class Biased(Deep):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.linear.bias = nn.Parameter(torch.zeros(WIDTH))

    units = Units(persistent_numel=WIDTH + 1)
    results = [on_two_ranks(Policy.stage(stage), units, Biased) for stage in range(4)]
    assert all(same(result.parameters, results[0].parameters) for result in results[1:])
    half = (ROOT + DEPTH * BLOCK) // 2
    assert results[3].at_rest == half + DEPTH * WIDTH
    limited = on_two_ranks(units=Units(persistent_numel=WIDTH + 1, max_persistent_numel=3 * WIDTH), make=Biased)
    # Five biases are in their blocks' buckets, padded there.
    assert half + 3 * WIDTH < limited.at_rest <= half + 3 * WIDTH + 5 * 16 + 16


def test_small_blocks_come_with_what_contains_them(reference: Ran) -> None:
    result = on_two_ranks(units=Units(min_numel=BLOCK + 1))
    assert result.live == (ROOT + DEPTH * BLOCK,) * 2
    torch.testing.assert_close(result.losses, reference.losses)


class Mixture(nn.Module):
    """Each rank runs the expert of its own number."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        return x + self.experts[rank](x) + self.experts[2 + rank](x)


class Sparse(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Mixture() for number in range(2)})
        self.order = ["0", "1"]


@pytest.mark.parametrize(
    "units",
    [
        Units(leaf_classes=("Sparse",)),  # the model itself
        Units(leaf_classes=("Mixture",)),
        Units(leaf_classes=(Mixture,)),
        Units(leaf_names=("blocks.0", "blocks.1")),
        Units(leaf_suffixes=("ocks.0", "ocks.1")),
    ],
    ids=["model", "class name", "class", "name", "suffix"],
)
def test_a_leaf_is_whole_on_ranks_that_run_different_parts_of_it(units: Units) -> None:
    expected = on_two_ranks(Policy.stage(0), units if units.leaf_classes != ("Sparse",) else None, Sparse)
    expect_equal(on_two_ranks(units=units, make=Sparse), expected)


def test_ranks_that_run_different_units_are_told_to_declare_a_leaf() -> None:
    def body(rank: int) -> None:
        model, sharded = build(3, make_model=Sparse)
        step(model, sharded, rank, 0)

    with pytest.raises(RankError, match="leaf") as caught:
        run_ranks(body, 2, collective_timeout=3)
    assert "blocks.0.experts.0" in str(caught.value)
    assert "blocks.0.experts.1" in str(caught.value)


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"leaf_classes": ("Mixtral",)}, "class Mixtral"),
        ({"leaf_names": ("blocks",)}, r"blocks is a container.*leaf_names=\(\"blocks\.\*\",\)"),
        ({"leaf_suffixes": ("mlp",)}, "suffix mlp"),
        ({"leaf_classes": "Mixture"}, r"leaf_classes=\('Mixture',\)"),
    ],
)
def test_a_leaf_that_does_not_exist_is_an_error(leaves: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(2, make_model=Deep, units=Units(**leaves))


def test_the_keys_of_a_config_say_so() -> None:
    zero = {
        "stage": 3,
        "stage3_prefetch_bucket_size": "5e2",
        "stage3_max_live_parameters": 1e4,
        "stage3_max_reuse_distance": 300,
        "stage3_param_persistence_threshold": 17,
        "stage3_model_persistence_threshold": 64,
        "stage3_module_granularity_threshold": 20,
        "leaf_module": {"classes": ["Mixture"], "names": ["a.*"], "name_suffixes": ["mlp"]},
    }
    config = load_config({"zero_optimization": zero}, 1)
    policy = config.policy
    assert (policy.prefetch_numel, policy.max_live_numel, policy.max_reuse_numel) == (500, 10_000, 300)
    assert config.units == Units(("Mixture",), ("a.*",), ("mlp",), 20, 17, 64)
    plain = load_config({"zero_optimization": {"stage": 3}}, 1)
    assert plain.policy.prefetch_numel is None
    assert plain.units == Units(max_persistent_numel=2**63 - 1)
