"""Other uses of torch.compile (after `shard`, by the engine, with different names) are correct, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_compile import CONFIG, adamw, compiled, kept_code, texts  # noqa: F401
from torch import Tensor, nn
from twin import LARGE_BUCKETS, build, engine_steps, same, update, whole

import zeroshard
from zeroshard import UsageError
from zeroshard.testing.gpt import GPT, GPTConfig

pytestmark = pytest.mark.full

SMALL = GPTConfig(layers=2, width=32, heads=4, context=16)
HOWS = ["wrapped blocks", "blocks in place", "wrapped model", "model in place"]
ON_TWO_RANKS = pytest.mark.ranks(2, fresh=True, timeout=200)
ON_ONE_RANK = pytest.mark.ranks(1, fresh=True, timeout=200)


def make(how: str | None = None, config: GPTConfig = SMALL, backend: str = "aot_eager", **options: Any) -> Any:
    torch.manual_seed(0)
    model = GPT(config)
    if how is None:
        return model
    return compiled(model, how, **options if "mode" in options else {"backend": backend, **options})


def sharded_of(stage: int, *how: Any, **options: Any) -> tuple[Any, zeroshard.Sharded]:
    """Return what `make` makes of the other arguments, sharded."""
    return build(stage, make_model=partial(make, *how, **options), make_optimizer=adamw, bucket_numel=LARGE_BUCKETS)


def ended(losses: Iterable[Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return what a run ended with: its losses, and the whole parameters in order."""
    return {"losses": torch.stack([*losses])} | {str(n): value for n, value in enumerate(whole(model).values())}


def trained(sharded: zeroshard.Sharded, backward: Callable[[int], Tensor]) -> dict[str, Tensor]:
    """Take three steps on gradients of `backward(number)`, which returns the loss. Remove the sharding."""
    losses = []
    for number in range(3):
        losses.append(backward(number).detach())
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    end = ended(losses, sharded.model)
    sharded.remove()
    return end


def loop(model: Callable[..., Tensor], rank: int) -> Callable[[int], Tensor]:
    def backward(number: int) -> Tensor:
        loss = model(*texts(rank, number))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return backward


# ------------------------------------------------------------------ when, and through which door


@ON_TWO_RANKS
def test_compiled_after_shard(rank: int) -> None:
    """As before it; also a step as a whole, whose graphs end where autograd and the optimizer begin."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    ends = []
    for stage in (1, 3):
        for how in ("wrapped blocks", "wrapped model", "step"):
            for late in (False, True):
                model, sharded = sharded_of(stage, None if late or how == "step" else how)
                if late and how != "step":
                    model = compiled(model, how, backend="aot_eager")
                backward = loop(model, rank)
                ends.append(
                    trained(sharded, torch.compile(backward, backend="aot_eager") if how == "step" else backward)
                )
                assert same(ends[-1], ends[0]), (stage, how, late)


@ON_TWO_RANKS
def test_a_compiled_step_with_the_optimizer_inside(rank: int) -> None:
    """Its graphs end at the hooks of the optimizer's step."""
    ends = []
    for stage, compiles in ((0, False), (1, True), (3, True)):
        model, sharded = sharded_of(stage)

        def step(number: int, model: nn.Module = model, own: Any = sharded.optimizer) -> Tensor:
            return update(model(*texts(rank, number)), own)

        taken = torch.compile(step, backend="eager") if compiles else step
        ends.append(ended([taken(number) for number in range(3)], model))
        sharded.remove()
        assert same(ends[-1], ends[0]), stage


@ON_TWO_RANKS
def test_an_engine_compiles_and_is_compiled(rank: int) -> None:
    ends = []
    for door in ("not at all", "engine.compile", "torch.compile(engine)"):
        for stage in (2, 3):
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 2,
                "gradient_clipping": 1.0,
                "zero_optimization": {"stage": stage},
            }
            model = make()
            engine, *_ = zeroshard.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
            called: Any = engine
            if door == "engine.compile":
                engine.compile(backend="aot_eager")
            elif door == "torch.compile(engine)":
                called = torch.compile(engine, backend="aot_eager")
            ends.append(ended(engine_steps(called, rank, range(6), texts), model))
            engine.destroy()
            assert same(ends[-1], ends[0]), (door, stage)


@ON_ONE_RANK
@pytest.mark.parametrize("how", ["wrapped blocks", "blocks in place"])
def test_hooks_of_users_run_as_without_us(rank: int, how: str) -> None:
    whole_calls, part_calls = [], []
    for stage in (None, 1, 3):
        torch._dynamo.reset()
        model, sharded = (make(how), None) if stage is None else sharded_of(stage, how)
        block = model.blocks[0]
        calls: list[str] = []
        block.register_forward_hook(lambda *_, calls=calls: calls.append("whole"))
        inner = getattr(block, "_orig_mod", block).norm1
        inner.register_forward_pre_hook(lambda *_, calls=calls: calls.append("part"))
        if sharded is None:
            for number in range(3):
                loop(model, rank)(number)
        else:
            trained(sharded, loop(model, rank))
        whole_calls.append(calls.count("whole"))
        part_calls.append(calls.count("part"))
    assert whole_calls == [3, 3, 3]
    # Of a hook inside of a graph, plain torch keeps what it did while the graph was made, and no more.
    assert all(part_calls[0] <= count <= 3 for count in part_calls)


@ON_TWO_RANKS
def test_parts_that_run_alone_in_compiled_functions(rank: int) -> None:
    """`model.head(x)` outside of the model's forward: brought together, also where the function was compiled while it was whole."""
    ends = []
    for stage in (0, 3):
        model, sharded = sharded_of(stage)
        score = torch.compile(lambda x, model=model: model.head(x).sin().mean(), backend="aot_eager")
        x = torch.randn(3, SMALL.width, generator=torch.Generator().manual_seed(1))
        with zeroshard.unsharded(model), torch.no_grad():
            score(x)
        ends.append(trained(sharded, loop(lambda *of, m=model, s=score, x=x: m(*of) + s(x), rank)))
    assert same(*ends)


@ON_TWO_RANKS
def test_units_are_given_back_under_stage_3(rank: int) -> None:
    """Compiled or not, as much is whole between forward and backward."""
    live: list[list[int]] = []
    for how in (None, "wrapped blocks", "blocks in place"):
        model, sharded = sharded_of(3, how, CONFIG)
        live.append([])

        def backward(number: int, model: nn.Module = model, sharded: zeroshard.Sharded = sharded) -> Tensor:
            loss: Tensor = model(*texts(rank, number))
            live[-1].append(sharded.memory_report()["parameters"])
            loss.backward()
            live[-1].append(sharded.memory_report()["parameters"])
            return loss

        trained(sharded, backward)
    assert live[0] == live[1] == live[2], live
    assert live[0][0] < sum(p.nbytes for p in GPT(CONFIG).parameters()), "a look at all of it sees nothing"


# ------------------------------------------------------------------ refusals


@ON_ONE_RANK
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_refused_by_name(rank: int, mode: str) -> None:
    for how in HOWS:
        with pytest.raises(UsageError, match=r"CUDA graphs.*max-autotune-no-cudagraphs"):
            sharded_of(0, how, mode=mode)
    for stage in (1, 3):
        for how in HOWS:
            model, sharded = sharded_of(stage)
            late = compiled(model, how, mode=mode)
            with pytest.raises(UsageError, match="CUDA graphs"):
                late(*texts(rank, 0))
            with pytest.raises(UsageError, match="CUDA graphs"):
                torch.compile(loop(model, rank), mode=mode)(0)
            sharded.remove()


@ON_ONE_RANK
@pytest.mark.parametrize("how", ["wrapped model", "model in place"])
def test_a_graph_of_the_whole_model_is_refused_by_name(rank: int, how: str) -> None:
    model, _ = sharded_of(3, how, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="zeroshard gathers a unit's parameters"):
        model(*texts(rank, 0))


# ------------------------------------------------------------------ beside DDP


@ON_TWO_RANKS
@pytest.mark.parametrize("outside", [False, True], ids=["DDP of compiled", "compiled DDP"])
def test_zero_redundancy_optimizer_beside_a_compiled_ddp(rank: int, outside: bool) -> None:
    results = []
    for ours in (False, True):
        torch._dynamo.reset()
        model = make()
        ddp = nn.parallel.DistributedDataParallel(model if outside else torch.compile(model, backend="aot_eager"))
        called = torch.compile(ddp, backend="aot_eager") if outside else ddp
        optimizer = (
            zeroshard.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
            if ours
            else torch.optim.AdamW(model.parameters(), lr=1e-2)
        )
        losses = []
        for number in range(4):
            losses.append(update(called(*texts(rank, number)), optimizer))
            if number == 1:
                torch.compiler.set_stance("fail_on_recompile")
        torch.compiler.set_stance("default")
        results.append(ended(losses, model))
    assert same(*results)
    dist.barrier()
