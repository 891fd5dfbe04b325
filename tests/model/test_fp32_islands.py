"""Parameters that stay in fp32 in 16-bit training: those that transformers models declare, and those that the user names."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import text
from mixtures import MIXTURES, PEFT_OF_EXPERTS, glm4_moe, qwen3_moe
from ranks import on_ranks
from torch import Tensor, nn
from twin import Setting, as_set, microbatch, same, whole

import zeroshard
from zeroshard import Offload, Place, Policy, Precision, UsageError
from zeroshard.core.bucketing import kept_in_fp32
from zeroshard.testing import Run, Workload, train

DECLARING = ["DeepSeek-V3", "GLM-4-MoE"]
"""The mixtures whose routers are declared strict in fp32."""
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def trained(name: str, policy: Policy, rank: int, dtype: torch.dtype, steps: int = 3) -> Run:
    work = Workload(
        MIXTURES[name],
        lambda rank, number: (text(rank, number),),
        compute_loss=lambda model, batch: model(**batch[0]).loss,
        steps=steps,
        max_norm=1.0,
    )
    return train(rank, work, policy, precision=Precision(dtype), bucket_numel=3000)


@pytest.mark.quick(2)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", DECLARING)
def test_dtypes_and_losses_are_those_of_from_pretrained_and_stages_are_bit_equal(
    name: str, half: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model: Any = MIXTURES[name]()
    model.save_pretrained(tmp_path / "model")
    theirs = type(model).from_pretrained(tmp_path / "model", dtype=HALVES[half])
    dtypes = {fqn: p.dtype for fqn, p in theirs.named_parameters()}
    if not any(kind in fqn for fqn in dtypes for kind in model._keep_in_fp32_modules_strict):
        pytest.skip("this transformers declares no parameter of the model strict in fp32")
    assert {*dtypes.values()} == {HALVES[half], torch.float32}
    theirs.train()
    offload = Offload(str(tmp_path), buffer_numel=1 << 16, block_nbytes=4096)
    policies = [Policy.stage(stage) for stage in (1, 2, 3)]
    policies += [
        Policy.stage(3).offloaded(optimizer=place, parameters=place, offload=offload)
        for place in (Place.CPU, Place.DISK)
    ]

    def body(rank: int) -> None:
        first = trained(name, Policy.stage(0), rank, HALVES[half])
        assert {fqn: p.dtype for fqn, p in first.parameters.items()} == dtypes
        assert torch.equal(first.losses[0], theirs(**text(rank, 0)).loss.float())
        for policy in policies:
            with as_set(Setting(policy, apart=policy.parameters.place is not Place.ACCELERATOR)):
                run = trained(name, policy, rank, HALVES[half])
            assert run.equals(first), policy
            assert {fqn: p.dtype for fqn, p in run.parameters.items()} == dtypes

    on_ranks(body, 2)


@pytest.mark.ranks(2)
def test_a_model_that_declares_nothing_keeps_its_bits(rank: int) -> None:
    run = trained("Qwen3-MoE", Policy.stage(3), rank, torch.bfloat16)
    assert {one.dtype for one in run.parameters.values()} == {torch.bfloat16}
    assert not kept_in_fp32(qwen3_moe(), Precision(torch.bfloat16))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_config_names_others(rank: int, stage: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), Wide(4, 4)))
    config = {
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage}, "data_types": {"keep_in_fp32_modules": ["1.1.*t"]},
    }  # fmt: skip
    engine, *_ = zeroshard.initialize(model=model, config=config)

    def step(number: int) -> None:
        microbatch(engine, engine(torch.ones(2, 4, dtype=torch.bfloat16) * (rank + number)).float().pow(2).mean())

    step(0)
    step(1)
    engine.save_checkpoint(tmp_path)
    before = whole(model)
    dtypes = {fqn: p.dtype for fqn, p in before.items()}
    assert {fqn for fqn, dtype in dtypes.items() if dtype == torch.float32} == {"1.1.weight"}
    step(2)
    engine.load_checkpoint(tmp_path)
    assert same(whole(model), before)
    assert {fqn: tensor.dtype for fqn, tensor in engine.named_weights()} == dtypes


class Wide(nn.Linear):
    """A module that casts for its own weight, as those of transformers do."""

    def forward(self, values: Tensor) -> Tensor:
        return nn.functional.linear(values.float(), self.weight, self.bias.float()).to(values.dtype)


def test_a_name_without_parameters_is_refused() -> None:
    model = qwen3_moe()
    with pytest.raises(UsageError, match=r"'rooter' is to stay in fp32, and no parameter of Qwen3MoeForCausalLM"):
        zeroshard.shard(model, None, 1, precision=Precision(torch.bfloat16, keep_in_fp32=("gate.weight", "rooter")))
    assert kept_in_fp32(model, Precision(torch.float32, keep_in_fp32=("rooter",))) == set()


def test_adapters_leave_the_router_in_fp32() -> None:
    pytest.importorskip("peft", minversion=PEFT_OF_EXPERTS)
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(
        glm4_moe(), LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.gate.weight"])
    )  # type: ignore[arg-type]
    found = kept_in_fp32(model, Precision(torch.bfloat16))
    names = [fqn for fqn, p in model.named_parameters() if id(p) in found]
    assert len(names) == 1
    assert "gate." in names[0]
    assert "lora" not in names[0]


def test_all_declarations_of_transformers_are_understood() -> None:
    """The same parameters as transformers' own rule selects, for every declaration in its sources."""
    import transformers
    from transformers.core_model_loading import build_glob_alternation

    declared = set[tuple[str, ...]]()
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for found in re.findall(r"_keep_in_fp32_modules_strict = (\[[^\]]*\])", path.read_text(encoding="utf-8")):
            declared.add(tuple(ast.literal_eval(found)))
    assert len(declared) > 15
    for patterns in declared - {()}:
        rule, *_ = build_glob_alternation(list(patterns))
        names = [f"model.layers.0.{one.replace('*', 'x').replace(chr(92), '').strip('^$.')}" for one in patterns]
        names += [f"{name}.weight" for name in names] + ["model.layers.0.mlp.up_proj.weight", "lm_heads", "gateXweight"]
        model = Named(patterns, names)
        kept = kept_in_fp32(model, Precision(torch.bfloat16))
        assert {name for name, one in model.all.items() if id(one) in kept} == {
            name for name in names if rule.search(name)
        }


class Named(nn.Module):
    """A model that declares patterns, with parameters under any names."""

    def __init__(self, patterns: tuple[str, ...], names: list[str]) -> None:
        super().__init__()
        self._keep_in_fp32_modules_strict = list(patterns)
        self.all = {name: nn.Parameter(torch.zeros(1)) for name in names}

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        return iter(self.all.items())
