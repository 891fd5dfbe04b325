"""Models that cannot be sharded, and models whose backward bypasses their modules' outputs: plain PyTorch's bits at every stage."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import Skipping, sgd, tokens
from ranks import on_ranks
from torch import Tensor, nn
from twin import build, refusal, same, step, update, whole
from unusual import WIDTH, Block, Net, batch

import zeroshard
from zeroshard import Place, Policy, Precision

EVERY_STAGE = pytest.mark.parametrize("stage", range(4))


# ------------------------------------------------------------------ what cannot be sharded


def changed(change: Callable[[Any], None]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Net()
        change(model)
        return model

    return make


def nested(kind: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    def change(model: Any) -> None:
        model.parts = kind(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged))

    return changed(change)


def made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return Net()


def tied_by_data(model: Any) -> None:
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data


def overlapping(model: Any) -> None:
    flat = torch.randn(WIDTH, 3 * WIDTH)
    model.blocks[0].down.weight.data = flat[:, : 2 * WIDTH]
    model.blocks[1].down.weight.data = flat[:, WIDTH:]


def buffer_over_parameter(model: Any) -> None:
    model.register_buffer("table", model.blocks[0].up.weight.detach()[1:])


def eight_bits(model: Any) -> None:
    model.blocks[0].eighths = nn.Parameter(torch.randn(3, WIDTH).to(torch.float8_e4m3fn))


ONE_MEMORY = r"blocks\.0\.\w+\.weight.*they would diverge"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4)), r"0\.weight is lazy.*Run the model once"),
    "a nested parameter": (nested(nn.Parameter), r"^parameter parts .*dense.*torch\.jagged"),
    "a nested buffer": (nested(nn.Buffer), r"^buffer parts .*dense.*torch\.jagged"),
    "made for inference": (made_for_inference, r"first\.weight was made inside torch\.inference_mode"),
    "eight bits": (changed(eight_bits), r"blocks\.0\.eighths of torch\.float8_e4m3fn cannot be trained"),
    "tied by data": (changed(tied_by_data), ONE_MEMORY),
    "overlapping parameters": (changed(overlapping), ONE_MEMORY),
    "a buffer over a parameter": (changed(buffer_over_parameter), ONE_MEMORY),
}


@pytest.mark.ranks(1)
@pytest.mark.quick(8)
@EVERY_STAGE
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_sharded_are_refused_by_name(rank: int, stage: int, name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(zeroshard.UsageError, match=message):
        build(stage, make_model=make, make_optimizer=sgd)


def test_sharding_inside_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        assert "inside torch.inference_mode" in refusal(lambda: build(2, make_model=Net))


@pytest.mark.ranks(1)
@EVERY_STAGE
def test_a_sparse_gradient_is_refused_by_name(rank: int, stage: int) -> None:
    model, _ = build(stage, make_model=lambda: nn.Sequential(nn.Embedding(7, 8, sparse=True), nn.Linear(8, 1)))
    with pytest.raises(zeroshard.UsageError, match=r"0\.weight got a sparse gradient.*sparse=False"):
        model(torch.tensor([rank, 2])).sum().backward()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_trained_embeddings_that_a_forward_rescales_are_refused_on_several_ranks(kind: type[nn.Module]) -> None:
    """Each rank would rescale the rows of its own batch, and half of a row where a shard ends."""

    def body(rank: int, is_refused: bool) -> None:
        model = nn.Sequential(kind(23, 4, max_norm=1.0), nn.Linear(4, 1))
        take = partial(build, 2, make_model=lambda: model)
        if is_refused:
            with pytest.raises(zeroshard.UsageError, match=r"0 has max_norm=1\.0.*Pass max_norm=None"):
                take()
            zeroshard.shard(model, None, 2).remove()
            model[0].weight.requires_grad_(False)
        take()

    on_ranks(body, 2, True)
    on_ranks(body, 1, False)


@pytest.mark.ranks(1)
def test_a_batch_norm_of_two_dtypes_is_refused(rank: int) -> None:
    """torch refuses it in the forward, in words that name neither the module nor the remedy."""
    for precision in (
        Precision(torch.bfloat16),
        Precision(torch.bfloat16, buffer_dtype=torch.bfloat16),
        Precision(),
    ):
        layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False)
        take = partial(build, 2, make_model=partial(nn.Sequential, *layers), precision=precision)
        if precision.param_dtype and not precision.buffer_dtype:
            with pytest.raises(zeroshard.UsageError, match=r"1 is a BatchNorm1d.*buffer_dtype"):
                take()
        else:
            model, sharded = take()
            update(model(torch.randn(5, 3, dtype=precision.param_dtype)).float().sum(), sharded.optimizer)


# ------------------------------------------------------------------ buffers, and parameters of unusual memory


@pytest.mark.ranks(2)
def test_buffers_of_every_kind_are_rank_0s_and_keep_their_layout(rank: int) -> None:
    model = Net()
    model.register_buffer("expanded", torch.full((1,), float(rank)).expand(5))
    model.register_buffer("numbers", torch.arange(3) + rank)
    model.register_buffer("flags", torch.tensor([rank == 0]))
    model.register_buffer("scalar", torch.tensor(rank + 1.5))
    model.register_buffer("eighths", torch.full((4,), rank + 1.0).to(torch.float8_e4m3fn))
    model.register_buffer("base", torch.full((3, 4), float(rank + 1)))
    model.register_buffer("transposed", model.base.t())
    model.register_buffer("image", torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last))
    build(2, make_model=lambda: model)
    assert model.expanded.tolist() == [0.0] * 5 and model.numbers.tolist() == [0, 1, 2]
    assert model.flags.item() and model.scalar.item() == 1.5 and model.eighths.float().tolist() == [1.0] * 4
    model.expanded[0] = 1.0
    assert model.expanded.sum() == 1.0, "no two elements share memory"
    assert bool((model.base == 1).all())
    model.base.fill_(7)
    assert bool((model.transposed == 7).all())
    assert model.image.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.ranks(1)
@EVERY_STAGE
def test_buffers_keep_their_dtype_unless_another_is_named(rank: int, stage: int) -> None:
    """Rotary frequencies rounded to bf16 turn positions by other angles."""
    frequencies = 10000.0 ** -torch.linspace(0, 1, 7)
    for dtype in (None, torch.float16):
        make = changed(lambda model: model.register_buffer("frequencies", frequencies.clone()))
        model, _ = build(stage, make_model=make, precision=Precision(torch.bfloat16, buffer_dtype=dtype))
        assert torch.equal(model.frequencies, frequencies.to(dtype or torch.float32))


@pytest.mark.ranks(2)
@EVERY_STAGE
def test_frozen_parameters_of_eight_bits_stay_as_they_are(rank: int, stage: int) -> None:
    """As of a quantized base model."""
    model: Any = Net()
    eighths = torch.arange(3 * WIDTH).view(3, WIDTH).float().to(torch.float8_e4m3fn)
    model.blocks[0].eighths = nn.Parameter(eighths if rank == 0 else eighths.clone().zero_(), requires_grad=False)
    model.blocks[0].register_forward_pre_hook(lambda block, args: (args[0] + block.eighths.float().sum(0),))
    plain = copy.deepcopy(model)
    _, sharded = build(stage, make_model=lambda: model)
    found = model(batch(0, 0))
    if rank == 0:
        assert torch.equal(found, plain(batch(0, 0)))
    update(found, sharded.optimizer)
    kept = whole(model)["blocks.0.eighths"]
    assert kept.dtype == torch.float8_e4m3fn
    assert torch.equal(kept.float(), eighths.float())


@pytest.mark.ranks(2)
def test_parts_of_one_memory_are_no_tie(rank: int) -> None:
    """Rows and columns of one tensor, one Parameter in two modules, and two buffers over one memory."""
    model: Any = Net()
    flat = torch.randn(3 * WIDTH, 4 * WIDTH)
    model.blocks[0].up.weight.data = flat[: 2 * WIDTH, :WIDTH]
    model.blocks[1].up.weight.data = flat[: 2 * WIDTH, WIDTH : 2 * WIDTH]
    model.blocks[2].down.weight.data = flat[2 * WIDTH :, : 2 * WIDTH]
    model.blocks[1].down.weight = model.blocks[0].down.weight
    model.register_buffer("one", torch.zeros(3))
    model.register_buffer("other", model.one[1:])
    step(*build(2, make_model=lambda: model), rank, 0, lambda *of: (batch(*of),))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "policy",
    [Policy.stage(1), Policy.stage(2).offloaded(parameters=Place.CPU), Policy.stage(3)],
    ids=["1", "2, offloaded", "3"],
)
def test_parameters_that_are_views_of_one_tensor_train(rank: int, policy: Policy) -> None:
    """They share a version counter, which also counts zeroshard's own writes to the others."""

    def make() -> nn.Module:
        model: Any = Net()
        flat = torch.randn(3, 2 * WIDTH, WIDTH) / WIDTH
        model.blocks[0].up.weight, model.blocks[1].up.weight = nn.Parameter(flat[0]), nn.Parameter(flat[1])
        model.blocks[0].down.weight = nn.Parameter(flat[2].view(WIDTH, 2 * WIDTH))
        return model

    def run(policy: Policy) -> dict[str, Tensor]:
        model, sharded = build(policy, make_model=make)
        for number in range(4):
            if number == 3:
                with zeroshard.unsharded(model, modifier_rank=0), torch.no_grad():
                    model.blocks[0].up.weight.mul_(1 + rank)
            update(model(batch(rank, number)), sharded.optimizer)
        return whole(model)

    assert same(run(Policy.stage(0)), run(policy))


@torch.jit.script
def scripted(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


class Scripted(Block):
    others: tuple[Any, ...] = ()
    """Other blocks whose parameters it reads, where torch tells no class of them."""

    def forward(self, x: Tensor) -> Tensor:
        y = scripted(x, self.up.weight)
        for other in self.others:
            y = y + scripted(x, other.up.weight)
        return x + self.down(y)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reads_another", [False, True])
def test_a_function_of_torchscript_reads_values_or_is_refused(rank: int, reads_another: bool) -> None:
    model, _ = build(3, make_model=partial(Net, Scripted))
    if reads_another:
        model.blocks[2].others = (model.blocks[0],)
        with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight is sharded at rest.*jit\.script"):  # torch's own
            model(batch(rank, 0))
    else:
        loss = model(batch(rank, 0))
        loss.backward()
        assert loss.isfinite()


# ------------------------------------------------------------------ views that outlive a module's run


class Prompt(nn.Module):
    """Returns a part of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[: x.shape[0]]


class Prompted(Net):
    def __init__(self) -> None:
        super().__init__(Prompt)

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_views_that_modules_return_stay_readable(rank: int, stage: int) -> None:
    def run(stage: int) -> list[Tensor]:
        model, sharded = build(stage, make_model=Prompted, make_optimizer=sgd)
        seen = []
        for number in range(3):
            with torch.no_grad():
                seen.append(model.blocks[0](batch(rank, number)).clone())
            update(model(batch(rank, number)), sharded.optimizer)
        with zeroshard.unsharded(model):
            kept = [parameter.detach() for parameter in model.parameters()]
            seen += [value.clone() for value in kept]
        return seen + [value.clone() for value in kept]  # an alias, read after

    assert all(map(torch.equal, run(0), run(stage)))


def penalised(model: nn.Module, x: Tensor, between: str) -> None:
    """A root's parameter in the loss, outside of any forward; then something that gives units back."""
    loss = model(x) + 0.1 * model.last.weight.square().sum()
    if between == "evaluation":
        with torch.no_grad():
            model(2 * x)
    elif between == "state_dict":
        model.state_dict()
    elif between == "another backward":
        loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("between", ["nothing", "evaluation", "state_dict", "another backward"])
def test_a_roots_parameter_in_the_loss(rank: int, between: str) -> None:
    """It is whole there; where something gives it back before it is read again, torch says so, and nothing is NaN."""

    def run(stage: int) -> dict[str, Tensor]:
        model, sharded = build(stage, make_model=Net, make_optimizer=sgd)
        if stage == 3 and between != "nothing":
            with pytest.raises(RuntimeError, match="inplace operation"):
                penalised(model, batch(rank, 0), between)
            sharded.optimizer.zero_grad()
        for number in range(2):
            penalised(model, batch(rank, number), "nothing")
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
        return whole(model)

    found = run(3)
    assert all(torch.isfinite(value).all() for value in found.values())
    assert same(run(2), found)


# ------------------------------------------------------------------ transforms, copies and graphs of a sharded model


@pytest.mark.ranks(1)
def test_transforms_and_traces_of_a_sharded_model_are_refused_by_name(rank: int) -> None:
    model, _ = build(3, make_model=Net)
    x = batch(rank, 0)
    with pytest.raises(zeroshard.UsageError, match=r"torch\.func.*torch\.autograd\.grad"):
        torch.func.grad(model)(x)
    with pytest.raises(zeroshard.UsageError, match=r"torch\.jit\.trace.*unsharded"):
        torch.jit.trace(model, x)
    with torch.no_grad(), zeroshard.unsharded(model):
        expected = torch.autograd.functional.jacobian(model, x)
        torch.testing.assert_close(torch.func.grad(model)(x), expected)
        assert torch.equal(torch.jit.trace(model, x)(x), model(x))
    assert not any(zeroshard.parameter_states(parameter).is_here for parameter in model.parameters())


@pytest.mark.parametrize("stage", [2, 3])
def test_a_copy_names_nothing_of_zeroshards(stage: int) -> None:
    """It can be unpickled where zeroshard is not installed."""
    model, _ = build(stage, make_model=Net)
    data = pickle.dumps(copy.deepcopy(model))
    assert b"zeroshard" not in data
    assert torch.equal(pickle.loads(data)(batch(0, 0)), model(batch(0, 0)))


@pytest.mark.ranks(2)
def test_a_graph_from_before_remove_leaves_the_model_alone(rank: int) -> None:
    model, sharded = build(3, make_model=Net, make_optimizer=sgd)
    loss = model(batch(rank, 0))
    sharded.remove()
    loss.backward()
    assert all(torch.isfinite(parameter).all() and type(parameter) is nn.Parameter for parameter in model.parameters())
    assert "after remove" in refusal(sharded.optimizer.step)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimised_input_of_a_frozen_model_gathers_no_hooks(rank: int, stage: int) -> None:
    model, _ = build(stage, make_model=lambda: Net().requires_grad_(False), make_optimizer=None)
    x = batch(rank, 0).requires_grad_()
    for forwards in (1, 1, 5):  # all but the last have no backward
        for _ in range(forwards):
            loss = model(x)
        assert len(x._backward_hooks or ()) == (stage == 3)
        loss.backward()
        assert x.grad is not None and not x._backward_hooks


@pytest.mark.ranks(2, fresh=True, collective_timeout=20)
def test_a_forward_whose_graph_is_dropped_holds_nobody_up(rank: int) -> None:
    """Of the forwards that no backward follows, and of the others, each rank takes other side paths."""
    model, sharded = build(3, make_model=Skipping, bucket_numel=600)
    for number in range(3):
        model(*tokens(rank, number + 10))
        step(model, sharded, rank, number)


def forward_and_error(model: Any, x: Tensor) -> BaseException:
    """Run a forward that fails in the last block. Return its error, whose traceback holds the graph."""
    handle = model.blocks[-1].register_forward_hook(lambda *_: 1 / 0)
    try:
        model(x)
    except ZeroDivisionError as error:
        return error
    finally:
        handle.remove()
    raise AssertionError


def seven_blocks() -> nn.Module:
    """More reductions than may be in flight."""
    model = Net()
    model.blocks.extend(Block() for _ in range(4))
    return model


@pytest.mark.ranks(2, fresh=True, collective_timeout=20)
@pytest.mark.parametrize("what", ["an output", "an error", "an output of its own", "a target"])
def test_ranks_may_keep_different_graphs(rank: int, what: str) -> None:
    """Only rank 0 keeps the graphs of forwards that no backward follows."""

    def run(stage: int) -> dict[str, Tensor]:
        model, sharded = build(stage, make_model=seven_blocks, make_optimizer=sgd, bucket_numel=10**6)
        kept: list[object] = []
        for number in range(3):
            x = batch(rank, number)
            loss = model(x)
            if what == "an output of its own":
                with zeroshard.unsharded(model):
                    found: Any = model(2 * x) if rank == 0 else None
            else:
                found = forward_and_error(model, 2 * x) if what == "an error" else model(2 * x)
            if what == "a target":
                loss = (loss - found.detach()).square()
            elif rank == 0:
                kept.append(found)
            del found
            update(loss, sharded.optimizer)
        return whole(model)

    assert same(run(2), run(3))
