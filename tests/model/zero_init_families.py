"""Builds every model family of the installed transformers under zero.Init, and compares it with a plain build.

Models are tiny. transformers draws random values in another order there, so distributions are compared.

    python tests/model/zero_init_families.py        # prints the families that differ, and those without a tiny model

Sizes come from the names of a config's fields. Families that cannot be built plainly at such sizes, or need a package that is
not installed, are left out by name.
"""

from __future__ import annotations

# ruff: isort: off
import zeroshard.as_deepspeed  # first: transformers looks for deepspeed when it is imported
# ruff: isort: on

import json
import sys
import warnings
from typing import Any

import torch
import transformers
from transformers import AutoModel, PretrainedConfig
from transformers.integrations import HfDeepSpeedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

import zeroshard
from zeroshard.testing import run_ranks

SIZES: dict[int, str] = {
    64: "vocab_size intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner max_position_embeddings n_positions "
    "dim_feedforward hidden_dim",
    32: "hidden_size d_model n_embd embed_dim dim moe_intermediate_size image_size embedding_size",
    8: "head_dim d_kv patch_size",
    4: "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts",
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers depth "
    "num_key_value_heads",
    0: "pad_token_id",
}
TINY = {name: size for size, names in SIZES.items() for name in names.split()}
MOST_NUMEL = 20_000_000
_DEEPER = "transformers initialises parameters on rank 0 that it has not gathered: every rank raises CollectiveError"
_LEFT = (
    "transformers initialises some parameters only in constructors, which ZeRO-3 skips: NaN, and a warning names them"
)
NAMED: dict[str, str] = {
    **dict.fromkeys(["OpenAIGPTConfig", "RegNetConfig"], _LEFT),
    **dict.fromkeys(
        [
            "BarkConfig", "ClvpConfig", "DecisionTransformerConfig", "EncodecConfig", "HubertConfig", "ImageGPTConfig",
            "LwDetrConfig", "Mask2FormerConfig", "OneFormerConfig", "RfDetrConfig", "SEWConfig", "SEWDConfig",
            "UniSpeechConfig", "UniSpeechSatConfig", "VideoPrismConfig", "VitsConfig", "Wav2Vec2Config",
            "Wav2Vec2ConformerConfig", "WavLMConfig", "WavTokenizerEncoderConfig",
        ],
        _DEEPER,
    ),
}  # fmt: skip
"""Families that `from_config` under ZeRO-3 does not build as plainly, and why. `from_pretrained` reads their values from files."""
LEAST_FAMILIES = 200
"""Fewer would mean that the sizes no longer fit the configs."""


def tiny(kind: type[PretrainedConfig]) -> PretrainedConfig:
    """Return a config with small sizes, in its parts too."""

    def shrink(config: Any) -> None:
        for name, value in list(vars(config).items()):
            if isinstance(value, PretrainedConfig):
                shrink(value)
            elif name in TINY and type(value) is int:
                setattr(config, name, TINY[name])

    config = kind()
    shrink(config)
    return config


def families() -> tuple[list[type[PretrainedConfig]], dict[str, str]]:
    """Return the configs whose models can be built at a tiny size, and why the others cannot."""
    found: list[type[PretrainedConfig]] = []
    without: dict[str, str] = {}
    for kind in MODEL_MAPPING:
        try:
            with torch.device("meta"):
                numel = sum(parameter.numel() for parameter in AutoModel.from_config(tiny(kind)).parameters())
            if numel > MOST_NUMEL:
                raise ValueError(f"{numel:,} elements")
        except Exception as error:
            without[kind.__name__] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        else:
            found.append(kind)
    return found, without


def build(kind: type[PretrainedConfig]) -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = AutoModel.from_config(tiny(kind))
    return model


def resembles(found: torch.Tensor, plain: torch.Tensor) -> bool:
    """Return whether values have the shape, dtype and distribution of others. transformers initialises in another order here."""
    if (found.shape, found.dtype) != (plain.shape, plain.dtype):
        return False
    if not plain.is_floating_point() or not plain.isfinite().all():
        return torch.equal(found.nan_to_num(), plain.nan_to_num())
    if plain.numel() < 2 or plain.std() == 0:
        return torch.equal(found, plain) or plain.numel() == 1
    few = plain.numel() < 256
    near = few or (0.5 < found.std() / plain.std() < 2 and abs(found.mean() - plain.mean()) < 0.5 * plain.std())
    return bool(found.isfinite().all() and near)


def compare(kinds: list[type[PretrainedConfig]]) -> dict[str, str]:
    """Return what is different, by family."""
    wrong: dict[str, str] = {}
    for kind in kinds:
        try:
            plain = build(kind).state_dict()
        except Exception:  # the meta device needs fewer packages and checks less
            continue
        config = HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1})
        try:
            model = build(kind)
            with zeroshard.unsharded(model):
                found = {name: value.clone() for name, value in model.state_dict().items()}
        except Exception as error:
            wrong[kind.__name__] = f"{type(error).__name__}: {error}"[:300]
            continue
        finally:
            del config
        if found.keys() != plain.keys():
            wrong[kind.__name__] = f"names: {sorted(found.keys() ^ plain.keys())[:3]}"
        else:
            names = [name for name, value in plain.items() if not resembles(found[name], value)]
            if names:
                wrong[kind.__name__] = f"values: {names[:3]} ({len(names)} of {len(plain)})"
    return wrong


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    kinds, without = families()
    chosen = [kind for kind in kinds if kind.__name__ in sys.argv[1:]] or kinds

    def body(rank: int) -> str:
        torch.set_num_threads(1)
        return json.dumps(compare(chosen))

    wrong: dict[str, str] = {}
    for answer in run_ranks(body, 2, timeout=1500):
        wrong |= json.loads(answer)
    for name, reason in without.items():
        print(f"left out: {name}: {reason}")
    for name in wrong.keys() & NAMED.keys():
        print(f"named: {name}: {NAMED[name]}")
    new = {name: reason for name, reason in wrong.items() if name not in NAMED}
    for name, reason in new.items():
        print(f"WRONG {name}: {reason}")
    print(f"{len(chosen)} families, {len(new)} of them wrong, {len(wrong) - len(new)} named")
    sys.exit(bool(new) or len(kinds) < LEAST_FAMILIES)


if __name__ == "__main__":
    main()
