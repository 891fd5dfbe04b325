"""The package named deepspeed: it has the names that trainers use, refuses others by name, and is imported only on request."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import os
import pickle
import pkgutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from zeroshard.integrations.shim_path import shim_path

ROOT = Path(zeroshard.__file__).parent.parent
TRAINERS = ("accelerate", "transformers", "trl", "peft", "lightning")
NOT_TRAINERS = ("accelerate/test_utils",)
"""Tests of theirs, which use DeepSpeed's insides."""


def python(code: str, *path: Path, cwd: Path | None = None, status: int = 0, **environment: str) -> str:
    """Return what a process prints that has these folders on its path."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)]), **environment}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if status == 0 else done.stderr


# ---------------------------------------------------------------------- what it has

CASES: list[Callable[[], None]] = []
"""They run one after another in one child, in which the package named deepspeed is on the path."""


def in_the_child(case: Callable[[], None]) -> Callable[[], None]:
    CASES.append(case)
    return case


def run_cases() -> None:
    """Run all of them, and print the traceback of each that fails."""
    for case in CASES:
        try:
            case()
        except BaseException:  # pytest's own is no Exception
            print(f"{case.__name__} failed:\n{traceback.format_exc()}")
    print(f"{len(CASES)} cases ended")


MODEL_CONFIG = {
    "train_batch_size": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
}


def stepped(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Tensor:
    """Return a parameter after three steps."""
    parameter = nn.Parameter(torch.linspace(-1, 1, 8))
    optimizer = make([parameter])
    for step in range(3):
        parameter.grad = torch.sin(torch.arange(8.0) + step)
        optimizer.step()
    return parameter.detach()


def raised(call: Callable[[], object], kind: type[BaseException]) -> str:
    """Return the message of its error."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@in_the_child
def optimizers_are_torchs_with_deepspeeds_names() -> None:
    """Adam decays apart from the gradient, and by default not; it takes the groups of other Adams, which accelerate passes."""
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    def adam(p: Any, lr: float = 1e-3, decay: float = 0.1) -> Any:
        return torch.optim.Adam(p, lr, weight_decay=decay, fused=True)

    def adamw(p: Any, lr: float = 1e-3, decay: float = 0.1) -> Any:
        return torch.optim.AdamW(p, lr, weight_decay=decay, fused=True)

    def groups_of(kind: Any, p: Any) -> list[dict[str, Any]]:
        """Return groups that name their own kernels and kind of decay."""
        groups: list[dict[str, Any]] = kind(p, 3e-3, weight_decay=0.1).param_groups
        return groups

    same: list[tuple[Callable[[list[nn.Parameter]], Any], Callable[[list[nn.Parameter]], Any]]] = [
        (FusedAdam, lambda p: adamw(p, decay=0)),
        (DeepSpeedCPUAdam, lambda p: adamw(p, decay=0)),
        (lambda p: FusedAdam(p, weight_decay=0.1), adamw),
        (lambda p: FusedAdam(p, adam_w_mode=False, weight_decay=0.1), adam),
        (lambda p: DeepSpeedCPUAdam(p, adamw_mode=False, weight_decay=0.1), adam),
        (lambda p: DeepSpeedCPUAdam(groups_of(torch.optim.Adam, p), adamw_mode=False), lambda p: adam(p, 3e-3)),
        (lambda p: DeepSpeedCPUAdam(groups_of(torch.optim.AdamW, p)), lambda p: adamw(p, 3e-3)),
        (lambda p: DeepSpeedCPUAdam(groups_of(torch.optim.Adam, p)), lambda p: adamw(p, 3e-3)),
        (lambda p: DeepSpeedCPUAdagrad(p, weight_decay=0.1), lambda p: torch.optim.Adagrad(p, 1e-2, weight_decay=0.1)),
    ]
    for number, (ours, torchs) in enumerate(same):
        assert torch.equal(stepped(ours), stepped(torchs)), number
    assert not torch.equal(stepped(adam), stepped(adamw)) and not torch.equal(stepped(FusedAdam), stepped(adamw))
    for kind in (DeepSpeedCPULion, FusedLion):
        assert kind([nn.Parameter(torch.ones(1))]).defaults == {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    for wrong in (
        lambda p: FusedAdam(p, bias_correction=False),
        lambda p: FusedAdam(p, amsgrad=True),
        lambda p: DeepSpeedCPUAdam(p, fp32_optimizer_states=False),
        lambda p: DeepSpeedCPUAdagrad(p, amsgrad=True),
        lambda p: DeepSpeedCPULion(p, fp32_optimizer_states=False),
    ):
        raised(lambda wrong=wrong: stepped(wrong), zeroshard.UsageError)


@in_the_child
def its_version_and_arguments_are_deepspeeds() -> None:
    import deepspeed

    assert deepspeed.__version__ == importlib.metadata.version("deepspeed") == deepspeed.version == "0.19.8"
    assert deepspeed.__implementation__.startswith("zeroshard")
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "a.json"])
    assert (args.deepspeed, args.deepspeed_config) == (True, "a.json")


@in_the_child
def a_process_without_a_group_may_go_without_one() -> None:
    import deepspeed

    assert not torch.distributed.is_initialized()
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 1), config=config, dist_init_required=False)
    engine.destroy()
    assert not torch.distributed.is_initialized()


@in_the_child
def a_process_that_nobody_launched_trains_as_a_group_of_one() -> None:
    import deepspeed

    model = nn.Linear(4, 4)
    made = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=MODEL_CONFIG)
    engine, optimizer, _, scheduler = made
    assert deepspeed.dist is deepspeed.comm
    assert deepspeed.comm.get_world_size() == 1
    assert scheduler is None
    assert isinstance(engine, deepspeed.DeepSpeedEngine)
    assert isinstance(engine, nn.Module)
    assert isinstance(optimizer, deepspeed.runtime.base_optimizer.DeepSpeedOptimizer)
    engine.backward(engine(torch.ones(4, 4)).sum())
    engine.step()


@in_the_child
def a_config_may_come_by_the_arguments_and_no_second_one() -> None:
    import deepspeed

    with tempfile.TemporaryDirectory() as folder:
        args = argparse.Namespace(deepspeed=True, deepspeed_config=str(Path(folder, "zero.json")))
        Path(args.deepspeed_config).write_text(json.dumps(MODEL_CONFIG))
        model = nn.Linear(4, 4)
        engine, *_ = deepspeed.initialize(args, model, model_parameters=model.parameters())
        assert engine.zero_optimization_stage() == 3
        for wrong in ({"args": args, "config": MODEL_CONFIG}, {"config": MODEL_CONFIG, "mesh_param": (1, 1)}, {}):
            said = raised(lambda wrong=wrong: deepspeed.initialize(model=nn.Linear(2, 2), **wrong), RuntimeError)
            assert len(said) < 200


@in_the_child
def its_config_class_reads_a_config() -> None:
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

    read = DeepSpeedConfig(MODEL_CONFIG)
    assert (read.train_batch_size, read.gradient_accumulation_steps, read.zero_optimization_stage) == (4, 1, 3)
    assert (read.gradient_clipping, read.optimizer_name) == (1.0, "adam")
    assert deepspeed.DeepSpeedConfigError is DeepSpeedConfigError
    wrong = {"train_batch_size": 4, "zero_optimization": {"stage": 7}}
    raised(lambda: DeepSpeedConfig(wrong), DeepSpeedConfigError)


@in_the_child
def small_helpers_do_what_deepspeeds_do() -> None:
    import deepspeed
    from deepspeed.runtime.utils import move_to_device

    repeating = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(repeating) for _ in range(5)] == [1, 2, 1, 2, 1]
    flat = torch.arange(100.0)
    copy = deepspeed.checkpoint.utils.clone_tensors_for_torch_save({"a": [flat[:2]], "b": (1, flat[2:4])})
    assert copy["a"][0].untyped_storage().nbytes() == 8, "no more memory than it shows"
    assert torch.equal(copy["b"][1], flat[2:4])
    x = torch.ones(2)
    moved = move_to_device({"x": [x], "step": 3, "name": None}, "meta")
    assert moved["x"][0].is_meta and moved["step"] == 3 and moved["name"] is None and not x.is_meta
    assert move_to_device((x,), "meta", lambda value: False)[0] is x and not x.is_meta
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        deepspeed.utils.logging.print_dist("said", ranks=[0])
        deepspeed.utils.logging.print_dist("not said", ranks=[1])
    assert said.getvalue() == "[Rank 0] said\n"


@in_the_child
def on_device_builds_there_and_leaves_the_defaults() -> None:
    import deepspeed

    there = deepspeed.OnDevice(dtype=torch.bfloat16, device="meta")
    for _ in range(2):
        with there:
            made = nn.Linear(2, 2)
        assert made.weight.is_meta and made.weight.dtype is torch.bfloat16
        assert torch.zeros(1).dtype is torch.float32
    with deepspeed.OnDevice(dtype=torch.bfloat16, enabled=False):
        assert nn.Linear(2, 2).weight.dtype is torch.float32


@in_the_child
def a_checkpointed_function_takes_keyword_arguments() -> None:
    import deepspeed

    x, scale = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    deepspeed.checkpointing.checkpoint(lambda a, scale: (a * scale).sin(), x, scale=scale).sum().backward()
    assert torch.equal(x.grad, 3 * torch.tensor([3.0, 3.0]).cos())
    assert scale.grad is not None


@in_the_child
def its_accelerator_is_torchs() -> None:
    import deepspeed

    deepspeed.init_distributed()
    accelerator = deepspeed.get_accelerator()
    assert torch.ones(1).to(accelerator.current_device_name()).device.type == accelerator.device_name()
    assert accelerator.communication_backend_name() == torch.distributed.get_backend()
    assert accelerator.available_memory() <= accelerator.total_memory()
    accelerator.synchronize()
    accelerator.empty_cache()
    accelerator.range_push("forward")
    accelerator.range_pop()
    deepspeed.runtime.utils.see_memory_usage("here", force=True)
    accelerator.manual_seed(0)
    state = accelerator.get_rng_state()
    first = torch.rand(3, device=accelerator.current_device_name())
    accelerator.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=accelerator.current_device_name()), first)


@in_the_child
def a_name_that_is_missing_is_told_at_a_look_and_at_an_import() -> None:
    import deepspeed

    assert not hasattr(deepspeed, "nothing")
    assert not hasattr(deepspeed.utils, "nothing")
    sentence = "zeroshard has no deepspeed.utils.nothing"
    assert sentence in raised(lambda: deepspeed.utils.nothing, AttributeError)
    assert sentence in raised(lambda: exec("from deepspeed.utils import nothing"), ImportError)
    raised(lambda: importlib.import_module("deepspeed.inference"), ModuleNotFoundError)


@in_the_child
def a_feature_that_is_missing_says_what_to_use() -> None:
    import deepspeed
    import deepspeed.linear
    from accelerate import ParallelismConfig
    from accelerate.state import AcceleratorState
    from deepspeed.monitor.monitor import MonitorMaster
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    refused = zeroshard.UsageError
    preferences = {"input_ids": torch.ones(2, 4, dtype=torch.long), "completion_mask": torch.ones(2, 4)}
    cut = UlyssesSPDataLoaderAdapter([preferences], 0, None, 1, torch.device("cpu"))
    divided = parallelize_module(nn.Linear(1, 1), init_device_mesh("cpu", (1,)), ColwiseParallel())
    cases: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: deepspeed.PipelineModule([]), NotImplementedError, "stage 3"),
        (lambda: next(iter(cut)), refused, "Sequences.log_probabilities"),
        (lambda: deepspeed.tp_model_init(nn.Linear(1, 1), 2), refused, "do not divide the 1 ranks"),
        (lambda: deepspeed.tp_model_init(divided, 2), refused, "already divided over 1 ranks"),
        (lambda: deepspeed.tp_model_init(nn.Linear(1, 1), 2, tp_group=1), refused, "tp_group=...) is not supported"),
        (lambda: deepspeed.init_inference(None), NotImplementedError, "engine.export"),
        (lambda: deepspeed.ops.lamb.FusedLamb([]), NotImplementedError, "AdamW"),
        (MonitorMaster, NotImplementedError, "tensorboard"),
        (deepspeed.linear.OptimizedLinear, NotImplementedError, "PEFT"),
        (lambda: deepspeed.zero.MiCS_Init, AttributeError, "mics_shard_size"),
    ]
    names = {
        "deepspeed.PipelineEngine": "stage 3",
        "deepspeed.runtime.sequence_parallel.ulysses_sp.TiledMLP": "zeroshard.sequence.tile",
        "deepspeed.runtime.zero.mics.MiCS_Init": "mics_shard_size",
        "deepspeed.utils.comms_logging.CommsLogger": "comms_logger",
    }
    for call, kind, words in cases:
        assert words in raised(call, kind)
    for name, words in names.items():
        module, _, attribute = name.rpartition(".")
        assert words in raised(lambda line=f"from {module} import {attribute}": exec(line), ImportError)
    assert not isinstance(nn.Linear(1, 1), deepspeed.PipelineModule)
    assert deepspeed.tp_model_init(divided, 1) is divided
    AcceleratorState._shared_state["parallelism_config"] = ParallelismConfig(tp_size=2)
    assert "tp_size=2) is not supported" in raised(lambda: deepspeed.initialize(model=nn.Linear(1, 1)), refused)
    del AcceleratorState._shared_state["parallelism_config"]


@in_the_child
def every_module_is_found_listed_and_imported_with_what_it_exports() -> None:
    import deepspeed

    listed = {module.name for module in pkgutil.walk_packages(deepspeed.__path__, "deepspeed.")}
    assert {"deepspeed.moe.layer", "deepspeed.ops.adam.cpu_adam", "deepspeed.utils.zero_to_fp32"} <= listed
    for name in sorted(listed):
        assert importlib.util.find_spec(name) is not None
        module = importlib.import_module(name)
        assert {one for one in getattr(module, "__all__", ()) if not hasattr(module, one)} == set()
    assert importlib.util.find_spec("deepspeed.inference") is None


@in_the_child
def classes_belong_to_the_modules_of_deepspeeds_names() -> None:
    from deepspeed.ops import adam, op_builder
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum

    assert adam.FusedAdam.__module__ == "deepspeed.ops.adam.fused_adam"
    assert lr_schedules.WARMUP_MIN_LR == "warmup_min_lr"
    assert inspect.getsource(adam.FusedAdam).startswith("class FusedAdam(")
    for one in (adam.FusedAdam, op_builder.CPUAdamBuilder, OffloadDeviceEnum.cpu):
        assert pickle.loads(pickle.dumps(one)) is one


@in_the_child
def its_finder_is_there_once_and_finds_nothing_for_others() -> None:
    import deepspeed

    hooks = list(sys.path_hooks)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "deepspeed"}
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, "deepspeed")
        other.mkdir()
        (other / "__init__.py").write_text("")
        sys.path.insert(0, folder)
        assert importlib.import_module("deepspeed").__file__ == str(other / "__init__.py")
        assert importlib.util.find_spec("deepspeed.moe") is None
        sys.path.remove(folder)
    del sys.modules["deepspeed"]
    importlib.import_module("deepspeed.moe.layer")
    assert len(sys.path_hooks) == len(hooks)
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[name]
    sys.modules.update(kept)
    sys.path_hooks[:] = hooks
    assert importlib.import_module("deepspeed.moe.layer").MoE is deepspeed.moe.layer.MoE


def test_it_does_what_scripts_expect() -> None:
    said = python("import test_shim; test_shim.run_cases()", shim_path(), Path(__file__).parent)
    if " failed:" in said or f"{len(CASES)} cases ended" not in said:
        pytest.fail(said, pytrace=False)


# ---------------------------------------------------------------------- the guard


def touched(package: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, where) of all that a library's source takes from deepspeed, imports and attributes alike."""
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


@pytest.mark.full
def test_every_name_that_trainers_touch_is_there_or_refused_on_purpose(tmp_path: Path) -> None:
    """A new release of one of them that touches another name fails here."""
    names: dict[str, str] = {}
    for trainer in TRAINERS:
        spec = importlib.util.find_spec(trainer)
        if spec is not None and spec.origin is not None:
            names |= dict(touched(Path(spec.origin).parent))
    (tmp_path / "names.json").write_text(json.dumps(names))
    (tmp_path / "resolve.py").write_text(RESOLVE)
    code = "import sys; sys.argv = ['', 'names.json']; exec(open('resolve.py').read())"
    problems, found, refused = json.loads(python(code, shim_path(), cwd=tmp_path).splitlines()[-1])
    assert problems == {}
    assert {"deepspeed.initialize", "deepspeed.zero.Init", "deepspeed.comm.init_distributed"} <= set(found)
    assert "deepspeed.runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF" in found
    assert len(refused) < 8


def test_the_engine_has_what_accelerate_calls() -> None:
    import accelerate.utils.deepspeed as theirs

    tree = ast.parse(inspect.getsource(theirs))
    called = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self.engine"
    }
    assert {"backward", "step", "set_gradient_accumulation_boundary"} <= called
    assert {name for name in called if not hasattr(zeroshard.Engine, name)} == set()


# ---------------------------------------------------------------------- how it comes


@pytest.mark.full
def test_as_deepspeed_puts_it_on_the_path_once_and_says_so(tmp_path: Path) -> None:
    code = """
import os, subprocess, sys
import zeroshard.as_deepspeed
import importlib.metadata, deepspeed
assert deepspeed.__implementation__.startswith("zeroshard") and importlib.metadata.version("deepspeed") == "0.19.8"
subprocess.run([sys.executable, "-c", "import deepspeed; deepspeed.__implementation__"], check=True)
assert sum(part.endswith("zeroshard/shim") for part in os.environ["PYTHONPATH"].split(os.pathsep)) == 1
import zeroshard.as_deepspeed
sys.exit(7)
"""
    real = tmp_path / "deepspeed"
    real.mkdir()
    (real / "__init__.py").write_text("")
    said = python(code, tmp_path, status=7).splitlines()
    assert said == [f"zeroshard: this process imports zeroshard as deepspeed, instead of the one at {real}."]
    assert python("import zeroshard.as_deepspeed, sys; sys.exit(7)", status=7, RANK="1") == ""


@pytest.mark.parametrize(
    ("before", "sentence"),
    [
        ("import deepspeed", "DeepSpeed is loaded"),
        pytest.param("import accelerate", "is loaded already, and found no deepspeed", marks=pytest.mark.full),
        pytest.param(
            "import transformers.integrations.deepspeed",
            "is loaded already, and found no deepspeed",
            marks=pytest.mark.full,
        ),
    ],
)
def test_as_deepspeed_too_late_is_an_error(tmp_path: Path, before: str, sentence: str) -> None:
    path = []
    if before == "import deepspeed":
        (tmp_path / "deepspeed.py").write_text("")
        path = [tmp_path]
    elif importlib.util.find_spec("deepspeed"):
        pytest.skip("needs no DeepSpeed")
    *_, last = python(f"{before}\nimport zeroshard.as_deepspeed", *path, status=1).splitlines()
    assert "UsageError" in last and "comes too late" in last and sentence in last
