"""torch's private names: only one module uses them, and an error names one that torch lacks."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard import UsageError, torch_private
from zeroshard.testing import run_ranks

PACKAGE = Path(zeroshard.__file__).parent
HOME = Path(torch_private.__file__)
SELF_TESTS = HOME.with_name("self_tests.py")
PRIVATE = re.compile(
    r"\btorch(?:\.\w+)*\._\w+|\bfrom torch(?:\.\w+)*\._\w+|\b_C\._\w+|\._execution_engine\b|\._version\b|\._parameters\b"
    r"|\._cdata\b|\._local_tensor\b|\._spec\b|(?<!self)\._buffers\b|\._non_persistent_buffers_set\b|\._forward_(?:pre_)?hooks\b|\._compiled_call_impl\b|\._post_accumulate_grad_hooks\b|\._optimizer_step_(?:pre|post)_hooks\b"
)
NAMES = sorted(
    node.value
    for path in (HOME, SELF_TESTS)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"torch\.[\w.]+", node.value)
)
"""Those that the module looks up, or tries out."""


class Absent:
    """In the place of an attribute of a class, where instances have one of their own too."""

    def __get__(self, *_: object) -> Any:
        raise AttributeError

    def __set__(self, *_: object) -> None:
        pass


def remove(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a name away; or its holder, where that is written in C."""
    path, _, last = name.rpartition(".")
    holder: Any = torch
    for part in path.split(".")[1:]:
        holder = getattr(holder, part)
    if isinstance(holder, type) and last not in vars(holder):
        monkeypatch.setattr(holder, last, Absent(), raising=False)
    elif isinstance(holder, type | ModuleType):
        monkeypatch.delattr(holder, last)
    else:
        outer, _, attribute = path.rpartition(".")
        monkeypatch.setattr(f"{outer}.{attribute}", object())


def import_anew(*, late: bool = True) -> ModuleType:
    """Run the module and its tests once more, beside those in use; with `late`, ask for the names of the plan too."""
    spec = importlib.util.spec_from_file_location(
        "torch_private_anew", HOME, submodule_search_locations=[str(HOME.parent)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    in_use = patch.dict(sys.modules, {"zeroshard.torch_private": module})
    with in_use, patch.object(zeroshard, "torch_private", module):
        del sys.modules["zeroshard.torch_private.self_tests"]
        spec.loader.exec_module(module)
    if late:
        for name in module._AT_FIRST_USE:
            getattr(module, name)
    return module


def test_no_other_module_uses_private_names() -> None:
    assert PRIVATE.search(HOME.read_text(encoding="utf-8"))
    for path in PACKAGE.rglob("*.py"):
        if path not in (HOME, SELF_TESTS) and not path.is_relative_to(PACKAGE / "shim"):
            assert not PRIVATE.findall(path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("name", sorted(set(NAMES)))
def test_a_torch_without_a_name_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remove(name, monkeypatch)
    with pytest.raises(UsageError, match=re.escape(name.removesuffix(".__func__"))) as raised:
        import_anew()
    assert f"torch {torch.__version__}" in str(raised.value)
    assert "torch 2.11, 2.13, 2.14" in str(raised.value)


def test_names_of_the_plan_are_looked_up_at_their_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in torch_private._AT_FIRST_USE.values():
        remove(name, monkeypatch)
    module = import_anew(late=False)
    with pytest.raises(UsageError, match="FakeTensor is missing"):
        module.FakeTensor  # noqa: B018
    with pytest.raises(UsageError, match="_disable_current_modes is missing"):
        module.outside_of_modes()


def test_a_name_that_does_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._C._storage_Use_Count", lambda _: 1)
    with pytest.raises(UsageError, match="_storage_Use_Count behaves differently"):
        import_anew()


def test_the_locale_may_be_ascii() -> None:
    """The sources of torch have other characters, too."""
    assert "read_text()" not in HOME.read_text() + SELF_TESTS.read_text()


def import_everywhere(rank: int) -> int:
    module, sizes = import_anew(), list[int]()
    with torch.inference_mode(), torch.device("meta"), module.FakeTensorMode():
        import_anew()
    leaf = nn.Parameter(torch.zeros(2))
    leaf.register_post_accumulate_grad_hook(lambda _: sizes.append(len(vars(import_anew()))))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        leaf.square().sum().backward()
    torch.func.vmap(lambda x: [import_anew(), x][1])(torch.zeros(2))
    return len(sizes)


def test_it_may_be_imported_anywhere() -> None:
    """Under modes and transforms, in a backward, and inside of hooks; and processes may be forked after."""
    import_anew()
    assert run_ranks(import_everywhere, 1, initialise=False) == [1]


def ask_a_backward(rank: int) -> list[object]:
    leaf, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    heard = list[object]()

    def ask(_: object) -> None:
        nodes = [torch.autograd.graph.get_gradient_edge(one).node for one in (leaf, other)]
        heard.extend([torch_private.in_backward(), *map(torch_private.backward_reaches, nodes)])
        torch_private.at_end_of_backward(lambda: heard.append("end"))

    product = leaf * 2
    product.register_hook(ask)
    product.sum().backward()
    return [*heard, torch_private.in_backward()]


def test_questions_of_a_backward() -> None:
    assert run_ranks(ask_a_backward, 1, initialise=False) == [[True, True, False, "end", False]]
