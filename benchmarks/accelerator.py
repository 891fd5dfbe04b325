"""Owns `make accelerator`: parts of at most nine minutes each, which measure zeroshard and other systems on one accelerator.

    python benchmarks/accelerator.py --part right --out results       # one part, on the first accelerator
    python benchmarks/accelerator.py --rehearse --out /tmp/rehearsal  # tiny versions of all parts, on the simulated accelerator

Each part runs in a separate process, which ends within the part's time. `results.json` gets each row as soon as it is
measured. After each row, `results.tar.gz` is written again with that file, the logs and the traces. Both keep the
results of earlier parts.

The script needs torch and this checkout. benchmarks/results/README.md describes how to supply libraries that a machine lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = ("facts", "right", "memory", "speed", "offload")
"""The parts, the most important first."""
RESERVE_SECONDS = 20.0
"""A part starts no row in its last seconds, so that a row that hangs can be killed."""
GRACE_SECONDS = 5.0
RESULTS, ARCHIVE = "results.json", "results.tar.gz"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=PARTS, nargs="*", default=list(PARTS), help="default: all, one after another")
    parser.add_argument(
        "--rows", type=int, nargs="*", default=[], help="rows of the part offload to run; the results keep the others"
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="the time limit of each part")
    parser.add_argument("--out", type=Path, default=Path("runs/accelerator"), help="the folder for results")
    parser.add_argument("--rehearse", action="store_true", help="on the simulated accelerator, with tiny sizes")
    parser.add_argument("--inside", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rows and arguments.inside is None and arguments.part != ["offload"]:
        parser.error("--rows needs --part offload: other parts run whole.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    seconds = 60 * arguments.minutes
    if arguments.inside:
        run_inside(arguments.inside, arguments.out, arguments.end, arguments.rows, rehearse=arguments.rehearse)
        return
    if arguments.rehearse:
        _build_simulated()
    failed = []
    for part in arguments.part:
        end = run_part(part, arguments.out, seconds, arguments.rows, rehearse=arguments.rehearse)
        print(f"{part}: {end}", flush=True)
        if end != "done":
            failed.append(part)
    print(f"results in {arguments.out / RESULTS} and {ARCHIVE}")
    if failed:
        raise SystemExit(f"failed parts: {', '.join(failed)}")


def _build_simulated() -> None:
    """Compile the simulated accelerator before the time of any part begins, since this may take minutes."""
    sys.path.insert(0, str(HERE.parent / "tests" / "support"))
    from simgpu.build import build  # type: ignore[import-not-found, unused-ignore]

    build()


def run_part(part: str, out: Path, seconds: float, rows: Sequence[int] = (), *, rehearse: bool) -> str:
    """Run a part in a separate process group and record how it ended."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(os.cpu_count() or 1))}
    if part == "right":  # bits are compared; see accelerator_ranks.be_deterministic
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo looks up the host's name, which may not resolve here
    paths = [str(HERE.parent), str(HERE), str(HERE.parent / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, str(HERE / "accelerator.py"), "--inside", part, "--out", str(out)]
    begin = time.monotonic()
    end_at = begin + max(seconds - GRACE_SECONDS, 1.0)
    # The same clock in each process: the part's time does not begin again after its imports.
    command += ["--end", str(end_at), *(["--rehearse"] if rehearse else [])]
    command += ["--rows", *map(str, rows)]
    Findings(out, part).begin(rows)
    with (out / f"{part}.log").open("a" if rows else "w") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            code = child.wait(end_at - time.monotonic())
            end = "done" if code == 0 else f"exit status {code}: see {part}.log"
        except subprocess.TimeoutExpired:
            end = f"ended after its {seconds:.0f} s: see {part}.log"
        finally:
            _end(child)
    Findings(out, part).end(end, time.monotonic() - begin)
    return end


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a process and all its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS / 2)
            return


class Findings:
    """The rows of one part, in the file of all parts."""

    def __init__(self, out: Path, part: str) -> None:
        self._out = out
        self._part = part

    def begin(self, rows: Sequence[int] = ()) -> None:
        """Delete the results of an earlier run of this part: all, or only these rows."""
        kept = []
        if rows:
            known = read(self._out)["parts"].get(self._part, {}).get("rows", [])
            kept = [row for row in known if row["row"] not in rows]
        self._change({"rows": kept, "end": "under way", "seconds": 0.0})

    @property
    def device(self) -> str | None:
        """The device of an earlier run, or None."""
        found: str | None = read(self._out)["parts"].get(self._part, {}).get("about", {}).get("device")
        return found

    def about(self, **facts: Any) -> None:
        """Record the setting of the part."""
        self._change({"about": facts})

    def add(self, **row: Any) -> None:
        """Add a row."""
        print(row, flush=True)
        rows = [*read(self._out)["parts"][self._part]["rows"], row]
        self._change({"rows": sorted(rows, key=lambda one: one.get("row", 0))})

    def end(self, how: str, seconds: float) -> None:
        """Record how the part ended, and after how many seconds."""
        self._change({"end": how, "seconds": round(seconds, 1)})

    def _change(self, values: dict[str, Any]) -> None:
        found = read(self._out)
        found["parts"].setdefault(self._part, {}).update(values)
        unfinished = self._out / f"{RESULTS}.part"
        unfinished.write_text(json.dumps(found, indent=1))
        unfinished.replace(self._out / RESULTS)
        _pack(self._out)


def read(out: Path) -> dict[str, Any]:
    """Return all results, by part."""
    path = out / RESULTS
    if not path.exists():
        return {"parts": {}}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _pack(out: Path) -> None:
    """Write the archive again. Traces move into it, since a remote machine may return only a few files."""
    traces = sorted(out.glob("*.json.gz"))
    unfinished = out / f"{ARCHIVE}.part"
    with tarfile.open(unfinished, "w:gz", compresslevel=1) as archive:
        for path in [out / RESULTS, *sorted(out.glob("*.log")), *traces]:
            archive.add(path, path.name)
        _keep_traces(out / ARCHIVE, archive, {path.name for path in traces})
    unfinished.replace(out / ARCHIVE)
    for path in traces:
        path.unlink()


def _keep_traces(earlier: Path, archive: tarfile.TarFile, newer: set[str]) -> None:
    if not earlier.exists():
        return
    with tarfile.open(earlier) as old:
        for member in old:
            if member.name.endswith(".json.gz") and member.name not in newer:
                archive.addfile(member, old.extractfile(member))


def run_inside(part: str, out: Path, end: float, rows: Sequence[int] = (), *, rehearse: bool) -> None:
    """Run a part in this process, which is killed at `end`, by `time.monotonic`."""
    from stand_ins import stand_in

    missing = stand_in()
    import accelerator_parts
    from accelerator_setting import Setting

    setting = Setting.make(out, end - RESERVE_SECONDS, rehearse=rehearse, rows=rows)
    findings = Findings(out, part)
    if rows and findings.device not in (None, setting.name):
        raise SystemExit(f"the other rows in {out} are from {findings.device}: choose another folder, or run all rows.")
    findings.about(device=setting.name, torch=setting.version, rehearsal=rehearse, missing=missing)
    accelerator_parts.PARTS[part](setting, findings.add)


if __name__ == "__main__":
    main()
