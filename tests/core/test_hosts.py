"""Two hosts with a network link: the same bits and bytes as on one, checkpoints, and errors that name lost ranks on both hosts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from folders import HOSTS
from two_hosts import NotPermitted, Outcome, Program, TwoHosts

from zeroshard import UsageError
from zeroshard.tools.doctor import doctor
from zeroshard.tools.links import problem_of

pytestmark = pytest.mark.full

JOB = HOSTS / "job.py"
SECONDS = 240.0
"""For whatever must come to an end, on a machine that does other things too."""


LEVELS = pytest.mark.parametrize("within", ["", "host"], ids=["one level", "two levels"])


def named(message: str) -> set[int]:
    """The ranks that a message speaks of: `rank 1`, `ranks 0, 2-3`."""
    runs = [
        run for words in re.findall(r"ranks? (\d[\d, -]*)", message) for run in re.findall(r"(\d+)(?:-(\d+))?", words)
    ]
    return {rank for low, high in runs for rank in range(int(low), int(high or low) + 1)}


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    try:
        made = TwoHosts(delay_us=200, mbit=1000)
    except NotPermitted as error:
        pytest.skip(str(error))
    with made:
        yield made


def wait_for(folder: Path, pattern: str, programs: list[Program]) -> None:
    """Until there is such a file."""
    for _ in range(5000):
        if any(folder.glob(pattern)):
            return
        time.sleep(0.05)
    pytest.fail("\n".join([f"{pattern} never came", *(one.log for one in programs)]))


def passed(outcomes: list[Outcome]) -> None:
    assert [one.status for one in outcomes] == [0, 0], "\n".join(one.log for one in outcomes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_policies_are_bit_equal(ranks: int, hosts: TwoHosts, tmp_path: Path) -> None:
    before = hosts.crossed()
    passed(hosts.torchrun(ranks, JOB, "parity", str(tmp_path), timeout=SECONDS))
    assert all(now > then for now, then in zip(hosts.crossed(), before, strict=True))
    told = [torch.load(tmp_path / f"parity.{rank}") for rank in range(2 * ranks)]
    assert all(one["sent"]["reduce_scatter across"] for one in told)
    if ranks > 1:  # else everything crosses in any case
        across = sum(n for one in told for kind, n in one["sent"].items() if kind.endswith("across"))
        assert across < sum(sum(one["flat"].values()) for one in told) / 2


def test_checkpoints(hosts: TwoHosts, tmp_path: Path) -> None:
    passed(hosts.torchrun(2, JOB, "checkpoint", str(tmp_path), timeout=SECONDS))


@pytest.mark.parametrize("loss", ["a host", "the link", "the link, which is back too late"])
@LEVELS
def test_a_loss_ends_in_errors_that_name_ranks_on_the_other_host(
    within: str, loss: str, hosts: TwoHosts, tmp_path: Path
) -> None:
    """Also where the store is on the other side, and where the link is back when one side has given up."""
    timeout = "1000" if loss == "a host" else "10"
    programs = hosts.start_torchrun(2, JOB, "train", str(tmp_path), timeout, environment={"WITHIN": within})
    programs[0].until("training", SECONDS)
    if loss == "a host":
        hosts.kill(1)
        programs = programs[:1]
    else:
        hosts.drop()
    if loss == "the link, which is back too late":
        wait_for(tmp_path, "failed.*", programs)
        hosts.join()
    for program in programs:
        assert program.wait(SECONDS).status != 0
    told = {int(path.name.removeprefix("failed.")): path.read_text() for path in tmp_path.glob("failed.*")}
    assert {rank // 2 for rank in told} == {*range(len(programs))}, told
    named_others = [bool(named(text) & ({2, 3} if rank < 2 else {0, 1})) for rank, text in told.items()]
    assert any(named_others) if loss == "a host" else all(named_others), told


@LEVELS
def test_a_link_that_is_back_in_time_changes_nothing(within: str, hosts: TwoHosts, tmp_path: Path) -> None:
    told = {"WITHIN": within, "ZEROSHARD_NOTICE_SECONDS": "1"}
    programs = hosts.start_torchrun(2 if within else 1, JOB, "twice", str(tmp_path), environment=told)
    programs[0].until("training", SECONDS)
    hosts.drop()
    time.sleep(3)
    hosts.join()
    outcomes = [program.wait(SECONDS) for program in programs]
    passed(outcomes)
    assert any(re.search("ha(s|ve) waited", one.log) for one in outcomes), "nobody noticed"


def test_the_doctor_measures_the_links(hosts: TwoHosts) -> None:
    outcomes = hosts.torchrun(
        2, "-m", "zeroshard", "doctor", "--net", "--size", "1MiB", timeout=SECONDS, environment={"COLUMNS": "150"}
    )
    passed(outcomes)
    told = outcomes[0].log
    assert "hosta cannot resolve its own name" in told
    assert "hosta (its name has no address): ranks 0, 1" in told
    assert "hostb (its name has no address): ranks 2, 3" in told
    assert told.count("inside a host") == 2
    assert told.count("across hosts") == 1
    assert "ranks" not in outcomes[1].log


def test_names_that_others_cannot_use_are_told() -> None:
    assert problem_of("a", "10.0.0.1") is None
    assert "the loopback" in (problem_of("a", "127.0.1.1") or "")
    assert "cannot resolve" in (problem_of("a", None) or "")


def test_the_doctor_wants_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="no launcher started any"):
        doctor(net=True)
