"""Owns the injected faults: each wait on zeroshard's accelerator path, and each argument with a wait, is removed in turn.

The table is read from the source of the modules in ROAD. A module with waits is in ROAD, or in ELSEWHERE with the reason. Only the
call is removed, and its object is still computed: `slot.read(out).wait(device)` becomes `slot.read(out)`. A comment right above a
wait excuses it: `# no test needs this wait: why`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import zeroshard

GROUPS = {
    "storage": ("core.storage.transfers", "core.storage.base", "core.storage.buffers", "core.storage.disk"),
    "transport": ("core.transport.native", "core.transport.grouped", "core.transport.composed"),
    "parameters": ("core.parameter_bucket",),
    "gradients": ("core.gradient_bucket", "core.reductions"),
    "checkpoint": ("checkpoint.values", "checkpoint.saving"),
    "construction": ("model.born",),
    "step": ("core.parking", "core.resident", "core.travelling", "core.model_states"),
    "schedule": ("core.unit", "core.writes", "core.schedule"),
    "zero_redundancy": ("model.zero_redundancy.gathered_bucket",),
}
"""The modules with waits on the accelerator's path, by their task."""
ROAD = tuple(name for names in GROUPS.values() for name in names)
WAITS = {"wait", "wait_stream", "wait_event", "record_stream", "synchronize", "wait_gather", "wait_unsharded", "hold"}
"""Names of waits, whose calls are separate statements."""
FENCES = {"copy": 2, "release": 1, "write": 3}
"""Calls with an argument to wait for, and the index of this argument."""
WAIT_LIKE = re.compile(r"_?wait\w*|synchronize|record_stream")
"""Names of calls that are sites, or listed below."""
ELSEWHERE = {
    "tools": "no part of a training",
    "testing": "no part of a training",
    "core.transport.members": "the host waits for the store",
    "core.transport.shared_memory": "CPU ranks",
    "core.transport.tree": "messages in CPU memory",
    "core.transport.watch": "a thread that reports",
    "core.transport.base": "an error is under way: nothing is computed with what arrives",
    "checkpoint.checkpoints": "the host waits for a thread that writes files",
    "checkpoint.node_local": "the host waits for gloo",
    "checkpoint.hugging_face": "the host waits for a thread that writes files",
    "engine.progress": "a clock",
    "engine.readings": "a number for people",
    "engine.recompute.checkpointer": "a clock, if the user asks for it",
    "model.zero_redundancy.ddp_hooks": "the wait of a future of torch's returns the value",
}
"""Modules and packages whose waits are not removed, each with the reason."""
NO_WAITS = {
    "self._schedule.hold(": "a count of users",
    "work.wait(_PROBE)": "a look, after an error",
    "self._made_engine.recv([room], peer, _NEVER_SENT_TAG).wait(_PROBE)": "it times out, which closes a connection, after an error",
}
"""Beginnings of statements that are no waits."""


EXCUSE = "no test needs this wait:"


@dataclass(frozen=True)
class Site:
    """A removable wait. Its `name` is unique, and does not change when lines move.

    Attributes:
        excuse: the reason in the source why no test needs the wait, or None.
    """

    name: str
    module: str
    function: str
    text: str
    line: int
    column: int
    excuse: str | None


def _is_wait(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call) or _method(node.value) not in WAITS:
        return False
    return not ast.unparse(node).startswith(tuple(NO_WAITS))


def _is_fence(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or len(node.args) != FENCES.get(_method(node), 99) + 1:
        return False
    return not ast.unparse(node).startswith("file.release(")  # a range of the file, not a wait


def _is_note(node: ast.AST) -> bool:
    """Return whether a node is `self._in_flight.add(transfer)`, which makes later users wait for the transfer."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "self._in_flight.add"


def waits_of_none() -> list[str]:
    """Return the package's waits that are not sites, and have no reason in ELSEWHERE."""
    places = {(site.module, site.line, site.column) for site in sites().values()}
    package = Path(zeroshard.__file__).parent
    found = []
    for path in sorted(package.rglob("*.py")):
        short = ".".join(path.relative_to(package).with_suffix("").parts)
        if short in ELSEWHERE or short.partition(".")[0] in ELSEWHERE:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            text = ast.unparse(node)
            is_wait = WAIT_LIKE.fullmatch(_method(node)) and text not in NO_WAITS
            if is_wait and (f"zeroshard.{short}", node.lineno, node.col_offset) not in places:
                found.append(f"{short}:{node.lineno} {text}")
            if _method(node) in FENCES and any(word.arg == "after" for word in node.keywords):
                found.append(f"{short}:{node.lineno} {text}: only an argument by place is a site")
    return found


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _functions(node: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield functions by qualified name. A nested function belongs to the outer one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{outer}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            yield outer + child.name, child


def _tree(module: str) -> ast.Module:
    return ast.parse(_source(module))


def _source(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


def _excuse(lines: list[str], line: int) -> str | None:
    """Return the text after `EXCUSE` in the comment right above a line, or None."""
    above = line - 1
    while above and lines[above - 1].lstrip().startswith("#"):
        above -= 1
    comment = " ".join(one.strip().removeprefix("#").strip() for one in lines[above : line - 1])
    _, found, excuse = comment.partition(EXCUSE)
    return excuse.strip() if found else None


@cache
def sites() -> dict[str, Site]:
    """Return all sites by name."""
    found: dict[str, Site] = {}
    for short in ROAD:
        module = f"zeroshard.{short}"
        lines = _source(module).splitlines()
        for function, definition in _functions(_tree(module)):
            seen: Counter[str] = Counter()
            for node in ast.walk(definition):
                if _is_wait(node) or _is_fence(node) or _is_note(node):
                    text = ast.unparse(node)
                    seen[text] += 1
                    number = f" #{seen[text]}" if seen[text] > 1 else ""
                    name = f"{short} {function}: {text}{number}"
                    line, column = node.lineno, node.col_offset  # type: ignore[attr-defined]
                    found[name] = Site(name, module, function, text, line, column, _excuse(lines, line))
    return found


class _Removal(ast.NodeTransformer):
    """A transformer that removes one site from its module."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.is_done = False

    def _is_site(self, node: Any) -> bool:
        return (node.lineno, node.col_offset, ast.unparse(node)) == (
            self._site.line,
            self._site.column,
            self._site.text,
        )

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if not _is_wait(node) or not self._is_site(node):
            return self.generic_visit(node)
        assert isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute)
        node.value, self.is_done = node.value.func.value, True
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not (_is_fence(node) or _is_note(node)) or not self._is_site(node):
            return self.generic_visit(node)
        self.is_done = True
        if _is_note(node):
            return node.args[0]
        node.args.pop()
        return node


def plant(name: str) -> None:
    """Remove one site in this process."""
    site = sites()[name]
    tree, removal = _tree(site.module), _Removal(site)
    removal.visit(tree)
    assert removal.is_done, name
    module = importlib.import_module(site.module)
    code = compile(ast.fix_missing_locations(tree), str(module.__file__), "exec")
    codes = {one.co_qualname: one for one in _codes(code)}
    _function(module, site.function).__code__ = codes[site.function]


def _function(module: Any, name: str) -> Any:
    """Return the function with this qualified name, without its decorators."""
    target: Any = module
    for part in name.split("."):
        target = inspect.getattr_static(target, part)
    target = target.fget if isinstance(target, property) else target
    target = target.__func__ if isinstance(target, staticmethod | classmethod) else target
    return inspect.unwrap(target)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
