"""Owns what every test shares: one thread in the parent, so that forks are safe, which tests run when, and on which accelerator."""

import inspect
import subprocess
import sys
import time
from itertools import chain, groupby
from pathlib import Path

import pytest
import torch
import torch._dynamo  # optimizers import it at their first step: once here, not once in each forked rank

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

from sampling import mark_what_is_not_quick  # noqa: E402
from simgpu import server  # noqa: E402
from simgpu.build import why_not  # noqa: E402
from simgpu.device import MODES, QUICK_MODES  # noqa: E402

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

_BEGIN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every combination, not only the quick set")
    parser.addoption("--rest", action="store_true", help="only what the quick set leaves out")
    parser.addoption("--minutes", type=float, help="start no test after so many; each commit begins with other files")


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
    if config.getoption("--minutes"):
        items[:] = _turned(items)
    reason = why_not()
    if reason is not None:
        for item in items:
            if _is_pretended(item) or item.path.stem.startswith("test_simgpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


def _turned(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files in their order, from one on that the commit picks: where time is short, every file has its turn."""
    files = [list(group) for _, group in groupby(items, key=lambda item: item.path)]
    command, here = ["git", "rev-parse", "HEAD"], Path(__file__).parent
    head = subprocess.run(
        command, cwd=here, check=False, capture_output=True, text=True
    )  # empty: a copy without history
    first = int(head.stdout.strip() or "0", 16) % max(len(files), 1)
    return list(chain.from_iterable(files[first:] + files[:first]))


def pytest_sessionstart(session: pytest.Session) -> None:
    """The time of `--minutes` begins."""
    session.config.stash[_BEGIN] = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """When the time of `--minutes` is over, what is left is skipped, and counted as that."""
    minutes = item.config.getoption("--minutes")
    if minutes and time.monotonic() - item.config.stash[_BEGIN] > 60 * minutes:
        pytest.skip(f"not run: the {minutes:g} minutes given were over")


def _is_pretended(item: pytest.Item) -> bool:
    """It needs an accelerator, and there is none but the pretended one."""
    return item.get_closest_marker("accelerator") is not None and not torch.accelerator.is_available()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """On the pretended accelerator a test runs in several scheduling modes."""
    if metafunc.definition.get_closest_marker("accelerator") and not torch.accelerator.is_available():
        metafunc.fixturenames.append("schedule")
        quick = [pytest.param(mode, marks=() if mode in QUICK_MODES else pytest.mark.full) for mode in MODES]
        metafunc.parametrize("schedule", quick)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that needs an accelerator runs where the pretended one is: in another process."""
    if not _is_pretended(pyfuncitem):
        return None
    options = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    server.run(
        server.Request(
            pyfuncitem.obj.__module__, pyfuncitem.obj.__name__, options, str(pyfuncitem.callspec.params["schedule"])
        )
    )
    return True
