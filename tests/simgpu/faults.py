"""Owns the planted faults: each place of zeroshard's accelerator road that waits, or hands a wait on, is taken out in turn.

The table is read from the source, so a new wait is in it by itself. What is removed is the call alone: what it is called on is
still computed, and so `slot.read(out).wait(device)` becomes `slot.read(out)`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

ROAD = (
    "storage.transfers", "storage.memory_slot", "storage.base", "storage.buffer_pool", "storage.disk", "storage.direct_file",
    "collectives.native", "collectives.grouped", "parameters.parameter_bucket", "parameters.away", "gradients.gradient_bucket",
    "recompute.saved_inputs", "step.parking", "step.resident", "step.sub_groups", "schedule.unit",
    "zero_redundancy.parameter_bucket", "zero_redundancy.optimizer_state", "born",
)  # fmt: skip
WAITS = {"wait", "wait_stream", "wait_event", "record_stream", "synchronize", "wait_gather", "wait_unsharded", "hold"}
"""Calls that are statements of their own."""
FENCES = {"copy": 2, "release": 1, "write": 3}
"""Calls that are given what to wait for, as the argument of this number."""


@dataclass(frozen=True)
class Site:
    """One place. `name` tells it from all others, and stays when lines move."""

    name: str
    module: str
    function: str
    line: int
    column: int


def _is_wait(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _method(node.value) in WAITS


def _is_fence(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or len(node.args) != FENCES.get(_method(node), 99) + 1:
        return False
    return not ast.unparse(node).startswith("file.release(")  # a range of the file, not a wait


def _is_note(node: ast.AST) -> bool:
    """`self._in_flight.add(transfer)`, in the place of the transfer: those who come later wait for it."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "self._in_flight.add"


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _functions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions by qualified name; one inside of another belongs to it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{outer}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield outer + child.name, child


def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


@cache
def sites() -> dict[str, Site]:
    """All of them, by name."""
    found: dict[str, Site] = {}
    for short in ROAD:
        module = f"zeroshard.{short}"
        for function, definition in _functions(_tree(module)):
            seen: Counter[str] = Counter()
            for node in ast.walk(definition):
                if (_is_wait(node) or _is_fence(node) or _is_note(node)) and "_PROBE" not in ast.unparse(node):
                    text = ast.unparse(node)
                    seen[text] += 1
                    number = f" #{seen[text]}" if seen[text] > 1 else ""
                    name = f"{short} {function}: {text}{number}"
                    found[name] = Site(name, module, function, node.lineno, node.col_offset)  # type: ignore[attr-defined]
    return found


class _TakeOut(ast.NodeTransformer):
    def __init__(self, site: Site) -> None:
        self._site = site

    def _is_it(self, node: Any) -> bool:
        return (node.lineno, node.col_offset) == (self._site.line, self._site.column)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        if self._is_it(node) and _is_wait(node):
            assert isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute)
            node.value = node.value.func.value
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if self._is_it(node) and _is_fence(node):
            node.args.pop()
        if self._is_it(node) and _is_note(node):
            return node.args[0]
        return node


def plant(name: str) -> None:
    """Take one out, in this process."""
    site = sites()[name]
    module = importlib.import_module(site.module)
    tree = _tree(site.module)
    before = ast.dump(tree)
    _TakeOut(site).visit(tree)
    assert ast.dump(tree) != before, name
    code = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
    target: Any = module
    for part in site.function.split("."):
        target = inspect.getattr_static(target, part)
    target = target.fget if isinstance(target, property) else target
    target = target.__func__ if isinstance(target, staticmethod | classmethod) else target
    inspect.unwrap(target).__code__ = next(one for one in _codes(code) if one.co_qualname == site.function)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
