"""The search for a plan never skips the best setting. The tests compare it with a plan of every setting."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from insides import FORKS_RUN_BACKWARDS, last_that_fits
from torch import Tensor, nn

import zeroshard
from zeroshard.errors import UsageError
from zeroshard.planning.dry_run import Figures, Job
from zeroshard.planning.machine import Machine, Unseen, machines
from zeroshard.planning.planner import Plan, job_of
from zeroshard.planning.search import Choice, Search, in_processes, largest_micro_batch, micros, settings
from zeroshard.testing.gpt import GPT, GPTConfig

BASE = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
WIDTH, CONTEXT = 64, 32
PLENTY = 1 << 50


@dataclass(frozen=True)
class Model:
    """A GPT. A deep one is known by shallow ones first."""

    layers: int
    ranks: int
    per_rank: int = 4

    def of(self, layers: int) -> nn.Module:
        return GPT(GPTConfig(layers=layers, width=WIDTH, heads=2, context=CONTEXT))

    def __call__(self) -> nn.Module:
        return self.of(self.layers)


def batch(samples: int) -> tuple[Tensor, Tensor]:
    tokens = torch.zeros(samples, CONTEXT, dtype=torch.long)
    return tokens, tokens


def machine() -> Machine:
    """Fast, and without constants that would drown a small model's bytes."""
    return machines()["h100"].model_copy(
        update={"unseen": Unseen(context=0, collectives=0, workspaces=0, fragmentation=0.05)}
    )


@dataclass
class Remembered(Search):
    """Runs each dry run once, whatever the limit."""

    seen: dict[tuple[Choice, int | None], Figures] = field(default_factory=dict)
    asked: set[tuple[Choice, int | None]] = field(default_factory=set)

    def _dry_runs(self, runs: Sequence[tuple[Choice, int | None]]) -> Iterator[tuple[Choice, int | None, Plan]]:
        unknown = [run for run in runs if run not in self.seen]
        for choice, layers, plan in super()._dry_runs(unknown):
            self.seen[choice, layers] = plan.figures
        self.asked.update(runs)
        for run in runs:
            yield *run, Plan(self.job, self.seen[run])


@cache
def search_of(model: Model) -> Remembered:
    job = job_of(model, batch, model.ranks, machine(), memory=PLENTY, host_memory=PLENTY)
    return Remembered(job, BASE, model.per_rank, depth=model.layers, shallow=lambda layers: lambda: model.of(layers))


def with_memory(job: Job, memory: int, host_memory: int = PLENTY) -> Job:
    return replace(job, machine=job.machine.model_copy(update={"memory": memory, "host_memory": host_memory}))


def everything(search: Search) -> dict[Choice, Plan]:
    """Each setting's plan."""
    choices = [choice for micro in micros(search.per_rank) for wave in settings(search.job, micro) for choice in wave]
    return {choice: plan for choice, _, plan in search._dry_runs([(choice, None) for choice in choices])}


@pytest.mark.full
@pytest.mark.parametrize("model", [Model(2, 2), Model(2, 2, 16), Model(11, 2)], ids=str)
def test_the_search_finds_what_a_sweep_finds(model: Model) -> None:
    search = search_of(model)
    assert search._is_shallow == (model.layers > 10)
    plans = everything(search)
    needs = sorted({plan.needed_nbytes for plan in plans.values()})
    tried = []
    some = needs[:: 20 if search._is_shallow else 1]  # each search of a deep model takes 20 seconds
    for limit in sorted({0, needs[0] - 1, *some}):
        one = replace(search, job=with_memory(search.job, limit), asked=set())
        found = one.run()
        fitting = {choice: plan for choice, plan in plans.items() if plan.needed_nbytes <= limit}
        assert found.plan.needed_nbytes == plans[found.choice].needed_nbytes
        if fitting:
            assert found.choice in fitting, f"{found.choice} does not fit into {limit}"
            fastest = min(fitting, key=lambda choice: fitting[choice].seconds)
            assert found.plan.seconds <= fitting[fastest].seconds * 1.021, f"{found.choice}, but {fastest}, at {limit}"
            assert found.choice not in [choice for choice, _ in found.others]
            assert all(plans[choice].fits for choice, _ in found.others)
        else:
            assert found.plan.needed_nbytes == needs[0]
        tried.append(len(one.asked))
    assert min(tried) < len(plans) / 2  # or there is nothing that it leaves out


@pytest.mark.full
def test_what_rests_on_a_host_is_bounded_too() -> None:
    search = search_of(Model(2, 2))
    plans = everything(search)
    least = min(plan.needed_nbytes for plan in plans.values())
    on_cpu = min(plan.host_nbytes for plan in plans.values() if plan.needed_nbytes == least)
    found = replace(search, job=with_memory(search.job, least, on_cpu - 1)).run()
    assert not found.plan.fits
    assert replace(search, job=with_memory(search.job, least, on_cpu)).run().plan.fits


@pytest.mark.parametrize("first", [1, 3, 64])
def test_the_largest_micro_batch_is_found_where_the_first_samples_add_nothing(first: int) -> None:
    for start, per_sample, limit in [(100, 1, 100), (100, 7, 99), (100, 7, 1000), (0, 9, 80), (50, 10, 49)]:
        asked: list[int] = []

        def need(micro: int, start: int = start, per_sample: int = per_sample, asked: list[int] = asked) -> int:
            asked.append(micro)
            return max(start, per_sample * micro)

        expected = limit // per_sample if start <= limit else 0
        assert last_that_fits(need, limit, first) == expected
        assert len({*asked}) <= 20


@pytest.mark.full
def test_the_largest_micro_batch_fits_into_the_hosts_memory_too() -> None:
    options = {"checkpoint_units": "auto", "cpu_checkpointing": True}
    config = BASE | {"train_micro_batch_size_per_gpu": 8, "activation_checkpointing": options}
    made = zeroshard.plan(Model(2, 16), config, world_size=16, batch=batch, machine=machine(), sharded_init=True)
    of_sample = made.figures.host_peak.parts["activations"] // 8
    limit = 5 * of_sample * made.job.ranks_per_host
    assert largest_micro_batch(replace(made, job=with_memory(made.job, made.needed_nbytes, limit))) == 5


def test_what_never_exceeds_is_not_looked_for_for_ever() -> None:
    assert last_that_fits(lambda _: 1, 10, 1) == 1 << 16


@pytest.mark.parametrize("run_backwards", [True, False])
def test_dry_runs_are_here_where_forks_cannot_differentiate(
    run_backwards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds of torch for accelerators let no forked process run a backward after one in this process."""
    if not run_backwards:
        monkeypatch.setattr(FORKS_RUN_BACKWARDS, lambda: False)
    processes = [process for _, process in in_processes([os.getpid, os.getpid])]
    assert (os.getpid() in processes) is not run_backwards
    assert len({*processes}) == (2 if run_backwards else 1)


def test_one_thread_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """filelock, which most programs import, raises if two threads fork at once."""
    threads = []
    fork = os.fork

    def noted() -> int:
        threads.append(threading.get_ident())
        return fork()

    monkeypatch.setattr(os, "fork", noted)
    found = dict(in_processes([os.getpid] * 5))
    assert found.keys() == {*range(5)}
    # A build of torch for accelerators forks once more, to try a backward.
    assert len({*found.values()}) == 5 <= len(threads)
    assert {*threads} == {threading.get_ident()}


def test_an_error_of_a_dry_run_is_not_a_lack_of_memory(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="whose traceback is above"):
        list(in_processes([lambda: {}["missing"]]))
    assert "KeyError: 'missing'" in capfd.readouterr().err


def test_a_dry_run_that_dies_ends_the_others() -> None:
    with pytest.raises(UsageError, match=r"died \(exit code 7\)"):
        for _ in in_processes([lambda: os._exit(7), lambda: time.sleep(600)]):
            pass
    assert not multiprocessing.active_children()
