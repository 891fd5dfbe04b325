"""Owns the cases of the other scripts in this folder, from CASES.json to OUT.json. Otherwise they are stock scripts."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState


def run_all(run: Callable[[dict[str, Any], Path], dict[str, Any]]) -> None:
    """Run the cases one after another, as separate programs would. Rank 0 writes the results."""
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results = []
    for case in cases:
        folder = out.parent / case["name"]
        results.append(run(case, folder))
        AcceleratorState._reset_state(reset_partial_state=False)
        if case.get("throw_away", True) and int(os.environ.get("RANK", "0")) == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if int(os.environ.get("RANK", "0")) == 0:
        out.write_text(json.dumps(results))
