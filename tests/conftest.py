"""Owns what every test shares: one thread in the parent, so that forks are safe, and which tests run when."""

import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # optimizers import it at their first step: once here, not once in each forked rank

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

from sampling import mark_what_is_not_quick  # noqa: E402

HEAVY = (
    "test_export",
    "test_families",
    "test_from_pretrained",
    "test_lightning",
    "test_pretrained",
    "test_sharded_init",
    "test_trainers",
    "test_zero_trainer",
)
"""They import transformers: every rank that is forked afterwards is ten times as large, and starts more slowly."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every combination, not only the quick set")
    parser.addoption("--rest", action="store_true", help="only what the quick set leaves out")


@pytest.fixture(params=["shared memory", "gloo"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the ranks talk."""
    monkeypatch.setenv("ZEROSHARD_SHARED_MEMORY", "0" if request.param == "gloo" else "1")
    return str(request.param)


@pytest.fixture
def steps(request: pytest.FixtureRequest) -> int:
    """How long trainings last that are compared bit by bit: shorter in the quick set."""
    return 20 if request.config.getoption("--all") or request.config.getoption("--rest") else 6


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The quick set, unless asked for more. Accelerator tests run where there is one. Heavy files come last."""
    items.sort(key=lambda item: item.path.stem in HEAVY)
    mark_what_is_not_quick(items)
    if not config.getoption("--all"):
        rest = config.getoption("--rest")
        left_out = [item for item in items if bool(item.get_closest_marker("full")) != rest]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if bool(item.get_closest_marker("full")) == rest]
    if not torch.accelerator.is_available():
        for item in items:
            if item.get_closest_marker("accelerator"):
                item.add_marker(pytest.mark.skip(reason="no accelerator on this machine"))
