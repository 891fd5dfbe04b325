"""Owns the setting of all tests: variables of the environment, one thread in the parent, so that forks are safe, the order of
tests, and the accelerator."""

import importlib
import inspect
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "support"))
from folders import IMPORTED

sys.path[:0] = map(str, IMPORTED)
OF_THE_CALLER = re.compile(
    r"ZEROSHARD_(?!EMULATED_DTYPES)|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_|SLURM_|OMPI_|PMI_|TORCHELASTIC_|ACCELERATE_"
    r"|FORCE_COLOR|NO_COLOR|PY_COLORS|GITHUB_ACTIONS|COLUMNS|LINES"
)
"""Variables that would change what the tests see: settings, the job in which they run, and the terminal."""
for name in filter(OF_THE_CALLER.match, [*os.environ]):
    del os.environ[name]
torch.set_num_threads(1)
# In builds of torch for accelerators, forks cannot run a backward if a plan, under FakeTensorMode, ran this process's first.
torch.ones(1, requires_grad=True).sum().backward()

from forks import prepare  # noqa: E402
from ranks import on_ranks, run_ranks  # noqa: E402
from sampling import sample  # noqa: E402
from simgpu import server  # noqa: E402
from simgpu.device import MODES  # noqa: E402

SERVED = (
    ("test_accelerate_contract", "test_trainer_contract", "test_divided_contract", "test_preference_contract"),
    ("test_simgpu", "test_simgpu_budgets", "test_simgpu_faults", "test_simgpu_host", "test_simgpu_plans",
     "test_accelerator_collectives", "test_accelerator_storage"),
)  # fmt: skip
"""Files whose tests share a server that takes seconds to start: for trainers, and for the simulated accelerator. One process begins
with each group, so that few processes start its server."""
LONG = (
    ("test_lightning", "test_hosts", "test_elastic", "test_zero_trainer"),
    ("test_compile", "test_compile_strangers", "test_plan", "test_plan_cli"),
)  # fmt: skip
"""Files with tests of many seconds. Other processes begin with them, so that none starts such a test at the end."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="the quick set and the rest: not every combination, see --rest")
    rest = "only the rest: of each test every two values of two parameters together, of one marked `every` all combinations"
    parser.addoption("--rest", action="store_true", help=rest)
    long = "how many times as many random sequences the tests `at_length` try as they do in --rest"
    parser.addoption("--times", type=int, default=1, metavar="N", help=long)
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


@pytest.fixture(params=["shared memory", "gloo"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Set the transport between ranks, and return its name."""
    monkeypatch.setenv("ZEROSHARD_SHARED_MEMORY", "0" if request.param == "gloo" else "1")
    return str(request.param)


@pytest.fixture
def rank() -> None:
    """The rank in a test marked `ranks`, which gets it in place of this None."""


@pytest.fixture
def times(request: pytest.FixtureRequest) -> int:
    """The factor by which a test of random sequences is longer than in CI."""
    return int(request.config.getoption("--times"))


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Remove the state that libraries keep after a test. Otherwise later tests, and the ranks that they fork, would find it."""
    yield
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    if deepspeed := sys.modules.get("transformers.integrations.deepspeed"):
        deepspeed.unset_hf_deepspeed_config()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the quick set, or the tests that the options ask for."""
    quick, rest = sample(items)
    runs_quick, runs_rest = not config.getoption("--rest"), config.getoption("--rest") or config.getoption("--all")
    chosen = {id(item) for item in [*quick * runs_quick, *rest * runs_rest]}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = in_order([item for item in items if id(item) in chosen], processes)
    if config.getoption("--shuffle") is not None:
        random.Random(config.getoption("--shuffle")).shuffle(items)


def in_order(items: list[pytest.Item], processes: int) -> list[pytest.Item]:
    """Return the tests in an order such that each process, if all get equal parts of it, begins with a group of files."""
    groups = [*SERVED, *LONG]
    place = {file: (number, index) for number, group in enumerate(groups) for index, file in enumerate(group)}
    first: list[list[pytest.Item]] = [[] for _ in range(processes)]
    for number in range(len(groups)):
        mine = [item for item in items if place.get(item.path.stem, (None, 0))[0] == number]
        first[number % processes] += sorted(mine, key=lambda item: place[item.path.stem])
    others = [item for item in items if item.path.stem not in place]
    ordered = []
    for process, beginning in enumerate(first):
        part = (len(items) - len(ordered)) // (processes - process)
        count = max(part - len(beginning), 0)
        ordered += beginning + others[:count]
        del others[:count]
    return ordered + others


def pytest_collection_finish() -> None:
    """Exclude imported objects from later garbage collections, also in forked ranks. This saves a quarter of all time."""
    prepare()


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin that prints what a run takes, and import what ranks need."""
    is_worker = hasattr(config, "workerinput")
    if not is_worker:
        config.pluginmanager.register(_Times(), "times")
    if is_worker or not config.getoption("numprocesses", None):  # this process runs tests
        importlib.import_module("torch._dynamo")  # otherwise each forked rank would, at its optimizer's first step


class _Times:
    """A plugin that prints the progress of the collection, and adds up the seconds of each test file."""

    def __init__(self) -> None:
        self._seconds = Counter[str]()
        self._collected = 0

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        processes = session.config.getoption("numprocesses", None)
        self._write = session.config.pluginmanager.get_plugin("terminalreporter").write_line
        where = f" in {processes} processes" if processes else ""
        self._write(f"collecting tests{where}: up to a minute, longer in a new clone")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self._collected += 1
        self._write(f"process {self._collected} has collected {len(ids)} tests")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.location[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("seconds of each file, all processes")
        for file, seconds in self._seconds.most_common():
            if seconds >= 1:
                terminalreporter.write_line(f"{seconds:7.1f}  {file}")


def _is_pretended(item: pytest.Item) -> bool:
    """Return whether a test needs an accelerator, and this machine has only the simulated one."""
    return item.get_closest_marker("accelerator") is not None and not torch.accelerator.is_available()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on the simulated accelerator in several scheduling modes."""
    if metafunc.definition.get_closest_marker("accelerator") and not torch.accelerator.is_available():
        metafunc.fixturenames.append("schedule")
        quick = [pytest.param(mode, marks=() if mode == "all late" else pytest.mark.full) for mode in MODES]
        metafunc.parametrize("schedule", quick)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that needs the simulated accelerator in the server process, which has it, and one marked `ranks` on ranks."""
    test = pyfuncitem.obj
    is_pretended, mark = _is_pretended(pyfuncitem), pyfuncitem.get_closest_marker("ranks")
    if mark is None and not is_pretended:
        return None
    options = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    if is_pretended:
        server.run(server.Request(test.__module__, test.__name__, options, str(pyfuncitem.callspec.params["schedule"])))
    elif mark is not None:
        _run_on_ranks(test, options, *mark.args, **mark.kwargs)
    return True


def _run_on_ranks(
    test: Callable[..., None], options: dict[str, Any], count: int | str, *, fresh: bool = False, **limits: float
) -> None:
    """Run a test on `count` ranks, each with its `rank`. If `count` is a name, the parameter of that name has the number.

    Args:
        test: a module's function; the ranks get its name, and what is patched in its module stays in theirs.
        options: its other arguments, which are sent by cloudpickle.
        fresh: whether the ranks are new processes, forked from this one (`run_ranks`).
        limits: seconds, passed on to `on_ranks` or `run_ranks`.
    """
    del options["rank"]
    world_size = options[count] if isinstance(count, str) else count
    (run_ranks if fresh else on_ranks)(partial(test, **options), world_size, **limits)
