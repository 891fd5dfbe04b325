"""Obstacles for a new user: a misspelt config, nonsense on the command line, and the cost of imports."""

from __future__ import annotations

import ast
import importlib
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import cloudpickle
import pytest
import torch
import typer
from models import Stack
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typer.testing import CliRunner

import zeroshard
from zeroshard import ConfigError, UsageError, ZeroshardError
from zeroshard.engine.config.fields import DTYPE_NAMES, DType
from zeroshard.engine.config.load import load_config
from zeroshard.tools.main import app
from zeroshard.tools.options import dtype_name, nbytes_of, parameters_of

ROOT = Path(__file__).parents[2]
TRAINS = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def command(*arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the program, as `main` ends it."""
    script = "import sys; from zeroshard.tools.main import main; sys.argv = ['zeroshard', *sys.argv[1:]]; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=ROOT, check=False, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


# ---------------------------------------------------------------------- configs


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation: unknown key; did you mean 'zero_optimization'?"),
        ({"train_batchsize": 4}, "did you mean 'train_batch_size'?"),
        ({"my_program": {"a": 1}}, '"ignored_keys": ["my_program"]'),
        ({"ignored_keys": ["other"], "my_program": 1}, "my_program: unknown key"),
    ],
)
def test_an_unknown_key_at_the_top_is_an_error(more: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({**TRAINS, **more}, 1)
    assert expected in str(caught.value)


def test_keys_of_other_programs_are_let_through_by_name() -> None:
    config = load_config({**TRAINS, "my_program": {"a": 1}, "ignored_keys": ["my_program"]}, 1)
    assert config.batch.micro == 2


@pytest.mark.parametrize(
    ("optimizer", "scheduler", "expected"),
    [
        ({"type": "AdamWW"}, None, "optimizer.type: torch.optim has no 'AdamWW'; did you mean 'AdamW'?"),
        ({"type": "AdamW", "params": {"lr": "1e-5"}}, None, "optimizer.params.lr: '1e-5' is text"),
        ({"type": "AdamW", "params": {"betas": ["0.9", 0.99]}}, None, "optimizer.params.betas: '0.9' is text"),
        (
            {"type": "AdamW", "params": {"learning_rate": 1}},
            None,
            "optimizer.params.learning_rate: AdamW takes no such",
        ),
        ({"type": "AdamW", "params": {"lr": -1}}, None, "Invalid learning rate: -1"),
        (None, {"type": "WarmupLr"}, "did you mean 'WarmupLR'?"),
        (
            None,
            {"type": "WarmupLR", "params": {"warmup_steps": 3}},
            "scheduler.params.warmup_steps: WarmupLR takes no such",
        ),
        (None, {"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps: WarmupDecayLR requires this"),
        (
            None,
            {"type": "WarmupLR", "params": {"warmup_max_lr": "1e-3"}},
            "scheduler.params.warmup_max_lr: '1e-3' is text",
        ),
    ],
)
def test_check_makes_the_optimizer_and_the_scheduler(
    optimizer: dict[str, Any] | None, scheduler: dict[str, Any] | None, expected: str, tmp_path: Path
) -> None:
    config: dict[str, Any] = {**TRAINS, **({"optimizer": optimizer} if optimizer else {})}
    config |= {"scheduler": scheduler} if scheduler else {}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    checked = CliRunner().invoke(app, ["config", "check", str(path)])
    assert expected in str(checked.exception)
    with pytest.raises(ConfigError) as caught:
        zeroshard.initialize(model=Stack(), config=config)
    assert str(caught.value) == str(checked.exception)


def test_check_says_the_stage_and_the_clipping_and_takes_values_by_group(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    groups = {"type": "WarmupLR", "params": {"warmup_max_lr": [1e-3, 1e-4], "warmup_min_lr": [0.0, 0.0]}}
    path.write_text(json.dumps({**TRAINS, "scheduler": groups}))
    shown = CliRunner().invoke(app, ["config", "check", str(path), "--ranks", "3"])
    assert shown.exit_code == 0, shown.output
    assert "ZeRO stage 0" in shown.output
    assert "clipped to a norm of 1.0" in shown.output
    assert "batch 6 = 2 samples x 1 accumulated x 3 ranks" in shown.output
    path.write_text(json.dumps({**TRAINS, "gradient_clipping": 0, "zero_optimization": {"stage": 2}}))
    shown = CliRunner().invoke(app, ["config", "check", str(path)])
    assert "ZeRO stage 2; gradients are not clipped" in shown.output


def test_a_batch_size_is_named_by_the_config_or_the_caller(tmp_path: Path) -> None:
    config = {"optimizer": TRAINS["optimizer"]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    message = str(CliRunner().invoke(app, ["config", "check", str(path)]).exception)
    assert "names no batch size" in message
    assert "--auto train_micro_batch_size_per_gpu=" in message
    size = ["--auto", "train_micro_batch_size_per_gpu=1"]
    assert (
        "batch 1 = 1 sample x 1 accumulated x 1 rank."
        in CliRunner().invoke(app, ["config", "check", str(path), *size]).output
    )
    with pytest.raises(ConfigError, match="names no batch size"):
        zeroshard.initialize(model=Stack(), config=config)
    engine, *_ = zeroshard.initialize(model=Stack(), config=config, auto={"train_micro_batch_size_per_gpu": 5})
    assert engine.train_batch_size() == 5
    evaluating, *_ = zeroshard.initialize(model=Stack(), config={})
    assert evaluating.global_steps == 0


def test_training_data_that_cannot_be_cut_by_ranks_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    data: Any
    for data, expected in ((DataLoader(TensorDataset(torch.zeros(4))), "loader.dataset"), (Stream(), "Stream")):
        with pytest.raises(UsageError, match=expected):
            zeroshard.initialize(model=Stack(), config=TRAINS, training_data=data)
    with pytest.raises(ConfigError, match="names no batch size"):
        zeroshard.initialize(model=Stack(), config={}, training_data=TensorDataset(torch.zeros(4)))


# ---------------------------------------------------------------------- sizes and dtypes


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7B", 7e9),
        ("500M", 5e8),
        ("1e9", 1e9),
        ("7.5e9", 7.5e9),
        ("1_000_000", 1e6),
        ("1.5 b", 1.5e9),
        ("3T", 3e12),
        ("2k", 2e3),
    ],
)
def test_numbers_of_parameters(text: str, number: float) -> None:
    assert parameters_of(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("80GB", 80 * 10**9),
        ("512MiB", 512 << 20),
        ("1e9", 10**9),
        ("16 gib", 16 << 30),
        ("7B", 7),
        ("4096", 4096),
        ("5G", 5 * 10**9),
    ],
)
def test_numbers_of_bytes(text: str, number: int) -> None:
    assert nbytes_of(text) == number


@pytest.mark.parametrize(
    "text", ["", "-1", "0", "7X", "B", "1e", "nan", "inf", "1e999", "0x10", "7BB", "1 2", "__", "."]
)
def test_what_is_no_size(text: str) -> None:
    for read in (parameters_of, nbytes_of):
        with pytest.raises(typer.BadParameter):
            read(text)


def test_dtypes_have_the_same_names_everywhere() -> None:
    import torch

    names = set(get_args(get_args(DType)[0]))
    assert names == set(DTYPE_NAMES) >= {"fp32", "float32", "bf16", "bfloat16", "fp16", "float16", "half"}
    for name, known in DTYPE_NAMES.items():
        assert dtype_name(name) == dtype_name(name.upper()) == known
        types = load_config({"data_types": {"param_dtype": name}}, 1).precision
        assert types.param_dtype is getattr(torch, known)
        if known != "float32":
            autocast = load_config({"torch_autocast": {"enabled": True, "dtype": name}}, 1)
            assert autocast.autocast_dtype is getattr(torch, known)
    with pytest.raises(typer.BadParameter):
        dtype_name("int8")


# ---------------------------------------------------------------------- the command line

MODEL = """
import torch
def boom():
    return {}["x"]
def number():
    return 3
def empty():
    return torch.nn.ReLU()
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["estimate", "--model", "{tmp}/model.py:boom"], "failed: KeyError: 'x' ({tmp}/model.py, line 4)"),
        (["estimate", "--model", "{tmp}/model.py:number"], "Return a torch.nn.Module"),
        (["estimate", "--model", "{tmp}/model.py:empty"], "no trainable parameters"),
        (["estimate", "--model", "{tmp}/model.py:nothing"], "has no function 'nothing'"),
        (["estimate", "--model", "{tmp}/bad.py:make"], "importing {tmp}/bad.py failed: SyntaxError"),
        (["estimate", "--model", "no_such_module:make"], "no module 'no_such_module'"),
        (["estimate", "--model", "model.py"], "module:function or file.py:function"),
        (["estimate", "--model", "{tmp}/folder.safetensors"], "is a folder, not a file"),
        (["estimate", "--model", "{tmp}/none.safetensors"], "no file at"),
        (["estimate", "--parameters", "1B", "--optimizer", "Adan"], "there is no --optimizer"),
        (["config", "check", "{tmp}"], "is a folder, not a config file"),
        (["config", "check", "{tmp}/none.json"], "no config file at"),
        (["config", "check", "{tmp}/bad.py"], "not readable as JSON"),
        (["inspect", "{tmp}/none"], "no folder at"),
        (["inspect", "{tmp}/bad.py"], "is a file, not a folder"),
        (["inspect", "{tmp}"], "has no file 'latest'"),
        (["consolidate", "{tmp}", "{tmp}/bad.py"], "is a file, not a folder"),
        (["import-deepspeed", "{tmp}/none", "{tmp}/out"], "no folder at"),
    ],
)
def test_wrong_input_is_a_sentence(arguments: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "folder.safetensors").mkdir()
    done = CliRunner().invoke(app, [argument.replace("{tmp}", str(tmp_path)) for argument in arguments])
    assert isinstance(done.exception, ZeroshardError), (done.exception, done.output)
    assert expected.replace("{tmp}", str(tmp_path)) in str(done.exception)


@pytest.mark.parametrize(
    "arguments",
    [
        ["estimate", "--parameters", "-7B"],
        ["estimate", "--parameters", "1B", "--ranks", "0"], ["estimate", "--parameters", "1B", "--dtype", "int8"],
        ["doctor", "--size", "-1MB"], ["plan", "x", "--gpus", "0"], ["plan", "x", "--memory", "80"],
        ["config", "check", "x.json", "--ranks", "-2"], ["nonsense"], ["consolidate", "a", "b", "--max-shard-size", "many"],
    ],
)  # fmt: skip
def test_wrong_numbers_are_refused_by_the_option(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)


def test_sentences_keep_their_brackets(tmp_path: Path) -> None:
    """What looks like markup in an error is text."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**TRAINS, "[bold]": 1}))
    code, _, told = command("config", "check", str(path))
    assert code == 2
    assert "[bold]: unknown key" in told
    assert "Traceback" not in told


def test_the_program_answers_without_torch() -> None:
    script = "import sys, zeroshard.tools.main; print([name for name in ('torch', 'pydantic', 'rich') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
    done = subprocess.run(
        [sys.executable, "-m", "zeroshard", "--version"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.startswith(f"zeroshard {zeroshard.__version__}, torch 2")
    assert "--install-completion" in CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output


# ---------------------------------------------------------------------- importing


def test_public_names_are_imported_at_first_use() -> None:
    """A name is imported from its module; no import of a module hides a name."""
    script = """
import sys, types
import zeroshard
assert {name for name in sys.modules if name.startswith("zeroshard.")} <= {"zeroshard.version"}, "importing it imports nothing"
assert set(zeroshard.__all__) <= set(dir(zeroshard))
from zeroshard.model.sharded import Sharded
import zeroshard.engine.initialize, zeroshard.model.born, zeroshard.model.unsharded, zeroshard.tools.planning.dry_run
for name in ("shard", "initialize", "sharded_init", "unsharded", "plan"):
    assert isinstance(getattr(zeroshard, name), types.FunctionType), name
for name in zeroshard.__all__:
    getattr(zeroshard, name)
assert "torch._dynamo" not in sys.modules, "the compiler, whose import takes as long as torch's"
assert zeroshard.checkpointing.__name__ == "zeroshard.engine.recompute.checkpointing"
try:
    zeroshard.shrad
except AttributeError as error:
    assert "shrad" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_type_checkers_see_the_public_names() -> None:
    """They do not read the table that the names are imported by; no module may have the name of one."""
    package = Path(zeroshard.__file__).parent
    imports = set()
    for node in ast.walk(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module not in ("importlib", "typing", "zeroshard.version"):
            imports |= {(alias.name, node.module) for alias in node.names if alias.asname == alias.name}
    assert [name for name, _ in sorted(imports)] == sorted(zeroshard.__all__)
    for name, module in imports:
        assert getattr(importlib.import_module(module), name) is getattr(zeroshard, name), name
    modules = {path.stem for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    assert not set(zeroshard.__all__) & modules


def test_the_package_is_pickled_by_name() -> None:
    """As the globals of a script's functions are by what sends these to other processes, such as Ray."""
    assert pickle.loads(cloudpickle.dumps(zeroshard)) is zeroshard
