"""What changed in the weights that each rank holds, and a loop that trains and generates in turns."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import gpt2, text
from test_named_weights import MADE, gathered, kept, sent_by, train
from torch import Tensor, nn
from twin import DISK, build, same

import zeroshard
from zeroshard import Offload, Sharded

adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0)
built = partial(build, make_optimizer=adamw, bucket_numel=2000)


# ---------------------------------------------------------------------- changes


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Mixtral", "LoRA over Llama", "tied"])
def test_changes_give_the_full_copy(rank: int, name: str, stage: int, precision: str, tmp_path: Path) -> None:
    """After each hand-over, what all ranks sent gives the full copy to the bit, and in 16 bits it is a small message.

    States may leave in between, as while an engine generates.
    """
    model, sharded = built(stage, make_model=MADE[name][0], precision=precision, make_optimizer=partial(adamw, lr=1e-6))
    version, engine = sharded.weights_version(), kept(sharded.named_weights())
    numel = sum(tensor.numel() for tensor in engine.values())
    for number in range(3):
        if number == 1:
            sharded.offload_states(place=DISK, offload=Offload(str(tmp_path)))
            sharded.reload_states()
        train(name, model, sharded, number)
        everyones = gathered(sent_by(sharded, lambda: list(sharded.changed_since(version))))
        assert not list(sharded.changed_since(version))
        changes = list(itertools.chain.from_iterable(everyones))
        for fqn, index, value in changes:
            engine[fqn].view(-1)[index] = value
        assert same(engine, kept(sharded.named_weights()))
        counts = [index.numel() for _, index, _ in changes]
        assert counts and min(counts) > 0
        if precision == "bf16" and name in ("Llama", "GPT-2", "Mixtral"):
            assert sum(counts) < numel / 10
    sharded.remove()


def test_bits_count_and_a_turn_that_was_left_comes_again() -> None:
    model, sharded = build(2, make_model=lambda: nn.Linear(4, 4, bias=False))
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
    version, engine = sharded.weights_version(), kept(sharded.named_weights())
    sharded.remove()
    _, sharded = build(3, make_model=lambda: model, bucket_numel=5000)
    train("GPT-2", model, sharded, 0)
    for name, index, value in sharded.changed_since(version):
        engine[name].view(-1)[index] = value
    assert same(engine, kept(sharded.named_weights()))
    assert not list(sharded.changed_since(version))
    sharded.remove()


# ---------------------------------------------------------------------- a loop that trains and generates in turns


def copied(make: Callable[[], nn.Module], sharded: Sharded) -> nn.Module:
    """Return an ordinary model with the weights. Buffers of rotary embeddings stay in fp32, as transformers loads them."""
    plain = make().eval()
    for name, tensor in sharded.named_weights():
        plain.get_parameter(name).data = tensor.clone()
    plain.tie_weights()  # type: ignore[operator]
    return plain


def generated(model: Any, prompt: Tensor, count: int, **options: Any) -> Tensor:
    found: Tensor = model.generate(
        prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(prompt),
        **options,
    )  # fmt: skip
    return found


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_each_rank_generates_other_lengths_from_the_model_in_training(
    rank: int, name: str, stage: int, precision: str
) -> None:
    """Inside `unsharded` without other ranks, outside of it with synced_gpus: the tokens are those of a plain copy."""
    model, sharded = built(stage, make_model=MADE[name][0], precision=precision)
    for number in range(2):
        train(name, model, sharded, number)
        model.eval()
        prompt, count = text(rank, number)["input_ids"][: 1 + rank, : 3 + 2 * rank], 3 + 5 * rank
        expected = generated(copied(MADE[name][0], sharded), prompt, count)
        assert expected.shape == (1 + rank, 6 + 7 * rank)
        with zeroshard.unsharded(model), torch.inference_mode():
            assert torch.equal(generated(model, prompt, count), expected)
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
