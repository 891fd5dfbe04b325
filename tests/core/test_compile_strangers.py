"""Other uses of torch.compile (after `shard`, by the engine, with different names) are correct, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from test_compile import CONFIG, adamw, compiled, kept_code, texts  # noqa: F401
from torch import Tensor, nn

import zeroshard
from zeroshard import Policy, UsageError
from zeroshard.testing.gpt import GPT, GPTConfig

pytestmark = pytest.mark.full

SMALL = GPTConfig(layers=2, width=32, heads=4, context=16)
HOWS = ["wrapped blocks", "blocks in place", "wrapped model", "model in place"]


def make(how: str | None = None, config: GPTConfig = SMALL, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(config)
    return model if how is None else compiled(model, how, **options)


def take_steps(sharded: zeroshard.Sharded, step: Callable[[int], Tensor], steps: int = 3) -> list[Tensor]:
    """Losses, and then the whole parameters."""
    losses = []
    for number in range(steps):
        losses.append(step(number).detach())
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    with zeroshard.unsharded(sharded.model):
        return [torch.stack(losses), *(p.detach().clone() for p in sharded.model.parameters())]


def loop(model: Callable[..., Tensor], rank: int) -> Callable[[int], Tensor]:
    def step(number: int) -> Tensor:
        loss = model(*texts(rank, number))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return step


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ------------------------------------------------------------------ when, and through which door


@pytest.mark.ranks(2, fresh=True, timeout=200)
@pytest.mark.full
def test_compiled_after_shard(rank: int) -> None:
    """As before it; also a step as a whole, whose graphs end where autograd and the optimizer begin."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    before: dict[str, list[Tensor]] = {}
    for stage in (1, 3):
        for how in ("blocks", "model", "step"):
            for late in (False, True):
                model = make()
                whole = model
                way = "wrapped blocks" if how == "blocks" else "wrapped model"
                if not late and how != "step":
                    whole = compiled(model, way, backend="aot_eager")
                sharded = zeroshard.shard(whole, adamw(whole.parameters()), Policy.stage(stage))
                if late and how != "step":
                    whole = compiled(model, way, backend="aot_eager")
                step = loop(whole, rank)
                if how == "step":
                    step = torch.compile(step, backend="aot_eager")
                got = take_steps(sharded, step)
                assert same(got, before.setdefault("any", got)), (stage, how, late)
                sharded.remove()


@pytest.mark.ranks(2, fresh=True, timeout=200)
def test_a_compiled_step_with_the_optimizer_inside(rank: int) -> None:
    """Its graphs end at the hooks of the optimizer's step."""
    results = []
    for stage, compiles in ((0, False), (1, True), (3, True)):
        model = make()
        own = adamw(model.parameters())
        sharded = zeroshard.shard(model, own, stage)

        def step(number: int, model: nn.Module = model, own: torch.optim.Optimizer = own) -> Tensor:
            loss = model(*texts(rank, number))
            loss.backward()
            own.step()
            own.zero_grad()
            return loss.detach()

        taken = torch.compile(step, backend="eager") if compiles else step
        losses = [taken(number) for number in range(3)]
        with zeroshard.unsharded(model):
            results.append([torch.stack(losses), *(p.detach().clone() for p in model.parameters())])
        sharded.remove()
        assert same(results[-1], results[0]), stage


@pytest.mark.ranks(2, fresh=True, timeout=200)
@pytest.mark.full
def test_an_engine_compiles_and_is_compiled(rank: int) -> None:
    results = []
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
            losses = []
            for microbatch in range(6):
                loss = called(*texts(rank, microbatch))
                called.backward(loss)
                called.step()
                losses.append(loss.detach())
            with zeroshard.unsharded(model):
                results.append([torch.stack(losses), *(p.detach().clone() for p in model.parameters())])
            engine.destroy()
            assert same(results[-1], results[0]), (door, stage)


@pytest.mark.ranks(1, fresh=True, timeout=200)
@pytest.mark.full
def test_hooks_of_users_run_as_without_us(rank: int) -> None:
    for how in ("wrapped blocks", "blocks in place"):
        calls: dict[int | None, tuple[list[int], list[int]]] = {}
        for stage in (None, 1, 3):
            torch._dynamo.reset()
            model = make(how, backend="aot_eager")
            whole, part = calls[stage] = [], []
            block = model.get_submodule("blocks")[0]
            block.register_forward_hook(lambda module, args, output, own=whole: own.append(1))
            inner = getattr(block, "_orig_mod", block).norm1
            inner.register_forward_pre_hook(lambda module, args, own=part: own.append(1))
            if stage is None:
                for number in range(3):
                    model(*texts(rank, number)).backward()
            else:
                sharded = zeroshard.shard(model, adamw(model.parameters()), Policy.stage(stage))
                take_steps(sharded, loop(model, rank))
                sharded.remove()
        whole, part = zip(*(calls[stage] for stage in (None, 1, 3)), strict=True)
        assert [len(one) for one in whole] == [3, 3, 3], how
        # Of a hook inside of a graph, plain torch keeps what it did while the graph was made, and no more.
        assert all(len(part[0]) <= len(one) <= 3 for one in part), how


@pytest.mark.ranks(2, fresh=True, timeout=200)
@pytest.mark.full
def test_parts_that_run_alone_in_compiled_functions(rank: int) -> None:
    """`model.head(x)` outside of the model's forward: brought together, also where the function was compiled while it was whole."""
    results = []
    for stage in (0, 3):
        model = make()
        sharded = zeroshard.shard(model, adamw(model.parameters()), Policy.stage(stage))
        score = torch.compile(lambda x, model=model: model.head(x).sin().mean(), backend="aot_eager")
        x = torch.randn(3, SMALL.width, generator=torch.Generator().manual_seed(1))
        with zeroshard.unsharded(model), torch.no_grad():
            score(x)

        def step(number: int, model: nn.Module = model, score: Any = score, x: Tensor = x) -> Tensor:
            loss = model(*texts(rank, number)) + score(x)
            loss.backward()
            return loss

        results.append(take_steps(sharded, step))
        sharded.remove()
    assert same(*results)


@pytest.mark.ranks(2, fresh=True, timeout=200)
@pytest.mark.full
def test_units_are_given_back_under_stage_3(rank: int) -> None:
    """Compiled or not, as much is whole between forward and backward."""
    live = []
    for how in (None, "wrapped blocks", "blocks in place"):
        model = make(how, CONFIG, **({} if how is None else {"backend": "aot_eager"}))
        sharded = zeroshard.shard(model, adamw(model.parameters()), Policy.stage(3))
        for number in range(3):
            loss = model(*texts(rank, number))
            live.append(sharded.memory_report()["parameters"])
            loss.backward()
            live.append(sharded.memory_report()["parameters"])
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
        sharded.remove()
    assert live[:6] == live[6:12] == live[12:], live
    assert live[0] < sum(p.nbytes for p in GPT(CONFIG).parameters()), "a look at all of it sees nothing"


# ------------------------------------------------------------------ names


@pytest.mark.ranks(2, fresh=True, timeout=200)
@pytest.mark.full
@pytest.mark.parametrize("how", [HOWS[0], *(pytest.param(how, marks=pytest.mark.full) for how in HOWS[1:])])
def test_files_of_compiled_models_are_files_of_the_model(rank: int, how: str, tmp_path: Path) -> None:
    plain_names = [name for name, _ in GPT(SMALL).named_parameters()]

    def shard(how: str | None) -> tuple[nn.Module, zeroshard.Sharded]:
        model = make(how, **({} if how is None else {"backend": "eager"}))
        return model, zeroshard.shard(model, adamw(model.parameters()), Policy.stage(3))

    model, sharded = shard(how)
    expected = take_steps(sharded, loop(model, rank))
    sharded.save(tmp_path / "compiled", "end")
    sharded.export(tmp_path / "exported")
    assert set(zeroshard.DistributedState(sharded).state_dict()["model"]) <= set(plain_names)
    for name, own in zip(plain_names, dict(model.named_parameters()), strict=True):
        assert torch.equal(sharded.states.get(name), sharded.states.get(own))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no parameter"):
        sharded.states.get("blocks._orig_mod.7.weight")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    GPT(SMALL).load_state_dict(exported)
    for value, whole in zip(expected[1:], map(exported.get, plain_names), strict=True):
        assert torch.equal(value, whole)  # type: ignore[arg-type]
    sharded.remove()
    again, other = shard(None)
    other.load(tmp_path / "compiled")
    other.save(tmp_path / "plain", "end")
    with zeroshard.unsharded(again):
        assert same(expected[1:], [p.detach().clone() for p in again.parameters()])
    other.remove()
    back, third = shard(how)
    third.load(tmp_path / "plain")
    with zeroshard.unsharded(back):
        assert same(expected[1:], [p.detach().clone() for p in back.parameters()])


@pytest.mark.ranks(2, fresh=True, timeout=200)
@pytest.mark.full
def test_a_folder_of_weights_is_read_into_a_compiled_model(rank: int, tmp_path: Path) -> None:
    model = make()
    sharded = zeroshard.shard(model, adamw(model.parameters()), Policy.stage(2))
    take_steps(sharded, loop(model, rank), steps=1)
    sharded.export(tmp_path / "exported")
    sharded.remove()
    other = make("wrapped blocks", backend="eager")
    assert zeroshard.load_pretrained(other, tmp_path / "exported") == ([], [])
    sharded = zeroshard.shard(other, adamw(other.parameters()), Policy.stage(3))
    with zeroshard.unsharded(other):
        assert same([p.detach() for p in model.parameters()], [p.detach() for p in other.parameters()])


# ------------------------------------------------------------------ refusals


@pytest.mark.ranks(1, fresh=True, timeout=200)
@pytest.mark.parametrize("mode", ["reduce-overhead", pytest.param("max-autotune", marks=pytest.mark.full)])
def test_cuda_graphs_are_refused_by_name(rank: int, mode: str) -> None:
    for how in HOWS:
        model = make(how, mode=mode)
        with pytest.raises(UsageError, match=r"CUDA graphs.*max-autotune-no-cudagraphs"):
            zeroshard.shard(model, adamw(model.parameters()), Policy.stage(rank))
    for stage in (1, 3):
        for how in HOWS:
            model = make()
            sharded = zeroshard.shard(model, adamw(model.parameters()), Policy.stage(stage))
            late = compiled(model, how, mode=mode)
            with pytest.raises(UsageError, match="CUDA graphs"):
                late(*texts(rank, 0))
            step = torch.compile(loop(model, rank), mode=mode)
            with pytest.raises(UsageError, match="CUDA graphs"):
                step(0)
            sharded.remove()


@pytest.mark.ranks(1, fresh=True, timeout=200)
def test_a_graph_of_the_whole_model_is_refused_by_name(rank: int) -> None:
    for how in ("wrapped model", "model in place"):
        model = make(how, backend="eager", fullgraph=True)
        sharded = zeroshard.shard(model, adamw(model.parameters()), Policy.stage(3))
        with pytest.raises(torch._dynamo.exc.Unsupported, match="zeroshard gathers a unit's parameters"):
            model(*texts(rank, 0))
        sharded.remove()


# ------------------------------------------------------------------ beside DDP


@pytest.mark.ranks(2, fresh=True, timeout=200)
@pytest.mark.full
@pytest.mark.parametrize(
    "outside", [pytest.param(False, marks=pytest.mark.full), True], ids=["DDP of compiled", "compiled DDP"]
)
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
            loss = called(*texts(rank, number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if number == 1:
                torch.compiler.set_stance("fail_on_recompile")
        torch.compiler.set_stance("default")
        results.append([torch.stack(losses), *(p.detach().clone() for p in model.parameters())])
    assert same(*results)
    dist.barrier()
