"""The drop-in optimizer, compared with torch's own class and a plain optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from safetensors.torch import load_file, save_model
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as DDP
from twin import update

import zeroshard
from zeroshard import Lion, UsageError, ZeroRedundancyOptimizer
from zeroshard.optim.states import looks_at_whole_parameters

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "NAdam": (torch.optim.NAdam, {"lr": 1e-2}),
    "Lion": (Lion, {"lr": 1e-3}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}


class Net(nn.Module):
    """A convolution in channels-last order, an uneven matrix, a scalar; a large matrix that has a bucket of its own on request."""

    def __init__(self, large: bool = False) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 7, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(7)
        self.head = nn.Linear(7, 1 << 20 >> 3 if large else 11)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.convolution(x)).mean((2, 3))) * self.scale


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "lr": 3e-3}, {"params": vectors}]


def build(
    make: Callable[[Any], torch.optim.Optimizer], large: bool = False, **ddp: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(large)
    wrapped = DDP(model, broadcast_buffers=False, **ddp) if dist.get_world_size() > 1 or ddp else model
    return wrapped, make(groups(model))


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, closure: bool = False) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for step in steps:

        def backward(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = model(batch(rank, step)).square().mean()
            loss.backward()
            return loss

        if closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
        schedule.step()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.ranks("ranks")
@pytest.mark.quick(5)
@pytest.mark.parametrize("bucket_view", [False, True], ids=["own storages", "bucket view"])
@pytest.mark.parametrize("closure", [False, True], ids=["plain", "closure"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parity_with_torch(rank: int, ranks: int, optimizer: str, closure: bool, bucket_view: bool) -> None:
    """30 steps, two param groups, a scheduler: the same bits as torch's class and as a plain optimizer, and the same state dict."""
    cls, options = OPTIMIZERS[optimizer]
    plain = build(lambda p: cls(p, **options))
    theirs = build(lambda p: TorchZero(p, cls, **options))
    ours = build(lambda p: ZeroRedundancyOptimizer(p, cls, parameters_as_bucket_view=bucket_view, **options))
    for model, its in (plain, theirs, ours):
        train(rank, model, its, range(30), closure)
    assert same(ours[0], plain[0])
    assert same(ours[0], theirs[0])
    assert ours[0].state_dict().keys() == plain[0].state_dict().keys()
    for to in {0, ranks - 1}:
        ours[1].consolidate_state_dict(to)  # type: ignore[attr-defined]
        theirs[1].consolidate_state_dict(to)  # type: ignore[attr-defined]
        if rank == to:
            mine = ours[1].state_dict()
            assert equal(mine, plain[1].state_dict())
            assert equal(mine["state"], theirs[1].state_dict()["state"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adafactor"])
def test_a_checkpoint_goes_from_plain_to_ours_to_torchs_and_back(rank: int, optimizer: str) -> None:
    cls, options = OPTIMIZERS[optimizer]

    def plain(p: Any) -> torch.optim.Optimizer:
        return cls(p, **options)

    def ours(p: Any) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(p, cls, **options)

    def ours_flat(p: Any) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(p, cls, parameters_as_bucket_view=True, **options)

    def theirs(p: Any) -> torch.optim.Optimizer:
        return TorchZero(p, cls, **options)

    oracle_model, oracle = build(plain)
    train(rank, oracle_model, oracle, range(5))
    model_state, state = copy.deepcopy(oracle_model.state_dict()), copy.deepcopy(oracle.state_dict())
    start = 5
    for make in (ours, theirs, ours_flat, plain):
        model, optimizer = build(make)
        model.load_state_dict(model_state)
        before = copy.deepcopy(state)
        optimizer.load_state_dict(state if make is not theirs else copy.deepcopy(state))
        assert equal(state, before), "its argument stays as it was"
        train(rank, model, optimizer, range(start, start + 5))
        train(rank, oracle_model, oracle, range(start, start + 5))
        assert same(model, oracle_model)
        if make is not plain:
            optimizer.consolidate_state_dict(0)  # type: ignore[attr-defined]
        saved = [optimizer.state_dict() if rank == 0 else None]
        dist.broadcast_object_list(saved, src=0)
        model_state, state = copy.deepcopy(model.state_dict()), saved[0]  # type: ignore[assignment]
        start += 5


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 3)])
def test_a_whole_state_loads_on_any_number_of_ranks(before: int, after: int, tmp_path: Any) -> None:
    path = tmp_path / "state.pt"

    def make(p: Any) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=1e-2)

    def save(rank: int) -> None:
        model, optimizer = build(make)
        train(0, model, optimizer, range(3))
        optimizer.consolidate_state_dict()  # type: ignore[attr-defined]
        if rank == 0:
            torch.save([model.state_dict(), optimizer.state_dict()], path)

    def load(rank: int) -> None:
        states = torch.load(path, weights_only=True)
        model, optimizer = build(make)
        strip = {fqn.removeprefix("module."): value for fqn, value in states[0].items()}
        (model.module if after > 1 else model).load_state_dict(strip)  # type: ignore[union-attr]
        optimizer.load_state_dict(states[1])
        optimizer.consolidate_state_dict()  # type: ignore[attr-defined]
        if rank == 0:
            assert equal(optimizer.state_dict(), states[1])

    on_ranks(save, before)
    on_ranks(load, after)


@pytest.mark.ranks(2)
def test_shards_are_taken_back_and_strangers_are_refused(rank: int) -> None:
    def make(p: Any) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=1e-2)

    model, optimizer = build(make)
    assert optimizer.state_dict()["state"] == {}
    train(rank, model, optimizer, range(3))
    shards = copy.deepcopy(optimizer.state_dict())
    assert shards["zeroshard"]["rank"] == rank
    assert len(shards["zeroshard"]["pieces"]) == len(shards["state"])
    other_model, other = build(make)
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict(shards)
    train(rank, model, optimizer, range(3, 6))
    train(rank, other_model, other, range(3, 6))
    assert same(model, other_model)
    exchanged: list[Any] = [None, None]
    dist.all_gather_object(exchanged, shards)
    with pytest.raises(UsageError, match=f"shards of rank {1 - rank} of 2"):
        other.load_state_dict(exchanged[1 - rank])
    with pytest.raises(ValueError, match="param groups"):
        other.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})
    optimizer.consolidate_state_dict(1)  # type: ignore[attr-defined]
    assert ("zeroshard" in optimizer.state_dict()) is (rank == 0)
    train(rank, model, optimizer, range(6, 7))
    assert "zeroshard" in optimizer.state_dict(), "a whole state of an earlier step is not shown for this one's"
    with pytest.raises(UsageError, match="0 to 1"):
        optimizer.consolidate_state_dict(2)  # type: ignore[attr-defined]


def test_shards_are_even_and_repr_says_so() -> None:
    """One large matrix among small ones: torch's class gives it whole to one rank."""

    def body(rank: int) -> tuple[int, str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 100_000), nn.Linear(10, 10), nn.Linear(10, 10))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return sum(v.nbytes for s in optimizer.optim.state.values() for v in s.values()), repr(optimizer)

    held, texts = zip(*on_ranks(body, 4), strict=True)
    assert max(held) <= 1.01 * min(held)
    assert "elementwise, even shards: 50," in texts[0]
    assert "elements on rank 0 of 4" in texts[0]
    assert "Adam (" in texts[0]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("whole_first", [False, True])
def test_shards_of_another_elementwise_are_refused(rank: int, whole_first: bool) -> None:
    def made(elementwise: bool) -> tuple[nn.Parameter, ZeroRedundancyOptimizer]:
        parameter = nn.Parameter(torch.arange(12.0).view(3, 4))
        return parameter, ZeroRedundancyOptimizer([parameter], torch.optim.Adam, lr=0.1, elementwise=elementwise)

    first, second = made(not whole_first), made(whole_first)
    first[0].grad = torch.ones(3, 4)
    first[1].step()
    with pytest.raises(UsageError, match="consolidate_state_dict"):
        second[1].load_state_dict(first[1].state_dict())
    first[1].consolidate_state_dict()
    second[1].load_state_dict(first[1].state_dict())
    second[0].data.copy_(first[0].data)
    for parameter, optimizer in (first, second):
        parameter.grad = parameter.detach() + 1
        optimizer.step()
    assert torch.equal(first[0], second[0])


@pytest.mark.ranks(2)
def test_the_choice_follows_the_optimizer_and_the_user(rank: int) -> None:
    parameters = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(3, 3))]

    class Unknown(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        def step(self, closure: Any = None) -> None:
            for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                parameter.data -= 0.1 * parameter.grad / parameter.grad.norm()

    assert looks_at_whole_parameters(Unknown) is None
    assert "whole parameters" in repr(ZeroRedundancyOptimizer(parameters, Unknown))
    assert "whole parameters" in repr(ZeroRedundancyOptimizer(parameters, torch.optim.Muon, lr=0.1))
    assert "whole parameters" in repr(ZeroRedundancyOptimizer(parameters, torch.optim.Adam, elementwise=False))
    assert "elementwise" in repr(ZeroRedundancyOptimizer(parameters, Unknown, elementwise=True))
    optimizer = ZeroRedundancyOptimizer(parameters, Unknown)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.testing.assert_close(parameters[0].detach(), torch.full((4, 4), 1 - 0.1 / 4))
    torch.testing.assert_close(parameters[1].detach(), torch.full((3, 3), 1 - 0.1 / 3))


@pytest.mark.ranks(2)
def test_groups_added_frozen_and_freed_on_the_way(rank: int) -> None:
    def run(rank: int, make: Callable[[Any], torch.optim.Optimizer]) -> list[Tensor]:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        layers[1].requires_grad_(False)
        optimizer = make(layers[:2].parameters())
        for step in range(9):
            if step == 3:
                optimizer.param_groups[0]["lr"] = 0.05
                optimizer.add_param_group({"params": list(layers[2].parameters()), "lr": 0.3})
                assert optimizer.param_groups[0]["lr"] == 0.05
            if step == 6:
                layers[1].requires_grad_(True)
                layers[0].requires_grad_(False)
            x = torch.randn(2, 5, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            for layer in layers:
                x = layer(x)
            x.square().mean().backward()
            optimizer.step()
        assert optimizer.param_groups[1]["lr"] == 0.3
        assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)
        return [p.detach().clone() for p in layers.parameters()]

    plain = run(rank, lambda p: torch.optim.Adam(p, lr=0.1))
    for bucket_view in (False, True):
        ours = run(
            rank, lambda p, flat=bucket_view: ZeroRedundancyOptimizer(p, torch.optim.Adam, None, flat, lr=0.1)  # type: ignore[misc]
        )  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


@pytest.mark.ranks(4)
def test_mixed_dtypes_extra_arguments_and_subgroups(rank: int) -> None:
    class Doubled(torch.optim.SGD):
        def step(self, closure: Any = None, *, times: int = 1) -> Any:
            for _ in range(times):
                super().step()
            return times

    pair = dist.new_group([1, 3])
    if rank not in (1, 3):
        return
    parameters = [nn.Parameter(torch.ones(6, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    optimizer = ZeroRedundancyOptimizer(parameters, Doubled, process_group=pair, lr=0.25)
    assert (optimizer.rank, optimizer.world_size) == ([1, 3].index(rank), 2)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert optimizer.step(times=2) == 2
    for parameter in parameters:
        assert torch.equal(parameter.detach(), torch.full_like(parameter, 0.5).detach())


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("hook", [zeroshard.hook_with_zero_step, zeroshard.hook_with_zero_step_interleaved])
@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_step_runs_inside_ddps_backward(
    rank: int, ranks: int, static_graph: bool, hook: Callable[..., Any]
) -> None:
    """From the first step on, with two param groups, over gloo: none of which torch's class does."""
    options = {"static_graph": static_graph, "bucket_cap_mb": 0.0005}
    plain_model, plain = build(lambda p: torch.optim.AdamW(p, lr=1e-2), **options)
    model, zero = build(
        lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, overlap_with_ddp=True, lr=1e-2), **options
    )
    assert isinstance(model, DDP)
    model.register_comm_hook(None, hook(allreduce_hook, model, zero))
    for step in range(10):
        for each, optimizer in ((plain_model, plain), (model, zero)):
            optimizer.zero_grad()
            each(batch(rank, step)).square().mean().backward()
        plain.step()
        assert same(model, plain_model), f"step {step}"
    with pytest.warns(UserWarning, match="overlap_with_ddp"):
        assert zero.step() is None
    with pytest.raises(RuntimeError, match="overlap_with_ddp"):
        zero.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    zero.consolidate_state_dict()  # type: ignore[attr-defined]
    if rank == 0:
        assert equal(zero.state_dict()["state"], plain.state_dict()["state"])
    with pytest.raises(UsageError, match="overlap_with_ddp=True"):
        hook(allreduce_hook, model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))


@pytest.mark.ranks("ranks")
@pytest.mark.parametrize("optimizer", ["Adam", "Adafactor"])
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_uneven_inputs_under_join(rank: int, ranks: int, bucket_view: bool, optimizer: str) -> None:
    """The oracle is a plain optimizer on the rank with the most inputs. (Torch's class needs the gradients set by hand here.)"""
    cls, options = OPTIMIZERS[optimizer]
    inputs = (3, 4, 2, 7)[-ranks:][rank]

    def run(make: Callable[[Any], torch.optim.Optimizer]) -> nn.Module:
        model, its = build(make)
        with Join([model, its] if isinstance(its, ZeroRedundancyOptimizer) else [model]):  # type: ignore[list-item]
            for step in range(inputs):
                its.zero_grad()
                model(batch(rank, step)).square().mean().backward()
                its.step()
        return model

    plain = run(lambda p: cls(p, **options))
    ours = run(lambda p: ZeroRedundancyOptimizer(p, cls, parameters_as_bucket_view=bucket_view, **options))
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        truth = b.detach().contiguous()
        dist.broadcast(truth, src=ranks - 1)
        assert torch.equal(a, truth)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("params", "error"),
    [
        (torch.ones(3), TypeError),
        (3, TypeError),
        ([], ValueError),
        ([torch.ones(3), {"params": [torch.ones(3)]}], TypeError),
        ([{"lr": 0.1}], ValueError),
        ([nn.Parameter(torch.ones(3).to_sparse())], ValueError),
    ],
)
def test_bad_parameters_raise_what_torchs_class_raises(rank: int, params: Any, error: type[Exception]) -> None:
    for cls in (TorchZero, ZeroRedundancyOptimizer):
        with pytest.raises(error):
            cls(params, torch.optim.SGD, lr=0.1)


@pytest.mark.ranks(2)
def test_sparse_gradients_are_refused_by_a_sentence(rank: int) -> None:
    model = nn.Embedding(5, 4, sparse=True)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UsageError, match="sparse=False"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_large_matrices_travel_without_a_copy(rank: int) -> None:
    """A parameter with a bucket of its own is gathered in its own storage; the numbers are the same."""
    plain_model, plain = build(lambda p: torch.optim.SGD(p, lr=0.1), large=True)
    model, optimizer = build(lambda p: ZeroRedundancyOptimizer(p, torch.optim.SGD, lr=0.1), large=True)
    assert {bucket.needs_scratch for bucket in optimizer.buckets} == {True, False}  # type: ignore[attr-defined]
    big = nn.Parameter(torch.ones(1 << 10, 1 << 10))
    alone = ZeroRedundancyOptimizer([big], torch.optim.SGD, lr=0.5)
    assert [bucket.needs_scratch for bucket in alone.buckets] == [False]
    big.grad = torch.ones_like(big)
    alone.step()
    assert bool((big == 0.5).all())
    train(rank, plain_model, plain, range(2))
    train(rank, model, optimizer, range(2))
    assert same(model, plain_model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("optimizer", ["Adam", "Adafactor"])
def test_parameters_may_get_other_storages(rank: int, optimizer: str, bucket_view: bool) -> None:
    """Trainers replace `p.data`; a view that looked at the old storage would train nothing, in silence."""
    cls, options = OPTIMIZERS[optimizer]
    plain_model, plain = build(lambda p: cls(p, **options), large=True)
    make = lambda p: ZeroRedundancyOptimizer(p, cls, parameters_as_bucket_view=bucket_view, **options)  # noqa: E731
    model, optimizer = build(make, large=True)
    for step in range(4):
        for each, its in ((plain_model, plain), (model, optimizer)):
            train(rank, each, its, range(step, step + 1))
            for parameter in each.parameters():
                parameter.data = parameter.data.clone() * (1 + step)
    assert same(model, plain_model)
    model.double()
    model(batch(rank, 9).double()).square().mean().backward()
    with pytest.raises(UsageError, match="move and cast the model first"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_parameters_of_a_bucket_are_written_to_files(rank: int, tmp_path: Any) -> None:
    model, optimizer = build(
        lambda p: ZeroRedundancyOptimizer(p, torch.optim.Adam, parameters_as_bucket_view=True, lr=0.1)
    )
    train(rank, model, optimizer, range(2))
    save_model(model, str(tmp_path / str(rank)))
    found = load_file(tmp_path / str(rank))
    assert all(torch.equal(found[fqn], value) for fqn, value in model.state_dict().items())


class WithoutClosure(torch.optim.SGD):
    """Takes a closure, and does not call it."""

    def step(self, closure: Any = None) -> Any:
        return super().step()


@pytest.mark.ranks(2)
def test_an_optimizer_that_does_not_call_its_closure_steps_with_the_gradients_that_are_there(rank: int) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = ZeroRedundancyOptimizer([parameter], WithoutClosure, lr=0.5)
    parameter.grad = torch.ones(4)
    optimizer.step(lambda: torch.zeros(()))
    assert torch.equal(parameter.detach(), torch.full((4,), 0.5))


def adamw(model: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)


def steps(rank: int, take: Callable[[Callable[[], None]], Callable[[], None]], *, asks: bool = False) -> Tensor:
    """The weights after three steps under DDP. `take` wraps the step."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 4))
    optimizer = adamw(model)

    def step() -> None:
        update(model(torch.full((2, 4), 1.0 + rank)).square().mean(), optimizer)

    taken = take(step)
    for number in range(3):
        taken()
        if asks and number == 1:
            with pytest.raises(UsageError, match=r"takes a rank's shards.*consolidate_state_dict"):
                get_optimizer_state_dict(model, optimizer)
    return model.module.weight.detach()


@pytest.mark.ranks(2)
def test_torchs_functions_for_state_dicts_are_refused_and_change_nothing(rank: int, tmp_path: Path) -> None:
    """They step an optimizer whose `state` is empty, and take each piece's states for a whole parameter's."""
    assert torch.equal(steps(rank, lambda step: step, asks=True), steps(rank, lambda step: step))
    optimizer = adamw(nn.Linear(4, 4))
    with pytest.raises(UsageError, match=r"one rank's in place of all.*consolidate_state_dict"):
        dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path)
    optimizer.consolidate_state_dict()
    assert optimizer.state_dict()["param_groups"]


@pytest.mark.ranks(2)
def test_a_compiled_step_has_the_bits_of_one_that_is_not(rank: int) -> None:
    compiled = steps(rank, lambda step: torch.compile(step, backend="eager"))
    assert torch.equal(compiled, steps(rank, lambda step: step))


def test_hooks_of_load_state_dict_run_and_may_change_what_is_loaded() -> None:
    calls = []
    optimizer = adamw(nn.Linear(4, 4))
    saved = optimizer.state_dict()

    def change(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "param_groups": [{**state_dict["param_groups"][0], "lr": 0.5}]}

    optimizer.register_load_state_dict_pre_hook(change)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after"))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5 and saved["param_groups"][0]["lr"] == 0.01 and calls == ["after"]


@pytest.mark.ranks(2)
def test_named_parameters_keep_their_names(rank: int) -> None:
    model, other = nn.Linear(4, 3), nn.Linear(4, 3)
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), torch.optim.Adam, lr=0.1)
    plain = torch.optim.Adam(other.named_parameters(), lr=0.1)
    optimizer.consolidate_state_dict()
    if rank == 0:
        assert equal(optimizer.state_dict(), plain.state_dict())


def test_an_optimizer_in_the_place_of_its_class_is_named() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(TypeError, match="is an object of class Adam"):
        ZeroRedundancyOptimizer(parameters, torch.optim.Adam(parameters))  # type: ignore[arg-type]


def test_parameters_that_were_frozen_with_gradients_are_equal_on_all_ranks() -> None:
    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(512, 512)  # a bucket of its own
        optimizer = ZeroRedundancyOptimizer(table.parameters(), torch.optim.Adam, lr=0.1)
        for number in range(2):
            table.weight.grad = torch.ones_like(table.weight)
            table.weight.requires_grad_(number == 0)
            optimizer.step()
        return table.weight.detach()

    one, other = on_ranks(body, 2)
    assert torch.equal(one, other)


@pytest.mark.ranks(2)
def test_after_a_hook_that_raised_each_parameter_is_updated_again(rank: int) -> None:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(3)]), bucket_cap_mb=1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=1e-3)
    raises = [False]

    def hook(state: Any, bucket: dist.GradBucket) -> Any:
        reduced = allreduce_hook(None, bucket)  # type: ignore[arg-type]

        def fail(_: Any) -> Any:
            raise ValueError("the user's hook")

        return reduced.then(fail) if raises[0] and bucket.is_last() else reduced

    model.register_comm_hook(None, zeroshard.hook_with_zero_step_interleaved(hook, model, optimizer))
    for number in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        raises[0] = number == 1
        loss = model(torch.ones(2, 512)).square().sum()
        if raises[0]:
            with pytest.raises(RuntimeError, match="the user's hook"):
                loss.backward()
            continue
        loss.backward()
        if number >= 1:
            assert not [1 for p, old in zip(model.parameters(), before, strict=True) if torch.equal(p, old)]


@pytest.mark.parametrize("cls", [ZeroRedundancyOptimizer, TorchZero])
def test_closures_of_ranks_with_uneven_inputs(cls: Any) -> None:
    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = DDP(nn.Linear(4, 4))
        optimizer = cls(model.parameters(), torch.optim.SGD, lr=0.1)
        with Join([model, optimizer]):
            for _ in range(2 + rank):

                def closure() -> Tensor:
                    optimizer.zero_grad()
                    loss: Tensor = model(torch.full((2, 4), 1.0 + rank)).sum()
                    loss.backward()
                    return loss

                optimizer.step(closure)
        return model.module.weight.detach()

    one, other = on_ranks(body, 2)
    assert torch.equal(one, other)


@pytest.mark.ranks(2)
def test_a_memory_format_that_changes_between_steps_is_refused(rank: int) -> None:
    model = nn.Conv2d(3, 8, 3)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    model.to(memory_format=torch.channels_last)  # before the first step: there are no states yet
    for change in (lambda: None, lambda: model.to(memory_format=torch.contiguous_format)):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        change()
    with pytest.raises(UsageError, match="changed its strides"):
        optimizer.step()
