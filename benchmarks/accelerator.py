"""Owns `make accelerator`: all the truth that a few minutes of one accelerator can give, the most valued first.

Each part runs in a process of its own, within its share of the time, and writes what it found as soon as it found it: whatever ends the
run, what was measured until then is in the folder, as JSON for each part, and as one table in Markdown.

    python benchmarks/accelerator.py --minutes 9 --out results            # on the first accelerator
    python benchmarks/accelerator.py --rehearse --out /tmp/rehearsal      # on the pretended one, tiny: to see that it runs

It needs torch and this checkout, and nothing that is installed besides.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHARES = {"correctness": 0.3, "memory": 0.16, "step": 0.2, "profile": 0.1, "offload": 0.24}
"""Parts in their order, and of the minutes at most. What one does not use the next may."""
GRACE_SECONDS = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--out", type=Path, default=Path("runs/accelerator"), help="the folder for results")
    parser.add_argument("--only", nargs="*", choices=list(SHARES), help="these parts")
    parser.add_argument("--rehearse", action="store_true", help="on the pretended accelerator, with tiny sizes")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        run_part(arguments.part, arguments.out, rehearse=arguments.rehearse)
        return
    end, failed = time.monotonic() + 60 * arguments.minutes, []
    parts = [part for part in SHARES if not arguments.only or part in arguments.only]
    for number, part in enumerate(parts):
        left = end - time.monotonic()
        share = SHARES[part] / sum(SHARES[one] for one in parts[number:])
        limit = left * share if number < len(parts) - 1 else left
        said = run_limited(part, arguments.out, limit, rehearse=arguments.rehearse)
        if said:
            failed.append(f"{part}: {said}")
        print(f"{part}: {said or 'done'}", flush=True)
        write_table(arguments.out, failed)
    print(f"results in {arguments.out}")
    if failed:
        raise SystemExit(1)


def run_limited(part: str, out: Path, limit: float, *, rehearse: bool) -> str:
    """Run a part in a process group of its own; says what went wrong, if anything did."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "8")}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "accelerator.py"), "--part", part, "--out", str(out)]
    command += ["--rehearse"] if rehearse else []
    with (out / f"{part}.log").open("w") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            code = child.wait(max(limit, 1.0))
        except subprocess.TimeoutExpired:
            _end(child)
            return f"ended after its {limit:.0f} s; see {part}.log and what {part}.json has"
        finally:
            _end(child)
    return f"exit status {code}, see {part}.log" if code else ""


def _end(child: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
            return


class Findings:
    """What a part found, written with every finding."""

    def __init__(self, path: Path) -> None:
        self._path, self._rows = path, list[dict[str, Any]]()
        self._write()

    def add(self, **row: Any) -> None:
        """One row of the part's table."""
        self._rows.append(row)
        print(row, flush=True)
        self._write()

    def _write(self) -> None:
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(self._rows, indent=1))
        unfinished.replace(self._path)


def run_part(part: str, out: Path, *, rehearse: bool) -> None:
    """In a process of its own."""
    from stand_ins import stand_in

    missing = stand_in()
    import accelerator_parts
    from accelerator_setting import Setting

    setting = Setting.make(rehearse=rehearse)
    findings = Findings(out / f"{part}.json")
    about = {"device": setting.name, "torch": setting.version, "rehearsal": rehearse, "not installed": missing}
    (out / "about.json").write_text(json.dumps(about, indent=1))
    getattr(accelerator_parts, part)(setting, findings.add)


# ---------------------------------------------------------------------- the table


def write_table(out: Path, failed: list[str]) -> None:
    """Everything that is there, as `table.md`."""
    about = json.loads((out / "about.json").read_text()) if (out / "about.json").exists() else {}
    lines = ["# " + ("A rehearsal: no figure here says anything" if about.get("rehearsal") else "One accelerator"), ""]
    lines += [", ".join(f"{key}: {value}" for key, value in about.items() if value), ""]
    for part in SHARES:
        if (out / f"{part}.json").exists():
            lines += [f"## {part}", "", *_markdown(json.loads((out / f"{part}.json").read_text())), ""]
    lines += ["## What did not end well", "", *(f"- {one}" for one in failed), ""] if failed else []
    (out / "table.md").write_text("\n".join(lines))


def _markdown(rows: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    if not columns:
        return ["nothing"]
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    return [f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *cells)]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")


if __name__ == "__main__":
    main()
