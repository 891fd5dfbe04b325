"""Runs the quick set as other machines and users would: `python tests/support/anywhere.py [VARIANT ...] [-- ARGUMENTS OF PYTEST]`.

Each variant prints one line. Its whole output is in runs/anywhere/VARIANT.txt.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
OUT = ROOT / "runs" / "anywhere"
NOBODY = "65534"
PYTEST = [sys.executable, "-m", "pytest", "-q", "--dist", "worksteal"]

VARIANTS: dict[str, dict[str, Any]] = {
    "slow-cpu": {"environment": {"ZEROSHARD_EMULATED_DTYPES": "bf16,fp16", "ATEN_CPU_CAPABILITY": "default"}},
    "fast-cpu": {"environment": {"ZEROSHARD_EMULATED_DTYPES": "none"}},
    "locale": {  # files are ASCII unless a call says otherwise
        "environment": {
            "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TZ": "Pacific/Kiritimati",
        },
    },
    "environment": {  # of a job and a terminal with settings, and of a user without a home
        "environment": {
            "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "RANK": "1", "WORLD_SIZE": "2", "FORCE_COLOR": "1", "TERM": "dumb",
            "COLUMNS": "40", "ZEROSHARD_NOTICE_SECONDS": "1", "ZEROSHARD_SHARED_MEMORY": "0", "HOME": "/proc/nowhere",
        },
    },
    "umask": {"before": ["sh", "-c", 'umask 077; exec "$@"', "sh"]},
    "one-core": {"before": ["taskset", "-c", str(min(os.sched_getaffinity(0)))], "processes": 1},
    "shuffled": {"arguments": ["--shuffle", str(random.randrange(10_000))]},
    "user": {"is_user": True},
}  # fmt: skip
"""What differs: the environment, a command in front of pytest, pytest's arguments, or the user."""

HIDDEN = """
mount --bind "$PYTHON_FOLDER" "$STAND_IN" && mount -t tmpfs -o mode=755 none "$HIDDEN_FOLDER" &&
mkdir -p "$PYTHON_FOLDER" && mount --bind "$STAND_IN" "$PYTHON_FOLDER" && exec "$@"
"""
"""Shows a Python below a folder that only root reads, such as /root, to another user. Only this process and its children see it."""


@contextmanager
def another_user(environment: dict[str, str]) -> Iterator[tuple[Path, list[str]] | str]:
    """Give (a copy of the tree, a command to be a user without privileges in it), or the reason why this is not possible."""
    if os.geteuid() != 0 or not shutil.which("setpriv"):
        yield "needs root and setpriv to become another user (an ordinary user's own run shows the same)"
        return
    with tempfile.TemporaryDirectory(prefix="anywhere") as folder:
        Path(folder).chmod(0o755)
        copy, home, stand_in = (Path(folder) / name for name in ("tree", "home", "python"))
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        for name in filter(None, subprocess.check_output(listed, cwd=ROOT, text=True).split("\0")):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        subprocess.run(["git", "init", "-q"], cwd=copy, check=True)  # a test asks git for the files
        subprocess.run(["git", "add", "-A"], cwd=copy, check=True)
        home.mkdir()
        stand_in.mkdir()
        subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", copy, home], check=True)
        environment |= {"HOME": str(home), "USER": "nobody", "LOGNAME": "nobody", "PYTHONPATH": str(copy)}
        become = ["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]
        python = Path(sys.base_prefix).resolve()
        hidden = [one for one in reversed(python.parents) if not one.stat().st_mode & 0o001]
        if hidden:
            environment |= {"PYTHON_FOLDER": str(python), "STAND_IN": str(stand_in), "HIDDEN_FOLDER": str(hidden[0])}
            become = ["unshare", "--mount", "sh", "-c", HIDDEN, "sh", *become]
        tried = subprocess.run(
            [*become, sys.executable, "-c", "import torch"], env=environment, cwd=copy, capture_output=True, check=False
        )
        if tried.returncode:
            yield f"another user cannot run {sys.executable}: {tried.stderr.decode(errors='replace').strip()[-200:]}"
        else:
            yield copy, become


def run(name: str, given: list[str]) -> bool:
    """Run a variant, print its line, and return whether no test failed."""
    variant = VARIANTS[name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variant.get("environment", {})}
    processes = str(variant.get("processes", os.environ.get("JOBS", 3)))
    before = variant.get("before", [])
    if before and not shutil.which(before[0]):
        print(f"{name:11} not run: {before[0]} is not installed", flush=True)
        return True
    tried = subprocess.run([*before, "true"], capture_output=True, check=False)
    if tried.returncode:
        print(f"{name:11} not run: {tried.stderr.decode(errors='replace').strip()}", flush=True)
        return True
    command = [*before, *PYTEST, "-n", processes, *variant.get("arguments", []), *given]
    began = time.monotonic()
    with another_user(environment) if variant.get("is_user") else _as_it_is() as place:
        if isinstance(place, str):
            print(f"{name:11} not run: {place}", flush=True)
            return True
        folder, become = place
        with (OUT / f"{name}.txt").open("wb") as log:
            done = subprocess.run(
                [*become, *command], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
    text = re.sub(r"\x1b\[[\d;]*m", "", (OUT / f"{name}.txt").read_text(encoding="utf-8", errors="replace"))
    last = re.findall(r"^=* ?((?:\d+ \w+,? ?)+ in .*?)=*$", text, re.MULTILINE)
    told = " ".join(variant.get("arguments", []))
    print(
        f"{name:11} {'passed' if done.returncode == 0 else 'FAILED'}: {last[-1].strip() if last else 'no result'}, "
        f"{time.monotonic() - began:.0f} s {told}",
        flush=True,
    )
    for line in re.findall(r"^(?:FAILED|ERROR) .*$", text, re.MULTILINE):
        print(f"            {line[:200]}", flush=True)
    return done.returncode == 0


@contextmanager
def _as_it_is() -> Iterator[tuple[Path, list[str]]]:
    yield ROOT, []


def main() -> None:
    """Run the variants that the command line names, or all."""
    names, given = sys.argv[1:], []
    if "--" in names:
        names, given = names[: names.index("--")], names[names.index("--") + 1 :]
    if unknown := set(names) - VARIANTS.keys():
        sys.exit(f"no variant {', '.join(sorted(unknown))}: the variants are {', '.join(VARIANTS)}")
    OUT.mkdir(parents=True, exist_ok=True)
    passed = [run(name, given) for name in names or VARIANTS]
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
