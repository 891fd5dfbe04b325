"""Plants single-line faults in the core of zeroshard, one at a time, and lists those that `make test` does not find.

    python tests/support/mutants.py [--count 30] [--seed 0] [--only NAME] [--first-only] [--list]

Cosmic Ray makes the faults (mutants), in a copy of the repository: the script only reads the repository itself.

- `tests/promises/test_equality.py` first runs under coverage. Only lines of functions that it runs get a mutant.
- A seed always picks the same mutants: evenly over the files of the core, at most one in a line.
- A mutant is found if a test fails that passes without it. The files that most likely find one run first, then the quick set.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
LEFT_OUT = ("watch.py",)
"""Files that write messages for people. A mutated message is no fault of the core."""
FIRST = (
    "tests/promises/test_equality.py", "tests/core/test_unusual_models.py", "tests/core/test_offload.py",
    "tests/core/test_collectives.py", "tests/checkpoint/test_checkpoints.py",
)  # fmt: skip
"""The files that most likely find a fault. Lines that the first of them runs get mutants."""
USED = re.compile(
    r"core/(AddNot|NumberReplacer|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceTrueWithFalse|ReplaceFalseWithTrue"
    r"|ReplaceBreakWithContinue|ReplaceContinueWithBreak|ZeroIterationForLoop|ReplaceUnaryOperator_Delete_\w+"
    r"|ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_FloorDiv)"
    r"|ReplaceComparisonOperator_(Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Eq_NotEq|NotEq_Eq|Is_IsNot|IsNot_Is))"
)
"""Cosmic Ray's operators without those that make a TypeError, or many mutants of one kind."""
FOR_PEOPLE = ("raise_stmt", "fstring", "decorator", "param")
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


@dataclass(frozen=True)
class Mutant:
    """A place for one fault: in `path`, the operator's mutation number `occurrence`."""

    path: Path
    line: int
    operator: str
    occurrence: int

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line} {self.operator}"


def mutants_of(path: Path, run: set[int]) -> Iterator[Mutant]:
    """Yield the mutants of a file's functions, on lines that ran."""
    nodes = list(ast_nodes(get_ast_from_path(path)))
    for name, operator in OPERATORS.items():
        positions = ((node, start) for node in nodes for start, _ in operator().mutation_positions(node))
        for occurrence, (node, (line, _)) in enumerate(positions):
            function = parso.tree.search_ancestor(node, "funcdef")
            is_seconds_or_size = node.type == "number" and node.value not in ("0", "1", "2")
            # An object without an attribute fails at once, so any test finds the fault.
            is_first = name == "SkipStatement" and function is not None and function.name.value == "__init__"
            if function and line in run and not (is_first or is_seconds_or_size or _is_for_people(node)):
                yield Mutant(path, line, name, occurrence)


def _is_for_people(node: Any) -> bool:
    """Return whether a node belongs to a message, or to what Python evaluates at the import."""
    while node is not None:
        if node.type in FOR_PEOPLE or re.match(r"warn|logging\.", node.get_code(include_prefix=False)):
            return True
        node = None if node.type == "funcdef" else node.parent
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
    """Copy the files that git does not ignore, and make the copy the folder of this process and what it imports."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(lambda name: name and (ROOT / name).is_file(), names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    if (ROOT / ".cache").exists():
        (folder / ".cache").symlink_to(ROOT / ".cache")
    os.chdir(folder)
    os.environ.update(PYTHONPATH=str(folder), OMP_NUM_THREADS="1")


def run_of_pytest(arguments: list[str], workers: int, measured: bool = False) -> str:
    """Return the command that runs tests until one fails."""
    module = ["coverage", "run", "-m", "pytest"] if measured else ["pytest"]
    return shlex.join(
        [sys.executable, "-m", *module, "-q", "-x", "-n", str(workers), "--dist", "worksteal", *arguments]
    )


def lines_that_run(workers: int, limit: float) -> CoverageData:
    """Run the first file under coverage, and return its data. Exit if a test fails or another copy of zeroshard runs."""
    Path("runs/coverage").mkdir(parents=True)
    outcome, output = run_tests(run_of_pytest([FIRST[0]], workers, measured=True), limit)
    if outcome != TestOutcome.SURVIVED:
        raise SystemExit(f"{output}\n{FIRST[0]} fails in the copy without a mutant.")
    subprocess.run([sys.executable, "-m", "coverage", "combine", "--quiet"], check=True)
    data = CoverageData("runs/coverage/data")
    data.read()
    if not any(Path(path).is_relative_to(Path.cwd()) for path in data.measured_files()):
        raise SystemExit(f"Tests import another zeroshard, not the copy in {Path.cwd()}: mutants would never run.")
    return data


class Search:
    """The runs of the tests, with a mutant and without."""

    def __init__(self, first_only: bool, workers: int, limit: float) -> None:
        self._parts = [list(FIRST), *([] if first_only else [[f"--ignore={name}" for name in FIRST]])]
        self._workers, self._limit = workers, limit
        self._unusable: list[str] = []

    def verdict(self, mutant: Mutant) -> tuple[str, list[str]]:
        """Return what became of a mutant, and its diff."""
        with use_mutation(mutant.path, OPERATORS[mutant.operator](), mutant.occurrence) as (before, after):
            diff = [
                *difflib.unified_diff(
                    before.split("\n"), after.split("\n"), str(mutant.path), "mutant", n=1, lineterm=""
                )
            ]
        for part in self._parts:
            found = self._failure(mutant, part)
            if found is not None:
                return found, diff
        return "SURVIVED", diff

    def _failure(self, mutant: Mutant, part: list[str]) -> str | None:
        """Return why tests fail with a mutant, or None. Tests that fail without it, too, are left out from then on."""
        while True:
            with use_mutation(mutant.path, OPERATORS[mutant.operator](), mutant.occurrence):
                left_out = [f"--deselect={name}" for name in self._unusable]
                outcome, output = run_tests(run_of_pytest([*part, *left_out], self._workers), self._limit)
            if outcome == TestOutcome.SURVIVED:
                return None
            if output == "timeout":
                return f"UNDECIDED after {self._limit:.0f} s"
            failed = FAILED.search(output)
            if failed is None:
                return "found: pytest cannot start"
            if run_tests(run_of_pytest([failed[1], "--all"], 0), self._limit)[0] == TestOutcome.SURVIVED:
                return f"found by {failed[1]}"
            print(f"  {failed[1]} fails without the mutant, too: left out from now on", flush=True)
            self._unusable.append(failed[1])


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Does `make test` find single-line faults in the core?")
    parser.add_argument("--count", type=int, default=30, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--only", default="", help="all mutants whose names contain this, instead of --count")
    parser.add_argument("--first-only", action="store_true", help="only the files that most likely find one")
    parser.add_argument("--list", action="store_true", help="print the names of the mutants, and end")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest-xdist")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for each run of the tests")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # removes the copy
    with tempfile.TemporaryDirectory(prefix="mutants", ignore_cleanup_errors=True) as folder:
        copy_repository(Path(folder).resolve())
        data = lines_that_run(options.workers, options.limit)
        files = [path for path in sorted(CORE.rglob("*.py")) if path.name not in LEFT_OUT]
        mutants = {path: [*mutants_of(path, set(data.lines(str(path.resolve())) or ()))] for path in files}
        every = [mutant for path in files for mutant in mutants[path]]
        print(f"{len(every)} mutants in {len(files)} files", flush=True)
        chosen = pick(mutants, options.count, options.seed)
        if options.only:
            chosen = [mutant for mutant in every if options.only in mutant.name]
        search = Search(options.first_only, options.workers, options.limit)
        missed = []
        for number, mutant in enumerate(chosen, 1):
            verdict, diff = ("", []) if options.list else search.verdict(mutant)
            print(f"{number:3}/{len(chosen)}  {mutant.name}  {verdict}".rstrip(), flush=True)
            if verdict.startswith(("SURVIVED", "UNDECIDED")):
                missed.append("\n".join([f"\n{verdict}  {mutant.name}", *diff]))
        print(*missed, f"{len(missed)} of {len(chosen)} were not found" * (not options.list), sep="\n")
        os.chdir(ROOT)
    raise SystemExit(bool(missed))


if __name__ == "__main__":
    main()
