"""`make accelerator` with tiny sizes on the simulated accelerator: each part ends in time, and the page takes its figures."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tarfile
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeroshard import Policy, Precision
from zeroshard.engine.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("facts", "right", "memory", "speed", "offload")
EXPECTED = {
    "facts": "pinning, GB/s",
    "right": '"feature: failing_disk", "result": "right"',
    "memory": "peak_reserved_gib",
    "speed": "zeroshard, stage 3, collectives forced",
    "offload": '"row": 8, "model": "1.3 B", "where": "disk", "microbatches": 8, "ratio": 1.0, "parameters_b"',
}
"""A word of the last rows of each part."""


def rehearse(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks/accelerator.py"), "--rehearse", "--out", str(out), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a module of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def parts(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the parts, whose traces are left out."""
    module = load("accelerator_parts")
    monkeypatch.setattr(module, "_profiled", lambda *_: {})
    return module


def speeds(parts: Any, left: float = 500.0) -> list[dict[str, Any]]:
    """Run the part `speed` with so many seconds left, and return its rows."""
    rows: list[dict[str, Any]] = []
    setting = SimpleNamespace(left=left, rehearse=False, shape=lambda _: None, tokens=lambda *sizes: sizes)
    parts.speed(setting, lambda **row: rows.append(row))
    return rows


def results(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


@pytest.mark.full
@pytest.mark.parametrize("part", PARTS)
def test_each_part_ends_in_its_time(part: str, tmp_path: Path) -> None:
    done = rehearse(tmp_path, "--part", part)
    log = (tmp_path / f"{part}.log").read_text()
    assert done.returncode == 0, log[-3000:]
    found = results(tmp_path)["parts"][part]
    assert found["end"] == "done"
    assert found["about"]["rehearsal"]
    assert EXPECTED[part] in json.dumps(found["rows"])
    assert not [row for row in found["rows"] if "failed" in row]
    assert not [row for row in found["rows"] if row.get("kept")]
    if part == "right":  # on this device every policy has the bits of stage 0
        said = {row["what"]: row["result"] for row in found["rows"]}
        assert said.pop("deterministic kernels") == "requested where torch has them; CUBLAS_WORKSPACE_CONFIG=:4096:8"
        assert said.pop("stage 0 compared with plain AdamW").startswith("within")
        assert set(said.values()) == {"equal", "right"}
    with tarfile.open(tmp_path / "results.tar.gz") as archive:
        names = set(archive.getnames())
        logs = {path.name for path in tmp_path.iterdir()} - {"results.tar.gz"}
    assert logs == {"results.json", f"{part}.log"}
    traces = names - logs
    assert len(traces) == (3 if part == "speed" else 0)
    assert all(name.endswith(".json.gz") for name in traces)


def test_a_part_that_hangs_is_ended_and_others_stay(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load("accelerator")
    known = {"parts": {"facts": {"rows": [{"fact": "x", "value": 1.0}], "end": "done", "seconds": 1.0}}}
    (tmp_path / "results.json").write_text(json.dumps(known))
    (tmp_path / "accelerator.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(runner, "HERE", tmp_path)
    monkeypatch.setattr(runner, "GRACE_SECONDS", 1.0)
    assert runner.run_part("speed", tmp_path, 2.0, rehearse=True).startswith("ended after its 2 s")
    found = results(tmp_path)["parts"]
    assert found["facts"] == known["parts"]["facts"]
    assert found["speed"]["end"].startswith("ended after its 2 s")


def test_a_part_counts_its_time_from_its_start(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    runner = load("accelerator")
    lines = ["import json, os, sys, time", "end = float(sys.argv[sys.argv.index('--end') + 1])"]
    lines.append("print(json.dumps([end - time.monotonic(), os.environ['GLOO_SOCKET_IFNAME']]))")
    (tmp_path / "accelerator.py").write_text("\n".join(lines))
    monkeypatch.setattr(runner, "HERE", tmp_path)
    begin = time.monotonic()
    assert runner.run_part("facts", tmp_path, 60.0, rehearse=True) == "done"
    took = time.monotonic() - begin
    left, interface = json.loads((tmp_path / "facts.log").read_text())
    assert 55.0 - took <= left < 55.0
    assert interface == "lo"


def test_rows_for_which_there_is_no_time_are_left_out(parts: Any) -> None:
    rows = speeds(parts, left=44.0)
    assert len(rows) > 10
    assert all(row["left_out"] == "no time" for row in rows)


def test_rows_of_offload_run_one_by_one(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, part = load("accelerator"), load("accelerator_offload")
    monkeypatch.setattr(part, "_in_a_process", lambda _, row: {"tflops": 100.0 if row.where == "device" else 80.0})
    for rows in ((1,), (6, 2), (2,)):
        findings = runner.Findings(tmp_path, "offload")
        findings.begin(rows)
        part.offload(SimpleNamespace(rows=rows, left=500.0, rehearse=False, out=tmp_path), findings.add)
    found = results(tmp_path)["parts"]["offload"]["rows"]
    assert [(row["row"], row["share"]) for row in found] == [(1, 1.0), (2, 0.8), (6, 0.8)]
    with pytest.raises(SystemExit, match="no row 9: its rows are 1 to 8"):
        part.offload(SimpleNamespace(rows=(9,)), findings.add)
    assert sum(row.seconds for row in part.ROWS[:6]) <= 9 * 60 - runner.GRACE_SECONDS - runner.RESERVE_SECONDS
    done = rehearse(tmp_path, "--part", "speed", "--rows", "1")
    assert done.returncode == 2
    assert "--rows needs --part offload" in done.stderr


@pytest.mark.parametrize(
    ("device", "base", "largest"), [(79, "3.2 B", "9.6 B"), (139, "5.4 B", "12.6 B"), (47, "1.3 B", "5.4 B")]
)
def test_models_are_those_that_the_device_holds(
    device: int, base: str, largest: str, load: Callable[[str], Any]
) -> None:
    part = load("accelerator_offload")
    gib = 1 << 30
    fitted = [part.fitted(row, device * gib, 118 * gib) for row in part.ROWS]
    assert {row.model for row in fitted[:5]} == {base}
    assert fitted[6].model == largest
    assert part.host_bytes(fitted[6], part.SHAPES[largest].parameters) < 110 * gib
    assert part.fitted(part.ROWS[1], device * gib, 10 * gib) is None


def test_a_system_that_raises_ends_its_row_alone(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Any]] = []
    gone: list[bool] = []

    def fails(*_: object) -> None:
        model = torch.nn.Linear(2, 2)
        held.append(weakref.ref(model))
        raise AssertionError("a rival's own assertion\nof two lines")

    monkeypatch.setattr(parts, "systems", lambda: {"a rival": fails})
    monkeypatch.setattr(parts, "TURNS", ("a rival",))
    monkeypatch.setattr(parts, "_timed", lambda _setting, make, *_: make())
    monkeypatch.setattr(parts, "forget", lambda: gone.append(held[-1]() is None))
    rows = speeds(parts)
    assert [row["failed"] for row in rows] == ["AssertionError a rival's own assertion"] * 4
    assert gone == [True] * 4
    assert [row["tokens"] for row in rows] == ["1 x 512, in turns", "8 x 2048", "1 x 512", "8 x 2048"]


def test_systems_that_keep_memory_run_last(parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "systems", lambda: {"first": 1, parts.KEEP_MEMORY[0]: 2, "last": 3})
    monkeypatch.setattr(parts, "attempted", lambda work: work())
    monkeypatch.setattr(parts, "_in_turns", lambda *_: None)
    monkeypatch.setattr(parts, "_timed", lambda _setting, make, *_: {"ms": float(make)})
    rows = speeds(parts)
    assert [row["system"] for row in rows] == ["first", "last"] * 3 + [parts.KEEP_MEMORY[0]] * 3
    assert [row["x_first"] for row in rows] == [1.0, 3.0] * 3 + [2.0] * 3


def test_idle_time_counts_overlapping_kernels_once(parts: Any) -> None:
    assert parts.idle_share([(0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (6.0, 8.0)]) == 3 / 8


@pytest.mark.parametrize("stage", range(4))
def test_the_plan_is_of_what_is_trained(stage: int, parts: Any) -> None:
    config = load_config(parts.planned_config(stage, 4), world_size=1)
    assert config.precision.resolve(torch.float32) == Precision(torch.bfloat16).resolve(torch.float32)
    assert config.bucket_numel == parts.BUCKET_NUMEL
    assert replace(config.policy, max_live_numel=None) == Policy.stage(
        stage
    )  # fewer parameters than the config's limit


def test_a_rehearsals_figures_are_refused(load: Callable[[str], Any]) -> None:
    part = {"rows": [], "end": "done", "seconds": 61.2, "about": {"device": "D", "torch": "2", "rehearsal": True}}
    with pytest.raises(ValueError, match="of a rehearsal"):
        load("accelerator_page").filled("<!-- figures: begin -->\n<!-- figures: end -->\n", {"parts": {"speed": part}})


def test_the_page_of_results_shows_the_figures_that_are_kept(load: Callable[[str], Any]) -> None:
    results = json.loads((ROOT / "benchmarks/results/accelerator.json").read_text(encoding="utf-8"))
    text = (ROOT / "benchmarks/results/accelerator.md").read_text(encoding="utf-8")
    assert load("accelerator_page").filled(text, results) == text


def test_results_are_counted_and_what_is_wrong_is_named(load: Callable[[str], Any]) -> None:
    found = {
        "forced: stage 1": "equal",
        "forced: stage 2": "equal",
        "forced: stage 3": "close: differs by 1.0e-04",
        "forced: stage 3, on disk": "WRONG: differs by 2.0e+00",
        "twice": "equal",
    }
    rows = [{"what": what, "result": result} for what, result in found.items()]
    assert load("accelerator_page").counted(rows) == [
        {"check": "forced", "result": "2 equal; 1 close; 1 WRONG (stage 3, on disk)", "largest difference": 2.0},
        {"check": "twice", "result": "equal", "largest difference": None},
    ]
