"""Exports of a checkpoint, or of a model in training, in transformers' format, and the commands that show them."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from folders import RECORDED
from insides import sharded_of
from models import MODELS
from ranks import on_ranks
from safetensors.torch import load_file
from twin import step
from typer.testing import CliRunner

import zeroshard
from zeroshard import CheckpointError, Policy
from zeroshard.checkpoint.consolidated import write_files
from zeroshard.checkpoint.hugging_face import claimed, export
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.testing import run_ranks
from zeroshard.tools.checkpoints import folded
from zeroshard.tools.main import app

CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}


def saved(tmp_path: Path, make: Any = MODELS["tied"], stage: int = 3, live: Any = None) -> dict[str, torch.Tensor]:
    """A checkpoint in `tmp_path / "ckpt"`, and the parameters and buffers that it holds."""

    def body(rank: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = make()
        trained = [p for p in model.parameters() if p.requires_grad]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": live is not None and live[1]},
        }
        engine, *_ = zeroshard.initialize(model=model, optimizer=torch.optim.SGD(trained, lr=0.1), config=config)
        engine.save_checkpoint(tmp_path / "ckpt")
        if live is not None:
            live[0](engine)
        states = sharded_of(engine).states
        whole = {fqn: states.get(fqn).clone() for fqn, _ in model.named_parameters()}
        state_dict_keys = model.state_dict().keys()
        return whole | {fqn: b.clone() for fqn, b in model.named_buffers() if fqn in state_dict_keys}

    return on_ranks(body, 2)[0]


def read(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


@pytest.mark.parametrize("limit", [10**9, 2000])
@pytest.mark.parametrize("name", ["tied", "frozen", "batch norm", "tiny"])
def test_a_checkpoint_becomes_a_model_file(name: str, limit: int, tmp_path: Path) -> None:
    expected = saved(tmp_path, MODELS[name])
    for dtype in (None, torch.bfloat16):
        written = export(open_checkpoint(tmp_path / "ckpt"), tmp_path / "out", dtype, max_shard_nbytes=limit)
        got = read(tmp_path / "out")
        assert got.keys() == expected.keys()
        for fqn, value in expected.items():
            assert torch.equal(got[fqn], value.to(dtype) if dtype and value.is_floating_point() else value), fqn
        assert sorted(written) == sorted((tmp_path / "out").iterdir())
        if limit == 2000 and len(written) > 1:
            assert all(path.stat().st_size < 4000 for path in written if path.suffix == ".safetensors")
            index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
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


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_model_that_trains_exports_itself(stage: int, bf16: bool, tmp_path: Path) -> None:
    def live(engine: zeroshard.Engine) -> None:
        engine.export(tmp_path / "whole")
        engine.export(tmp_path / "half", torch.bfloat16)

    expected = saved(tmp_path, MODELS["batch norm" if not bf16 else "tied"], stage, live=(live, bf16))
    for folder, dtype in (("whole", None), ("half", torch.bfloat16)):
        got = read(tmp_path / folder)
        assert got.keys() == expected.keys()
        for fqn, value in expected.items():
            floating = value.is_floating_point() and dtype is not None
            assert torch.equal(got[fqn], value.to(dtype) if floating else value), fqn


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5"])
def test_transformers_loads_it(name: str, tmp_path: Path) -> None:
    make = next(f for key, (f, *_) in FAMILIES.items() if key.startswith(name))
    expected = saved(tmp_path, make)
    export(open_checkpoint(tmp_path / "ckpt"), tmp_path / "out", max_shard_nbytes=40_000)
    model = make()
    model.config.save_pretrained(tmp_path / "out")
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for fqn, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[fqn]), fqn


def test_what_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("x")

    def live(engine: zeroshard.Engine) -> None:
        with pytest.raises(CheckpointError, match="cannot be written"):
            engine.export(blocked)

    saved(tmp_path, live=(live, False))


def test_parameters_are_folded_by_block() -> None:
    one = {"shape": [2, 3], "names": ["blocks.0.w"], "trained": True, "states": {"parameters": "float32"}}
    parameters = {f"blocks.{block}.w": {**one, "names": [f"blocks.{block}.w"]} for block in range(12)}
    parameters["blocks.12.w"] = {**one, "shape": [2, 4]}
    parameters["head.w"] = {**one, "names": ["head.w", "embedding.w"]}
    shown = [(name, number) for name, number, _ in folded(parameters)]
    assert shown == [("blocks.*.w", 12), ("blocks.12.w", 1), ("head.w", 1)]


def test_inspect_cuts_no_name_and_prints_small_sizes(tmp_path: Path) -> None:
    model = torch.nn.Sequential()
    model.add_module("a_module_with_a_very_long_name" * 3, torch.nn.Linear(3, 4))
    zeroshard.shard(model, torch.optim.AdamW(model.parameters()), 1).save(tmp_path, "one")
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)]).output
    assert "\u2026" not in shown
    assert "parameters 0.1 KiB" in shown
    assert "also called" not in shown


def flat(output: str) -> str:
    return re.sub(r"\s+", " ", output)


def test_the_commands(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    run = CliRunner().invoke
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
    victim = next((tmp_path / "ckpt" / "global_step0").glob("rank_00001*"))
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
    model = MODELS["frozen"]()
    trained = [p for p in model.parameters() if p.requires_grad]
    sharded = zeroshard.shard(model, torch.optim.SGD(trained), Policy.stage(0))
    step(model, sharded, 0, 0)
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


@pytest.mark.parametrize("full", [0, 1])
def test_an_export_on_a_disk_that_fills_leaves_nothing_and_names_the_file(full: int, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def body(rank: int) -> None:
        engine = zeroshard.initialize(model=MODELS["tied"](), config=CONFIG)[0]
        engine.export(out)
        if rank == full:
            _fill_disk(1)
        with pytest.raises(CheckpointError, match=rf"{out}/model\.safetensors\.tmp cannot be written: No space left"):
            engine.export(out, torch.bfloat16)

    run_ranks(body, 2)
    assert [path.name for path in out.iterdir()] == ["model.safetensors"]
    assert all(value.dtype == torch.float32 for value in read(out).values())


def test_a_consolidation_on_a_disk_that_fills_leaves_nothing_and_names_the_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    saved(tmp_path)

    def body(rank: int) -> None:
        _fill_disk(1)
        with pytest.raises(CheckpointError, match=rf"{out}/model\.safetensors\.tmp cannot be written: No space left"):
            export(open_checkpoint(tmp_path / "ckpt"), out)

    run_ranks(body, 1)
    assert not list(out.iterdir())


@pytest.mark.ranks(1, fresh=True)
def test_a_saved_file_is_replaced_only_by_a_whole_one(rank: int, tmp_path: Path) -> None:
    """A file size limit stands for the disk's end."""
    engine = zeroshard.initialize(model=MODELS["tied"](), config=CONFIG)[0]
    engine.save_16bit_model(tmp_path)
    before = (tmp_path / "pytorch_model.bin").read_bytes()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be written"):
        engine.save_16bit_model(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert (tmp_path / "pytorch_model.bin").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["pytorch_model.bin"]


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
