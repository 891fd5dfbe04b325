"""Ranks that a launcher started always join, leave at the end, and report one mistake only once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from folders import ROOT
from insides import meeting_point
from ports import free_port
from twin import build

import zeroshard
from zeroshard import UsageError
from zeroshard.errors.uncaught import ExceptHook, report_uncaught, restore
from zeroshard.launch import NOTICE_VARIABLE, Launch, first_host, join_ranks, read_launch, trap_of_restarts
from zeroshard.testing import run_ranks

CPU = torch.device("cpu")


# ---------------------------------------------------------------------- joining


SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "12"}
STEP = {**SLURM, "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "n[03-04]"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "7"}
TASK = {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n04"}


@pytest.mark.quick(13)
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "0"}, None),
        ({"WORLD_SIZE": "1", **SLURM}, None),  # the nearest launcher counts
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "²", "SLURM_NODELIST": "[,"}, None),
        (TORCHRUN, Launch("torchrun", 3, 4, 1, "a", 7)),
        (STEP, Launch("Slurm", 1, 2, 0, "n03", 15012)),
        ({**STEP, **TASK}, Launch("Slurm", 1, 2, 1, "n04", 15012)),  # as one task of two in a job of four
        ({**SLURM, **MPI}, Launch("Open MPI", 1, 2, 1, "127.0.0.1", 15012)),  # mpirun inside of a batch script
        ({**SLURM, **PMI, "MASTER_ADDR": "a"}, Launch("PMI", 1, 2, 0, "a", 15012)),
        ({**STEP, "PMI_RANK": "1", "PMI_SIZE": "2"}, Launch("Slurm", 1, 2, 0, "n03", 15012)),  # srun --mpi=pmi2
        (MPI, Launch("Open MPI", 1, 2, 1, "127.0.0.1", 29500)),
        (PMI, Launch("PMI", 1, 2, 0, None, 29500)),
    ],
)
def test_what_launchers_say_is_read(environment: dict[str, str], expected: Launch | None) -> None:
    assert read_launch(environment) == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 is not below"),
        ({**SLURM, "SLURM_JOB_NODELIST": "n"}, "start it with srun"),
        ({"RANK": "1"}, "RANK=1 implies several ranks, but WORLD_SIZE is not set"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1 is not below WORLD_SIZE=1"),
        ({"SLURM_PROCID": "1"}, "SLURM_PROCID=1 implies .* SLURM_NTASKS is not set"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK=1 implies .* OMPI_COMM_WORLD_SIZE is not set"),
        ({"PMI_RANK": "1"}, "PMI_RANK=1 implies .* PMI_SIZE is not set"),
        ({"WORLD_SIZE": "²"}, "WORLD_SIZE='²' is not an integer"),
        ({"WORLD_SIZE": "9" * 5000}, "is not an integer"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "70000"}, "MASTER_PORT=70000 is invalid"),
        ({**STEP, "SLURM_STEP_NODELIST": "[,"}, r"'\[,' names none"),
    ],
)
@pytest.mark.quick(13)
def test_what_makes_no_sense_is_refused(environment: dict[str, str], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        read_launch(environment)


FIRST_HOSTS = {
    "gpu1": "gpu1", "gpu1,gpu2": "gpu1", "gpu[003-005,9]-ib,x": "gpu003-ib", "r[1-2]n[07,9]": "r1n07", "[4-5]": "4",
    **dict.fromkeys(["", ",a", "[", "[,", "a[", "²/"]),
}  # fmt: skip
"""The first machine of a list of Slurm's; None: it is refused."""
MEETING_POINTS = {
    "node1": "tcp://node1:7", "::1": "tcp://[::1]:7", "[fe80::1]": "tcp://[fe80::1]:7", "10.0.0.1": "tcp://10.0.0.1:7",
    **dict.fromkeys(["/", "a b", "http://a", "host:29500", "[", "a?rank=3"]),
}  # fmt: skip
"""Where ranks meet if an address is rank 0's; None: it is refused."""


def test_the_machine_of_rank_0_is_read_or_refused() -> None:
    for nodes, first in FIRST_HOSTS.items():
        if first is None:
            with pytest.raises(UsageError, match="names none: set MASTER_ADDR"):
                first_host(nodes)
        else:
            assert first_host(nodes) == first
    for address, point in MEETING_POINTS.items():
        launch = Launch("Slurm", 0, 2, None, address, 7)
        if point is None:
            with pytest.raises(UsageError, match="is invalid: set it to the machine of rank 0"):
                meeting_point(launch)
        else:
            assert meeting_point(launch) == point


def test_a_store_that_outlives_its_ranks_is_told_of() -> None:
    shared = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in (trap_of_restarts(shared) or "")
    assert trap_of_restarts({**shared, "TORCHELASTIC_MAX_RESTARTS": "0"}) is None
    assert trap_of_restarts({**shared, "TORCHELASTIC_USE_AGENT_STORE": "False"}) is None
    assert trap_of_restarts({}) is None


@pytest.mark.parametrize("launcher", ["torchrun", "Slurm", "Open MPI", "Slurm, IPv6", "Open MPI, IPv6"])
def test_a_plain_loop_joins_its_ranks(launcher: str) -> None:
    if "IPv6" in launcher and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    port = str(free_port())

    def body(rank: int) -> int:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        one, two = str(rank), "2"
        names = {
            "torchrun": {"RANK": one, "WORLD_SIZE": two, "MASTER_ADDR": "127.0.0.1"},
            "Slurm": {"SLURM_PROCID": one, "SLURM_NTASKS": two, "SLURM_JOB_NODELIST": "localhost"},
            "Open MPI": {
                "OMPI_COMM_WORLD_RANK": one,
                "OMPI_COMM_WORLD_SIZE": two,
                "OMPI_COMM_WORLD_LOCAL_SIZE": two,
            },
        }
        if "IPv6" in launcher:
            os.environ["MASTER_ADDR"] = "::1"
        os.environ.update(names[launcher.partition(",")[0]], MASTER_PORT=port)
        build(1, seed=rank)
        return dist.get_world_size()

    assert run_ranks(body, 2, initialise=False) == [2, 2]


def test_ranks_that_cannot_be_joined_never_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="set MASTER_ADDR"):
        build(2)
    with pytest.raises(UsageError, match="would train by itself"):
        join_ranks(CPU, required=False)
    assert not dist.is_initialized()


NOWHERE = "no-such-machine.invalid"
"""No name below `invalid` ever has an address (RFC 2606)."""


NO_ADDRESS = f"(?s)timed out. '{NOWHERE}', the machine of rank 0, has no address.*set MASTER_ADDR"


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": NOWHERE, "MASTER_PORT": "29500"}, NO_ADDRESS),
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": f"{NOWHERE},other"},
            NO_ADDRESS,
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
            r"timed out\. Check that rank 0 runs there",
        ),
    ],
    ids=["MASTER_ADDR", "a list of machines", "an address"],
)
@pytest.mark.quick(3)
def test_a_machine_without_an_address_is_named_before_the_wait_and_in_the_error(
    environment: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wait(*_: object, **__: object) -> None:
        assert ("has no address on" in caplog.text) == (told is NO_ADDRESS)
        raise dist.DistStoreError("The client socket has timed out.")

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", wait)
    with pytest.raises(UsageError, match=told):
        join_ranks(CPU)
    assert len(caplog.records) == (told is NO_ADDRESS)


@pytest.mark.full
@pytest.mark.parametrize(
    ("rank", "advice"), [(0, "all 2 ranks were started"), (1, "rank 0 runs there")], ids=["rank 0", "rank 1"]
)
def test_a_rank_that_waits_for_the_others_to_join_is_named(
    rank: int, advice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other rank is never started."""
    port = free_port()
    named = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, NOTICE_VARIABLE: 1}
    for name, value in named.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UsageError, match=advice):
        join_ranks(CPU, timeout=timedelta(seconds=3))
    assert f"rank {rank} of 2 has waited 1 s at 127.0.0.1:{port} for the other ranks to join" in caplog.text


def test_one_process_is_joined_with_itself_where_that_is_required() -> None:
    def body(rank: int) -> int:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        join_ranks(CPU)
        assert not dist.is_initialized()
        join_ranks(CPU, required=True)
        return dist.get_world_size()

    assert run_ranks(body, 1, initialise=False) == [1]


def test_the_device_is_one_that_this_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm and containers show each process its own device alone: local rank 3 is device 0 there."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    from zeroshard.launch import local_device

    assert local_device() == torch.device("cuda", 0)
    assert chosen == [0]


# ---------------------------------------------------------------------- leaving

SCRIPT = """
import atexit, os, signal, sys
import torch, torch.distributed as dist
import zeroshard, zeroshard.launch

torch.set_num_threads(1)
os.environ.update(WORLD_SIZE="3", MASTER_ADDR="127.0.0.1")
children = []
for rank in range(3):
    pid = os.fork()
    if pid == 0:
        break
    children.append(pid)
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(children[rank], 0)[1]) for rank in (0, 2)]
    if sys.argv[1:]:
        os.kill(children[1], signal.SIGKILL)  # it stands still
    print([*codes, os.waitstatus_to_exitcode(os.waitpid(children[1], 0)[1])])
    os._exit(0)
os.environ.update(RANK=str(rank))
atexit.register(lambda: print("alive" if dist.is_initialized() else "down", flush=True))  # runs after what is registered later
model = torch.nn.Linear(4, 4)
sharded = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(2):
    model(torch.randn(2, 4)).sum().backward()
    sharded.optimizer.step()
    sharded.optimizer.zero_grad()
if sys.argv[1:]:
    zeroshard.launch._LEAVE_SECONDS = 3.0
    if rank == 1:
        os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    dist.all_reduce(torch.ones(1), async_op=True)  # never ends
"""


@pytest.mark.full
@pytest.mark.parametrize("gone", [None, "SIGKILL", "SIGSTOP"])
def test_a_script_that_just_ends_leaves_its_ranks(gone: str | None, tmp_path: Path) -> None:
    """It does not wait for rank 1, which dies, or stands still with its connections open, while the others end."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", MASTER_PORT=str(free_port()))
    command = [sys.executable, str(path), *([gone] if gone else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    codes = json.loads(done.stdout.splitlines()[-1])
    if gone is None:
        assert codes == [0, 0, 0], done.stderr
        assert done.stdout.count("down") == 3
    else:  # the collective that cannot end is given up: they may fail, and they do not stay
        assert codes[2] == -signal.SIGKILL and set(codes[:2]) <= {0, 1}, done.stdout + done.stderr


# ---------------------------------------------------------------------- errors


@pytest.fixture
def rank_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Makes this process a rank that torchrun started: the files lie as its agent lays them out."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def become(rank: int) -> Path:
        folder = tmp_path / "attempt_0" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
        monkeypatch.setenv("RANK", str(rank))
        return folder / "error.json"

    return become


def end_by(error: BaseException) -> None:
    """What Python does with an uncaught exception."""
    try:
        raise error
    except BaseException as raised:
        sys.excepthook(type(raised), raised, raised.__traceback__)


def test_a_mistake_is_told_once_and_in_torchruns_report(
    rank_files: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    failures = {}
    for rank in (1, 0):
        file = rank_files(rank)
        error = UsageError("the model has no parameters.")
        error.__cause__ = TypeError("of this sort")
        end_by(error)
        failures[rank] = ProcessFailure(rank, 100 + rank, 1, str(file))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[rank 1] UsageError: the model has no parameters."
    assert len(lines) == 4, lines  # nothing of rank 0
    assert "test_launch.py" in lines[1] and "raise error" in lines[1]
    assert "TypeError: of this sort" in lines[2]
    report = str(ChildFailedError("train.py", failures))
    root = report[report.index("Root Cause") :]
    assert "rank      : 1" in root and "UsageError: the model has no parameters." in root
    assert "as rank 1: UsageError" in report[: report.index("Root Cause")]
    for rank in (0, 1):
        rank_files(rank).unlink()
    for rank in (0, 1):  # another sentence of another rank is one line
        rank_files(rank)
        end_by(UsageError(f"ranks differ\n  here is rank {rank}"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "[rank 1] UsageError: ranks differ here is rank 1"
    assert len([line for line in lines if "rank 1" in line]) == 1


def test_the_hook_is_polite(rank_files: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    before = sys.excepthook
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    UsageError("a process that torchrun did not start")
    assert sys.excepthook is before
    file = rank_files(0)
    file.write_text("the script's own record")
    report_uncaught(zeroshard.ZeroshardError)
    report_uncaught(zeroshard.ZeroshardError)
    assert isinstance(sys.excepthook, ExceptHook) and sys.excepthook.before is before
    end_by(KeyError("not ours"))
    assert isinstance(seen[0], KeyError)
    end_by(UsageError("ours"))
    assert len(seen) == 1 and file.read_text() == "the script's own record"
    restore()
    assert sys.excepthook is before


def test_under_torchrun_the_sentence_comes_first(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch, zeroshard\nzeroshard.shard(torch.nn.ReLU(), None)\n")
    command = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2", str(script)]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert "UsageError: the model (ReLU) has no parameters" in lines[0], done.stderr
    assert f"at {script}, line 2: zeroshard.shard(torch.nn.ReLU(), None)" in lines[1]
    agents = next(number for number, line in enumerate(lines) if "torch/distributed/elastic" in line)
    assert agents <= 3, done.stderr
    root = done.stderr[done.stderr.index("Root Cause") :]
    assert "UsageError: the model (ReLU) has no parameters" in root


def test_a_process_of_multiprocessing_that_joined_no_ranks_is_warned() -> None:
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()

    def train_alone() -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build(2)
        answers.put([str(one.message) for one in caught])

    process = fork.Process(target=train_alone)
    process.start()
    messages = answers.get()
    process.join()
    assert any("so it trains by itself, as rank 0 of 1" in message for message in messages)
