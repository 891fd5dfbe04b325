"""`expert_parallel.autoep_size` divides the experts of a transformers model by its own plan, and it trains as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import divided
import pytest
import torch
from divided import expect_near, expect_same
from experts import divide, loss_of, mixture, tokens
from insides import sharded_of
from mixtures import MIXTURES, lora_on_experts
from ranks import on_ranks
from test_mixtures import batch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zeroshard
from zeroshard import ConfigError, UsageError
from zeroshard.engine.config.load import expert_parallel_ranks, load_config
from zeroshard.model.expert_parallel import plan_of_experts

pytest.importorskip("transformers.distributed.expert_parallel", reason="this transformers cannot divide experts")
RANKS, STEPS = 4, 10
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.01}}


def settings(stage: int, ep: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "gradient_clipping": 0.5, "optimizer": ADAMW,
        "expert_parallel": {"enabled": True, "autoep_size": ep}, **more,
    }  # fmt: skip


def built(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = MIXTURES[name]()
    model.train()
    return model


def loss(model: Any, number: int, rank: int) -> Tensor:
    return model(**batch(rank, number)).loss


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, weight_decay=0.01)


def trained(engine: Any, rank: int, steps: range = range(STEPS)) -> divided.Run:
    return divided.train_engine(engine, loss, rank, steps)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("ep", [2, 4])
def test_a_config_divides_experts(ep: int, name: str, tmp_path: Path) -> None:
    def body(rank: int) -> list[dict[str, Any]]:
        runs = []
        for stage in (1, 2, 3):
            engine, *_ = zeroshard.initialize(model=built(name, seed=rank), config=settings(stage, ep))
            assert any(isinstance(one, DTensor) for one in engine.module.parameters())
            assert (engine.dp_world_size, engine.mp_world_size) == (RANKS, 1)
            assert engine.train_batch_size() == 2 * RANKS
            runs.append(trained(engine, rank))
            with torch.no_grad():
                runs[-1]["evaluated"] = float(engine(**batch(rank, 9)).loss)
            if stage == 3:
                engine.save_checkpoint(tmp_path)
                engine.export(tmp_path / "exported")
            engine.destroy()
        assert len({run["evaluated"] for run in runs}) == 1
        return runs

    everyone = on_ranks(body, RANKS)
    reference = divided.in_one_process(built(name), loss, RANKS, STEPS, make_optimizer=adamw)
    for runs in everyone:
        for run in runs:
            expect_same(run, everyone[0][0])
    expect_near(everyone[0][0], reference)
    values = everyone[0][0]["values"]
    exported = type(built(name)).from_pretrained(tmp_path / "exported")
    for fqn, value in exported.named_parameters():
        assert torch.equal(value, values[fqn]), fqn


@pytest.mark.ranks(RANKS)
def test_experts_that_the_caller_divided(rank: int) -> None:
    """With the mesh, or with none: the ranks follow from the DTensors."""
    found = []
    config = {key: value for key, value in settings(2, 2).items() if key != "expert_parallel"}
    for passes in (True, False):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
        model = mixture()
        divide(model, mesh["ep"])
        engine, *_ = zeroshard.initialize(model=model, config=config, group=mesh if passes else None)
        assert (engine.dp_world_size, engine.mp_world_size) == (4, 1)
        engine.backward(loss_of(engine, tokens(0, rank)))
        engine.step()
        found.append((float(engine.get_global_grad_norm()), sharded_of(engine).states.get("blocks.0.experts.up")))
        engine.destroy()
    (norm, value), (other_norm, other) = found
    assert norm == other_norm and torch.equal(value, other)


@pytest.mark.ranks(RANKS)
@pytest.mark.parametrize("stage", [2, 3])
def test_each_rank_generates_other_lengths(rank: int, stage: int) -> None:
    """As the docs say: ranks that have finished take part in the exchange of tokens until all have."""
    engine, *_ = zeroshard.initialize(model=built("Qwen3-MoE"), config=settings(stage, 2))
    model: Any = engine.module
    prompt = torch.arange(2 + rank)[None]
    how: dict[str, Any] = {"max_new_tokens": 2 + 2 * rank, "do_sample": False}
    with zeroshard.unsharded(model):
        inside = model.generate(prompt, synced_gpus=True, **how)
    outside = model.generate(prompt, synced_gpus=True, **how)
    expected = built("Qwen3-MoE").generate(prompt, **how)
    assert torch.equal(inside, expected) and torch.equal(outside, expected)


# ---------------------------------------------------------------------- refusals


@pytest.mark.ranks(RANKS)
def test_refused_configs(rank: int) -> None:
    """Of what no config is needed for, tests/model/test_experts.py tests the refusal."""
    both = {"tensor_parallel": {"autotp_size": 2}}
    uneven = {"expert_parallel": {"enabled": True, "autoep_size": 3}}
    for more, told in ((both, "Leave one of them out"), (uneven, "choose a divisor")):
        with pytest.raises(UsageError, match=told):
            zeroshard.initialize(model=built("Qwen3-MoE"), config=settings(2, 2) | more)


def test_refused_models() -> None:
    plain = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"Linear has no plan .* Leave expert_parallel out"):
        plan_of_experts(plain, 2)
    with pytest.raises(UsageError, match=r"PEFT model .* Leave expert_parallel out"):
        plan_of_experts(lora_on_experts(), 2)
    model: Any = built("Qwen3-MoE")
    with pytest.raises(UsageError, match=r"has 4 experts, which 3 ranks .* choose a divisor of 4"):
        plan_of_experts(model, 3)
    model.ep_plan = {"model.layers.*.mlp.experts": "moe_identity_expert"}
    with pytest.raises(UsageError, match=r'as "moe_identity_expert", which is not supported'):
        plan_of_experts(model, 2)


def test_the_block_of_a_config() -> None:
    assert expert_parallel_ranks({"expert_parallel": {"enabled": True, "autoep_size": "2"}}) == 2
    assert expert_parallel_ranks({"expert_parallel": {"enabled": False, "autoep_size": 2}}) == 1
    assert expert_parallel_ranks({"expert_parallel": {"autoep_size": 2}}) == 1
    assert expert_parallel_ranks({"expert_parallel": None}) == 1
    config = load_config({"expert_parallel": {"enabled": True, "autoep_size": 2, "use_grouped_mm": True}}, 4)
    assert config.schema.expert_parallel.ranks == 2
    for key, value in (("top_k", 2), ("expert_tensor_parallel_size", 2), ("load_balance_coeff", 1e-3), ("unknown", 1)):
        with pytest.raises(ConfigError, match=key):
            load_config({"expert_parallel": {"enabled": True, "autoep_size": 2, key: value}}, 4)
