"""Weights that are yielded unit by unit, whole or as each rank holds them: an export's names and values, and bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES, llama, text
from insides import settle, transport_of, units
from models import MODELS, Stack, floats, tokens
from ranks import RankError, on_ranks, run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from twin import (
    ACCELERATOR,
    CPU,
    DISK,
    Setting,
    as_set,
    build,
    engine_steps,
    gpt_batch,
    offloaded,
    same,
    step,
    steps,
    update,
)

import zeroshard
from zeroshard import Place, Policy, Sharded, UsageError
from zeroshard.model.weight_shards import WeightShard
from zeroshard.testing.gpt import GPT, GPTConfig

DTYPES = {"fp32": None, "bf16": torch.bfloat16}


def kept(weights: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copy all that is handed over; no name comes twice."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights:
        assert name not in found
        found[name] = tensor.clone()
    return found


MADE: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    **{name: FAMILIES[name] for name in ("Llama", "GPT-2", "T5", "Mixtral", "LoRA over Llama")},
    "batch norm": (MODELS["batch norm"], floats),
    "tied": (MODELS["tied"], tokens),
}
"""Models, with what makes their batches."""


def train(name: str, model: Any, sharded: Sharded, number: int) -> None:
    """Take a step on this rank's batch with that number."""
    batch = MADE[name][1](sharded.rank, number)
    if isinstance(batch, dict):
        loss = model(**batch).loss
    else:
        dtype = next(model.parameters()).dtype
        loss = model(*(one.to(dtype) if one.is_floating_point() else one for one in batch))
    update(loss, sharded.optimizer)


def sent_by(sharded: Sharded, act: Callable[[], Any]) -> Any:
    """Return what `act` returns. It must not send a byte, not even one that counts as control."""
    settle(sharded)
    sharded.comm_report()
    result = act()
    settle(sharded)
    assert not any(sharded.comm_report().values())
    return result


def parts(sharded: Sharded, names: str = "checkpoint") -> list[tuple[str, WeightShard]]:
    """Copy this rank's parts to ordinary tensors, as a message would."""
    return [
        (name, WeightShard(one.tensor.clone(), one.shape, one.offset, one.strides))
        for name, one in sharded.named_weights(names=names, shards=True)
    ]


def put_together(everyone: list[list[tuple[str, WeightShard]]]) -> dict[str, Tensor]:
    """Build whole weights from all ranks' parts, which must cover each element once."""
    found: dict[str, Tensor] = {}
    times: dict[str, Tensor] = {}
    for name, shard in (pair for one in everyone for pair in one):
        whole = found.setdefault(name, torch.empty(shard.shape, dtype=shard.tensor.dtype))
        assert whole.shape == shard.shape
        shard.view_in(whole).copy_(shard.tensor)
        shard.view_in(times.setdefault(name, torch.zeros(shard.shape, dtype=torch.int32))).add_(1)
        assert torch.equal(whole.view(-1)[shard.index()], shard.tensor.reshape(-1))
    assert all(bool((count == 1).all()) for count in times.values())
    return found


# ---------------------------------------------------------------------- names and values


def gathered(value: Any) -> list[Any]:
    """Return every rank's value."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


@pytest.mark.ranks(2)
@pytest.mark.quick(5)
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(
    ("stage", "place"),
    [(0, ACCELERATOR), *((stage, place) for stage in (1, 2, 3) for place in (ACCELERATOR, CPU, DISK))],
)
@pytest.mark.parametrize("name", MADE)
def test_they_are_the_file_of_an_export_and_all_ranks_parts(
    rank: int, name: str, stage: int, place: Place, precision: str, tmp_path: Path
) -> None:
    """Also of buffers, and of parameters without elements. For their parts, ranks send no byte."""
    with as_set(Setting(Policy.stage(stage), apart=place is not ACCELERATOR)):
        # torch requires one dtype of a BatchNorm's weights and buffers.
        trained_in = "bf16, buffers too" if (name, precision) == ("batch norm", "bf16") else precision
        model, sharded = build(
            offloaded(stage, place, tmp_path), make_model=MADE[name][0], precision=trained_in, bucket_numel=2000
        )
        for number in range(2):
            train(name, model, sharded, number)
        everyones = {
            names: gathered(sent_by(sharded, partial(parts, sharded, names))) for names in ("checkpoint", "model")
        }
        found, given = kept(sharded.named_weights()), kept(sharded.named_weights(to=1))
        in_memory = kept(sharded.named_weights(names="model"))
        sharded.export(tmp_path / "out", DTYPES[precision])
    if name != "batch norm" or rank == 0:  # each rank has its own buffers, and the first rank's count
        assert same(found, load_file(next((tmp_path / "out").glob("*.safetensors"))))
        for names, expected in (("checkpoint", found), ("model", in_memory)):
            assert same(put_together(everyones[names]), expected)
    assert same(given, found if rank == 1 else {})
    if stage > 0 and name not in ("batch norm", "tied"):  # each rank has about a half
        nbytes = [sum(shard.tensor.nbytes for _, shard in own) for own in everyones["model"]]
        assert max(nbytes) < 0.75 * sum(nbytes)
    sharded.remove()


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
@pytest.mark.parametrize("precision", DTYPES)
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
        assert same(own, load_file(tmp_path / "out" / "adapter_model.safetensors"))
        torch.manual_seed(0)
        base = llama().to(DTYPES[precision])
        loaded = PeftModel.from_pretrained(base, tmp_path / "out", autocast_adapter_dtype=False)
        assert same(merged, loaded.merge_and_unload().state_dict())
        assert not torch.equal(merged["model.layers.0.self_attn.q_proj.weight"], before[Q_PROJ].to(DTYPES[precision]))
        assert same({name: sharded.states.get(name) for name in before}, before)

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
    assert same(merged, model.merge_and_unload().state_dict())  # that which is active


# ---------------------------------------------------------------------- memory


def small() -> nn.Module:
    return GPT(GPTConfig(layers=2, width=64, heads=2, context=16))


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("stage", [2, 3])
def test_at_most_the_shards_and_two_units(rank: int, stage: int) -> None:
    model, sharded = build(stage, make_model=small)
    step(model, sharded, rank, 0, gpt_batch)
    settle(sharded)
    largest = max(unit.flat.tensor.nbytes for unit in units(sharded))
    at_rest = sharded.memory_report()
    for _ in sharded.named_weights():
        assert sum(unit.sharded_at_rest and unit.flat.nbytes > 0 for unit in units(sharded)) == (stage == 3)
        assert sum(sharded.memory_report().values()) - sum(at_rest.values()) <= 2 * largest
    after = sharded.memory_report()
    assert {**after, "buffers": 0} == {**at_rest, "buffers": 0}
    sharded.remove()


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("precision", DTYPES)
def test_the_messages_are_those_of_one_forward(rank: int, stage: int, precision: str, transport: str) -> None:
    """Each unit is gathered once, in as many calls and bytes as a forward without gradients gathers all. Stage 2 sends nothing."""
    model, sharded = build(stage, precision=precision, make_model=small)
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
    assert taken(lambda: kept(sharded.named_weights())) == forward
    assert bool(forward[1]) == (stage == 3)
    sharded.remove()


@pytest.mark.ranks(2, fresh=True)
def test_what_is_kept_stays(rank: int, transport: str) -> None:
    """A list of all tensors is the whole model: units give back what nobody looks at."""
    model, sharded = build(3)
    step(model, sharded, rank, 0)
    listed = dict(sharded.named_weights())
    assert same(listed, {name: sharded.states.get(name) for name in listed})


# ---------------------------------------------------------------------- loops that end early


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


def one_breaks_at_the_last(sharded: Sharded) -> None:
    for number, _ in enumerate(sharded.named_weights(), start=1):
        if sharded.rank == 0 and number == len(dict(sharded.model.named_parameters())):
            break


def takes_all(sharded: Sharded) -> None:
    kept(sharded.named_weights())


@pytest.mark.ranks(2, fresh=True)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_rank_may_leave_early(rank: int, stage: int, transport: str) -> None:
    """Between two steps, which are those of a training without it."""
    losses = []
    for leave in (None, breaks, raises, receiver_breaks, one_breaks_at_the_last, takes_all):
        model, sharded = build(stage)
        losses.append(steps(model, sharded, rank, [0]))
        if leave is not None:
            leave(sharded)
        losses[-1] += steps(model, sharded, rank, [1, 2])
    assert all(one == losses[0] for one in losses)


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


@pytest.mark.ranks(2)
def test_a_rank_alone_takes_what_it_holds(rank: int, transport: str) -> None:
    """Where nothing is sharded at rest, or is held whole, it needs no other rank; nor does it for its own parts."""
    for stage in (0, 1, 2, 3):
        model, sharded = build(stage)
        step(model, sharded, rank, 0)
        expected = {name: sharded.states.get(name).clone() for name, _ in model.named_parameters()}
        with zeroshard.unsharded(model) if stage == 3 else nullcontext():
            if rank == 1:
                assert same(kept(sharded.named_weights()), expected)
        if rank == 1:
            version = sharded.weights_version()
            assert version.nbytes == sum(one.tensor.nbytes for _, one in parts(sharded))
            assert not list(sharded.changed_since(version))
        step(model, sharded, rank, 1)


def test_a_rank_alone_in_the_loop_is_named() -> None:
    def body(rank: int) -> None:
        model, sharded = build(3)
        if rank == 1:
            kept(sharded.named_weights())
        else:
            step(model, sharded, rank, 0)

    with pytest.raises(RankError, match=r"named_weights\(\)"):
        run_ranks(body, 2)


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
            assert same({name: sharded.states.get(name) for name in before}, before)
            assert same(kept(sharded.named_weights()), before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_inside_is_refused(rank: int, stage: int, shards: bool) -> None:
    model, sharded = build(stage)
    model(*tokens(rank, 0)).backward()
    with pytest.raises(UsageError, match=r"optimizer\.step\(\) (was called )?inside .*loop over named_weights\("):
        for _ in sharded.named_weights(shards=shards):
            sharded.optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"to": 1}, r"named_weights\(to=1\): the ranks are 0 to 0"),
        ({"to": 0, "shards": True}, "Leave out `to` and `merge_adapters`"),
        ({"merge_adapters": True, "shards": True}, "Leave out `to` and `merge_adapters`"),
        ({"names": "hub"}, r'names=.hub.*Pass "checkpoint" or "model"'),
        ({"names": "hub", "shards": True}, 'Pass "checkpoint" or "model"'),
    ],
)
def test_what_is_wrong_is_said_at_once(arguments: dict[str, Any], told: str) -> None:
    _, sharded = build(3)
    with pytest.raises(UsageError, match=told):
        sharded.named_weights(**arguments)


def test_an_open_loop_is_named() -> None:
    _, sharded = build(3)
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
        "train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }  # fmt: skip
    engine, *_ = zeroshard.initialize(model=Stack(), config=config)
    version, weights = engine.weights_version(), kept(engine.named_weights())
    assert weights.keys() == dict(engine.module.named_parameters()).keys()
    assert kept(engine.named_weights(to=0)).keys() == (weights.keys() if rank == 0 else set())
    assert same(put_together(gathered(list(engine.named_weights(shards=True)))), weights)
    engine_steps(engine, rank, [0])
    for changes in gathered(list(engine.changed_since(version))):
        for name, index, value in changes:
            weights[name].view(-1)[index] = value
    assert same(weights, kept(engine.named_weights()))
