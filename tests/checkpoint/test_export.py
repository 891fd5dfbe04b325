"""Exports of a checkpoint, or of a model in training, which the libraries' own `from_pretrained` loads, and their commands."""

from __future__ import annotations

import errno
import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import FAMILIES, llama
from folders import RECORDED
from full_disks import file_size_limit
from models import MODELS, Stack, sgd
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from ranks import on_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.integrations import peft as integration
from twin import build, build_engine, microbatch
from typer.testing import CliRunner

import zeroshard
from zeroshard import CheckpointError
from zeroshard.checkpoint.consolidated import write_files
from zeroshard.checkpoint.hugging_face import claimed, export
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.testing import run_ranks
from zeroshard.tools.checkpoints import folded
from zeroshard.tools.main import app

DTYPES = {"live": None, "live bf16": torch.bfloat16, "out": None, "out bf16": torch.bfloat16}


def saved(tmp_path: Path, name: str = "tied", stage: int = 3, bf16: bool = False) -> dict[str, torch.Tensor]:
    """A checkpoint in `ckpt`, and live exports in `live` and `live bf16`; the parameters and buffers that they hold."""

    def body(rank: int) -> dict[str, torch.Tensor]:
        precision = "bf16" if bf16 else None
        model, sharded = build(stage, make_model=MODELS[name], make_optimizer=sgd, precision=precision)
        sharded.save(tmp_path / "ckpt", "one")
        for folder in ("live", "live bf16"):
            sharded.export(tmp_path / folder, DTYPES[folder])
        whole = {fqn: sharded.states.get(fqn).clone() for fqn, _ in model.named_parameters()}
        return whole | {fqn: one.clone() for fqn, one in model.named_buffers() if fqn in model.state_dict()}

    return on_ranks(body, 2)[0]


def read(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("limit", [10**9, 2000])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("name", ["tied", "frozen", "batch norm", "tiny"])
def test_a_checkpoint_and_a_model_that_trains_become_model_files(
    name: str, stage: int, bf16: bool, limit: int, tmp_path: Path
) -> None:
    expected = saved(tmp_path, name, stage, bf16 and name != "batch norm")
    for folder, dtype in DTYPES.items():
        if folder.startswith("out"):
            written = export(open_checkpoint(tmp_path / "ckpt"), tmp_path / folder, dtype, max_shard_nbytes=limit)
            assert sorted(written) == sorted((tmp_path / folder).iterdir())
        got = read(tmp_path / folder)
        assert got.keys() == expected.keys()
        for fqn, value in expected.items():
            assert torch.equal(got[fqn], value.to(dtype) if dtype and value.is_floating_point() else value), fqn
        parts = [*(tmp_path / folder).glob("*.safetensors")]
        if len(parts) > 1:
            assert limit == 2000 and all(path.stat().st_size < 4000 for path in parts)
            index = json.loads((tmp_path / folder / "model.safetensors.index.json").read_text())
            assert index["weight_map"].keys() == expected.keys()


def test_a_checkpoint_of_which_a_part_is_elsewhere(tmp_path: Path) -> None:
    """The error says what is meant, and nothing half-written stays."""
    saved(tmp_path)
    reader = open_checkpoint(tmp_path / "ckpt")
    name = reader.manifest.files[1].name
    (reader.folder / name).unlink()
    with pytest.raises(
        CheckpointError, match=rf"lacks {re.escape(name)} \(files missing: 1\).* copy the files of all hosts"
    ):
        export(reader, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_parameters_are_folded_by_block() -> None:
    one = {"shape": [2, 3], "names": ["blocks.0.w"], "trained": True, "states": {"parameters": "float32"}}
    parameters = {f"blocks.{block}.w": {**one, "names": [f"blocks.{block}.w"]} for block in range(12)}
    parameters["blocks.12.w"] = {**one, "shape": [2, 4]}
    parameters["head.w"] = {**one, "names": ["head.w", "embedding.w"]}
    shown = [(name, number) for name, number, _ in folded(parameters)]
    assert shown == [("blocks.*.w", 12), ("blocks.12.w", 1), ("head.w", 1)]


def flat(output: str) -> str:
    return re.sub(r"\s+", " ", output)


def test_the_commands(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    run = CliRunner().invoke
    layers = OrderedDict({"a_module_with_a_very_long_name" * 3: torch.nn.Linear(3, 4)})
    build(1, make_model=lambda: torch.nn.Sequential(layers))[1].save(tmp_path / "small", "one")
    shown = run(app, ["inspect", str(tmp_path / "small")]).output
    assert "\u2026" not in shown and "also called" not in shown
    assert "parameters 0.1 KiB" in shown
    shown = run(app, ["inspect", str(tmp_path / "ckpt")])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("complete: all files are present")
    assert "sharded: " in shown.output
    assert "embedding.weight" in shown.output
    told = json.loads(run(app, ["inspect", str(tmp_path / "ckpt"), "--json"]).output)
    assert told["numel"] == sum(value.numel() for value in expected.values())
    assert told["parameters"]["embedding.weight"]["names"] == ["embedding.weight", "head.weight"]
    assert told["problems"] == []
    done = run(app, ["consolidate", str(tmp_path / "ckpt"), str(tmp_path / "out"), "--dtype", "bfloat16"])
    assert done.exit_code == 0, done.output
    assert torch.equal(read(tmp_path / "out")["embedding.weight"], expected["embedding.weight"].bfloat16())
    victim = next((tmp_path / "ckpt" / "one").glob("rank_00001*"))
    victim.write_bytes(victim.read_bytes()[:-8] + b"12345678")
    broken = run(app, ["inspect", str(tmp_path / "ckpt")])
    assert broken.exit_code == 1
    assert broken.output.startswith("damaged: load another tag")
    assert "is damaged" in flat(broken.output)
    refused = run(app, ["consolidate", str(tmp_path / "ckpt"), str(tmp_path / "out2")])
    assert isinstance(refused.exception, CheckpointError)
    assert "is damaged" in str(refused.exception)
    recorded = RECORDED / "of_deepspeed" / "stage3"
    imported = run(app, ["import-deepspeed", str(recorded), str(tmp_path / "imported")])
    assert imported.exit_code == 0, imported.output
    assert "2 ranks" in flat(imported.output)
    assert run(app, ["inspect", str(tmp_path / "imported")]).exit_code == 0


def test_a_checkpoint_without_its_base_has_no_model(tmp_path: Path) -> None:
    sharded = build(0, make_model=MODELS["frozen"])[1]
    sharded.save(tmp_path, "a", exclude_frozen=True)
    with pytest.raises(CheckpointError, match="so it has no whole model"):
        export(open_checkpoint(tmp_path / "a"), tmp_path / "out")
    with pytest.raises(CheckpointError, match="no file 'latest'"):
        open_checkpoint(tmp_path / "nothing")


def _fill_disk(after: int) -> None:
    """From here on, writes of this process find the disk full, after so many."""
    write = os.pwrite
    left = [after]

    def pwrite(*arguments: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*arguments)

    os.pwrite = pwrite


NO_SPACE = r"/model\.safetensors\.tmp cannot be written: No space left"


@pytest.mark.parametrize("full", [0, 1])
def test_an_export_on_a_disk_that_fills_leaves_what_was_there_and_names_the_file(full: int, tmp_path: Path) -> None:
    """On every rank. A file size limit stands for the end of the disk where a library writes the file."""
    out, bin_out, consolidated, blocked = (tmp_path / name for name in ("out", "bin", "consolidated", "file"))
    blocked.touch()

    def body(rank: int) -> None:
        engine = build_engine(2)
        with pytest.raises(CheckpointError, match="cannot be written"):
            engine.export(blocked)
        engine.save_checkpoint(tmp_path / "ckpt")
        engine.export(out)
        engine.save_16bit_model(bin_out)
        before = (bin_out / "pytorch_model.bin").read_bytes()
        with file_size_limit(1000), pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be written"):
            engine.save_16bit_model(bin_out)
        assert (bin_out / "pytorch_model.bin").read_bytes() == before
        if rank == full:
            _fill_disk(1)
        with pytest.raises(CheckpointError, match=f"{out}{NO_SPACE}"):
            engine.export(out, torch.bfloat16)
        if rank == full:
            _fill_disk(0)
            with pytest.raises(CheckpointError, match=f"{consolidated}{NO_SPACE}"):
                export(open_checkpoint(tmp_path / "ckpt"), consolidated)

    run_ranks(body, 2)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert [path.name for path in bin_out.iterdir()] == ["pytorch_model.bin"]
    assert not list(consolidated.iterdir())
    assert all(value.dtype == torch.float32 for value in read(out).values())


def test_two_exports_to_one_folder_are_refused(tmp_path: Path) -> None:
    """The one that comes second, while the first writes; they would write to each other's files."""
    saved(tmp_path)
    out = tmp_path / "out"
    with claimed(out):
        with pytest.raises(CheckpointError, match=f"another export is writing to {out}"):
            export(open_checkpoint(tmp_path / "ckpt"), out)
        with pytest.raises(CheckpointError, match=f"another export is writing to {out}"):
            write_files(open_checkpoint(tmp_path / "ckpt"), out)
        assert not list(out.iterdir())
    export(open_checkpoint(tmp_path / "ckpt"), out)


# ---------------------------------------------------------------------- what transformers and PEFT load


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
            microbatch(engine, engine(**batch(model)).loss)
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
    _, sharded = build(2, make_model=make, make_optimizer=sgd)
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
    build_engine(0, make_model=lora).export(tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "the base"
    assert (tmp_path / "adapter_model.safetensors").read_bytes() != b"an earlier adapter"
