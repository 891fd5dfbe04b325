"""Modules import only from lower rooms, and public names are documented."""

from __future__ import annotations

import ast
import inspect
import runpy
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import zeroshard

PACKAGE = Path(zeroshard.__file__).parent
SHIM = PACKAGE / "shim"
"""A package of its own, named deepspeed: it imports zeroshard, and nothing here imports it."""
ORDER = [
    {"version"},
    {"errors"},
    {"removed"},
    {"torch_private"},
    {"policy"},
    {"launch"},
    {"config"},
    {"layout"},
    {"optim"},
    {"collectives"},
    {"storage"},
    {"parameters"},
    {"gradients"},
    {"construction"},
    {"schedule"},
    {"observe"},
    {"recompute"},
    {"step"},
    {"zero_redundancy"},
    {"checkpoint"},
    {"formats"},
    {"access"},
    {"sharding"},
    {"sequence"},
    {"engine"},
    {"integrations"},
    {"as_deepspeed"},
    {"planning"},
    {"training_progress"},
    {"testing"},
    {"cli"},
    {"__main__"},
]
"""Rooms (folders, and modules beside them); each imports itself and those above it in this list."""


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
    rooms = [one for level in ORDER for one in level]
    assert len(rooms) == len(set(rooms))
    assert {room(name) for name in modules()} == set(rooms)


@pytest.mark.parametrize("name", sorted({room(name) for name in modules()}))
def test_imports_go_downwards(name: str) -> None:
    level = next(number for number, rooms in enumerate(ORDER) if name in rooms)
    allowed = {name}.union(*ORDER[:level])
    for module, path in modules().items():
        if room(module) == name:
            upwards = {one for one in imports(path) if room(one) not in allowed}
            assert not upwards, f"{module} imports {upwards}"


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


def test_only_collectives_talks_to_other_ranks() -> None:
    """Others may name a group, ask who they are, and open or close torch.distributed as a whole."""
    allowed = {
        "ProcessGroup", "group", "get_rank", "get_world_size", "is_available", "is_initialized", "init_process_group",
        "destroy_process_group", "get_backend", "get_default_backend_for_device", "GradBucket", "is_backend_available",
    }  # fmt: skip
    seen = 0
    for path in sources():
        if path.parent.name in ("collectives", "testing"):
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


def test_no_room_of_a_step_asks_for_a_stage() -> None:
    rooms = {
        "collectives",
        "storage",
        "parameters",
        "gradients",
        "schedule",
        "recompute",
        "step",
        "checkpoint",
        "access",
    }
    paths = [path for room in rooms for path in (PACKAGE / room).rglob("*.py")]
    assert len(paths) > 50
    for path in paths:
        for node in nodes(path):
            is_stage = isinstance(node, ast.Attribute) and node.attr == "stage" and isinstance(node.ctx, ast.Load)
            assert not is_stage, f"{path.relative_to(PACKAGE)} asks for a stage: ask the policy for a residency"


def test_nothing_imports_the_package_named_deepspeed() -> None:
    """It is on the path only when a user asks; `formats.deepspeed` is a module of ours."""
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


TESTS = Path(__file__).parent
OTHERS_NAMES = {
    "_", "_buffers", "_is_fsdp_managed_module", "_zero3_consolidated_16bit_state_dict", "_register_deepspeed_module",
    "_invalidate_trace",
}  # fmt: skip
"""Names of torch's, transformers' and DeepSpeed's, which zeroshard has to have."""
OWN_INSIDES = {
    "insides.py": "owns such looks",
    "mutants.py": "reads sources",
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
    """A rename inside of a room breaks `tests/insides.py`, and no other file; nor do strings name insides, for patches."""
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
            assert name not in private, f"{path.name}:{node.lineno} uses {name}: look inside in tests/insides.py"  # type: ignore[attr-defined]


def test_public_names_are_documented() -> None:
    for name in zeroshard.__all__:
        assert inspect.getdoc(getattr(zeroshard, name)), name
