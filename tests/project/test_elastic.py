"""A host dies and returns: the example continues with fewer ranks, then with more, with the same samples and losses."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from folders import HOSTS, ROOT
from two_hosts import NotPermitted, Program, TwoHosts

JOB = HOSTS / "elastic.py"
SECONDS = 240.0
BATCH, STEPS, SAVE_EVERY = 8, 30, 4
HOLDS = (10, 20)
"""Steps at which the job waits to be killed: see JOB."""


def arguments(folder: Path, *, node_local: bool = False) -> list[str]:
    config = {
        "checkpoint": {"use_node_local_storage": node_local},
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "figures"},
    }
    folder.mkdir()
    (folder / "text").write_bytes(bytes(range(256)) * 200)
    (folder / "config.json").write_text(json.dumps(config))
    return [
        str(folder), "--config", str(folder / "config.json"), "--text", str(folder / "text"), "--steps", str(STEPS),
        "--save-every", str(SAVE_EVERY), "--checkpoints", str(folder / "checkpoints"), "--sample", "1",
    ]  # fmt: skip


def taken(folder: Path) -> dict[str, dict[int, list[int]]]:
    """By life of the job and by step, the samples that its ranks took."""
    lives: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for path in folder.glob("taken.*"):
        for line in path.read_text().splitlines():
            told: dict[str, Any] = json.loads(line)
            lives[told["life"]][told["step"]] += told["samples"]
    return lives


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, the mean loss of its samples), as they were told, again and again for what was lost."""
    with (folder / "figures" / "Train_Samples_train_loss.csv").open() as file:
        return [(int(samples) // BATCH - 1, float(loss)) for samples, loss in list(csv.reader(file))[1:]]


def until(path: Path, programs: list[Program]) -> None:
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise AssertionError(f"{path.name} never came:\n" + "\n".join(one.log for one in programs))
        time.sleep(0.05)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses by step of two ranks that nobody killed, on one host."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "job"
    given = arguments(folder)
    for step in HOLDS:
        (folder / f"held.{step}").touch()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, str(JOB), *given], check=True, timeout=SECONDS, env=environment)
    (life,) = taken(folder).values()
    assert {step: sorted(samples) for step, samples in life.items()} == {
        step: samples_of(step) for step in range(STEPS)
    }
    return dict(losses(folder))


def samples_of(step: int) -> list[int]:
    return list(range(step * BATCH, (step + 1) * BATCH))


@pytest.mark.full
@pytest.mark.parametrize("node_local", [False, True], ids=["one folder", "a folder a host"])
def test_a_host_that_dies_and_comes_back_changes_nothing(
    tmp_path: Path, uninterrupted: dict[int, float], node_local: bool
) -> None:
    folder = tmp_path / "job"
    given = arguments(folder, node_local=node_local)
    own = [["--checkpoints", str(folder / f"memory of host {host}")] if node_local else [] for host in (0, 1)]
    try:
        made = TwoHosts(delay_us=200, mbit=1000)
    except NotPermitted as error:
        pytest.skip(str(error))
    with made as hosts:
        programs = [hosts.start_elastic(host, 1, JOB, *given, *own[host]) for host in (0, 1)]
        until(folder / f"held.{HOLDS[0]}", programs)
        hosts.kill(1)
        shutil.rmtree(folder / "memory of host 1", ignore_errors=True)  # as memory does
        until(folder / f"held.{HOLDS[1]}", programs)
        hosts.boot(1)
        programs[1] = hosts.start_elastic(1, 1, JOB, *given, *own[1])
        outcomes = [program.wait(SECONDS) for program in programs]
    assert [one.status for one in outcomes] == [0, 0], "\n".join(one.log for one in outcomes)

    lives = sorted(taken(folder).items(), key=lambda life: min(life[1]))
    assert [name.split()[0] for name, _ in lives] == ["2", "1", "2"]
    for _, steps in lives:
        for step, samples in steps.items():
            assert len(samples) == len(set(samples))
            assert set(samples) <= set(samples_of(step))
            assert step == HOLDS[0] or set(samples) == set(
                samples_of(step)
            )  # where a rank was killed, one took no samples
    (_, first), (_, alone), (_, last) = lives
    assert set(chain(first, alone, last)) == set(range(STEPS))
    for steps, hold in ((alone, HOLDS[0]), (last, HOLDS[1])):  # from the newest whole checkpoint on
        assert min(steps) % SAVE_EVERY == 0
        assert hold - 2 * SAVE_EVERY < min(steps) <= hold

    told = losses(folder)
    assert {step for step, _ in told} == set(range(STEPS))
    for number, (step, loss) in enumerate(told):
        if number < HOLDS[0]:
            assert loss == uninterrupted[step]
        assert loss == pytest.approx(uninterrupted[step], rel=1e-4)
