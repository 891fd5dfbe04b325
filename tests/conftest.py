"""Owns what every test shares: one thread in the parent, so that forks are safe."""

import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # optimizers import it at their first step: once here, not once in each forked rank

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)


HEAVY = ("test_export", "test_families", "test_pretrained", "test_sharded_init", "test_trainers")
"""They import transformers: every rank that is forked afterwards is ten times as large, and starts more slowly."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Accelerator tests run where there is one; elsewhere the summary says that they did not. Heavy ones come last."""
    items.sort(key=lambda item: item.path.stem in HEAVY)
    if not torch.accelerator.is_available():
        for item in items:
            if item.get_closest_marker("accelerator"):
                item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))
