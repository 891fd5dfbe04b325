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
import command_line
import pytest
import torch
import typer
from models import Stack
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from typer.testing import CliRunner

import zeroshard
from zeroshard import ConfigError, UsageError
from zeroshard.engine.config.fields import DTYPE_NAMES, DType
from zeroshard.engine.config.load import load_config
from zeroshard.tools.main import app
from zeroshard.tools.options import dtype_name, nbytes_of, parameters_of

ROOT = Path(__file__).parents[2]
TRAINS = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


# ---------------------------------------------------------------------- configs


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


def scheduler(name: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": name, "params": params}}


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation: unknown key; did you mean 'zero_optimization'?"),
        ({"my_program": {"a": 1}}, '"ignored_keys": ["my_program"]'),
        ({"ignored_keys": ["other"], "my_program": 1}, "my_program: unknown key"),
        ({"train_micro_batch_size_per_gpu": None}, "names no batch size"),
        (optimizer("AdamWW"), "optimizer.type: torch.optim has no 'AdamWW'; did you mean 'AdamW'?"),
        (optimizer("AdamW", lr="1e-5"), "optimizer.params.lr: '1e-5' is text"),
        (optimizer("AdamW", betas=["0.9", 0.99]), "optimizer.params.betas: '0.9' is text"),
        (optimizer("AdamW", learning_rate=1), "optimizer.params.learning_rate: AdamW takes no such"),
        (optimizer("AdamW", lr=-1), "Invalid learning rate: -1"),
        (scheduler("WarmupLr"), "did you mean 'WarmupLR'?"),
        (scheduler("WarmupLR", warmup_steps=3), "scheduler.params.warmup_steps: WarmupLR takes no such"),
        (scheduler("WarmupDecayLR"), "scheduler.params.total_num_steps: WarmupDecayLR requires this"),
        (scheduler("WarmupLR", warmup_max_lr="1e-3"), "scheduler.params.warmup_max_lr: '1e-3' is text"),
    ],
)
def test_check_refuses_what_a_run_refuses(blocks: dict[str, Any], expected: str, tmp_path: Path) -> None:
    config = {**TRAINS, **blocks}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    checked = CliRunner().invoke(app, ["config", "check", str(path)])
    assert expected in str(checked.exception)
    with pytest.raises(ConfigError) as caught:
        zeroshard.initialize(model=Stack(), config=config)
    # They differ in the way to pass a value: --auto of the command, auto={...} of the function.
    assert str(caught.value) == str(checked.exception) or "--auto" in str(checked.exception)


def test_check_says_the_stage_and_the_clipping_and_takes_values_by_group(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"my_program": {"a": 1}, "ignored_keys": ["my_program"]}))
    size = ["--auto", "train_micro_batch_size_per_gpu=1"]
    shown = CliRunner().invoke(app, ["config", "check", str(path), *size])
    assert "batch 1 = 1 sample x 1 accumulated x 1 rank." in shown.output
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

SIZES = {
    "7B": (7e9, 7), "500M": (5e8, 500 * 10**6), "1e9": (1e9, 10**9), "7.5e9": (7.5e9, 75 * 10**8), "4096": (4096, 4096),
    "1_000_000": (1e6, 10**6), "1.5 b": (1.5e9, 1), "3T": (3e12, 3 * 10**12), "2k": (2e3, 2000), "5G": (5e9, 5 * 10**9),
    "80GB": (None, 80 * 10**9), "512MiB": (None, 512 << 20), "16 gib": (None, 16 << 30),
}  # fmt: skip
"""What a text means as a number of parameters, and as one of bytes; None: it is refused."""
NO_SIZES = ["", "-1", "0", "7X", "B", "1e", "nan", "inf", "1e999", "0x10", "7BB", "1 2", "__", "."]


def test_sizes_as_people_write_them() -> None:
    for text, meant in {**SIZES, **dict.fromkeys(NO_SIZES, (None, None))}.items():
        for read, expected in zip((parameters_of, nbytes_of), meant, strict=True):
            if expected is None:
                with pytest.raises(typer.BadParameter):
                    read(text)
            else:
                assert read(text) == expected, text


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

FILES = {
    "model.py": """
import torch
def boom():
    return {}["x"]
def number():
    return 3
def empty():
    return torch.nn.ReLU()
""",
    "bad.py": "def f(:\n",
    "bold.json": json.dumps({**TRAINS, "[bold]": 1}),  # what looks like markup in an error is text
}


@pytest.mark.quick(12)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("estimate", "either --parameters N or --model FILE"),
        ("estimate --model model.py:boom", "failed: KeyError: 'x' ({tmp}/model.py, line 4)"),
        ("estimate --model model.py:number", "Return a torch.nn.Module"),
        ("estimate --model model.py:empty", "no trainable parameters"),
        ("estimate --model model.py:nothing", "has no function 'nothing'"),
        ("estimate --model bad.py:make", "importing bad.py failed: SyntaxError"),
        ("estimate --model nowhere.py:make", "no file at nowhere.py"),
        ("estimate --model no_such_module:make", "no module 'no_such_module'"),
        ("estimate --model model.py", "module:function or file.py:function"),
        ("estimate --model folder.safetensors", "is a folder, not a file"),
        ("estimate --model none.safetensors", "no file at"),
        ("estimate --parameters 1B --optimizer Adan", "there is no --optimizer"),
        ("estimate --parameters -7B", "Invalid value for '--parameters'"),
        ("estimate --parameters 1B --ranks 0", "Invalid value for '--ranks'"),
        ("estimate --parameters 1B --dtype int8", "Invalid value for '--dtype'"),
        ("plan x --gpus 0", "Invalid value for '--gpus'"),
        ("plan x --memory 80", "Invalid value for '--memory'"),
        ("config check {tmp}", "is a folder, not a config file"),
        ("config check none.json", "no config file at"),
        ("config check bad.py", "not readable as JSON"),
        ("config check bold.json", "[bold]: unknown key"),
        ("config check x.json --ranks -2", "Invalid value for '--ranks'"),
        ("inspect none", "no folder at"),
        ("inspect bad.py", "is a file, not a folder"),
        ("inspect {tmp}", "has no file 'latest'"),
        ("consolidate {tmp} bad.py", "is a file, not a folder"),
        ("consolidate a b --max-shard-size many", "Invalid value for '--max-shard-size'"),
        ("import-deepspeed none out", "no folder at"),
        ("doctor --size -1MB", "Invalid value for '--size'"),
        ("doctor --profile p.json", "Measure a disk with fio or dd"),
        ("compare --model x:y --plot bars.png", "run python examples/compare.py"),
        ("explain UsageError", "each message ends with its remedy"),
        ("nonsense", "No such command 'nonsense'"),
    ],
)
def test_a_mistake_on_the_command_line_is_a_sentence(
    arguments: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "folder.safetensors").mkdir()
    monkeypatch.chdir(tmp_path)
    done = command_line.zeroshard(*arguments.format(tmp=tmp_path).split())
    assert done.returncode == 2
    assert expected.format(tmp=tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


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
