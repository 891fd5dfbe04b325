"""Compares plans with real runs: the predicted peak of live bytes and the allocator's, over models, stages, dtypes and places.

On several ranks, a gloo thread may keep the gradient that it sent last, so the allocator's peak is the lowest over ranks and
repeated runs. Runs are repeated until the peak is within 0.1 % of the plan, up to a limit.

python benchmarks/plan.py [--ranks 1 2 3] [--only TEXT] [--dtypes fp32 bf16 fp16]
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from plan_cases import Case, config_of, gpt, measured, planned, tokens
from torch import nn

import zeroshard

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, use_cache=False, num_local_experts=4, num_experts_per_tok=2))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(  # type: ignore[call-arg]
            vocab_size=512,
            d_model=128,
            d_kv=32,
            d_ff=256,
            num_layers=3,
            num_heads=4,
            decoder_start_token_id=0,
            use_cache=False,
        )
    )


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model: nn.Module = get_peft_model(
        llama(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    )  # type: ignore[arg-type]
    return model


def text(samples: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 512, (samples, 64))
    return {"input_ids": ids, "labels": ids}


TRIES = 5
NEAR = 1e-3

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "GPT": (gpt, tokens), "Llama": (llama, text), "T5": (t5, text), "Mixtral": (mixtral, text), "LoRA": (lora, text),
}  # fmt: skip


def cases(ranks: list[int], folder: str) -> Iterator[tuple[str, Case]]:
    """Yield (label, case): every stage, dtype and checkpointing for each model, and places and accumulation for the first."""
    for (name, (factory, batch)), count, stage, dtype, checkpointing in itertools.product(
        MODELS.items(), ranks, range(4), ("fp32", "bf16", "fp16"), (False, True)
    ):
        micro = 1 if dtype == "fp16" else 4  # fp16 products are very slow on a CPU
        made = config_of(stage, dtype, checkpointing=checkpointing, micro=micro)
        yield (
            f"{name} {count} ranks stage {stage} {dtype}{' checkpointed' * checkpointing}",
            Case(made, count, factory, batch),
        )
    for count, stage, dtype, place in itertools.product(ranks, (1, 2, 3), ("fp32", "bf16"), ("cpu", "nvme")):
        where = {"device": place, **({"nvme_path": folder} if place == "nvme" else {})}
        offloads: dict[str, Any] = {"offload_optimizer": where, **({"offload_param": where} if stage == 3 else {})}
        yield (
            f"GPT {count} ranks stage {stage} {dtype} on {place}",
            Case(config_of(stage, dtype, **offloads), count, apart=True),
        )
    for count, stage, dtype in itertools.product(ranks, range(4), ("fp32", "bf16")):
        yield (
            f"GPT {count} ranks stage {stage} {dtype} 3 microbatches",
            Case(config_of(stage, dtype, accumulation=3), count),
        )


def least(case: Case, said: int) -> tuple[int, dict[str, int]]:
    """Return the least peak of real runs, and the bytes that they sent in a step."""
    peak, sent = 0, dict[str, int]()
    for _ in range(1 if case.ranks == 1 else TRIES):
        real = measured(case)
        found, sent = min(one["peak"] for one in real), real[0]["sent"]
        peak = min(peak or found, found)
        if abs(said / peak - 1) <= NEAR:
            break
    return peak, sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", default="", help="only cases whose label contains this text")
    parser.add_argument(
        "--dtypes", nargs="+", default=["fp32", "bf16", "fp16"], help="a CPU may lack instructions for some"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    worst, count = 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        for label, case in cases(options.ranks, folder):
            if options.only not in label or not any(f" {dtype}" in label for dtype in options.dtypes):
                continue
            try:
                plan = planned(case)
                said = plan.figures.peak.nbytes if not case.apart else plan.figures.peak_together
                peak, sent = least(case, said)
            except zeroshard.UsageError as why_not:
                print(f"{label:50} not planned: {why_not}", flush=True)
                continue
            ratio, is_equal = said / peak, plan.figures.sent == sent
            worst, count = max(worst, abs(ratio - 1)), count + 1
            print(
                f"{label:50} planned {said / 1e6:9.3f} MB, allocator {peak / 1e6:9.3f} MB: {ratio:.5f}; bytes sent "
                f"{'equal' if is_equal else 'DIFFER'}",
                flush=True,
            )
    print(f"{count} cases; the worst is off by {worst:.3%}")


if __name__ == "__main__":
    main()
