"""Owns the folders of the tests, and of what they read and start."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
RECORDED = TESTS / "support" / "recorded"
CONTRACTS = TESTS / "integrations" / "contracts"
HOSTS = TESTS / "support" / "hosts"
ROOMS = sorted({path.parent for path in TESTS.glob("*/test_*.py")})
IMPORTED = [TESTS / "support", HOSTS, RECORDED, *ROOMS]
"""The folders from which tests, and the processes that they start, import helpers and test files by name."""
PYTHONPATH = os.pathsep.join(map(str, [*IMPORTED, ROOT]))
"""The same for a process's environment, with the package's folder."""
