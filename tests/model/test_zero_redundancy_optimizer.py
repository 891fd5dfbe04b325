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
from oracles import same_on_all_ranks
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


def train(
    rank: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    closure: bool = False,
    decay: float = 0.97,
) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
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


def ours(cls: type[torch.optim.Optimizer], **options: Any) -> Callable[[Any], ZeroRedundancyOptimizer]:
    return lambda parameters: ZeroRedundancyOptimizer(parameters, cls, **options)


adam, sgd = ours(torch.optim.Adam, lr=0.1), ours(torch.optim.SGD, lr=0.1)


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
    """20 steps, two param groups, a scheduler: the same bits as torch's class and as a plain optimizer, and the same state dict.

    Each one's state dict loads into the others, which go on with the same bits.
    """
    cls, options = OPTIMIZERS[optimizer]
    makers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: cls(p, **options), lambda p: TorchZero(p, cls, **options),
        ours(cls, parameters_as_bucket_view=bucket_view, **options), ours(cls, elementwise=False, **options),
    ]  # fmt: skip
    (model, plain), theirs, mine, _ = made = [build(make) for make in makers]
    for each, its in made:
        train(rank, each, its, range(20), closure)
        assert same(each, model)
    assert mine[0].state_dict().keys() == model.state_dict().keys()
    saved: list[Any] = []
    for to in {0, ranks - 1}:
        for its in (theirs[1], mine[1]):
            its.consolidate_state_dict(to)  # type: ignore[attr-defined]
        if rank == to:
            saved = [its.state_dict() for its in (plain, theirs[1], mine[1])]
            assert equal(saved[2], saved[0])
            assert equal(saved[2]["state"], saved[1]["state"])
    if ranks > 2:
        return  # a new DDP model sums its first gradients in another order
    everyones: list[Any] = [None] * ranks
    dist.all_gather_object(everyones, saved)
    values = copy.deepcopy(model.state_dict())
    train(rank, model, plain, range(20, 22))
    for make in makers:
        for state in everyones[0]:
            other, its = build(make)
            other.load_state_dict(values)
            its.load_state_dict(copy.deepcopy(state))
            train(rank, other, its, range(20, 22))
            assert same(other, model)


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 2), (2, 3)])
def test_a_whole_state_loads_on_any_number_of_ranks(before: int, after: int, tmp_path: Path) -> None:
    def save(rank: int) -> None:
        model, optimizer = build(adam)
        train(0, model, optimizer, range(3))
        optimizer.consolidate_state_dict()  # type: ignore[attr-defined]
        if rank == 0:
            torch.save(optimizer.state_dict(), tmp_path / "state.pt")

    def load(rank: int) -> None:
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        _, optimizer = build(adam)
        optimizer.load_state_dict(state)
        optimizer.consolidate_state_dict()  # type: ignore[attr-defined]
        assert rank > 0 or equal(optimizer.state_dict(), state)

    on_ranks(save, before)
    on_ranks(load, after)


@pytest.mark.ranks(2)
def test_shards_are_taken_back_and_strangers_are_refused(rank: int) -> None:
    model, optimizer = build(adam)
    assert optimizer.state_dict()["state"] == {}
    train(rank, model, optimizer, range(3))
    shards = copy.deepcopy(optimizer.state_dict())
    assert shards["zeroshard"]["rank"] == rank
    assert len(shards["zeroshard"]["pieces"]) == len(shards["state"])
    other_model, other = build(adam)
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
    _, whole = build(ours(torch.optim.Adam, lr=0.1, elementwise=False))
    with pytest.raises(UsageError, match="consolidate_state_dict"):
        whole.load_state_dict(shards)
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


class Unknown(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.data -= 0.1 * parameter.grad / parameter.grad.norm()


@pytest.mark.ranks(2)
def test_the_choice_follows_the_optimizer_and_the_user(rank: int) -> None:
    parameters = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(3, 3))]
    assert looks_at_whole_parameters(Unknown) is None
    for make, told in (
        (ours(Unknown), "whole parameters"), (ours(torch.optim.Muon, lr=0.1), "whole parameters"),
        (ours(torch.optim.Adam, elementwise=False), "whole parameters"), (ours(Unknown, elementwise=True), "elementwise"),
    ):  # fmt: skip
        assert told in repr(make(parameters))
    optimizer = ours(Unknown)(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.testing.assert_close(parameters[0].detach(), torch.full((4, 4), 1 - 0.1 / 4))
    torch.testing.assert_close(parameters[1].detach(), torch.full((3, 3), 1 - 0.1 / 3))


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
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("optimizer", ["Adam", "Adafactor"])
@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_uneven_inputs_under_join(rank: int, ranks: int, bucket_view: bool, optimizer: str, closure: bool) -> None:
    """The oracle is a plain optimizer on the rank with the most inputs. (Torch's class needs the gradients set by hand here.)"""
    cls, options = OPTIMIZERS[optimizer]
    inputs = (3, 4, 2, 7)[-ranks:][rank]

    def run(make: Callable[[Any], torch.optim.Optimizer], closure: bool = False) -> nn.Module:
        model, its = build(make)
        with Join([model, its] if isinstance(its, ZeroRedundancyOptimizer) else [model]):  # type: ignore[list-item]
            train(rank, model, its, range(inputs), closure, decay=1.0)  # joined ranks do not call a scheduler
        return model

    plain = run(lambda p: cls(p, **options))
    found = run(ours(cls, parameters_as_bucket_view=bucket_view, **options), closure)
    for a, b in zip(found.parameters(), plain.parameters(), strict=True):
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


def stepped_with_sparse_gradients() -> None:
    model = nn.Embedding(5, 4, sparse=True)
    optimizer = sgd(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()


def stepped_in_another_memory_format() -> None:
    model = nn.Conv2d(3, 8, 3)
    optimizer = adam(model.parameters())
    model.to(memory_format=torch.channels_last)  # before the first step: there are no states yet
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        model.to(memory_format=torch.contiguous_format)


def made_of_an_object() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    ZeroRedundancyOptimizer(parameters, torch.optim.Adam(parameters))  # type: ignore[arg-type]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("act", "error", "told"),
    [
        (stepped_with_sparse_gradients, UsageError, "sparse=False"),
        (stepped_in_another_memory_format, UsageError, "changed its strides"),
        (made_of_an_object, TypeError, "is an object of class Adam"),
    ],
)
def test_what_it_does_not_compute_is_refused(
    rank: int, act: Callable[[], None], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        act()


@pytest.mark.ranks(2)
def test_a_large_parameter_is_gathered_in_its_own_storage(rank: int) -> None:
    """Without a copy, also after a trainer replaced `p.data`: a view of the old storage would train nothing, in silence."""
    plain_model, plain = build(lambda p: torch.optim.SGD(p, lr=0.1), large=True)
    model, its = build(sgd, large=True)
    assert {bucket.needs_scratch for bucket in its.buckets} == {True, False}  # type: ignore[attr-defined]
    for step in range(4):
        for each, optimizer in ((plain_model, plain), (model, its)):
            train(rank, each, optimizer, range(step, step + 1))
            for parameter in each.parameters():
                parameter.data = parameter.data.clone() * (1 + step)
    assert same(model, plain_model)
    model.double()
    model(batch(rank, 9).double()).square().mean().backward()
    with pytest.raises(UsageError, match="move and cast the model first"):
        its.step()


@pytest.mark.ranks(2)
def test_parameters_of_a_bucket_are_written_to_files(rank: int, tmp_path: Path) -> None:
    model, optimizer = build(ours(torch.optim.Adam, parameters_as_bucket_view=True, lr=0.1))
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


def steps(rank: int, take: Callable[[Callable[[], None]], Callable[[], None]], *, asks: bool = False) -> Tensor:
    """The weights after three steps under DDP. `take` wraps the step."""
    torch.manual_seed(0)
    model = DDP(nn.Linear(4, 4))
    optimizer = adam(model.parameters())

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
    optimizer = adam(nn.Linear(4, 4).parameters())
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
    optimizer = adam(nn.Linear(4, 4).parameters())
    saved = optimizer.state_dict()

    def change(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "param_groups": [{**state_dict["param_groups"][0], "lr": 0.5}]}

    optimizer.register_load_state_dict_pre_hook(change)
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after"))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5 and saved["param_groups"][0]["lr"] == 0.1 and calls == ["after"]


@pytest.mark.ranks(2)
def test_named_parameters_keep_their_names(rank: int) -> None:
    model = nn.Linear(4, 3)
    optimizer = adam(model.named_parameters())
    optimizer.consolidate_state_dict()
    assert rank > 0 or equal(optimizer.state_dict(), torch.optim.Adam(model.named_parameters(), lr=0.1).state_dict())


@pytest.mark.ranks(2)
def test_parameters_that_were_frozen_with_gradients_are_equal_on_all_ranks(rank: int) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(512, 512)  # a bucket of its own
    optimizer = adam(table.parameters())
    for number in range(2):
        table.weight.grad = torch.ones_like(table.weight)
        table.weight.requires_grad_(number == 0)
        optimizer.step()
    assert same_on_all_ranks({"weight": table.weight.detach()})


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
