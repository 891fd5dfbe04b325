"""Models whose backward bypasses their modules' outputs: plain PyTorch's bits at every stage."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from models import sgd
from ranks import on_ranks
from torch import Tensor, nn
from twin import build, update
from unusual import WIDTH, Block, Net, batch

import zeroshard
from zeroshard import Place, Policy, Precision

# ------------------------------------------------------------------ what cannot be sharded, and what leaves no trace


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", range(4))
def test_a_sparse_gradient_is_refused_by_name(rank: int, stage: int) -> None:
    model = nn.Sequential(nn.Embedding(7, 8, sparse=True), nn.Linear(8, 1))
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), Policy.stage(stage))
    with pytest.raises(zeroshard.UsageError, match=r"0\.weight got a sparse gradient.*sparse=False"):
        model(torch.tensor([rank, 2])).sum().backward()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_trained_embeddings_that_a_forward_rescales_are_refused_on_several_ranks(kind: type[nn.Module]) -> None:
    """Each rank would rescale the rows of its own batch, and half of a row where a shard ends."""

    def body(rank: int) -> None:
        model = nn.Sequential(kind(23, 4, max_norm=1.0), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(zeroshard.UsageError, match=r"0 has max_norm=1\.0.*Pass max_norm=None"):
            zeroshard.shard(model, optimizer, Policy.stage(2))
        model[0].weight.requires_grad_(False)
        zeroshard.shard(model, optimizer, Policy.stage(2)).remove()
        model[0].weight.requires_grad_(True)
        zeroshard.shard(model, None, Policy.stage(2))

    on_ranks(body, 2)
    model = nn.Sequential(kind(23, 4, max_norm=1.0), nn.Linear(4, 1))
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), Policy.stage(2))


@pytest.mark.ranks(2)
def test_buffers_of_every_kind_are_rank_0s(rank: int) -> None:
    model = Net()
    model.register_buffer("expanded", torch.full((1,), float(rank)).expand(5))
    model.register_buffer("numbers", torch.arange(3) + rank)
    model.register_buffer("flags", torch.tensor([rank == 0]))
    model.register_buffer("scalar", torch.tensor(rank + 1.5))
    model.register_buffer("eighths", torch.full((4,), rank + 1.0).to(torch.float8_e4m3fn))
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), Policy.stage(2))
    assert model.expanded.tolist() == [0.0] * 5 and model.numbers.tolist() == [0, 1, 2]
    assert model.flags.item() and model.scalar.item() == 1.5 and model.eighths.float().tolist() == [1.0] * 4
    model.expanded[0] = 1.0
    assert model.expanded.sum() == 1.0


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", range(4))
def test_buffers_keep_their_dtype_unless_another_is_named(rank: int, stage: int) -> None:
    """Rotary frequencies rounded to bf16 turn positions by other angles."""
    frequencies = 10000.0 ** -torch.linspace(0, 1, 7)
    for dtype in (None, torch.float16):
        model = Net()
        model.register_buffer("frequencies", frequencies.clone())
        precision = Precision(torch.bfloat16, buffer_dtype=dtype)
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage, precision=precision)
        assert torch.equal(model.frequencies, frequencies.to(dtype or torch.float32))


@pytest.mark.ranks(1)
def test_a_batch_norm_of_two_dtypes_is_refused(rank: int) -> None:
    """torch refuses it in the forward, in words that name neither the module nor the remedy."""
    for precision in (
        Precision(torch.bfloat16),
        Precision(torch.bfloat16, buffer_dtype=torch.bfloat16),
        Precision(),
    ):
        model = torch.nn.Sequential(
            torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4, affine=False)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if precision.param_dtype and not precision.buffer_dtype:
            with pytest.raises(zeroshard.UsageError, match=r"1 is a BatchNorm1d.*buffer_dtype"):
                zeroshard.shard(model, optimizer, 2, precision=precision)
        else:
            zeroshard.shard(model, optimizer, 2, precision=precision)
            model(torch.randn(5, 3, dtype=precision.param_dtype)).float().sum().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimised_input_of_a_frozen_model_gathers_no_hooks(rank: int, stage: int) -> None:
    model = Net().requires_grad_(False)
    zeroshard.shard(model, None, Policy.stage(stage))
    x = batch(rank, 0).requires_grad_()
    counts = []
    for _ in range(4):
        model(x).backward()
        counts.append(len(x._backward_hooks or ()))
    assert counts[-1] == counts[0] == 0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", range(4))
def test_parameters_of_eight_bits_stay_as_they_are(rank: int, stage: int) -> None:
    """As of a quantized base model. torch cannot train them."""

    def model_of(trained: bool) -> nn.Module:
        torch.manual_seed(0)
        model = Net()
        eighths = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank)).to(torch.float8_e4m3fn)
        model.blocks[0].eighths = nn.Parameter(eighths, requires_grad=trained)
        model.blocks[0].register_forward_pre_hook(lambda block, args: (args[0] + block.eighths.float().sum(0),))
        return model

    plain = model_of(False)
    model = model_of(False)
    sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage)
    if rank == 0:
        expected = plain(batch(0, 0))
    found = model(batch(0, 0))
    found.backward()
    sharded.optimizer.step()
    if rank == 0:
        assert torch.equal(found, expected)
    with zeroshard.unsharded(model):
        kept = model.blocks[0].eighths
        assert kept.dtype == torch.float8_e4m3fn
        assert rank > 0 or torch.equal(kept.float(), plain.blocks[0].eighths.float())
    with pytest.raises(zeroshard.UsageError, match=r"blocks\.0\.eighths of torch\.float8_e4m3fn cannot be trained"):
        other = model_of(True)
        zeroshard.shard(other, torch.optim.SGD(other.parameters(), lr=0.1), stage)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", range(4))
def test_a_model_that_is_not_ready_is_refused(rank: int, stage: int) -> None:
    def take(model: nn.Module) -> None:
        zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage)

    with pytest.raises(zeroshard.UsageError, match=r"0\.weight is lazy.*Run the model once"):
        take(nn.Sequential(nn.LazyLinear(4)))
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged)
    for name, kind in (("parameter", nn.Parameter), ("buffer", nn.Buffer)):  # no remedy for quantised weights
        model = nn.Linear(4, 4)
        model.parts = kind(jagged)
        with pytest.raises(zeroshard.UsageError, match=rf"^{name} parts .*dense.*torch\.jagged"):
            take(model)
    with torch.inference_mode():
        with pytest.raises(zeroshard.UsageError, match=r"inside torch\.inference_mode"):
            take(Net())
        model = Net()
    with pytest.raises(zeroshard.UsageError, match=r"first\.weight was made inside torch\.inference_mode"):
        take(model)


def tied_by_data(model: nn.Module) -> None:
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data


def overlapping(model: nn.Module) -> None:
    flat = torch.randn(WIDTH, 3 * WIDTH)
    model.blocks[0].down.weight.data = flat[:, : 2 * WIDTH]
    model.blocks[1].down.weight.data = flat[:, WIDTH:]


def buffer_over_parameter(model: nn.Module) -> None:
    model.register_buffer("table", model.blocks[0].up.weight.detach()[1:])


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("share", [tied_by_data, overlapping, buffer_over_parameter])
def test_two_tensors_over_one_memory_are_refused(rank: int, stage: int, share: Callable[[nn.Module], None]) -> None:
    model = Net()
    share(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(zeroshard.UsageError, match=r"blocks\.0\.\w+\.weight.*they would diverge"):
        zeroshard.shard(model, optimizer, stage)


@pytest.mark.ranks(2)
def test_parts_of_one_memory_are_no_tie(rank: int) -> None:
    """Rows and columns of one tensor, one Parameter in two modules, and two buffers over one memory."""
    model = Net()
    flat = torch.randn(3 * WIDTH, 4 * WIDTH)
    model.blocks[0].up.weight.data = flat[: 2 * WIDTH, :WIDTH]
    model.blocks[1].up.weight.data = flat[: 2 * WIDTH, WIDTH : 2 * WIDTH]
    model.blocks[2].down.weight.data = flat[2 * WIDTH :, : 2 * WIDTH]
    model.blocks[1].down.weight = model.blocks[0].down.weight
    model.register_buffer("one", torch.zeros(3))
    model.register_buffer("other", model.one[1:])
    sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    model(batch(rank, 0)).backward()
    sharded.optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "policy",
    [Policy.stage(1), Policy.stage(2).offloaded(parameters=Place.CPU), Policy.stage(3)],
    ids=["1", "2, offloaded", "3"],
)
def test_parameters_that_are_views_of_one_tensor_train(rank: int, policy: Policy) -> None:
    """They share a version counter, which also counts zeroshard's own writes to the others."""

    def run(policy: Policy) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        flat = torch.randn(3, 2 * WIDTH, WIDTH) / WIDTH
        model.blocks[0].up.weight, model.blocks[1].up.weight = nn.Parameter(flat[0]), nn.Parameter(flat[1])
        model.blocks[0].down.weight = nn.Parameter(flat[2].view(WIDTH, 2 * WIDTH))
        sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters(), lr=0.1), policy)
        for number in range(3):
            update(model(batch(rank, number)), sharded.optimizer)
        with zeroshard.unsharded(model, modifier_rank=0), torch.no_grad():
            model.blocks[0].up.weight.mul_(1 + rank)
        model(batch(rank, 3)).backward()
        sharded.optimizer.step()
        with zeroshard.unsharded(model):
            return [parameter.detach().clone() for parameter in model.parameters()]

    for one, other in zip(run(Policy.stage(0)), run(policy), strict=True):
        assert torch.equal(one, other)


@torch.jit.script
def scripted(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


class Scripted(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(scripted(x, self.up.weight))


class ScriptedReader(Block):
    """Reads another block's parameter where torch tells no class of it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + scripted(scripted(x, self.others[0].up.weight), self.up.weight.t())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reads_another", [False, True])
def test_a_function_of_torchscript_reads_values_or_is_refused(rank: int, reads_another: bool) -> None:
    model = Net(Scripted)
    if reads_another:
        model.blocks[2] = ScriptedReader(model.blocks[0])
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    if reads_another:
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
    def run(policy: Policy) -> list[Tensor]:
        model, sharded = build(policy, make_model=Prompted, make_optimizer=sgd)
        seen = []
        for number in range(3):
            with torch.no_grad():
                seen.append(model.blocks[0](batch(rank, number)).clone())
            update(model(batch(rank, number)), sharded.optimizer)
        with zeroshard.unsharded(model):
            kept = {name: parameter.detach() for name, parameter in model.named_parameters()}
            seen += [value.clone() for value in kept.values()]
        seen += [value.clone() for value in kept.values()]  # an alias, read after
        return seen

    for one, other in zip(run(Policy.stage(0)), run(Policy.stage(stage)), strict=True):
        assert torch.equal(one, other)


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

    def run(stage: int) -> list[Tensor]:
        model, sharded = build(stage, make_model=Net, make_optimizer=sgd)
        if stage == 3 and between != "nothing":
            with pytest.raises(RuntimeError, match="inplace operation"):
                penalised(model, batch(rank, 0), between)
            sharded.optimizer.zero_grad()
        for number in range(2):
            penalised(model, batch(rank, number), "nothing")
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
        with zeroshard.unsharded(model):
            return [parameter.detach().clone() for parameter in model.parameters()]

    for one, other in zip(run(2), run(3), strict=True):
        assert torch.isfinite(other).all() and torch.equal(one, other)


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
    copied = copy.deepcopy(model)
    data = pickle.dumps(copied)
    assert b"zeroshard" not in data
    again = pickle.loads(data)
    assert torch.equal(again(batch(0, 0)), model(batch(0, 0)))


@pytest.mark.ranks(2)
def test_a_graph_from_before_remove_leaves_the_model_alone(rank: int) -> None:
    model, sharded = build(3, make_model=Net, make_optimizer=sgd)
    loss = model(batch(rank, 0))
    sharded.remove()
    loss.backward()
    assert all(torch.isfinite(parameter).all() and type(parameter) is nn.Parameter for parameter in model.parameters())
    with pytest.raises(zeroshard.UsageError, match=r"after remove"):
        sharded.optimizer.step()


class RankBranch(Block):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        x = super().forward(x)
        return x + self.extra(x) if more else x


class Branching(Net):
    def __init__(self) -> None:
        super().__init__(RankBranch)
        self.more = False

    def run(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x, self.more)


@pytest.mark.ranks(2, fresh=True, collective_timeout=20)
def test_a_forward_whose_graph_is_dropped_holds_nobody_up(rank: int) -> None:
    """Rank 0 alone uses a part of each block, after a forward that no backward follows."""
    model = Branching()
    model.more = rank == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = zeroshard.shard(model, optimizer, Policy.stage(3), bucket_numel=600)
    for number in range(3):
        model(batch(rank, number + 10))
        update(model(batch(rank, number)), sharded.optimizer)


def forward_and_error(model: nn.Module, x: Tensor) -> BaseException:
    """Run a forward that fails in the last block. Return its error, whose traceback holds the graph."""
    handle = model.blocks[-1].register_forward_hook(lambda *_: 1 / 0)
    try:
        model(x)
    except ZeroDivisionError as error:
        return error
    finally:
        handle.remove()
    raise AssertionError


@pytest.mark.ranks(2, fresh=True, collective_timeout=20)
@pytest.mark.parametrize("what", ["an output", "an error", "an output of its own", "a target"])
def test_ranks_may_keep_different_graphs(rank: int, what: str) -> None:
    """Only rank 0 keeps the graphs of forwards that no backward follows."""

    def run(stage: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        model.blocks.extend(Block() for _ in range(4))  # more reductions than may be in flight
        sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), stage)
        kept: list[object] = []
        for number in range(3):
            x = batch(rank, number)
            loss = model(x)
            if what == "an output of its own":
                with zeroshard.unsharded(model):
                    found: object = model(2 * x) if rank == 0 else None
            else:
                found = forward_and_error(model, 2 * x) if what == "an error" else model(2 * x)
            if what == "a target":
                loss = (loss - found.detach()).square()
            elif rank == 0:
                kept.append(found)
            del found
            update(loss, sharded.optimizer)
        with zeroshard.unsharded(model):
            return [parameter.detach().clone() for parameter in model.parameters()]

    for one, other in zip(run(2), run(3), strict=True):
        assert torch.equal(one, other)


@pytest.mark.ranks(2)
def test_buffers_that_share_memory_still_do_and_keep_their_layout(rank: int) -> None:
    model = nn.Linear(2, 2)
    base = torch.full((3, 4), float(rank + 1))
    model.register_buffer("base", base)
    model.register_buffer("transposed", base.t())
    model.register_buffer("expanded", torch.full((1,), float(rank + 1)).expand(4))
    model.register_buffer("image", torch.ones(1, 2, 3, 4).to(memory_format=torch.channels_last))
    zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert bool((model.base == 1).all()) and bool((model.expanded == 1).all()), "rank 0's"
    model.base.fill_(7)
    assert bool((model.transposed == 7).all())
    assert model.image.is_contiguous(memory_format=torch.channels_last)
    model.expanded[0] = 9
    assert float(model.expanded[1]) == 1, "no two elements share memory"
