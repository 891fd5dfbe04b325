"""Checks whether `make test` finds single-line faults in the core of zeroshard.

    python tests/support/mutants.py [--count 30] [--seed 0] [--only NAME] [--list]

The script plants one fault (a mutant) at a time in a copy of the repository, and runs its quick set until a test fails.

- It finds sites by AST in the core. A short run of two ranks under `sys.settrace` shows which lines a steady step
  runs, and only these count. The layout works before the first step, so its lines count if they run at all.
- A seed always picks the same sites: evenly over the kinds of faults, then over the files, at most one in a line.
- A mutant is found if a test fails that passes without the mutant.
- A run in which no test ends for a long time is hung, which counts as found.
- A run that reaches its time limit while tests still pass is undecided, which counts as a survivor.

`--only` takes part of a name, and includes lines that no step runs. `--first-only` runs only the files that most likely
find a fault. The exit status is 1 if more than `--allow` mutants survive. The script only reads the repository itself.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("core",)
SETUP = ("layout", "blocks", "bucketing", "model_tree", "modules", "named_parameter", "placement")
"""Files that work only before the first step."""
LEFT_OUT = ("core/transport/watch.py",)
"""Files that write messages for people. A mutated message is no fault of the core."""
FIRST = (
    "tests/promises/test_equality.py", "tests/core/test_unusual_models.py", "tests/core/test_offload.py",
    "tests/core/test_collectives.py", "tests/checkpoint/test_checkpoints.py",
)  # fmt: skip
"""The files that most likely find a fault run before the rest. The script skips names that are not there."""
KINDS = ("sign or comparison", "missing wait", "off by one", "dropped divide", "boolean", "skipped assignment")
EQUIVALENT = {
    "core/transport/base.py off by one in range, row.shape[-1]: range(0, row.shape[-1], step)": "one more turn, over no element",
    "core/storage/disk.py flip += to -=: self.version += 1": "versions are compared for equality, and nothing else counts a disk's",
}
"""The reason why a mutant has no observable effect, by its site's name without the line. The script never picks these."""

WAIT = re.compile(r"_?wait(_\w+)?|synchronize")
DIVIDE = re.compile(r"div_?|divide_?|floor_divide_?|true_divide_?")
REPORT = re.compile(r"_?(warn|warning|info|debug|error|exception|log|print)|\w*(Error|Warning)")
UNSEEN_FUNCTIONS = ("__repr__", "__str__")
FLIPPED_SIGNS: dict[type[ast.operator], tuple[str, str]] = {ast.Add: ("+", "-"), ast.Sub: ("-", "+")}
DIVIDES: dict[type[ast.operator], str] = {ast.Div: "/", ast.FloorDiv: "//"}
FLIPPED_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}
STEADY_STEP = 2
"""The first step that counts as a steady one: the schedule has learned its order by then."""
TRACED_STEPS = 4
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::[^\[\s]+(?:\[.*?\](?= - |$))?)?)", re.MULTILINE)
SUMMARY = "short test summary info"


@dataclass(frozen=True)
class Site:
    """A place for one fault: an edit of a few bytes in one file.

    Attributes:
        kind: one of `KINDS`.
        path: the file, from the package's folder on.
        line, last_line: the lines of the mutated expression or statement.
        name: stays the same as long as the line stays where it is.
        start, end: the bytes of the file that are replaced.
        replacement: the text in their place.
    """

    kind: str
    path: str
    line: int
    last_line: int
    name: str
    start: int
    end: int
    replacement: str

    @property
    def room(self) -> str:
        """The file or folder of the core, such as `unit` or `storage`."""
        return self.path.split("/")[1].removesuffix(".py")

    def mutated(self, source: bytes) -> bytes:
        """Return the file's content with the fault in it."""
        return source[: self.start] + self.replacement.encode() + source[self.end :]

    def before_and_after(self, source: bytes) -> tuple[str, str]:
        """Return the source line on which the edit begins, without the fault and with it."""
        number = source[: self.start].count(b"\n")
        before = source.decode().split("\n")[number]
        after = self.mutated(source).decode().split("\n")[number]
        return before.strip(), after.strip()


class Collector(ast.NodeVisitor):
    """A walk over one file that keeps each site it meets.

    Args:
        path: the file, from the package's folder on.
        source: its content.
    """

    def __init__(self, path: str, source: bytes) -> None:
        self.sites: list[Site] = []
        self._path, self._source = path, source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._parents: list[ast.AST] = []
        self._functions: list[str] = []
        self._names: Counter[str] = Counter()
        self.visit(ast.parse(source))

    def visit(self, node: ast.AST) -> None:
        """Visit a node, and keep the list of its parents."""
        self._parents.append(node)
        super().visit(node)
        self._parents.pop()

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave out an error and its message."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave out an f-string: people read it."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Visit the condition, and leave out the message."""
        self.visit(node.test)

    def visit_If(self, node: ast.If) -> None:
        """Leave out code that only type checkers read."""
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Visit only the body, since decorators, defaults and annotations run at the import."""
        if node.name in UNSEEN_FUNCTIONS:
            return
        self._functions.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._functions.pop()

    def visit_Expr(self, node: ast.Expr) -> None:
        """Remove a wait that is a statement, and still evaluate the object for which it waits."""
        call = node.value
        if isinstance(call, ast.Call) and WAIT.fullmatch(_called(call)):
            left = call.func
            if isinstance(left, ast.Attribute):
                left = left.value
            self._add("missing wait", "drop wait", call, self._start(call), self._end(call), self._text(left))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Drop a divide that is a call, or lengthen a range."""
        name = _called(node)
        if REPORT.fullmatch(name):
            return
        if name == "range":
            for argument in node.args:
                self._one_more("off by one in range", argument, node)
        elif DIVIDE.fullmatch(name) and isinstance(node.func, ast.Attribute):
            self._drop_divide_call(node, node.func)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Flip a sign, or drop a divide. Texts and paths have the same operators, and are left out."""
        operator = type(node.op)
        if not _is_text(node.left) and not _is_text(node.right):
            if operator in FLIPPED_SIGNS:
                old, new = FLIPPED_SIGNS[operator]
                self._flip("sign or comparison", node, node.left, node.right, old, new)
            elif operator in DIVIDES:
                span = self._between(node.left, node.right, DIVIDES[operator])
                if span is not None:
                    kept = self._source[self._start(node) : span[0]].decode().rstrip()
                    self._add("dropped divide", "drop divide", node, self._start(node), self._end(node), kept)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Flip a sign, or drop a `not`."""
        start = self._start(node)
        if isinstance(node.op, ast.USub):
            self._add("sign or comparison", "flip - to +", node, start, start + 1, "+", self._around())
        elif isinstance(node.op, ast.Not):
            end = start + len("not")
            while self._source[end : end + 1] == b" ":
                end += 1
            self._add("boolean", "drop not", node, start, end, "")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Make an `and` an `or`, and the other way round."""
        old, new = "or", "and"
        if isinstance(node.op, ast.And):
            old, new = "and", "or"
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._flip("boolean", node, left, right, old, new)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Flip a comparison of values; `is` and `in` stay."""
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            if type(operator) in FLIPPED_COMPARISONS:
                old, new = FLIPPED_COMPARISONS[type(operator)]
                self._flip("sign or comparison", node, left, right, old, new)
            left = right
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Make a 1 a 0, or a 2."""
        if type(node.value) is not int or node.value != 1:
            return
        for other in ("0", "2"):
            verb = f"off by one, 1 to {other}"
            self._add("off by one", verb, node, self._start(node), self._end(node), other, self._around())

    def visit_Slice(self, node: ast.Slice) -> None:
        """Move a bound by one."""
        for name, bound in (("lower", node.lower), ("upper", node.upper)):
            if bound is not None:
                self._one_more(f"off by one in {name} bound", bound, self._around())
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Skip an assignment to self; the value is still evaluated."""
        if len(node.targets) == 1:
            self._skip_assignment(node, node.targets[0], node.targets[0])
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Skip an assignment to self, and leave out the annotation."""
        if node.value is not None:
            self._skip_assignment(node, node.target, node.annotation)
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Flip a sign, drop a divide, or skip an assignment to self."""
        operator = type(node.op)
        if operator in FLIPPED_SIGNS and not _is_text(node.value):
            old, new = FLIPPED_SIGNS[operator]
            self._flip("sign or comparison", node, node.target, node.value, f"{old}=", f"{new}=")
        elif operator in DIVIDES:
            kept = self._text(node.target)
            self._add("dropped divide", "drop divide", node, self._start(node), self._end(node), kept)
        self._skip_assignment(node, node.target, node.target)
        self.generic_visit(node)

    def _around(self) -> ast.AST:
        """Return the expression around the visited node, for clearer names than `-1` or `1:`."""
        outer = len(self._parents) - 2
        while isinstance(self._parents[outer], ast.UnaryOp | ast.Slice):
            outer -= 1
        return self._parents[outer]

    def _skip_assignment(self, node: ast.stmt, target: ast.expr, last: ast.expr) -> None:
        # An object without the attribute fails at once, so any test finds the fault.
        if "__init__" in self._functions[-1:] or not _is_of_self(target):
            return
        found = re.match(rb"[\s)]*[-+*/|&@%^<>]*=\s*", self._source[self._end(last) :])
        if found is not None:
            end = self._end(last) + found.end()
            self._add("skipped assignment", "skip assignment", node, self._start(node), end, "")

    def _drop_divide_call(self, node: ast.Call, function: ast.Attribute) -> None:
        """Make `x.div_(n)` x, and `torch.div(x, n, ...)` a divide by 1, which still writes to its `out`."""
        if isinstance(function.value, ast.Name) and function.value.id == "torch":
            if len(node.args) > 1:
                divisor = node.args[1]
                self._add("dropped divide", "drop divide", node, self._start(divisor), self._end(divisor), "1")
            return
        kept = self._text(function.value)
        self._add("dropped divide", "drop divide", node, self._start(node), self._end(node), kept)

    def _one_more(self, verb: str, node: ast.expr, around: ast.AST) -> None:
        # `visit_Constant` changes a literal 1 to 2, and a starred argument stands for several values.
        if isinstance(node, ast.Starred) or (isinstance(node, ast.Constant) and node.value == 1):
            return
        replacement = f"({self._text(node)}) + 1"
        self._add(
            "off by one", f"{verb}, {self._text(node)}", node, self._start(node), self._end(node), replacement, around
        )

    def _flip(self, kind: str, node: ast.AST, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        span = self._between(left, right, old)
        if span is not None:
            self._add(kind, f"flip {old} to {new}", node, span[0], span[1], new)

    def _between(self, left: ast.expr, right: ast.expr, operator: str) -> tuple[int, int] | None:
        """Return the span of the operator between two operands, or None if a comment, which may have any text, is there too."""
        end = self._end(left)
        gap = self._source[end : self._start(right)]
        found = re.search(re.escape(operator.encode()), gap)
        if found is None or b"#" in gap:
            return None
        return end + found.start(), end + found.end()

    def _add(self, kind: str, verb: str, node: Any, start: int, end: int, replacement: str, shown: Any = None) -> None:
        text = " ".join(self._text(shown or node).split())
        if len(text) > 70:
            text = f"{text[:67]}..."
        name = f"{self._path}:{node.lineno} {verb}: {text}"
        self._names[name] += 1
        if self._names[name] > 1:
            name = f"{name} #{self._names[name]}"
        self.sites.append(Site(kind, self._path, node.lineno, node.end_lineno, name, start, end, replacement))

    def _start(self, node: Any) -> int:
        return int(self._line_starts[node.lineno - 1] + node.col_offset)

    def _end(self, node: Any) -> int:
        return int(self._line_starts[node.end_lineno - 1] + node.end_col_offset)

    def _text(self, node: Any) -> str:
        return self._source[self._start(node) : self._end(node)].decode()


def _called(call: ast.Call) -> str:
    """Return the last name of the called function, or an empty string if it has none."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    if isinstance(call.func, ast.Name):
        return call.func.id
    return ""


def _is_text(node: ast.expr) -> bool:
    """Return whether an operand is a text or a literal sequence, for which a flipped sign raises TypeError at once."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.ListComp)


def _is_of_self(target: ast.expr) -> bool:
    """Return whether each target of an assignment is an attribute of self."""
    if isinstance(target, ast.Tuple):
        return all(_is_of_self(one) for one in target.elts)
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"


def collect(package: Path) -> list[Site]:
    """Return each site of the core, in the order of files and lines."""
    sites = []
    for room in ROOMS:
        for file in sorted((package / room).rglob("*.py")):
            path = file.relative_to(package).as_posix()
            if path not in LEFT_OUT:
                sites += Collector(path, file.read_bytes()).sites
    return sites


def pick(sites: list[Site], count: int, seed: int) -> list[Site]:
    """Return at most `count` sites, evenly over kinds and then over files, the same for the same seed.

    The rank of a site in its cell depends only on its name and the seed, so an edit elsewhere changes little.
    """
    cells: dict[tuple[str, str], list[Site]] = defaultdict(list)
    for site in sites:
        if re.sub(r":\d+ ", " ", site.name, count=1) not in EQUIVALENT:
            cells[site.kind, site.room].append(site)
    ranks = {site: random.Random(f"{seed} {site.name}").random() for site in sites}
    for cell in cells.values():
        cell.sort(key=lambda site: ranks[site], reverse=True)
    kinds: Counter[str] = Counter()
    rooms: Counter[str] = Counter()
    lines: set[tuple[str, int]] = set()
    picked: list[Site] = []
    while len(picked) < count and any(cells.values()):
        filled = [key for key, cell in cells.items() if cell]
        kind, room = min(filled, key=lambda key: (kinds[key[0]], rooms[key[1]], ranks[cells[key][-1]]))
        site = cells[kind, room].pop()
        if (site.path, site.line) not in lines:
            lines.add((site.path, site.line))
            kinds[kind] += 1
            rooms[room] += 1
            picked.append(site)
    return picked


Lines = set[tuple[str, int]]


class Tracer:
    """A tracer that adds the lines of the core that run to the set `now`."""

    def __init__(self, package: Path) -> None:
        self.now: Lines = set()
        self._package = f"{package}{os.sep}"
        self._rooms = tuple(f"{self._package}{room}{os.sep}" for room in ROOMS)

    def start(self) -> None:
        """Trace this thread, and those that start from now on."""
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename.startswith(self._rooms):
            return self._line
        return None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.now.add((frame.f_code.co_filename.removeprefix(self._package), frame.f_lineno))
        return self._line


def _train_traced(rank: int, tracer: Tracer, steady: Lines, setup: Lines, folder: str) -> None:
    """Train on one of two ranks, under policies that together use all paths of the core."""
    import torch
    from models import two_groups, workload

    import zeroshard
    from zeroshard import Offload, Place, Policy, Precision
    from zeroshard.core.storage import storages
    from zeroshard.core.transport.shared_memory import VARIABLE

    shared_memory, gloo = "1", "0"
    fp32, bf16 = Precision(), Precision(param_dtype=torch.bfloat16)
    offload = Offload(folder, buffer_numel=4096, block_nbytes=4096)
    on_cpu = Policy.stage(3).offloaded(optimizer=Place.CPU, parameters=Place.CPU, offload=offload)
    on_disk = Policy.stage(3).offloaded(optimizer=Place.DISK, parameters=Place.DISK, offload=offload)
    on_both = Policy.stage(2).offloaded(optimizer=Place.DISK, parameters=Place.CPU, offload=offload)
    runs = [
        (Policy.stage(0), fp32, shared_memory),
        (Policy.stage(1), bf16, gloo),
        (Policy.stage(2), fp32, shared_memory),
        (Policy.stage(3), bf16, shared_memory),
        (Policy.stage(3), fp32, gloo),
        (Policy.stage(3, reshard_after_forward=False), fp32, shared_memory),
        (Policy.stage(3, within=1), fp32, shared_memory),
        (on_cpu, bf16, shared_memory),
        (on_disk, fp32, gloo),
        (on_both, bf16, shared_memory),
    ]
    # Treat CPU memory as separate, as with an accelerator, so that states at rest are copied instead of used in place.
    storages.is_cpu_memory = lambda device: False
    work = workload("skipping", param_groups=two_groups, microbatches=2)
    for policy, precision, transport in runs:
        os.environ[VARIABLE] = transport
        model, optimizer = work.build()
        tracer.now = setup
        sharded = zeroshard.shard(model, optimizer, policy, precision=precision, bucket_numel=256)
        for step in range(TRACED_STEPS):
            if step == STEADY_STEP:
                tracer.now = steady
            for microbatch in range(2):
                loss = model(*work.make_batch(rank, 2 * step + microbatch))
                with sharded.accumulate(microbatch == 0):
                    loss.backward()
            sharded.clip_grad_norm_(0.5)
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
        tracer.now = set()
        sharded.remove()


def trace(package: Path) -> dict[str, list[tuple[str, int]]]:
    """Train on two ranks, and return the lines that ran: in a steady step, and before."""
    from zeroshard.testing import run_ranks

    importlib.import_module("torch._dynamo")  # otherwise optimizers would import it, traced, at their first step

    def body(rank: int) -> list[list[list[Any]]]:
        tracer = Tracer(package)
        steady: Lines = set()
        setup: Lines = set()
        tracer.start()
        _train_traced(rank, tracer, steady, setup, folder)
        sys.settrace(None)
        return [[list(line) for line in sorted(lines)] for lines in (steady, setup)]

    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        ranks = run_ranks(body, 2, timeout=500.0)
    steady = {tuple(line) for rank in ranks for line in rank[0]}
    setup = {tuple(line) for rank in ranks for line in rank[1]}
    return {"steady": sorted(steady), "setup": sorted(setup)}


def runs_in_a_step(site: Site, steady: Lines, setup: Lines) -> bool:
    """Return whether a steady step runs the site or, if its file works before the first step, whether any code does."""
    lines = steady
    if site.room in SETUP:
        lines = steady | setup
    return any((site.path, number) in lines for number in range(site.line, site.last_line + 1))


@dataclass(frozen=True)
class Outcome:
    """An end of a run of pytest.

    Attributes:
        passed: whether all tests passed.
        reason: the first failing test, or another reason for the end.
        test: the node id of the first failing test, if one is named.
        is_hung: whether no test ended for a long time.
        is_undecided: whether the time limit came first.
    """

    passed: bool
    reason: str = ""
    test: str = ""
    is_hung: bool = False
    is_undecided: bool = False


class Copy:
    """A copy of the repository in a temporary folder, and the runs of pytest in it.

    Args:
        folder: an empty folder, which the caller removes.
        workers: the number of pytest-xdist's processes.
        silence: the seconds without the end of a test after which a run is hung.
    """

    def __init__(self, folder: Path, workers: int, silence: float) -> None:
        self.root = folder / "copy"
        self.package = self.root / "zeroshard"
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._log = folder / "log"
        self._workers, self._silence = workers, silence
        self._unusable: list[str] = []
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        for name in listed.stdout.split("\0"):
            if name and (ROOT / name).is_file():
                target = self.root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        if (ROOT / ".cache").exists():
            (self.root / ".cache").symlink_to(ROOT / ".cache")

    @property
    def environment(self) -> dict[str, str]:
        """The environment of each child: the copy comes before the editable install."""
        return {
            **os.environ,
            "PYTHONPATH": str(self.root),
            "PYTHONUNBUFFERED": "1",  # the log grows with each test that ends, which `_wait` observes
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._temporary),
        }

    def imported(self) -> Path:
        """Return the package that a child imports, wherever the child starts."""
        script = "import zeroshard; print(zeroshard.__file__)"
        done = self._python(["-c", script], self._temporary)
        return Path(done.strip()).resolve().parent

    def lines(self) -> tuple[Lines, Lines]:
        """Return the lines that a steady step runs, and those that ran before."""
        told = self._python(["-W", "ignore", "tests/support/mutants.py", "--trace"], self.root)
        found = json.loads(told.splitlines()[-1])
        steady = {(path, number) for path, number in found["steady"]}
        setup = {(path, number) for path, number in found["setup"]}
        return steady, setup

    @contextlib.contextmanager
    def planted(self, site: Site) -> Iterator[None]:
        """Plant the fault in its file during the block."""
        file = self.package / site.path
        source = file.read_bytes()
        self._write(file, site.mutated(source))
        try:
            yield
        finally:
            self._write(file, source)

    def test(self, arguments: list[str], seconds: float) -> Outcome:
        """Run pytest until the first failure, for at most `seconds` seconds."""
        command = [sys.executable, "-m", "pytest", "-q", "-x"]
        if self._workers > 1:
            command += ["-n", str(self._workers), "--dist", "loadfile"]
        for name in self._unusable:
            command += ["--deselect", name]
        with self._log.open("w") as log:
            process = subprocess.Popen(
                [*command, *arguments], cwd=self.root, env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                stopped = self._wait(process.pid, seconds)
            finally:
                self._end(process)
        if stopped is not None:
            return stopped
        return self._read(process.returncode)

    def find(self, site: Site, first: list[str], first_only: bool, limit: float) -> Outcome:
        """Run the likely files with the fault, then the others, until a test fails that passes without the fault."""
        end = time.monotonic() + limit
        while True:
            with self.planted(site):
                outcome = self.test(first, end - time.monotonic())
                if outcome.passed and not first_only:
                    rest = [f"--ignore={name}" for name in first]
                    outcome = self.test(rest, end - time.monotonic())
            is_new = outcome.test and outcome.test not in self._unusable
            if not is_new or self.test([outcome.test], self._silence).passed:
                return outcome
            # The failure is not due to the fault, but to the copy or this machine.
            print(f"  {outcome.test} fails without the mutant too: left out from now on", flush=True)
            self._unusable.append(outcome.test)

    def tail(self) -> str:
        """Return the end of the last run's log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-30:])

    def _wait(self, pid: int, seconds: float) -> Outcome | None:
        """Wait until the process ends, without reaping it, so that its group's number is not reused."""
        start = time.monotonic()
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            silent = time.time() - self._log.stat().st_mtime
            if silent > self._silence:
                return Outcome(False, f"hung: no test ended for {silent:.0f} s", is_hung=True)
            if time.monotonic() - start > seconds:
                return Outcome(False, "the time limit, while tests still passed", is_undecided=True)
            time.sleep(0.2)
        return None

    def _end(self, process: subprocess.Popen[Any]) -> None:
        """End the whole group, and processes that moved to separate sessions."""
        if process.returncode is None:  # after reaping, another group may have its number
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        marker = f"TMPDIR={self._temporary}\0".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if marker in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)

    def _read(self, status: int) -> Outcome:
        if status == 0:
            return Outcome(True)
        found = FAILED.search(self._log.read_text(errors="replace").rpartition(SUMMARY)[2])
        if found is None:
            return Outcome(False, f"pytest ended with status {status}")
        name = found[1]
        if "::" not in name:  # a file that could not be imported, although all could before the first mutant
            return Outcome(False, f"{name} cannot be collected")
        return Outcome(False, name, test=name)

    def _write(self, file: Path, content: bytes) -> None:
        file.write_bytes(content)
        # Python checks bytecode by its source's time and size, which a flipped sign within a second does not change.
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)

    def _python(self, arguments: list[str], where: Path) -> str:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=where, env=self.environment, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            told, _ = process.communicate(timeout=600)
        finally:
            self._end(process)
        if process.returncode != 0:
            raise SystemExit(f"python {' '.join(arguments)} ended with status {process.returncode} in the copy")
        return told


def check(copy: Copy, first: list[str], first_only: bool) -> None:
    """Exit unless pytest imports the copy, and passes without a mutant."""
    imported = copy.imported()
    print(f"children import {imported}", flush=True)
    if imported != copy.package.resolve():
        raise SystemExit(f"Children import {imported}, not the copy in {copy.package}: mutants would never run.")
    collected = ["--collect-only"]
    if first_only:
        collected += first
    smallest = min(first, key=lambda name: (copy.root / name).stat().st_size)
    for arguments in (collected, [smallest]):
        outcome = copy.test(arguments, 600)
        if not outcome.passed:
            print(copy.tail())
            raise SystemExit(f"pytest {' '.join(arguments)} fails in the copy without a mutant: {outcome.reason}.")
    print(f"{smallest} passes without a mutant", flush=True)


def choose(copy: Copy, arguments: argparse.Namespace) -> list[Site]:
    """Return the sites that the command line asks for."""
    sites = collect(copy.package)
    if arguments.only:
        return [site for site in sites if arguments.only in site.name]
    steady, setup = copy.lines()
    run = [site for site in sites if runs_in_a_step(site, steady, setup)]
    print(f"{len(sites)} sites, of which a step runs {len(run)}", flush=True)
    return pick(run, arguments.count, arguments.seed)


Results = list[tuple[Site, str, Outcome]]


def run_all(copy: Copy, sites: list[Site], first: list[str], arguments: argparse.Namespace) -> Results:
    """Test each mutant, and print its result."""
    results: Results = []
    for number, site in enumerate(sites, 1):
        start = time.monotonic()
        outcome = copy.find(site, first, arguments.first_only, arguments.limit)
        verdict = "found"
        if outcome.is_undecided:
            verdict = "UNDECIDED"
        elif outcome.passed:
            verdict = "SURVIVED"
        elif outcome.is_hung:
            verdict = "found (hung)"
        seconds = time.monotonic() - start
        print(f"{number:3}/{len(sites)}  {verdict:12} {seconds:5.0f} s  {site.name}", flush=True)
        if outcome.reason:
            print(f"         by {outcome.reason}", flush=True)
        results.append((site, verdict, outcome))
    return results


def report(copy: Copy, results: Results) -> int:
    """Print the table and the survivors, and return the number of survivors."""
    verdicts = ("found", "found (hung)", "SURVIVED", "UNDECIDED")
    counts = Counter((site.kind, verdict) for site, verdict, _ in results)
    print(f"\n{'':20}" + "".join(f"{verdict:>14}" for verdict in verdicts))
    for kind in KINDS:
        print(f"{kind:20}" + "".join(f"{counts[kind, verdict]:14}" for verdict in verdicts))
    totals = Counter(verdict for _, verdict, _ in results)
    print(f"{'in all':20}" + "".join(f"{totals[verdict]:14}" for verdict in verdicts))
    survivors = [(site, verdict) for site, verdict, _ in results if not verdict.startswith("found")]
    for site, verdict in survivors:
        before, after = site.before_and_after((copy.package / site.path).read_bytes())
        print(f"\n{verdict}  {site.name}\n  - {before}\n  + {after}")
    return len(survivors)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description="Does `make test` find single-line faults in the core?")
    parser.add_argument("--count", type=int, default=30, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument(
        "--only", default="", help="the sites whose names contain this, whether a step runs them or not"
    )
    parser.add_argument("--list", action="store_true", help="print the sites, and end")
    parser.add_argument("--allow", type=int, default=2, help="survivors up to which the exit status is 0")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds for one mutant")
    parser.add_argument("--silence", type=float, default=300.0, help="seconds without the end of a test: hung")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest-xdist, where it is installed")
    parser.add_argument("--first", nargs="+", default=list(FIRST), help="the test files that run before the others")
    parser.add_argument("--first-only", action="store_true", help="no other test files: quick, and more survive")
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


@contextlib.contextmanager
def working_copy(workers: int, silence: float) -> Iterator[Copy]:
    """Make a copy of the repository, and remove it at the end, even after an error or SIGTERM."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if importlib.util.find_spec("xdist") is None:
        workers = 1
    with tempfile.TemporaryDirectory(prefix="mutants", ignore_cleanup_errors=True) as folder:
        yield Copy(Path(folder), workers, silence)


def main() -> None:
    """Run the command line."""
    arguments = parse()
    if arguments.trace:
        print(json.dumps(trace(ROOT / "zeroshard")))
        return
    with working_copy(arguments.workers, arguments.silence) as copy:
        sites = choose(copy, arguments)
        if arguments.list:
            for site in sites:
                print(f"{site.kind:20} {site.name}")
            return
        if not sites:
            raise SystemExit("No site has such a name: --list prints names.")
        first = [name for name in arguments.first if (copy.root / name).is_file()]
        if not first:
            raise SystemExit(f"None of these is in the repository: {', '.join(arguments.first)}.")
        check(copy, first, arguments.first_only)
        survivors = report(copy, run_all(copy, sites, first, arguments))
    if survivors > arguments.allow:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
