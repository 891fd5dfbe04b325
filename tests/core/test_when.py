"""The times at which parameters are unsharded: prefetched and kept units, the choice of units, and unchanged bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from twin import LARGE_BUCKETS, build, same, step, whole

import zeroshard
from zeroshard import Policy, Units, UsageError
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


def run(
    rank: int, policy: Policy, units: Units | None = None, make: Callable[[], nn.Module] = Deep, steps: int = 3,
    prepare: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> dict[str, object]:  # fmt: skip
    """Losses, parameters, and the most elements that were whole at once in the last step, by 2: forward and backward."""
    model, sharded = build(policy, make_model=make, units=units, bucket_numel=LARGE_BUCKETS)
    live = {"forward": 0, "backward": 0}

    def look(phase: str) -> None:
        live[phase] = max(live[phase], sharded.memory_report()["parameters"] // 4 - at_rest)

    at_rest = sharded.memory_report()["parameters"] // 4
    for module in model.modules():
        if isinstance(module, Block):
            module.linear.register_forward_hook(lambda *_: look("forward"))
            module.linear.register_full_backward_pre_hook(lambda *_: look("backward"))
    losses, sent = [], 0
    for number in range(steps):
        prepare(model, number)
        live.update(forward=0, backward=0)
        sharded.comm_report()
        losses.append(step(model, sharded, rank, number))
        sent = sharded.comm_report().get("all_gather", 0)
    return {
        "losses": torch.stack(losses),
        "parameters": whole(model),
        "live": dict(live),
        "sent": sent,
        "at_rest": at_rest,
    }


def on_two_ranks(**options: object) -> dict[str, object]:
    """Rank 0's `run`, after both agreed."""
    policy = options.pop("policy", Policy.stage(3))
    one, other = on_ranks(lambda rank: run(rank, policy, **options), 2)
    assert same_parameters(one, other)
    return one


def same_parameters(one: dict[str, object], other: dict[str, object]) -> bool:
    return same(one["parameters"], other["parameters"])


@pytest.fixture(scope="module")
def reference() -> dict[str, object]:
    return on_two_ranks(policy=Policy.stage(0))


ROOT = 32 * WIDTH
STAGE3 = Policy.stage(3)


@pytest.mark.parametrize(
    ("policy", "blocks"),
    [
        # The block that runs, and the next one on its way.
        (STAGE3, {"forward": 2, "backward": 2}),
        (Policy.stage(3, reshard_after_forward=False), {"forward": 8, "backward": 8}),
        # Nothing ahead: only the block that runs.
        ({"prefetch_numel": 0}, {"forward": 1, "backward": 1}),
        # Three ahead.
        ({"prefetch_numel": 3 * BLOCK}, {"forward": 4, "backward": 4}),
        ({"prefetch_numel": 10**9}, {"forward": 8, "backward": 8}),
        # As much ahead as fits into what may be alive: the root and four blocks.
        ({"prefetch_numel": 10**9, "max_live_numel": ROOT + 4 * BLOCK}, {"forward": 4, "backward": 4}),
        # The last three are kept: from the third last's forward to its backward, two blocks are used twice.
        ({"prefetch_numel": 0, "max_reuse_numel": 4 * BLOCK}, {"forward": 3, "backward": 3}),
        # What is kept makes room for what is needed.
        ({"prefetch_numel": 0, "max_reuse_numel": 10**9, "max_live_numel": ROOT + 2 * BLOCK}, {"forward": 2, "backward": 2}),
    ],
)  # fmt: skip
def test_what_is_whole_at_once_is_bounded(
    policy: Policy | dict[str, int],
    blocks: dict[str, int],
    reference: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The most unsharded elements alive are those of the root and of so many blocks, whatever the depth."""
    monkeypatch.setenv("ZEROSHARD_SHARED_MEMORY", "0")  # where parameters travel, what is on its way has its memory
    policy = (
        policy
        if isinstance(policy, Policy)
        else Policy(STAGE3.parameters, STAGE3.gradients, STAGE3.optimizer, **policy)
    )
    result = on_two_ranks(policy=policy)
    assert result["live"] == {phase: ROOT + count * BLOCK for phase, count in blocks.items()}
    assert torch.equal(result["losses"], reference["losses"])
    assert same_parameters(result, reference)


@pytest.mark.parametrize(("ahead", "blocks"), [(1, 2), (10**9, DEPTH)])
def test_what_is_gathered_ahead_takes_memory(ahead: int, blocks: int, reference: dict[str, object]) -> None:
    policy = Policy(STAGE3.parameters, STAGE3.gradients, STAGE3.optimizer, prefetch_numel=ahead)
    result = on_two_ranks(policy=policy)
    assert result["live"] == dict.fromkeys(("forward", "backward"), ROOT + blocks * BLOCK)
    assert torch.equal(result["losses"], reference["losses"])
    assert same_parameters(result, reference)


def test_what_is_kept_is_not_gathered_again() -> None:
    fewer = on_two_ranks(policy=Policy(STAGE3.parameters, STAGE3.gradients, STAGE3.optimizer, max_reuse_numel=10**9))
    more = on_two_ranks()
    # Half of each block is sent; all but the last block travel twice, or once.
    assert more["sent"] - fewer["sent"] == (DEPTH - 1) * BLOCK // 2 * 4


def test_an_order_that_changes_from_step_to_step_is_right() -> None:
    def shuffle(model: nn.Module, step: int) -> None:
        model.order = torch.randperm(DEPTH, generator=torch.Generator().manual_seed(step)).tolist()[: DEPTH - step]

    expected = on_two_ranks(policy=Policy.stage(0), prepare=shuffle, steps=5)
    for policy in (STAGE3, Policy(STAGE3.parameters, STAGE3.gradients, STAGE3.optimizer, prefetch_numel=10**9)):
        result = on_two_ranks(policy=policy, prepare=shuffle, steps=5)
        assert torch.equal(result["losses"], expected["losses"])
        assert same_parameters(result, expected)


def test_small_parameters_stay_whole() -> None:
    class Biased(Deep):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.linear.bias = nn.Parameter(torch.zeros(WIDTH))

    units = Units(persistent_numel=WIDTH + 1)
    results = {stage: on_two_ranks(policy=Policy.stage(stage), units=units, make=Biased) for stage in range(4)}
    assert all(same_parameters(results[stage], results[0]) for stage in (1, 2, 3))
    half = (ROOT + DEPTH * BLOCK) // 2
    assert results[3]["at_rest"] == half + DEPTH * WIDTH
    limited = on_two_ranks(units=Units(persistent_numel=WIDTH + 1, max_persistent_numel=3 * WIDTH), make=Biased)
    # Five biases are in their blocks' buckets, padded there.
    assert half + 3 * WIDTH < limited["at_rest"] <= half + 3 * WIDTH + 5 * 16 + 16


def test_small_blocks_come_with_what_contains_them(reference: dict[str, object]) -> None:
    result = on_two_ranks(units=Units(min_numel=BLOCK + 1))
    assert result["live"] == {"forward": ROOT + DEPTH * BLOCK, "backward": ROOT + DEPTH * BLOCK}
    torch.testing.assert_close(result["losses"], reference["losses"])


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
        Units(leaf_classes=("Mixture",)),
        Units(leaf_classes=(Mixture,)),
        Units(leaf_names=("blocks.0", "blocks.1")),
        Units(leaf_suffixes=("ocks.0", "ocks.1")),
    ],
    ids=["class name", "class", "name", "suffix"],
)
def test_a_leaf_is_whole_on_ranks_that_run_different_parts_of_it(units: Units) -> None:
    expected = on_two_ranks(policy=Policy.stage(0), units=units, make=Sparse)
    result = on_two_ranks(units=units, make=Sparse)
    assert same_parameters(result, expected)
    assert torch.equal(result["losses"], expected["losses"])


def test_ranks_that_run_different_units_are_told_to_declare_a_leaf() -> None:
    def body(rank: int) -> None:
        run(rank, STAGE3, make=Sparse)

    with pytest.raises(RankError, match="leaf") as caught:
        run_ranks(body, 2, collective_timeout=3)
    assert "blocks.0.experts.0" in str(caught.value)
    assert "blocks.0.experts.1" in str(caught.value)


def test_a_leaf_that_does_not_exist_is_an_error() -> None:
    model = Deep()
    for units, message in [
        (Units(leaf_classes=("Mixtral",)), "class Mixtral"),
        (Units(leaf_names=("blocks",)), r"blocks is a container.*leaf_names=\(\"blocks\.\*\",\)"),
        (Units(leaf_suffixes=("mlp",)), "suffix mlp"),
    ]:
        with pytest.raises(UsageError, match=message):
            zeroshard.shard(model, torch.optim.AdamW(model.parameters()), units=units)


def test_one_leaf_is_named_in_a_tuple() -> None:
    with pytest.raises(UsageError, match=r"leaf_classes=\('Mixture',\)"):
        Units(leaf_classes="Mixture")  # type: ignore[arg-type]


def test_the_model_itself_may_be_the_leaf() -> None:
    expected = on_two_ranks(policy=Policy.stage(0), make=Sparse)
    assert same_parameters(on_two_ranks(units=Units(leaf_classes=("Sparse",)), make=Sparse), expected)


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
    from zeroshard.engine.config.load import load_config

    config = load_config({"zero_optimization": zero}, 1)
    policy = config.policy
    assert (policy.prefetch_numel, policy.max_live_numel, policy.max_reuse_numel) == (500, 10_000, 300)
    assert config.units == Units(("Mixture",), ("a.*",), ("mlp",), 20, 17, 64)
    plain = load_config({"zero_optimization": {"stage": 3}}, 1)
    assert plain.policy.prefetch_numel is None
    assert plain.units == Units(max_persistent_numel=2**63 - 1)
