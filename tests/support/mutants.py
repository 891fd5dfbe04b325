"""Plants single-line faults in the core of zeroshard, one at a time, and lists those that `make test` does not find.

    python tests/support/mutants.py [--count 30] [--seed 0] [--only NAME] [--first-only] [--list]

Cosmic Ray makes the faults (mutants), in a copy of the repository: the script only reads the repository itself.

- The first file of `FIRST` runs under coverage. Only lines of functions that it runs get a mutant.
- A seed always picks the same mutants: evenly over the files of the core, at most one in a line.
- A mutant is found if a test fails that passes without it. `FIRST` runs first, then the rest of the quick set.
- A run that reaches its time limit is undecided: it hangs, or the machine is slow. The list includes it.

The exit status is 1 if the list is not empty.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import parso
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import use_mutation
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator, operator_names
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome
from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[2]
CORE = Path("zeroshard/core")
FIRST = [
    "tests/promises/test_equality.py", "tests/core/test_unusual_models.py", "tests/core/test_offload.py",
    "tests/core/test_collectives.py", "tests/checkpoint/test_checkpoints.py",
]  # fmt: skip
"""The files that most likely find a fault."""
USED = re.compile(
    r"core/(AddNot|NumberReplacer|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceTrueWithFalse|ReplaceFalseWithTrue"
    r"|ReplaceBreakWithContinue|ReplaceContinueWithBreak|ZeroIterationForLoop|ReplaceUnaryOperator_Delete_\w+"
    r"|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_FloorDiv)"
    r"|ReplaceComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is))"
)
"""Cosmic Ray's operators without those that cause a TypeError, or give many mutants of one kind."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py::[^\[\s]+(?:\[.*?\](?= - |$))?)", re.MULTILINE)


class SkipStatement(Operator):  # type: ignore[misc]
    """Skips a call whose result nobody takes, such as a wait, or an assignment to an attribute or an element."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        is_statement = node.parent is not None and node.parent.type == "simple_stmt"
        changed = node.children[0] if node.type == "expr_stmt" else node
        if is_statement and changed.type == "atom_expr":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return parso.python.tree.Keyword("pass", node.start_pos, node.get_first_leaf().prefix)

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


OPERATORS = {
    name.removeprefix("core/"): get_operator(name) for name in sorted(filter(USED.fullmatch, operator_names()))
}
OPERATORS["SkipStatement"] = SkipStatement


class Mutant(NamedTuple):
    """A fault: in `path`, the operator's mutation number `occurrence`."""

    path: Path
    line: int
    operator: str
    occurrence: int

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line} {self.operator}"

    def planted(self) -> Any:
        """Return a context with the mutated file, which gives the file's text before and after."""
        return use_mutation(self.path, OPERATORS[self.operator](), self.occurrence)

    def diff(self) -> str:
        with self.planted() as texts:
            return "\n".join(difflib.unified_diff(*(text.split("\n") for text in texts), n=1, lineterm=""))


def mutants_of(path: Path, run: set[int]) -> Iterator[Mutant]:
    """Yield the mutants of a file's functions, on lines that ran."""
    nodes = list(ast_nodes(get_ast_from_path(path)))
    for name, operator in OPERATORS.items():
        positions = ((node, start) for node in nodes for start, _ in operator().mutation_positions(node))
        for occurrence, (node, (line, _)) in enumerate(positions):
            function = parso.tree.search_ancestor(node, "funcdef")
            if function is None or line not in run or is_for_people(node):
                continue
            if node.type == "number" and node.value not in ("1", "2"):  # an index 0 of one element, seconds, or bytes
                continue
            if name == "SkipStatement" and function.name.value == "__init__":  # without an attribute any test fails
                continue
            yield Mutant(path, line, name, occurrence)


def is_for_people(node: Any) -> bool:
    """Return whether a node belongs to a message, or to what Python evaluates at the import."""
    while node is not None and node.type != "funcdef":
        if node.type in ("raise_stmt", "fstring", "decorator", "param"):
            return True
        if node.type == "atom_expr" and re.match(r"warn|logging\.", node.get_code(include_prefix=False)):
            return True
        node = node.parent
    return False


def pick(mutants: dict[Path, list[Mutant]], count: int, seed: int) -> list[Mutant]:
    """Return at most `count` mutants, evenly over files, at most one in a line."""
    chance = random.Random(seed)
    files = []
    for path in chance.sample(sorted(mutants), len(mutants)):
        shuffled = chance.sample(mutants[path], len(mutants[path]))
        files.append({mutant.line: mutant for mutant in shuffled}.values())
    turns = itertools.chain.from_iterable(itertools.zip_longest(*files))
    return list(itertools.islice(filter(None, turns), count))


def copy_repository(folder: Path) -> None:
    """Make a copy of the repository the folder of this process, and what its tests import."""
    left_out = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "runs", "dist", "build")
    shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=left_out)
    os.chdir(folder)
    os.environ.update(PYTHONPATH=str(folder), OMP_NUM_THREADS="1")


def failure(arguments: list[str], limit: float, module: str = "pytest") -> str | None:
    """Run tests until one fails, and return pytest's output, or None if all pass."""
    command = [sys.executable, "-m", *module.split(), "-q", "-x", "-n", "2", "--dist", "worksteal", *arguments]
    outcome, output = run_tests(shlex.join(command), limit)
    return None if outcome == TestOutcome.SURVIVED else str(output)


def lines_that_run(limit: float) -> CoverageData:
    """Run the first file under coverage, and return its data. Exit if a test fails, or other code than the copy runs."""
    Path("runs/coverage").mkdir(parents=True)
    if output := failure([FIRST[0]], limit, "coverage run -m pytest"):
        raise SystemExit(f"{output}\n{FIRST[0]} fails in the copy without a mutant.")
    subprocess.run([sys.executable, "-m", "coverage", "combine", "--quiet"], check=True)
    data = CoverageData("runs/coverage/data")
    data.read()
    if not any(Path(path).is_relative_to(Path.cwd()) for path in data.measured_files()):
        raise SystemExit(f"Tests import another zeroshard, not the copy in {Path.cwd()}: mutants would never run.")
    return data


def verdict(mutant: Mutant, arguments: list[str], left_out: list[str], limit: float) -> str | None:
    """Return why tests fail with a mutant, or None. A test that fails without it, too, is added to `left_out`."""
    while True:
        with mutant.planted():
            output = failure([*arguments, *(f"--deselect={name}" for name in left_out)], limit)
        if output is None:
            return None
        if output == "timeout":
            return f"UNDECIDED after {limit:.0f} s"
        failed = FAILED.search(output)
        if failed is None:
            return "found: pytest cannot start"
        if failure([failed[1], "--all"], limit) is None:
            return f"found by {failed[1]}"
        print(f"  {failed[1]} fails without the mutant, too: left out from now on", flush=True)
        left_out.append(failed[1])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Does `make test` find single-line faults in the core?")
    parser.add_argument("--count", type=int, default=30, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--only", default="", help="all mutants whose names contain this, instead of --count")
    parser.add_argument("--first-only", action="store_true", help="only the files that most likely find one")
    parser.add_argument("--list", action="store_true", help="print the names of the mutants, and end")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for each run of the tests")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # removes the copy
    parts = [FIRST] if options.first_only else [FIRST, [f"--ignore={name}" for name in FIRST]]
    missed: list[str] = []
    left_out: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mutants", ignore_cleanup_errors=True) as folder:
        copy_repository(Path(folder).resolve())
        data = lines_that_run(options.limit)
        files = sorted(set(CORE.rglob("*.py")) - {CORE / "transport/watch.py"})  # which writes messages for people
        mutants = {path: [*mutants_of(path, set(data.lines(str(path.resolve())) or ()))] for path in files}
        every = [mutant for path in files for mutant in mutants[path]]
        print(f"{len(every)} mutants in {len(files)} files", flush=True)
        named = [mutant for mutant in every if options.only in mutant.name]
        chosen = named if options.only else pick(mutants, options.count, options.seed)
        for number, mutant in enumerate(chosen, 1):
            reasons = (verdict(mutant, part, left_out, options.limit) for part in parts)
            found = "" if options.list else next(filter(None, reasons), "SURVIVED")
            print(f"{number:3}/{len(chosen)}  {mutant.name}  {found}", flush=True)
            if found.startswith(("SURVIVED", "UNDECIDED")):
                missed.append(f"\n{mutant.name}  {found}\n{mutant.diff()}")
        os.chdir(ROOT)
    if not options.list:
        print(*missed, f"{len(missed)} of {len(chosen)} were not found", sep="\n")
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
