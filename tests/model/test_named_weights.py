"""Weights that are yielded unit by unit: an export's names and values, bounded memory, and loops that ranks leave early."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, llama, text
from insides import settle, transport_of, units
from models import MODELS, Stack, floats, tokens
from ranks import RankError, on_ranks, run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from twin import ACCELERATOR, CPU, DISK, Setting, as_set, build, gpt_batch, offloaded, step, update

import zeroshard
from zeroshard import Place, Policy, Precision, Sharded, UsageError
from zeroshard.testing.gpt import GPT, GPTConfig

SMALL = GPTConfig(layers=2, width=64, heads=2, context=16)
DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def kept(weights: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copy all that is handed over; no name comes twice."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights:
        assert name not in found
        found[name] = tensor.clone()
    return found


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


# ---------------------------------------------------------------------- names and values


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("stage", "place"),
    [(0, ACCELERATOR), *((stage, place) for stage in (1, 2, 3) for place in (ACCELERATOR, CPU, DISK))],
)
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_they_are_those_of_from_pretrained(
    rank: int, name: str, stage: int, place: Place, precision: str, tmp_path: Path
) -> None:
    make, batch = FAMILIES[name]
    with as_set(Setting(Policy.stage(stage), apart=place is not ACCELERATOR)):
        model, sharded = build(
            offloaded(stage, place, tmp_path), make_model=make, precision=precision, bucket_numel=2000
        )
        for number in range(2):
            update(model(**batch(rank, number)).loss, sharded.optimizer)
        found, given = kept(sharded.named_weights()), kept(sharded.named_weights(to=1))
        sharded.export(tmp_path / "out", DTYPES[precision])
    same(found, load_file(tmp_path / "out" / "model.safetensors"))
    loaded = type(model).from_pretrained(tmp_path / "out", dtype="auto")
    state = loaded.state_dict()
    tied = {n for n, _ in loaded.named_parameters(remove_duplicate=False)} - set(dict(loaded.named_parameters()))
    same(found, {n: tensor for n, tensor in state.items() if n not in tied})
    same(given, found if rank == 1 else {})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_are_among_them(rank: int, stage: int, tmp_path: Path) -> None:
    model, sharded = build(stage, make_model=MODELS["batch norm"])
    model(*floats(0, 0)).backward()
    sharded.optimizer.step()
    found = kept(sharded.named_weights())
    sharded.export(tmp_path / "out")
    same(found, load_file(tmp_path / "out" / "model.safetensors"))
    assert found["net.1.running_mean"].any()


def adapted(**options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
        | options
    )
    model: nn.Module = get_peft_model(llama(), config)  # type: ignore[arg-type]
    return model


ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "DoRA": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "a trained head": {"modules_to_save": ["lm_head"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "a few tokens": {"trainable_token_indices": [3, 5]},
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_are_merged_as_peft_merges_them(kind: str, stage: int, precision: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", minversion="0.15" if kind == "a few tokens" else None)

    def body(rank: int) -> None:
        from peft import PeftModel

        model, sharded = build(
            stage, make_model=lambda: adapted(**ADAPTERS[kind]), precision=precision, bucket_numel=2000
        )
        for number in range(2):
            update(model(**text(rank, number)).loss, sharded.optimizer)
        before = {name: sharded.states.get(name).clone() for name, _ in model.named_parameters()}
        merged, own = kept(sharded.named_weights(merge_adapters=True)), kept(sharded.named_weights())
        sharded.export(tmp_path / "out", DTYPES[precision])
        same(own, load_file(tmp_path / "out" / "adapter_model.safetensors"))
        torch.manual_seed(0)
        base = llama().to(DTYPES[precision])
        loaded = PeftModel.from_pretrained(base, tmp_path / "out", autocast_adapter_dtype=False)
        same(merged, loaded.merge_and_unload().state_dict())
        assert not torch.equal(merged["model.layers.0.self_attn.q_proj.weight"], before[Q_PROJ].to(DTYPES[precision]))
        same({name: sharded.states.get(name) for name in before}, before)

    on_ranks(body, 2)


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"


def test_what_cannot_be_merged_is_named() -> None:
    peft = pytest.importorskip("peft")

    def prompts() -> nn.Module:
        model: nn.Module = peft.get_peft_model(
            llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        )
        return model

    _, sharded = build(3, make_model=prompts)
    with pytest.raises(UsageError, match=r"prompt_encoder\.default\..* that PEFT does not merge into weights"):
        kept(sharded.named_weights(merge_adapters=True))
    with pytest.raises(UsageError, match=r"the adapters cannot be handed over .*PROMPT_TUNING.*merge_adapters=True"):
        kept(sharded.named_weights())
    sharded.remove()


def test_adapters_with_names() -> None:
    peft = pytest.importorskip("peft")

    def two() -> nn.Module:
        model: Any = adapted()
        model.add_adapter("french", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
        model.set_adapter("french")
        return model

    model, sharded = build(2, make_model=two)
    inner = "base_model.model.model.layers.0.self_attn.q_proj.lora_A"
    own = kept(sharded.named_weights())
    assert torch.equal(own[f"french/{inner}.weight"], model.get_parameter(f"{inner}.french.weight"))
    assert torch.equal(own[f"{inner}.weight"], model.get_parameter(f"{inner}.default.weight"))
    merged = kept(sharded.named_weights(merge_adapters=True))
    sharded.remove()
    same(merged, model.merge_and_unload().state_dict())  # that which is active


# ---------------------------------------------------------------------- memory


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("stage", [2, 3])
def test_at_most_the_shards_and_two_units(rank: int, stage: int) -> None:
    model, sharded = build(stage, make_model=lambda: GPT(SMALL))
    for number in range(1):
        update(model(*gpt_batch(rank, number)), sharded.optimizer)
    settle(sharded)
    largest = max(unit.flat.tensor.nbytes for unit in units(sharded))
    at_rest = sharded.memory_report()

    def look() -> int:
        assert sum(unit.sharded_at_rest and unit.flat.nbytes > 0 for unit in units(sharded)) == (stage == 3)
        return sum(sharded.memory_report().values()) - sum(at_rest.values())

    seen = [look() for _ in sharded.named_weights()]
    assert max(seen) <= 2 * largest
    after = sharded.memory_report()
    assert {**after, "buffers": 0} == {**at_rest, "buffers": 0}
    sharded.remove()


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_messages_are_those_of_one_forward(rank: int, stage: int, precision: str, transport: str) -> None:
    """Each unit is gathered once, in as many calls and bytes as a forward without gradients gathers all. Stage 2 sends nothing."""
    model, sharded = build(stage, precision=Precision(DTYPES[precision]), make_model=lambda: GPT(SMALL))
    collectives: Any = transport_of(sharded)
    calls: list[tuple[int, ...]] = []
    gather = collectives.all_gather

    def count(rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tuple(rows.shape))
        return gather(rows, *args, **kwargs)

    def taken(run: Callable[[], object]) -> tuple[Counter[str], list[tuple[int, ...]]]:
        calls.clear()
        sharded.comm_report()
        run()
        settle(sharded)
        sent = Counter(sharded.comm_report())
        del sent["exchange"]  # a byte a unit, by which ranks agree to go on
        return sent, sorted(calls)

    with torch.no_grad():
        model(*gpt_batch(rank, 0))  # the first finds the order of units
        collectives.all_gather = count
        forward = taken(lambda: model(*gpt_batch(rank, 0)))
    handed_over = taken(lambda: kept(sharded.named_weights()))
    assert handed_over == forward
    assert bool(forward[1]) == (stage == 3)
    sharded.remove()


@pytest.mark.ranks(2, fresh=True)
def test_what_is_kept_stays(rank: int, transport: str) -> None:
    """A list of all tensors is the whole model: units give back what nobody looks at."""
    model, sharded = build(3)
    step(model, sharded, rank, 0)
    listed = dict(sharded.named_weights())
    same(listed, {name: sharded.states.get(name) for name in listed})


# ---------------------------------------------------------------------- loops that end early


def trained_after(rank: int, leave: Callable[[Sharded], object]) -> Tensor:
    """Return the losses of a training in which the weights are handed over between two steps."""
    model, sharded = build(int(os.environ["STAGE"]))
    losses = []
    for number in range(3):
        loss = model(*tokens(rank, number))
        update(loss, sharded.optimizer)
        losses.append(loss.detach())
        if number == 0:
            leave(sharded)
    return torch.stack(losses)


@pytest.fixture(params=[0, 2, 3])
def stage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("STAGE", str(request.param))
    return int(request.param)


@pytest.mark.ranks(2, fresh=True)
def test_every_rank_may_leave_early(rank: int, stage: int, transport: str) -> None:
    def breaks(sharded: Sharded) -> None:
        for name, _ in sharded.named_weights():
            if name.startswith("blocks.1"):
                break

    def raises(sharded: Sharded) -> None:
        with pytest.raises(ZeroDivisionError):
            for name, _ in sharded.named_weights():
                assert 1 // (not name.startswith("blocks.1"))

    def receiver_breaks(sharded: Sharded) -> None:
        turns = 0
        for turns, _ in enumerate(sharded.named_weights(to=1), start=1):
            if turns == 8:
                break
        assert turns == 8 * sharded.rank

    def at_the_last(sharded: Sharded) -> None:
        weights = sharded.named_weights()
        for number, _ in enumerate(weights, start=1):
            if sharded.rank == 0 and number == len(dict(sharded.model.named_parameters())):
                break

    expected = trained_after(rank, lambda sharded: None)
    for leave in (breaks, raises, receiver_breaks, at_the_last, lambda sharded: kept(sharded.named_weights())):
        assert torch.equal(trained_after(rank, leave), expected)


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("how", ["break", "exception"])
def test_one_rank_that_leaves_is_named(rank: int, how: str, transport: str) -> None:
    model, sharded = build(3)
    handed: list[str] = []

    def consume() -> None:
        for name, _ in sharded.named_weights():
            handed.append(name)
            if rank == 1 and name.startswith("blocks.0"):
                if how == "break":
                    break
                raise ValueError("the consumer's own")

    if rank == 0:
        with pytest.raises(UsageError, match=r"ranks \[1\] .*left the loop over named_weights\(\) after .*Leave it on"):
            consume()
    elif how == "break":
        consume()
    else:
        with pytest.raises(ValueError, match="the consumer's own"):
            consume()
    step(model, sharded, rank, 0)  # nobody waits, and nothing is held


def test_a_rank_alone(transport: str) -> None:
    """Where nothing is sharded at rest, or is held whole, it needs no other rank; else the error names the loop."""

    def right(rank: int) -> None:
        for stage in (0, 1, 2, 3):
            model, sharded = build(stage)
            step(model, sharded, rank, 0)
            expected = {name: sharded.states.get(name).clone() for name, _ in model.named_parameters()}
            if stage == 3:
                with zeroshard.unsharded(model):
                    if rank == 1:
                        same(kept(sharded.named_weights()), expected)
            elif rank == 1:
                same(kept(sharded.named_weights()), expected)
            step(model, sharded, rank, 1)

    run_ranks(right, 2)

    if transport == "gloo":  # there the timeout ends it
        return

    def refused(rank: int) -> None:
        model, sharded = build(3)
        if rank == 1:
            kept(sharded.named_weights())
        else:
            step(model, sharded, rank, 0)

    with pytest.raises(RankError, match=r"named_weights\(\)"):
        run_ranks(refused, 2)


# ---------------------------------------------------------------------- what a consumer may not do


@pytest.mark.ranks(2)
def test_writes_are_refused(rank: int) -> None:
    for stage in (3, 2):
        model, sharded = build(stage)
        before = {name: sharded.states.get(name).clone() for name, _ in model.named_parameters()}
        with pytest.raises(UsageError, match="parameters were changed inside unsharded"):
            for _, tensor in sharded.named_weights():
                tensor.zero_()
        if stage == 3:
            same({name: sharded.states.get(name) for name in before}, before)
            same(kept(sharded.named_weights()), before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_inside_is_refused(rank: int, stage: int) -> None:
    model, sharded = build(stage)
    model(*tokens(rank, 0)).backward()
    with pytest.raises(UsageError, match=r"optimizer\.step\(\) (was called )?inside .*loop over named_weights\(\)"):
        for _ in sharded.named_weights():
            sharded.optimizer.step()


def test_what_is_wrong_is_said_at_once() -> None:
    _, sharded = build(3)
    with pytest.raises(UsageError, match=r"named_weights\(to=1\): the ranks are 0 to 0"):
        sharded.named_weights(to=1)
    weights = sharded.named_weights()
    next(weights)
    with pytest.raises(
        UsageError, match=r"remove\(\) was called inside zeroshard\.unsharded\(\) or a loop over named_weights\(\)"
    ):
        sharded.remove()
    weights.close()  # type: ignore[attr-defined]
    sharded.remove()


@pytest.mark.ranks(2)
def test_an_engine_hands_them_over(rank: int) -> None:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW"},
    }
    engine, *_ = zeroshard.initialize(model=Stack(), config=config)
    names = sorted(name for name, _ in engine.named_weights(to=0))
    assert names == (sorted(dict(engine.module.named_parameters())) if rank == 0 else [])
