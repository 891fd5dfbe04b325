"""Configs that other programs supply are read unchanged: axolotl's configs, with the values of its Trainer."""

from __future__ import annotations

from typing import Any

import pytest

from zeroshard.engine.config.load import load_config
from zeroshard.errors import ConfigError
from zeroshard.policy import Place

AUTO = {
    "lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "train_micro_batch_size_per_gpu": 2,
    "train_batch_size": 8, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "fp16": False, "bf16": True,
}  # fmt: skip
BATCH: dict[str, Any] = dict.fromkeys(
    ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping"), "auto"
) | {"wall_clock_breakdown": False}
EITHER = {
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": "auto", "auto_cast": False, "loss_scale": 0, "initial_scale_power": 32, "loss_scale_window": 1000,
        "hysteresis": 2, "min_loss_scale": 1,
    },
}  # fmt: skip
COMPILED = {"compile": {"disable": False, "backend": "inductor"}}
UNTESTED = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
CPU = {"device": "cpu", "pin_memory": True}
STAGE_2 = {
    "stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True, "overlap_comm": True,
}  # fmt: skip
STAGE_3 = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0, "reduce_bucket_size": "auto",
}  # fmt: skip
LIMITS = {"max_live_parameters": 0, "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": True}
SIZES = {"prefetch_bucket_size": "auto", "param_persistence_threshold": "auto"}


def prefixed(block: dict[str, Any]) -> dict[str, Any]:
    return {f"stage3_{key}": value for key, value in block.items()}


ADAMW = {"optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}}
STAGE_1 = {"stage": 1, "overlap_comm": True}
BF16 = {"bf16": {"enabled": True}}
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero1": ({**EITHER, **ADAMW}, STAGE_1),
    "zero1_torch_compile": ({**EITHER, **COMPILED}, STAGE_1),
    "zero2": (EITHER, STAGE_2),
    "zero2_torch_compile": ({**EITHER, **COMPILED}, STAGE_2),
    "zero3": (EITHER, {**STAGE_3, **prefixed(SIZES | LIMITS)}),
    "zero3_bf16": (BF16, {**STAGE_3, **SIZES, **LIMITS}),
    "zero3_bf16_cpuoffload_all": (
        {**BF16, **UNTESTED}, {**STAGE_3, **prefixed(SIZES), **LIMITS, "offload_optimizer": CPU, "offload_param": CPU},
    ),
    "zero3_bf16_cpuoffload_params": (
        {**BF16, **UNTESTED}, {**STAGE_3, **prefixed(SIZES), **LIMITS, "offload_param": CPU},
    ),
    "zero3_cpuoffload": (
        EITHER, {**STAGE_3, **prefixed(SIZES | LIMITS), "offload_optimizer": CPU, "offload_param": CPU},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CONFIGS))
def test_axolotls(name: str) -> None:
    top, zero = CONFIGS[name]
    config = load_config({**BATCH, **top, "zero_optimization": zero}, 2, None, AUTO)
    assert config.stage == int(name[4])
    assert config.schema.bf16.enabled
    assert not config.schema.fp16.enabled
    assert (config.batch.micro, config.batch.accumulation, config.schema.gradient_clipping) == (2, 2, 0.5)
    policy = config.policy
    assert (policy.optimizer.place is Place.CPU) == ("offload_optimizer" in zero)
    assert (policy.parameters.place is Place.CPU) == ("offload_param" in zero)
    if config.stage == 3:
        assert (policy.max_live_numel, policy.max_reuse_numel) == (0, 0)
        assert policy.offload_optimizer.sub_group_numel == (1 if "offload_optimizer" in zero else 1_000_000_000)


def test_deepcompile_is_still_refused() -> None:
    with pytest.raises(ConfigError, match=r"compile\.deepcompile"):
        load_config({"train_batch_size": 2, "compile": {"deepcompile": True}}, 1)
    with pytest.raises(ConfigError, match=r"compile\.backnd: unknown key.*backend"):
        load_config({"train_batch_size": 2, "compile": {"backnd": "inductor"}}, 1)
