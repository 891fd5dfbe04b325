"""Stage 3 on the model families that people train, and on uses of these models other than training."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from families import FAMILIES, compare, llama, lora, text
from ranks import on_ranks
from twin import build, same, update, whole


@pytest.fixture(autouse=True, scope="module")
def _imported_once() -> None:
    """The forked ranks find what takes seconds to import."""
    import peft  # noqa: F401
    import transformers

    transformers.logging.set_verbosity_error()


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "family",
    [
        family if family in ("Llama", "Mixtral", "LoRA over Llama") else pytest.param(family, marks=pytest.mark.full)
        for family in FAMILIES
    ],
)
def test_families_are_bit_equal(family: str, ranks: int) -> None:
    for outcome in on_ranks(compare, ranks, family):
        # These two give other gradients when they are checkpointed, on one process, without any sharding.
        changes = outcome.pop("checkpointing changes nothing")
        assert changes or family in ("GPT-2", "T5")
        assert outcome == dict.fromkeys(outcome, True)


@pytest.mark.ranks(2)
def test_evaluation_through_inner_modules(rank: int) -> None:
    results = []
    for stage in (0, 3):
        model, sharded = build(stage, make_model=llama)
        batch = text(rank, 0)
        for _ in range(2):
            update(model(**batch).loss, sharded.optimizer)
        model.eval()
        with torch.no_grad():
            logits = model(**batch).logits
            hidden = model.model(batch["input_ids"]).last_hidden_state
        with torch.inference_mode():
            assert torch.equal(model(**batch).logits, logits)
        head = model.lm_head(hidden).detach()
        model.train()
        # Gradients through the inner model, without the outer one.
        loss = model.model(batch["input_ids"]).last_hidden_state.square().mean()
        update(loss, sharded.optimizer, partial(sharded.clip_grad_norm_, 1.0))
        results.append(whole(model) | {"logits": logits, "head": head})
    assert same(*results)


@pytest.mark.ranks(2)
def test_adapters_train_and_the_base_stays(rank: int) -> None:
    model, sharded = build(3, make_model=lora)
    before = whole(model)
    for step in range(3):
        update(model(**text(rank, step)).loss, sharded.optimizer)
    report = sharded.memory_report()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert report["optimizer"] <= 4 * 2 * (trainable / 2 + 1000) + 1000, "states for the adapters alone"
    assert report["parameters"] < 4 * sum(p.numel() for p in before.values()) * 0.6, "the frozen base is sharded too"
    for fqn, value in whole(model).items():
        assert torch.equal(value, before[fqn]) is not model.get_parameter(fqn).requires_grad, fqn


@pytest.mark.full
def test_every_family_of_transformers_under_zero_init() -> None:
    """At tiny sizes; the script names the families that it leaves out, and why."""
    script = Path(__file__).with_name("zero_init_families.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
