"""Weights as each rank holds them: its own parts, what changed in them, and a loop that trains and generates in turns."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, gpt2, llama, text
from insides import settle
from models import MODELS, floats, tokens
from ranks import on_ranks
from torch import Tensor, nn
from twin import ACCELERATOR, CPU, DISK, Setting, as_set, build, offloaded, update

import zeroshard
from zeroshard import Offload, Place, Policy, Sharded, UsageError
from zeroshard.model.weight_shards import WeightShard

adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)
built = partial(build, make_optimizer=adamw, bucket_numel=2000)


def step(model: Any, sharded: Sharded, batch: Callable[[int, int], dict[str, Any]], number: int) -> None:
    update(model(**batch(sharded.rank, number)).loss, sharded.optimizer)


def copied(weights: Iterator[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights}


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


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


MAKERS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    name: FAMILIES[name] for name in ("Llama", "GPT-2", "Mixtral", "LoRA over Llama")
}

# ---------------------------------------------------------------------- shards


@pytest.mark.quick(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("stage", "place"),
    [(0, ACCELERATOR), *((stage, place) for stage in (1, 2, 3) for place in (ACCELERATOR, CPU, DISK))],
)
@pytest.mark.parametrize("name", MAKERS)
def test_all_ranks_parts_are_the_weights(name: str, stage: int, place: Place, precision: str, tmp_path: Path) -> None:
    make, batch = MAKERS[name]

    def body(rank: int, names: str) -> tuple[list[tuple[str, WeightShard]], dict[str, Tensor]]:
        with as_set(Setting(Policy.stage(stage), apart=place is not ACCELERATOR)):
            model, sharded = built(offloaded(stage, place, tmp_path), make_model=make, precision=precision)
            step(model, sharded, batch, 0)
            own = sent_by(sharded, lambda: parts(sharded, names))
            whole = copied(sharded.named_weights(names=names))
            sharded.remove()
        return own, whole

    for names in ("checkpoint", "model"):
        results = on_ranks(body, 2, names)
        found = put_together([own for own, _ in results])
        same(found, results[0][1])
        if stage > 0:  # each rank has about a half
            nbytes = [sum(shard.tensor.nbytes for _, shard in own) for own, _ in results]
            assert max(nbytes) < 0.75 * sum(nbytes)


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_come_once(stage: int) -> None:
    def body(rank: int) -> tuple[list[tuple[str, WeightShard]], dict[str, Tensor]]:
        model, sharded = build(stage, make_model=MODELS["batch norm"])
        model(*floats(0, rank)).backward()
        sharded.optimizer.step()
        own = sent_by(sharded, lambda: parts(sharded))
        return own, copied(sharded.named_weights())

    results = on_ranks(body, 2)
    found = put_together([own for own, _ in results])
    same(found, results[0][1])
    assert found["net.1.running_mean"].any()


@pytest.mark.parametrize("stage", [1, 3])
def test_parameters_without_elements_come_once(stage: int) -> None:
    def body(rank: int) -> tuple[list[tuple[str, WeightShard]], dict[str, Tensor]]:
        model, sharded = build(stage, make_model=MODELS["tied"])
        version = sharded.weights_version()
        update(model(*tokens(rank, 0)), sharded.optimizer)
        own = sent_by(sharded, lambda: parts(sharded))
        assert "blocks.0.empty" not in {name for name, *_ in sharded.changed_since(version)}
        return own, copied(sharded.named_weights())

    results = on_ranks(body, 2)
    found = put_together([own for own, _ in results])
    same(found, results[0][1])
    assert found["blocks.0.empty"].shape == (0, 3)


@pytest.mark.ranks(2)
def test_a_rank_alone_takes_its_own(rank: int) -> None:
    model, sharded = built(3, make_model=llama, precision="bf16")
    if rank == 1:
        version = sharded.weights_version()
        assert version.nbytes == sum(one.tensor.nbytes for _, one in parts(sharded))
        assert not list(sharded.changed_since(version))
    step(model, sharded, text, 0)


def test_an_engine_hands_them_over() -> None:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 3, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }  # fmt: skip
    engine, *_ = zeroshard.initialize(model=llama(), config=config)
    version = engine.weights_version()
    weights = copied(engine.named_weights())
    same(put_together([list(engine.named_weights(shards=True))]), weights)
    engine.backward(engine(**text(0, 0)).loss)
    engine.step()
    for name, index, value in engine.changed_since(version):
        weights[name].view(-1)[index] = value
    same(weights, copied(engine.named_weights()))


def test_what_is_wrong_is_said_at_once() -> None:
    model, sharded = built(3, make_model=llama)
    for wrong in ({"to": 0}, {"merge_adapters": True}):
        with pytest.raises(UsageError, match="Leave out `to` and `merge_adapters`"):
            sharded.named_weights(shards=True, **wrong)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match='Pass "checkpoint" or "model"'):
        sharded.named_weights(names="hub", shards=True)
    model(**text(0, 0)).loss.backward()
    with pytest.raises(UsageError, match=r"optimizer\.step\(\) was called inside .* Call it after the loop"):
        for _ in sharded.named_weights(shards=True):
            sharded.optimizer.step()
    sharded.remove()


# ---------------------------------------------------------------------- changes


@pytest.mark.quick(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", MAKERS)
def test_changes_give_the_full_copy(name: str, stage: int, precision: str) -> None:
    """After each hand-over, what all ranks sent gives the full copy to the bit, and in 16 bits it is a small message."""
    make, batch = MAKERS[name]

    def body(rank: int) -> tuple[dict[str, Tensor], list[list[tuple[str, Tensor, Tensor]]], list[dict[str, Tensor]]]:
        model, sharded = built(stage, make_model=make, precision=precision, make_optimizer=partial(adamw, lr=1e-6))
        version = sharded.weights_version()
        whole = copied(sharded.named_weights())
        changes, expected = [], []
        for number in range(3):
            step(model, sharded, batch, number)
            changes.append(sent_by(sharded, lambda: list(sharded.changed_since(version))))
            assert not list(sharded.changed_since(version))
            expected.append(copied(sharded.named_weights()))
        return whole, changes, expected

    results = on_ranks(body, 2)
    engine = results[0][0]
    numel = sum(tensor.numel() for tensor in engine.values())
    for number in range(3):
        everyone = [one for _, changes, _ in results for one in changes[number]]
        for fqn, index, value in everyone:
            engine[fqn].view(-1)[index] = value
        same(engine, results[0][2][number])
        changed = sum(index.numel() for _, index, _ in everyone)
        assert changed > 0
        if precision == "bf16" and name != "LoRA over Llama":
            assert changed < numel / 10


def test_bits_count_and_a_turn_that_was_left_comes_again() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.0), 2)
    with torch.no_grad():
        model.weight.zero_()
    version = sharded.weights_version()
    with torch.no_grad():
        model.weight[1, 2] = -0.0
        model.weight[0, 1] = float("nan")
    for _ in sharded.changed_since(version):
        break  # the consumer may not have it: all of this part comes again
    ((name, index, value),) = sharded.changed_since(version)
    assert name == "weight" and index.tolist() == list(range(16)) and value[6].signbit() and value[1].isnan()
    assert not list(sharded.changed_since(version))
    with torch.no_grad():
        model.weight[1, 2] = 0.0
    ((_, index, value),) = sharded.changed_since(version)
    assert index.tolist() == [6] and not value.signbit()
    sharded.remove()


def test_a_version_outlives_the_sharding() -> None:
    """Parts that a new sharding cuts in other places come whole."""
    model, sharded = built(2, make_model=gpt2, precision="bf16")
    version = sharded.weights_version()
    engine = copied(sharded.named_weights())
    sharded.remove()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sharded = zeroshard.shard(model, optimizer, 3, bucket_numel=5000)
    step(model, sharded, text, 0)
    for name, index, value in sharded.changed_since(version):
        engine[name].view(-1)[index] = value
    same(engine, copied(sharded.named_weights()))
    assert not list(sharded.changed_since(version))
    sharded.remove()


# ---------------------------------------------------------------------- a loop that trains and generates in turns

STATES = ("parameters", "gradients", "optimizer")


class Engine:
    """Stands for an inference engine in the same process: whole weights, and calls named as vLLM's."""

    def __init__(self, make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
        self.model: Any = make().eval()
        for parameter in self.model.parameters():  # rotary embeddings' buffers stay in fp32, as transformers loads them
            parameter.data = parameter.data.to(dtype)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.model.get_parameter(name).data.copy_(tensor)

    def update(self, changes: list[tuple[str, Tensor, Tensor]]) -> None:
        for name, index, value in changes:
            self.model.get_parameter(name).data.view(-1)[index] = value

    def generate(self, prompt: Tensor, count: int) -> Tensor:
        return generated(self.model, prompt, count)


def generated(model: Any, prompt: Tensor, count: int, **options: Any) -> Tensor:
    found: Tensor = model.generate(
        prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(prompt),
        **options,
    )  # fmt: skip
    return found


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("place", [CPU, DISK])
def test_states_that_leave_while_an_engine_generates_return_to_the_bit(
    rank: int, place: Place, stage: int, precision: str, tmp_path: Path
) -> None:
    """All memory of the model states is given back, as memory_report counts it, and the training goes on as without."""

    def train(rank: int, *, parks: bool) -> list[Tensor]:
        model, sharded = built(stage, make_model=llama, precision=precision)
        engine = Engine(llama, torch.bfloat16 if precision == "bf16" else torch.float32)
        engine.load_weights(sharded.named_weights())
        version = sharded.weights_version()
        found = []
        for number in range(3):
            states = [(n, s) for n, _ in model.named_parameters() for s in sharded.states.names(n) if s != "gradients"]

            def bits(states: list[tuple[str, str]] = states) -> list[Tensor]:
                return [part.tensor.clone() for name, state in states for part in sharded.states.local(name, state)]

            if parks:
                settle(sharded)
                before, kept = sharded.memory_report(), bits()
                freed = sharded.offload_states(place=place, offload=Offload(str(tmp_path)))
                during = sharded.memory_report()
                at_rest = sum(before[one] for one in STATES)
                assert during["parameters"] == during["gradients"] == 0
                assert during["optimizer"] <= at_rest / 100  # step counts, and an element of each parked tensor
                assert at_rest * 0.99 <= freed <= at_rest
            found.append(engine.generate(text(rank, number)["input_ids"][:1, : 3 + rank], 4 + 3 * rank))
            if parks:
                sharded.reload_states()
                after = sharded.memory_report()
                assert [after[one] for one in STATES] == [before[one] for one in STATES]
                assert all(torch.equal(one, other) for one, other in zip(kept, bits(), strict=True))
            step(model, sharded, text, number)
            everyone: list[Any] = [None] * sharded.world_size
            torch.distributed.all_gather_object(everyone, list(sharded.changed_since(version)))
            for changes in everyone:
                engine.update(changes)
            for name, tensor in sharded.named_weights():
                assert torch.equal(engine.model.get_parameter(name), tensor)
                found.append(tensor.clone())
        sharded.remove()
        return found

    with as_set(Setting(Policy.stage(stage), apart=place is CPU)):
        plain, parked = train(rank, parks=False), train(rank, parks=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, parked, strict=True))


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_each_rank_generates_other_lengths_from_the_model_in_training(
    rank: int, make: Callable[[], nn.Module], stage: int, precision: str
) -> None:
    """Inside `unsharded` without other ranks, outside of it with synced_gpus: the tokens are those of a plain copy."""
    model, sharded = built(stage, make_model=make, precision=precision)
    for number in range(2):
        step(model, sharded, text, number)
        model.eval()
        plain = Engine(make, model.dtype)
        plain.load_weights(sharded.named_weights())
        prompt, count = text(rank, number)["input_ids"][: 1 + rank, : 3 + 2 * rank], 3 + 5 * rank
        expected = plain.generate(prompt, count)
        assert expected.shape == (1 + rank, 6 + 7 * rank)
        with zeroshard.unsharded(model):
            alone = generated(model, prompt, count)
        assert torch.equal(alone, expected)
        assert torch.equal(generated(model, prompt, count, synced_gpus=True), expected)
        model.train()
    sharded.remove()


@pytest.mark.full
def test_the_example_learns(tmp_path: Path) -> None:
    """At its end it compares the engine's weights with the model's."""
    root = Path(__file__).parents[2]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = dict(os.environ, PYTHONPATH=str(root), OMP_NUM_THREADS="1")
    done = subprocess.run(
        [*launcher, str(root / "examples" / "grpo.py")], capture_output=True, text=True, check=False, timeout=300,
        cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rewards = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(rewards) == 20 and rewards[0] < 0.1 and rewards[-1] > 0.5
