"""Exports load with the libraries' own `from_pretrained`, and the loaded models compute the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import FAMILIES, llama
from models import Stack
from ranks import on_ranks
from torch import Tensor, nn
from typer.testing import CliRunner

import zeroshard
from zeroshard import CheckpointError
from zeroshard.checkpoint.hugging_face import export
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.tools.main import app

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    make = FAMILIES[name][0]
    expected = trained(make, tmp_path, stage, bf16)
    dtype = "bfloat16" if bf16 else "float32"
    done = CliRunner().invoke(app, ["consolidate", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--dtype", dtype])
    assert done.exit_code == 0, done.output
    kind: Any = type(make())
    for folder in (tmp_path / "live", tmp_path / "out"):
        model, info = kind.from_pretrained(folder, output_loading_info=True, dtype="auto")
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert model.dtype is DTYPES[dtype]
        assert torch.equal(logits(model), expected)
        assert model.config.architectures == [kind.__name__]
        assert (folder / "generation_config.json").is_file()


def test_the_auto_class_knows_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    def make() -> nn.Module:
        model: Any = llama()
        model.generation_config.temperature = 0.25
        model.generation_config.do_sample = True
        return model

    expected = trained(make, tmp_path, 3)
    written = export(open_checkpoint(tmp_path / "ckpt"), tmp_path / "out", max_shard_nbytes=40_000)
    assert sorted(written) == sorted((tmp_path / "out").iterdir())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model) is LlamaForCausalLM
    assert model.generation_config.temperature == 0.25
    assert torch.equal(logits(model), expected)


def lora(base: Any = llama, adapter: str = "default", **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **{"task_type": "CAUSAL_LM"} | options)
    model: Any = get_peft_model(base(), config, adapter_name=adapter)
    return model


KINDS = {
    "plain": {},
    "DoRA": {"use_dora": True},
    "bias": {"bias": "lora_only"},
    "a trained head": {"modules_to_save": ["lm_head"]},
    "no task": {"task_type": None},
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_peft_loads_the_adapter(kind: str, stage: int, tmp_path: Path) -> None:
    from peft import PeftModel

    save = {"exclude_frozen_parameters": kind != "plain"}  # the checkpoint without the base will do
    expected = trained(lambda: lora(**KINDS[kind]), tmp_path, stage, save=save)
    done = CliRunner().invoke(app, ["consolidate", str(tmp_path / "ckpt"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    for folder in (tmp_path / "live", tmp_path / "out"):
        assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        torch.manual_seed(0)
        model = PeftModel.from_pretrained(llama(), folder)
        assert torch.equal(logits(model), expected)
        assert json.loads((folder / "adapter_config.json").read_text())["inference_mode"] is True


def test_adapters_with_names_have_folders(tmp_path: Path) -> None:
    from peft import PeftModel

    expected = trained(lambda: lora(adapter="french"), tmp_path, 3)
    assert {path.name for path in (tmp_path / "live").iterdir()} == {"french"}
    torch.manual_seed(0)
    assert torch.equal(logits(PeftModel.from_pretrained(llama(), tmp_path / "live" / "french")), expected)


def test_transformers_own_adapters_are_written_as_it_writes_them(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, __version__
    from transformers.integrations import peft as integration

    def make() -> nn.Module:
        model: Any = llama()
        with pytest.MonkeyPatch.context() as patched:
            # transformers 5.24 asks for a PEFT that is not released; what is called here works with the installed one.
            patched.setattr(integration, "MIN_PEFT_VERSION", __version__)
            model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
        return model

    expected = trained(make, tmp_path, 3)
    torch.manual_seed(0)
    assert torch.equal(logits(PeftModel.from_pretrained(llama(), tmp_path / "live")), expected)


def refused(make: Callable[[], nn.Module], folder: Path, message: str) -> None:
    """A live export and one from the checkpoint say why there is none; the save goes on."""
    torch.manual_seed(0)
    model = make()
    sharded = zeroshard.shard(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    sharded.save(folder, "a")
    with pytest.raises(CheckpointError, match=message):
        sharded.export(folder / "live")
    with pytest.raises(CheckpointError, match=message):
        export(open_checkpoint(folder), folder / "out")
    assert sharded.load(folder).tag == "a"


def test_what_an_adapter_would_lose_is_named(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model: Any = lora()
        model.base_model.model.model.norm.weight.requires_grad_(True)
        return model

    refused(make, tmp_path, r"model\.norm\.weight is trained and in no PEFT adapter")


def test_an_adapter_that_is_computed_is_refused(tmp_path: Path) -> None:
    from peft import PromptTuningConfig, get_peft_model

    def make() -> nn.Module:
        made: Any = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
        return made

    refused(make, tmp_path, r"this model cannot be exported for other programs: .*PROMPT_TUNING")


def test_a_config_that_cannot_be_written_stops_no_save(tmp_path: Path) -> None:
    class Strange:
        def to_json_string(self) -> str:
            raise TypeError("not JSON")

    def make() -> nn.Module:
        model = Stack()
        model.config = Strange()
        return model

    refused(make, tmp_path, "the model's config cannot be written: TypeError: not JSON")


def test_a_model_without_a_config_is_weights_alone(tmp_path: Path) -> None:
    model = Stack()
    sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sharded.export(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_an_export_of_adapters_leaves_the_model_in_their_folder(tmp_path: Path) -> None:
    """It may be their base."""
    (tmp_path / "model.safetensors").write_text("the base")
    (tmp_path / "adapter_model.safetensors").write_text("an earlier adapter")
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], r=2))
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    engine, *_ = zeroshard.initialize(model=model, config={"train_batch_size": 1, "optimizer": sgd})
    engine.export(tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "the base"
    assert (tmp_path / "adapter_model.safetensors").read_bytes() != b"an earlier adapter"
