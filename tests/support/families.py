"""Owns small random models of common families, for test_families.py and docs/families.md.

python tests/support/families.py        # trains every family and writes docs/families.md
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mixtures import MIXTURES, lora_on_experts, peft_knows_experts
from models import OPTIMIZERS
from torch import Tensor, nn

import zeroshard.testing
from zeroshard import Policy
from zeroshard.testing import Run, Workload, run_ranks

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
ENCODER = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=1)
    )


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=64, max_position_embeddings=32, **ENCODER))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=5, **ENCODER))


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model: nn.Module = get_peft_model(llama(), config)  # type: ignore[arg-type]
    model.base_model.model.enable_input_require_grads()  # type: ignore[operator, union-attr]
    return model


def text(rank: int, step: int) -> dict[str, Tensor]:
    tokens = torch.randint(2, 64, (2, 8), generator=torch.Generator().manual_seed(100 * step + rank))
    return {"input_ids": tokens, "labels": tokens}


def images(rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    labels = torch.randint(0, 5, (2,), generator=generator)
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": labels}


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], dict[str, Tensor]]]] = {
    "Llama": (llama, text),
    "GPT-2": (gpt2, text),
    "T5": (t5, text),
    "BERT": (bert, text),
    "Mixtral": (mixtral, text),
    "ViT": (vit, images),
    "LoRA over Llama": (lora, text),
    "Qwen3-MoE": (MIXTURES["Qwen3-MoE"], text),
    "DeepSeek-V3": (MIXTURES["DeepSeek-V3"], text),
    "gpt-oss": (MIXTURES["gpt-oss"], text),
    "GLM-4-MoE": (MIXTURES["GLM-4-MoE"], text),
    **({"LoRA over Qwen3-MoE's experts": (lora_on_experts, text)} if peft_knows_experts() else {}),
}


def train(rank: int, family: str, stage: int, checkpointing: bool) -> Run:
    """Train a family with its dropout: the random state of each step is the same at every stage."""
    make, batch = FAMILIES[family]

    def made() -> nn.Module:
        model: Any = make()
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    def seeded_batch(rank: int, step: int) -> tuple[dict[str, Tensor]]:
        torch.manual_seed(1000 * step + rank)
        return (batch(rank, step),)

    work = Workload(
        made, seeded_batch, OPTIMIZERS["fused AdamW"], lambda model, batch: model(**batch[0]).loss,
        lambda model: [p for p in model.parameters() if p.requires_grad], steps=10, max_norm=1.0,
    )  # fmt: skip
    return zeroshard.testing.train(rank, work, Policy.stage(stage))


def compare(rank: int, family: str) -> dict[str, Any]:
    """Compare stage 3 with stage 0, with and without checkpointing."""
    first = {checkpointing: train(rank, family, 0, checkpointing) for checkpointing in (False, True)}
    return {
        "finite": bool(torch.isfinite(first[False].losses).all()),
        "learns": bool(first[False].losses[-1] != first[False].losses[0]),
        "stage 3": train(rank, family, 3, False).equals(first[False]),
        "stage 3, checkpointing": train(rank, family, 3, True).equals(first[True]),
        "checkpointing changes nothing": first[True].equals(first[False]),
    }


def main() -> None:
    """Write the table of the docs."""
    rows = []
    for family, (make, _) in FAMILIES.items():
        model = make()
        numel = sum(p.numel() for p in model.parameters())
        trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
        cells = []
        for ranks in (2, 4):
            every = run_ranks(compare, ranks, family, timeout=300)
            cells += [
                "equal" if all(r[key] for r in every) else "**differs**"
                for key in ("stage 3", "stage 3, checkpointing")
            ]
        rows.append(f"| {family} | {type(model).__name__} | {numel:,} | {trainable:,} | {' | '.join(cells)} |")
    page = (
        "# Models that train at stage 3 without changes\n\n"
        "Each model is small, has random weights, and trains for 10 steps of AdamW with clipping.\n"
        "GPT-2, T5, BERT and LoRA also have dropout.\n"
        '"Equal" means that losses and parameters at stage 3 are bit-identical to those at stage 0. The\n'
        'checkpointed runs use `gradient_checkpointing_enable({"use_reentrant": False})` at both stages.\n'
        "`python tests/support/families.py` generates this page.\n\n"
        "| family | class | parameters | trainable | stage 3, 2 ranks | checkpointed | stage 3, 4 ranks | checkpointed |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows) + "\n"
    )
    (Path(__file__).parents[2] / "docs" / "families.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
