"""The package named deepspeed: it has what trainers touch, says what it has not, and comes only when called for."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import zeroshard
from zeroshard.shim_path import shim_path

ROOT = Path(zeroshard.__file__).parent.parent
TRAINERS = ("accelerate", "transformers", "trl", "peft", "lightning")
NOT_TRAINERS = ("accelerate/test_utils",)
"""Tests of theirs, which use DeepSpeed's insides."""


def python(code: str, *path: Path, cwd: Path | None = None, status: int = 0, **environment: str) -> str:
    """What a process prints that has these folders on its path."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)]), **environment}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


# ---------------------------------------------------------------------- what it has


def test_its_optimizers_are_torchs_with_deepspeeds_arguments() -> None:
    """Weight decay apart from the gradient unless they are told, and 0 by default; accelerate's way of handing groups over."""
    python(
        """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from zeroshard import UsageError

def trained(make):
    p = torch.nn.Parameter(torch.linspace(-1, 1, 8))
    optimizer = make([p])
    for step in range(3):
        p.grad = torch.sin(torch.arange(8.0) + step)
        optimizer.step()
    return p.detach()

T = torch.optim
for ours, theirs in (
    (FusedAdam, lambda p: T.AdamW(p, 1e-3, weight_decay=0, fused=True)),
    (DeepSpeedCPUAdam, lambda p: T.AdamW(p, 1e-3, weight_decay=0, fused=True)),
    (lambda p: FusedAdam(p, weight_decay=0.1), lambda p: T.AdamW(p, 1e-3, weight_decay=0.1, fused=True)),
    (lambda p: FusedAdam(p, adam_w_mode=False, weight_decay=0.1), lambda p: T.Adam(p, 1e-3, weight_decay=0.1, fused=True)),
    (lambda p: DeepSpeedCPUAdam(p, adamw_mode=False, weight_decay=0.1), lambda p: T.Adam(p, 1e-3, weight_decay=0.1, fused=True)),
    (lambda p: DeepSpeedCPUAdam(T.Adam(p, 3e-3, weight_decay=0.1).param_groups, adamw_mode=False),
     lambda p: T.Adam(p, 3e-3, weight_decay=0.1, fused=True)),
    (lambda p: DeepSpeedCPUAdam(T.AdamW(p, 3e-3, weight_decay=0.1).param_groups, adamw_mode=True),
     lambda p: T.AdamW(p, 3e-3, weight_decay=0.1, fused=True)),
    (lambda p: DeepSpeedCPUAdagrad(p, weight_decay=0.1), lambda p: T.Adagrad(p, 1e-2, weight_decay=0.1)),
):
    assert torch.equal(trained(ours), trained(theirs))
assert not torch.equal(trained(lambda p: FusedAdam(p, weight_decay=0.1)), trained(FusedAdam))
for Lion in (DeepSpeedCPULion, FusedLion):
    assert Lion([torch.nn.Parameter(torch.ones(1))]).defaults == {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
for wrong in (
    lambda p: FusedAdam(p, bias_correction=False), lambda p: FusedAdam(p, amsgrad=True),
    lambda p: DeepSpeedCPUAdam(p, fp32_optimizer_states=False), lambda p: DeepSpeedCPUAdagrad(p, amsgrad=True),
    lambda p: DeepSpeedCPULion(p, fp32_optimizer_states=False),
):
    try: trained(wrong)
    except UsageError: continue
    raise AssertionError("not refused")
""",
        shim_path(),
    )


def test_its_names_do_what_scripts_expect() -> None:
    python(
        """
import argparse, importlib.metadata, io, contextlib, json, pathlib, tempfile
import torch, deepspeed
from torch import nn
assert deepspeed.__version__ == importlib.metadata.version("deepspeed") == deepspeed.version == "0.19.8"
assert deepspeed.__implementation__.startswith("zeroshard")
args = deepspeed.add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed", "--deepspeed_config", "a.json"])
assert args.deepspeed and args.deepspeed_config == "a.json"

# A process that nobody launched is a group of one; args.deepspeed_config, and two configs at once.
config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-2}}, "zero_optimization": {"stage": 3}}
args.deepspeed_config = str(pathlib.Path(tempfile.mkdtemp(), "zero.json"))
pathlib.Path(args.deepspeed_config).write_text(json.dumps(config))
model = nn.Linear(4, 4)
engine, optimizer, loader, scheduler = deepspeed.initialize(args, model, model_parameters=model.parameters())
assert deepspeed.comm.get_world_size() == 1 and deepspeed.dist is deepspeed.comm and scheduler is None
assert isinstance(engine, deepspeed.DeepSpeedEngine) and isinstance(engine, nn.Module)
assert isinstance(optimizer, deepspeed.runtime.base_optimizer.DeepSpeedOptimizer)
loss = engine(torch.ones(4, 4)).sum()
engine.backward(loss)
engine.step()
for wrong in (dict(args=args, config=config), dict(config=config, mesh_param=(1, 1)), dict()):
    try: deepspeed.initialize(model=nn.Linear(2, 2), **wrong)
    except RuntimeError as error: assert len(str(error)) < 200
    else: raise AssertionError(wrong)

from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
read = DeepSpeedConfig(config)
assert (read.train_batch_size, read.gradient_accumulation_steps, read.zero_optimization_stage) == (4, 1, 3)
assert read.gradient_clipping == 1.0 and read.optimizer_name == "adam"
try: DeepSpeedConfig({"train_batch_size": 4, "zero_optimization": {"stage": 7}})
except deepspeed.DeepSpeedConfigError: pass
else: raise AssertionError

# Loaders, copies for torch.save, devices, logging, checkpointing with keyword arguments.
repeating = deepspeed.utils.RepeatingLoader([1, 2])
assert [next(repeating) for _ in range(5)] == [1, 2, 1, 2, 1]
flat = torch.arange(100.0)
copy = deepspeed.checkpoint.utils.clone_tensors_for_torch_save({"a": [flat[:2]], "b": (1, flat[2:4])})
assert copy["a"][0].untyped_storage().nbytes() == 8 and torch.equal(copy["b"][1], flat[2:4])
with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
    made = nn.Linear(2, 2)
assert made.weight.is_meta and made.weight.dtype is torch.bfloat16 and torch.zeros(1).dtype is torch.float32
with deepspeed.OnDevice(dtype=torch.bfloat16, enabled=False):
    assert nn.Linear(2, 2).weight.dtype is torch.float32
out = io.StringIO()
with contextlib.redirect_stdout(out):
    deepspeed.utils.logging.print_dist("said", ranks=[0]); deepspeed.utils.logging.print_dist("not said", ranks=[1])
assert out.getvalue() == "[Rank 0] said\\n"
x, scale = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
deepspeed.checkpointing.checkpoint(lambda a, scale: (a * scale).sin(), x, scale=scale).sum().backward()
assert torch.equal(x.grad, 3 * torch.tensor([3.0, 3.0]).cos()) and scale.grad is not None

accelerator = deepspeed.get_accelerator()
assert torch.ones(1).to(accelerator.current_device_name()).device.type == accelerator.device_name()
assert accelerator.communication_backend_name() == torch.distributed.get_backend()
assert accelerator.available_memory() <= accelerator.total_memory()
accelerator.synchronize(); accelerator.empty_cache(); accelerator.manual_seed(0)
state = accelerator.get_rng_state(); first = torch.rand(1); accelerator.set_rng_state(state)
deepspeed.runtime.utils.see_memory_usage("here", force=True)
""",
        shim_path(),
    )


def test_what_is_not_there_says_so() -> None:
    """hasattr is False, isinstance False, and whoever uses it reads what to use, also with `from ... import`."""
    python(
        """
import deepspeed, torch
assert not hasattr(deepspeed, "nothing") and not hasattr(deepspeed.utils, "nothing")
assert not isinstance(torch.nn.Linear(1, 1), deepspeed.PipelineModule)

def message(code, kind):
    try: exec(code, {"deepspeed": deepspeed})
    except kind as error: return str(error)
    raise AssertionError(code)

assert "zeroshard has no deepspeed.utils.nothing" in message("deepspeed.utils.nothing", AttributeError)
assert "zeroshard has no deepspeed.utils.nothing" in message("from deepspeed.utils import nothing", ImportError)
assert "stage 3" in message("from deepspeed import PipelineEngine", ImportError)
assert "sp_size=1" in message("from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF", ImportError)
assert "stage 3" in message("deepspeed.PipelineModule([])", NotImplementedError)
assert "stage 3" in message("deepspeed.tp_model_init(None, 2)", NotImplementedError)
assert "engine.export" in message("deepspeed.init_inference(None)", NotImplementedError)
assert "AdamW" in message("deepspeed.ops.lamb.FusedLamb([])", NotImplementedError)
message("import deepspeed.inference", ModuleNotFoundError)
""",
        shim_path(),
    )


# ---------------------------------------------------------------------- the guard


def touched(package: Path) -> Iterator[tuple[str, str]]:
    """(name, where) of all that a library's source takes from deepspeed, imports and attributes alike."""
    for path in package.rglob("*.py"):
        where = str(path.relative_to(package.parent))
        text = path.read_text(errors="replace")
        if "deepspeed" not in text or where.startswith(NOT_TRAINERS):
            continue
        known: dict[str, str] = {}
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "deepspeed":
                        known[alias.asname or "deepspeed"] = alias.name if alias.asname else "deepspeed"
                        yield alias.name, f"{where}:{node.lineno}"
            elif (
                isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "deepspeed"
            ):
                for alias in node.names:
                    known[alias.asname or alias.name] = name = f"{node.module}.{alias.name}"
                    yield name, f"{where}:{node.lineno}"
        for node in ast.walk(tree):
            parts = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else [""]
            if parts[0] in known and all(part.isidentifier() for part in parts):
                yield ".".join([known[parts[0]], *parts[1:]]), f"{where}:{node.lineno}"  # type: ignore[attr-defined]


RESOLVE = """
import importlib, json, sys
problems, found, refused = {}, [], []
for name, where in json.load(open(sys.argv[1])).items():
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try: owner = importlib.import_module(".".join(parts[:length])); break
        except ModuleNotFoundError: continue
    for part in parts[length:]:
        if hasattr(owner, part): owner = getattr(owner, part)
        elif part in getattr(getattr(owner, "__getattr__", None), "instead", {}): refused.append(name); break
        else: problems[name] = where; break
    else: found.append(name)
print(json.dumps([problems, found, refused]))
"""


def test_every_name_that_trainers_touch_is_there_or_refused_on_purpose(tmp_path: Path) -> None:
    """A new release of one of them that touches another name fails here."""
    names: dict[str, str] = {}
    seen = set()
    for trainer in TRAINERS:
        spec = importlib.util.find_spec(trainer)
        if spec is not None and spec.origin is not None:
            for name, where in touched(Path(spec.origin).parent):
                names[name] = where
                seen.add(trainer)
    if not {"accelerate", "transformers"} <= seen:
        pytest.skip("accelerate and transformers are not installed")
    (tmp_path / "names.json").write_text(json.dumps(names))
    (tmp_path / "resolve.py").write_text(RESOLVE)
    code = "import sys; sys.argv = ['', 'names.json']; exec(open('resolve.py').read())"
    problems, found, refused = json.loads(python(code, shim_path(), cwd=tmp_path).splitlines()[-1])
    assert problems == {}
    assert {"deepspeed.initialize", "deepspeed.zero.Init", "deepspeed.comm.init_distributed"} <= set(found)
    assert "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF" in refused
    assert len(refused) < 8


def test_the_engine_has_what_accelerate_calls() -> None:
    spec = importlib.util.find_spec("accelerate")
    if spec is None or spec.origin is None:
        pytest.skip("accelerate is not installed")
    tree = ast.parse((Path(spec.origin).parent / "utils" / "deepspeed.py").read_text())
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.engine"
    }
    assert {"backward", "step", "set_gradient_accumulation_boundary"} <= called
    assert {name for name in called if not hasattr(zeroshard.Engine, name)} == set()


# ---------------------------------------------------------------------- how it comes


def test_as_deepspeed_puts_it_on_the_path_once_and_says_so(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys
import zeroshard.as_deepspeed
import importlib.metadata, deepspeed
assert deepspeed.__implementation__.startswith("zeroshard") and importlib.metadata.version("deepspeed") == "0.19.8"
subprocess.run([sys.executable, "-c", "import deepspeed; deepspeed.__implementation__"], check=True)
assert sum(part.endswith("shim") for part in os.environ["PYTHONPATH"].split(os.pathsep)) == 1
import zeroshard.as_deepspeed
sys.exit(7)
"""
    real = tmp_path / "deepspeed"
    real.mkdir()
    (real / "__init__.py").write_text("")
    said = python(code, tmp_path, status=7).splitlines()
    assert said == [f"zeroshard: this process imports it as deepspeed, in place of the one at {real}."]
    assert python(code, status=7, RANK="1") == ""


@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        ("import deepspeed", "DeepSpeed is loaded"),
        ("import accelerate", "accelerate is loaded, and has found no deepspeed"),
        ("import transformers.integrations.deepspeed", "is loaded, and has found no deepspeed"),
    ],
)
def test_as_deepspeed_too_late_is_an_error(tmp_path: Path, before: str, sentence: str) -> None:
    path = []
    if before == "import deepspeed":
        (tmp_path / "deepspeed.py").write_text("")
        path = [tmp_path]
    elif importlib.util.find_spec(before.removeprefix("import ").partition(".")[0]) is None or importlib.util.find_spec(
        "deepspeed"
    ):
        pytest.skip("needs the library, and no DeepSpeed")
    *_, last, note = python(f"{before}\nimport zeroshard.as_deepspeed", *path, status=1).splitlines()
    assert note == "see docs/troubleshooting.md#usageerror"
    assert "UsageError" in last and "comes too late" in last and sentence in last


def test_the_wheel_holds_it(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = "import os, sys; from hatchling.build import build_wheel; os.chdir(sys.argv[1]); print(build_wheel(sys.argv[2]))"
    python(
        f"import sys; sys.argv = ['', {str(ROOT)!r}, {str(tmp_path)!r}]; {build}", *map(Path, filter(None, sys.path))
    )
    (wheel,) = tmp_path.glob("*.whl")
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    expected = {path.relative_to(ROOT) for path in shim_path().rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert len(expected) > 40
    assert {path for path in expected if not (installed / path).is_file()} == set()
    code = "import zeroshard.as_deepspeed, deepspeed, importlib.metadata as m; print(deepspeed.__file__, m.version('deepspeed'))"
    file, version = python(code, installed, cwd=tmp_path).split()
    assert Path(file).is_relative_to(installed) and version == "0.19.8"
