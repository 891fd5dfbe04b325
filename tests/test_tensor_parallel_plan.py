"""Plans of divided models: a real run's states and data-parallel traffic, and the list of omissions."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from plan_cases import to_the_byte
from ranks import on_ranks
from test_tensor_parallel import llama
from test_tensor_parallel_config import phi, qwen
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from typer.testing import CliRunner

import zeroshard
from zeroshard import UsageError
from zeroshard.cli.main import app

LENGTH = 8
MOMENTUM = {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}
"""Its states have no counters of steps, of which a real run has one for each part of a unit."""


def settings(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2, "tensor_parallel": {"autotp_size": 2}, "optimizer": MOMENTUM,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip


def batch(samples: int) -> dict[str, Tensor]:
    tokens = torch.zeros(samples, LENGTH, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def real(rank: int, build: Any, stages: tuple[int, ...]) -> list[dict[str, Any]]:
    """Take two steps at each stage. Returns bytes at rest and at the step, and what the second step sent."""
    runs = []
    for stage in stages:
        engine, *_ = zeroshard.initialize(model=build(), config=settings(stage))
        gradients: list[int] = []
        engine.optimizer.register_step_pre_hook(
            lambda *_, engine=engine, found=gradients: found.append(engine.memory_report()["gradients"])
        )
        for _ in range(2):
            engine.comm_report()
            engine.backward(engine(**batch(2)).loss)
            engine.step()
        report = engine.memory_report()
        sent = engine.comm_report()
        with CommDebugMode() as seen:  # it keeps what it sees
            engine.backward(engine(**batch(2)).loss)
        engine.step()
        sums = sum(count for key, count in seen.get_comm_counts().items() if "all_reduce" in str(key))
        runs.append(
            {
                "parameters": report["parameters"], "optimizer": report["optimizer"], "gradients": gradients[-1],
                "sent": sent, "sums": sums,
            }
        )  # fmt: skip
        engine.destroy()
    return runs


@pytest.mark.parametrize(
    "build", [llama, pytest.param(qwen, marks=pytest.mark.full), pytest.param(phi, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.full), 4])
def test_states_and_traffic_are_those_of_a_real_run(ranks: int, build: Any) -> None:
    stages = (1, 2, 3)
    for stage, run in zip(stages, on_ranks(real, ranks, build, stages)[0], strict=True):
        with to_the_byte():
            made = zeroshard.plan(build, settings(stage), world_size=ranks, batch=batch, machine="h100")
        known = {**made.figures.rest, "gradients": made.figures.states["gradients"]}
        for part in ("parameters", "optimizer", "gradients"):
            # A real run pads the norms between divided matrices apart from other norms, and sums their gradients.
            assert run[part] == (pytest.approx(known[part], rel=0.01) if build is qwen else known[part]), (stage, part)
        for kind in ("all_gather", "reduce_scatter"):
            assert made.figures.sent.get(kind) == run["sent"].get(kind), (stage, kind)
        norms = 4 if build is qwen else 0
        assert made.figures.calls["tensor_parallel_all_reduce"] == run["sums"] - norms


def test_activations_shrink_and_times_count_the_sums() -> None:
    def planned(**options: Any) -> zeroshard.Plan:
        config = {key: value for key, value in settings(1).items() if key != "tensor_parallel"}
        return zeroshard.plan(llama, config, world_size=4, batch=batch, machine="h100", **options)

    whole, divided = planned(), planned(tensor_parallel=2)
    assert divided.parts["activations"] < whole.parts["activations"]
    assert divided.figures.numel < 0.6 * whole.figures.numel
    assert divided.figures.config.batch.train == whole.figures.config.batch.train // 2
    assert divided.figures.spent["link"] > 0
    assert divided.as_dict()["tensor_parallel"] == 2
    assert divided.complete_config()["tensor_parallel"] == {"autotp_size": 2}


@pytest.mark.parametrize("vocabulary", [32, 33])
def test_a_gather_is_counted_if_ranks_do_not_divide_the_vocabulary(vocabulary: int) -> None:
    def build() -> torch.nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**{**llama().config.to_dict(), "vocab_size": vocabulary}))  # type: ignore[union-attr, operator]

    made = zeroshard.plan(build, settings(1), world_size=2, batch=batch, machine="h100")
    part = 2 * LENGTH * -(-vocabulary // 2) * 4
    assert made.figures.sent["tensor_parallel_all_gather"] == part


def test_what_cannot_be_planned() -> None:
    def planned(ranks: int, config: dict[str, Any], build: Any = llama, **options: Any) -> zeroshard.Plan:
        return zeroshard.plan(build, config, world_size=ranks, batch=batch, machine="h100", **options)

    with pytest.raises(UsageError, match="3 ranks on 1 hosts cannot hold models on 2 tensor-parallel ranks"):
        planned(3, settings(1))
    with pytest.raises(UsageError, match="that divides the ranks of each host"):
        planned(4, settings(1), hosts=4)
    with pytest.raises(UsageError, match=r"tensor_parallel is 4, and the config's tensor_parallel.autotp_size 2"):
        planned(4, settings(1), tensor_parallel=4)
    with pytest.raises(UsageError, match="with sequence parallelism or sharded_init"):
        planned(4, settings(1), sharded_init=True)
    with pytest.raises(UsageError, match="Linear has no plan for tensor parallelism"):
        planned(2, settings(1), lambda: torch.nn.Linear(4, 4))


@pytest.mark.parametrize("judged", [True, False])
def test_the_command(judged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model: Any = llama()
    Path("config.json").write_text(json.dumps({**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}))
    Path("zero.json").write_text(
        json.dumps({key: value for key, value in settings(2).items() if key != "tensor_parallel"})
    )
    options = ["plan", "config.json", "--gpus", "4", "--sequence", "8", "--tensor-parallel", "2", "--write", "out.json"]
    options += ["--config", "zero.json", "--quick"] if judged else []
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    assert "models divided over 2 ranks (--tensor-parallel)" in " ".join(done.output.split())
    written = json.loads(Path("out.json").read_text())
    assert written["tensor_parallel"] == {"autotp_size": 2}
    assert written["train_batch_size"] == (4 if judged else 2)
