"""Exports load with the libraries' own `from_pretrained`, and the loaded models compute the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import FAMILIES, llama
from models import Stack
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from ranks import on_ranks
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.integrations import peft as integration
from typer.testing import CliRunner

import zeroshard
from zeroshard import CheckpointError
from zeroshard.checkpoint.hugging_face import export
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.tools.main import app


def batch(model: nn.Module) -> dict[str, Tensor]:
    tokens = torch.randint(2, 64, (2, 8), generator=torch.Generator().manual_seed(7))
    return {"input_ids": tokens, "labels": tokens}


def logits(model: nn.Module) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(**batch(model)).logits.clone()


def trained(
    make: Callable[[], nn.Module], folder: Path, stage: int, bf16: bool = False, save: dict[str, Any] | None = None
) -> Tensor:
    """Two steps on 2 ranks, a live export to `folder / "live"`, a checkpoint in `folder / "ckpt"`; the live model's logits."""

    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        config = {
            "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16},
        }  # fmt: skip
        engine, *_ = zeroshard.initialize(model=model, optimizer=optimizer, config=config)
        for _ in range(2):
            engine.backward(engine(**batch(model)).loss)
            engine.step()
        engine.export(folder / "live", torch.bfloat16 if bf16 else None)
        engine.save_checkpoint(folder / "ckpt", **(save or {}))
        return logits(model)

    return on_ranks(body, 2)[0]


@pytest.mark.quick(2)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5"])
def test_transformers_loads_the_folder_and_nothing_else(name: str, stage: int, bf16: bool, tmp_path: Path) -> None:
    def make() -> nn.Module:
        model: Any = FAMILIES[name][0]()
        model.generation_config.temperature = 0.25
        model.generation_config.do_sample = True
        return model

    expected = trained(make, tmp_path, stage, bf16)
    dtype = "bfloat16" if bf16 else "float32"
    out = [str(tmp_path / "out"), "--dtype", dtype, "--max-shard-size", "40kB"]
    done = CliRunner().invoke(app, ["consolidate", str(tmp_path / "ckpt"), *out])
    assert done.exit_code == 0, done.output
    kind: Any = type(make())
    for folder in (tmp_path / "live", tmp_path / "out"):
        model, info = kind.from_pretrained(folder, output_loading_info=True, dtype="auto")
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert model.dtype is getattr(torch, dtype)
        assert torch.equal(logits(model), expected)
        assert model.config.architectures == [kind.__name__]
        assert (folder / "generation_config.json").is_file()
        if kind.__name__.endswith("ForCausalLM"):
            found = AutoModelForCausalLM.from_pretrained(folder)
            assert type(found) is kind and found.generation_config.temperature == 0.25


def lora(base: Any = llama, adapter: str = "default", **options: Any) -> nn.Module:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **{"task_type": "CAUSAL_LM"} | options)
    model: Any = get_peft_model(base(), config, adapter_name=adapter)
    return model


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "DoRA": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "a trained head": {"modules_to_save": ["lm_head"]},
    "no task": {"task_type": None},
    "a name": {"adapter": "french"},
}


def of_transformers() -> nn.Module:
    """A model with an adapter of transformers' own."""
    model: Any = llama()
    with pytest.MonkeyPatch.context() as patched:
        # transformers 5.24 asks for a PEFT that is not released; what is called here works with the installed one.
        patched.setattr(integration, "MIN_PEFT_VERSION", peft.__version__)
        model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    return model


@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["of transformers", *KINDS])
def test_peft_loads_the_adapter(kind: str, stage: int, tmp_path: Path) -> None:
    save = {"exclude_frozen_parameters": kind != "plain"}  # the checkpoint without the base will do
    make = partial(lora, **KINDS[kind]) if kind in KINDS else of_transformers
    expected = trained(make, tmp_path, stage, save=save)
    done = CliRunner().invoke(app, ["consolidate", str(tmp_path / "ckpt"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    for written in (tmp_path / "live", tmp_path / "out"):
        folder = written / "french" if kind == "a name" else written
        assert kind != "a name" or [*written.iterdir()] == [folder]
        assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        torch.manual_seed(0)
        model = PeftModel.from_pretrained(llama(), folder)
        assert torch.equal(logits(model), expected)
        assert json.loads((folder / "adapter_config.json").read_text())["inference_mode"] is True


def trains_more_than_the_adapter() -> nn.Module:
    model: Any = lora()
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


def computed_adapter() -> nn.Module:
    model: Any = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    return model


class Strange(Stack):
    class Config:
        def to_json_string(self) -> str:
            raise TypeError("not JSON")

    config = Config()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (trains_more_than_the_adapter, r"model\.norm\.weight is trained and in no PEFT adapter"),
        (computed_adapter, r"this model cannot be exported for other programs: .*PROMPT_TUNING"),
        (Strange, "the model's config cannot be written: TypeError: not JSON"),
        (Stack, None),  # without a config a model is its weights alone
    ],
)
@pytest.mark.quick(4)
def test_a_model_that_cannot_be_exported_whole_is_saved_all_the_same(
    make: Callable[[], nn.Module], says: str | None, tmp_path: Path
) -> None:
    model = make()
    sharded = zeroshard.shard(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    sharded.save(tmp_path, "a")
    for name, write in (("live", sharded.export), ("out", partial(export, open_checkpoint(tmp_path)))):
        if says is not None:
            with pytest.raises(CheckpointError, match=says):
                write(tmp_path / name)
        else:
            write(tmp_path / name)
            assert [path.name for path in (tmp_path / name).iterdir()] == ["model.safetensors"]
    assert sharded.load(tmp_path).tag == "a"


def test_an_export_of_adapters_leaves_the_model_in_their_folder(tmp_path: Path) -> None:
    """It may be their base."""
    (tmp_path / "model.safetensors").write_text("the base")
    (tmp_path / "adapter_model.safetensors").write_text("an earlier adapter")
    model = lora()
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    engine, *_ = zeroshard.initialize(model=model, config={"train_batch_size": 1, "optimizer": sgd})
    engine.export(tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "the base"
    assert (tmp_path / "adapter_model.safetensors").read_bytes() != b"an earlier adapter"
