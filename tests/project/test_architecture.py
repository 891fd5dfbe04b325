"""Modules import only from lower rooms, and public names are documented."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import zeroshard

PACKAGE = Path(zeroshard.__file__).parent
SHIM = PACKAGE / "shim"
"""A package of its own, named deepspeed: it imports zeroshard, and nothing here imports it."""
ORDER = [
    "version", "errors", "removed", "torch_private", "policy", "launch",
    "optim", "core", "checkpoint", "model", "sequence", "engine", "integrations", "as_deepspeed", "tools", "testing", "__main__",
]  # fmt: skip
"""Rooms (folders, and modules beside them); each imports itself and those before it."""
CORE = [
    {"layout", "blocks", "placement", "norm", "step", "rounding"},
    {"named_parameter", "eight_bits"},
    {"quantised", "transport"},
    {"storage"},
    {"bucketing", "modules", "model_tree", "context"},
    {"classes", "module_hooks", "parameter_bucket"},
    {"appearance", "gradient_bucket"},
    {"reductions", "writes"},
    {"unit"},
    {"saved_parameters", "state_dicts", "schedule", "resident"},
    {"hooks", "users_optimizer", "travelling"},
    {"replicas", "gradient_operations"},
    {"sharded_step"},
    {"model_states", "optimizer_states", "parking"},
]
"""Files and folders of the core; each imports itself and those of the lines above it."""


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Parse a file, once, and list all that is in it."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def sources() -> list[Path]:
    """List every file of the package, without the shim's."""
    return [path for path in PACKAGE.rglob("*.py") if not path.is_relative_to(SHIM)]


@cache
def modules() -> dict[str, Path]:
    """Map module names, as they are imported and without the package's, to files."""
    found = {}
    for path in sources():
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found[name] = path
    return found


@cache
def imported(path: Path) -> set[str]:
    """List the full names that a file imports: at its head, in a function, for types alone; of `from a import b`, a.b."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def imports(path: Path) -> set[str]:
    """List the modules of this package that a file imports; the package itself is "zeroshard"."""
    own = {name for name in imported(path) if name.partition(".")[0] == "zeroshard"}
    found = {name if _is_module(name) else name.rpartition(".")[0] for name in own}
    return {name.removeprefix("zeroshard.") for name in found}


@cache
def _is_module(name: str) -> bool:
    path = PACKAGE.parent / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def room(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def test_every_module_has_its_room() -> None:
    assert len(ORDER) == len(set(ORDER))
    assert {room(name) for name in modules()} == set(ORDER)
    files = [name.split(".")[1] for name in modules() if room(name) == "core" and name != "core"]
    assert set(files) == set().union(*CORE)
    told = inspect.getdoc(importlib.import_module("zeroshard.core"))
    assert told is not None
    assert all(re.search(rf"\b{name}\b", told) for name in files), "the docstring of core/__init__.py lists every file"


def test_imports_go_downwards() -> None:
    for module, path in modules().items():
        allowed = ORDER[: ORDER.index(room(module)) + 1]
        upwards = {one for one in imports(path) if room(one) not in allowed}
        assert not upwards, f"{module} imports {upwards}"


def test_imports_inside_the_core_go_downwards() -> None:
    level_of = {name: number for number, names in enumerate(CORE) for name in names}
    seen = 0
    for module, path in modules().items():
        if not module.startswith("core."):
            continue
        own = module.split(".")[1]
        for one in imports(path):
            if one.startswith("core.") and one.split(".")[1] != own:
                seen += 1
                assert level_of[one.split(".")[1]] < level_of[own], f"{module} imports {one}"
    assert seen > 50


NAMES = 1_747
"""The most names that the core may have: classes, functions, and attributes that objects set on themselves."""
FOREIGN_WRITES = 112
"""The most assignments in the core to attributes of objects other than `self`."""


def test_the_core_does_not_grow() -> None:
    """Cutting a file or a function in half only raises these. Lower a ceiling when a change makes room.

    A change that adds what users see may raise it, by as much as it needs; the commit says for what.
    """
    names = set[tuple[str, ...]]()
    writes = 0
    for path in (PACKAGE / "core").rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add((path.name, node.name))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    names.add((path.name, "self", node.attr))
                else:
                    writes += 1
    assert len(names) <= NAMES
    assert writes <= FOREIGN_WRITES


def test_no_modules_import_one_another_in_a_circle() -> None:
    graph = {}
    for module, path in modules().items():
        # A module beside others does not import them through their folder's __init__, which imports it.
        graph[module] = {one for one in imports(path) if one != module}
    assert list(TopologicalSorter(graph).static_order())


def test_nothing_imports_the_package_itself() -> None:
    """Its __init__ imports everything."""
    for module, path in modules().items():
        assert "zeroshard" not in imports(path), module


def test_only_the_transports_talk_to_other_ranks() -> None:
    """Others may name a group, ask who they are, and open or close torch.distributed as a whole."""
    allowed = {
        "ProcessGroup", "group", "get_rank", "get_world_size", "is_available", "is_initialized", "init_process_group",
        "destroy_process_group", "get_backend", "get_default_backend_for_device", "GradBucket", "is_backend_available",
    }  # fmt: skip
    seen = 0
    for path in sources():
        if path.parent.name in ("transport", "testing"):
            continue
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and _dotted(node.value) in ("dist", "torch.distributed"):
                seen += 1
                assert node.attr in allowed, f"{path}:{node.lineno} uses dist.{node.attr}"
    assert seen > 10


def _dotted(node: ast.AST) -> str:
    """Spell a chain of names; anything else is empty."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


RAW_NAMES = {
    "core/named_parameter.py": "removes the wrappers' parts",
    "core/model_tree.py": "removes them itself",
    "model/named_weights.py": "compares names with PEFT's, and removes them itself",
    "checkpoint/conversions.py": "has the order of a state dict, and removes them itself",
    "checkpoint/live_model.py": "returns names in the model; callers remove them",
    "model/tensor_parallel.py": "finds modules and parameters again",
    "model/expert_parallel.py": "finds modules and parameters again",
    "model/pretrained.py": "finds modules again",
    "tools/planning/dry_run.py": "uses the names of one module's own tensors",
    "core/state_dicts.py": "compares names with torch's state dicts",
    "sequence/sequences.py": "refuse_distributed removes them",
    "model/shard.py": "finds ranks that wrap modules differently",
    "testing/parity.py": "names two models of the user's in the same way",
}
"""The files that use the names of torch's own methods, which contain those of wrappers, and why."""


def test_names_are_those_without_wrappers() -> None:
    found = set()
    for path in [*sources(), *SHIM.rglob("*.py")]:
        for node in nodes(path):
            raw = ("named_parameters", "named_buffers", "named_modules")
            if isinstance(node, ast.Attribute) and node.attr in raw:
                found.add(str(path.relative_to(PACKAGE)))
    assert found == {*RAW_NAMES}, "use the functions of core/named_parameter.py"


def test_no_room_of_a_step_asks_for_a_stage() -> None:
    paths = [path for name in ("core", "checkpoint", "engine/recompute") for path in (PACKAGE / name).rglob("*.py")]
    assert len(paths) > 50
    paths.remove(PACKAGE / "checkpoint" / "deepspeed.py")  # it reads the stage of DeepSpeed's files
    for path in paths:
        for node in nodes(path):
            is_stage = isinstance(node, ast.Attribute) and node.attr == "stage" and isinstance(node.ctx, ast.Load)
            assert not is_stage, f"{path.relative_to(PACKAGE)} asks for a stage: ask the policy for a residency"


def test_nothing_imports_the_package_named_deepspeed() -> None:
    """It is on the path only when a user asks; `checkpoint.deepspeed` is a module of ours."""
    for path in sources():
        assert not {name for name in imported(path) if name.split(".")[0] == "deepspeed"}, path


def test_the_package_named_deepspeed_needs_public_names_alone() -> None:
    seen = 0
    for path in SHIM.rglob("*.py"):
        for name in imported(path):
            if name.split(".")[0] == "zeroshard":
                seen += 1
                assert not any(part.startswith("_") for part in name.split(".") if part != "__version__"), (
                    f"{path}: {name}"
                )
            else:
                assert name.split(".")[0] in {*sys.stdlib_module_names, "deepspeed", "torch", "packaging"}, (
                    f"{path}: {name}"
                )
    table = runpy.run_path(str(SHIM / "deepspeed" / "_names.py"))["TABLE"]
    for word in " ".join(row.names for row in table.values()).split():
        if word.startswith("zeroshard"):
            seen += 1
            assert word.endswith(":") and not any(part.startswith("_") for part in word.split(".")), word
    assert seen > 10


TESTS = Path(__file__).parents[1]
OTHERS_NAMES = {
    "_", "_buffers", "_is_fsdp_managed_module", "_zero3_consolidated_16bit_state_dict", "_register_deepspeed_module",
    "_invalidate_trace",
}  # fmt: skip
"""Names of torch's, transformers' and DeepSpeed's, which zeroshard has to have."""
OWN_INSIDES = {
    "insides.py": "owns such looks",
    "faults.py": "reads sources",
    "test_torch_private.py": "tests the module with torch's names, and its table",
}


def private_names() -> set[str]:
    """Names with one leading underscore that the package gives: to functions, classes, attributes, variables."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return {name for name in found if name.startswith("_") and not name.startswith("__")} - OTHERS_NAMES


def test_tests_look_inside_in_one_file() -> None:
    """A rename inside of a room breaks `tests/support/insides.py`, and no other file; nor do strings name insides, for patches."""
    private = private_names()
    assert len(private) > 1000
    for path in TESTS.rglob("*.py"):
        if path.name in OWN_INSIDES:
            continue
        for node in nodes(path):
            name = ""
            if isinstance(node, ast.Attribute) and _dotted(node.value) not in ("self", "cls"):
                name = node.attr
            elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("zeroshard"):
                name = next((alias.name for alias in node.names if alias.name.startswith("_")), "")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                name = node.value.rpartition(".")[2]
            assert name not in private, f"{path.name}:{node.lineno} uses {name}: look inside in support/insides.py"  # type: ignore[attr-defined]


def test_test_files_have_a_room_and_names_of_their_own() -> None:
    """Tests, and the processes that they start, import them by their names alone."""
    assert [path.name for path in TESTS.glob("*.py")] == ["conftest.py"]
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_class_name_has_one_meaning() -> None:
    found = dict[str, list[str]]()
    for path in sources():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert not twice
