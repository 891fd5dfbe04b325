"""Owns small mixtures of experts of transformers 5, whose names in files differ from those in memory, or whose experts do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import Any

from packaging.version import Version
from torch import nn

_FEW: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}


def _of(name: str, **options: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}Config")(**_FEW | options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


MIXTURES: dict[str, Callable[[], nn.Module]] = {
    "Qwen2-MoE": partial(_of, "Qwen2Moe", num_experts=4, shared_expert_intermediate_size=16, **_EXPERTS),
    "Qwen3-MoE": partial(_of, "Qwen3Moe", num_experts=4, head_dim=4, **_EXPERTS),
    "Mixtral": partial(_of, "Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "DeepSeek-V3": partial(
        _of, "DeepseekV3", num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4,
        v_head_dim=8, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1, n_shared_experts=1, **_EXPERTS,
    ),
    "gpt-oss": partial(_of, "GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=4),
    "GLM-4-MoE": partial(
        _of, "Glm4Moe", n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, head_dim=4,
        **_EXPERTS,
    ),
}  # fmt: skip
qwen3_moe, glm4_moe = MIXTURES["Qwen3-MoE"], MIXTURES["GLM-4-MoE"]


PEFT_OF_EXPERTS = "0.17"
"""The first release of PEFT with adapters of parameters that are not a module's weight."""


def peft_knows_experts() -> bool:
    return Version(version("peft")) >= Version(PEFT_OF_EXPERTS)


def lora_on_experts() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], target_parameters=parameters)
    model: nn.Module = get_peft_model(qwen3_moe(), config)  # type: ignore[arg-type]
    model.base_model.model.enable_input_require_grads()  # type: ignore[operator, union-attr]
    return model
