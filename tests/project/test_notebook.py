"""The notebook runs from its first cell to its last, and its stored outputs are still current."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "zero_stage_by_stage.ipynb"


def printed(notebook: Any) -> list[str]:
    """What each cell wrote to stdout."""
    streams = [[out for out in cell.get("outputs", []) if out["output_type"] == "stream"] for cell in notebook["cells"]]
    return ["".join("".join(one["text"]) for one in outputs if one["name"] == "stdout") for outputs in streams]


def pictures(notebook: Any) -> int:
    outputs = [out for cell in notebook["cells"] for out in cell.get("outputs", [])]
    return sum("image/png" in out.get("data", {}) for out in outputs)


@pytest.mark.full
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(NOTEBOOK.parent.parent), os.environ.get("PYTHONPATH", "")]))
    kept = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.from_dict(kept)
    nbclient.NotebookClient(run, timeout=300, kernel_name="python3").execute()
    said = "".join(printed(run))
    assert "to the last bit: [True, True, True, True]" in said
    assert "stage 2: parameters take 10.5 MiB at least, 10.5 MiB at most" in said
    assert "stage 3: parameters take 5.3 MiB at least, 9.0 MiB at most" in said, "two blocks are whole, and the root"
    assert pictures(run) == pictures(kept) == 2
    sent, sent_before = ([one for one in printed(notebook) if "sent by a rank" in one] for notebook in (run, kept))
    assert sent == sent_before, "what is kept in it is of another version: make notebook"


def test_what_is_kept_of_it_reads_on_the_web() -> None:
    assert NOTEBOOK.stat().st_size < 300_000
    kept = json.loads(NOTEBOOK.read_text())
    assert pictures(kept) == 2
    assert "to the last bit: [True, True, True, True]" in "".join(printed(kept))
    assert not [out for cell in kept["cells"] for out in cell.get("outputs", []) if out["output_type"] == "error"]
