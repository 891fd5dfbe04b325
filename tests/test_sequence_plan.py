"""Plans of sequences that are cut over ranks: messages equal a real run's, and memory decreases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SIZES, llama
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

import zeroshard
from zeroshard import UsageError
from zeroshard.cli.main import app
from zeroshard.planning import long_sequences
from zeroshard.sequence import Sequences

CONFIG = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
LENGTH = 32


def batch(samples: int) -> dict[str, Tensor]:
    tokens = torch.zeros(samples, LENGTH, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def planned(ranks: int = 2, **options: Any) -> zeroshard.Plan:
    return zeroshard.plan(llama, CONFIG, world_size=ranks, batch=batch, machine="h100", **options)


def test_exchanges_are_those_of_a_real_run() -> None:
    def body(rank: int) -> int:
        sequences = Sequences(init_device_mesh("cpu", (2,), mesh_dim_names=("sp",))["sp"])
        model: Any = llama()
        sequences.attach(model)
        zeroshard.shard(model, torch.optim.AdamW(model.parameters()), 3)
        sequences.loss(model, sequences.cut(batch(1)), tiles=2).backward()
        return sequences.sent_nbytes

    made = planned(sequence_parallel=2, tile_tokens=8)
    assert on_ranks(body, 2) == [made.figures.sent["all_to_all"]] * 2
    assert made.figures.calls["all_to_all"] == 4 * 3
    assert made.as_dict()["sequence_parallel"] == 2
    # Two ranks share a sample.
    assert made.samples_per_second == pytest.approx(1 / made.seconds)


def test_a_plan_leaves_the_callers_config_as_it_was() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES)

    def factory() -> nn.Module:
        return LlamaForCausalLM(config)

    plans = [
        zeroshard.plan(factory, CONFIG, world_size=2, batch=batch, machine="h100", sequence_parallel=ranks)
        for ranks in (1, 2, 1)
    ]
    assert plans[0].peak_nbytes == plans[2].peak_nbytes > plans[1].peak_nbytes

    def refused() -> nn.Module:
        model = LlamaForCausalLM(config)
        model.model.layers[0].mlp.norm = nn.BatchNorm1d(4)
        return model

    attention = config._attn_implementation
    with pytest.raises(UsageError, match="BatchNorm"):
        zeroshard.plan(refused, CONFIG, world_size=2, batch=batch, machine="h100", sequence_parallel=2, tile_tokens=8)
    assert config._attn_implementation == attention


def test_memory_falls_with_ranks_and_tiles() -> None:
    whole, cut, tiled = planned(), planned(sequence_parallel=2), planned(tile_tokens=8)
    for other in (cut, tiled):
        assert other.peak_nbytes < whole.peak_nbytes
    assert "all_to_all" not in tiled.figures.sent
    assert cut.parts["activations"] < 0.7 * whole.parts["activations"]


@pytest.mark.parametrize(
    "config",
    [pytest.param(CONFIG, marks=pytest.mark.full), CONFIG | {"bf16": {"enabled": True}}],
    ids=["fp32", "bf16"],
)
@pytest.mark.full
def test_tiles_that_are_alike_run_once(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of 1M tokens take seconds. The figures are those of all tiles."""

    def figures(most: int) -> tuple[Any, int]:
        monkeypatch.setattr(long_sequences, "MOST_TILES", most)
        calls = []

        def made() -> nn.Module:
            model: Any = llama()
            model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
            return model  # type: ignore[no-any-return]

        plan = zeroshard.plan(made, config, world_size=2, batch=batch, machine="h100", tile_tokens=5)
        return plan.figures, len(calls)

    (few, few_calls), (every, every_calls) = figures(4), figures(100)
    assert (few_calls, every_calls) == (2 * 2 * 4, 2 * 2 * -(-LENGTH // 5))
    assert (few.peak, few.peaks, few.rest, few.sent) == (every.peak, every.peaks, every.rest, every.sent)
    assert few.seconds == pytest.approx(every.seconds, rel=1e-9)
    assert few.spent == pytest.approx(every.spent, rel=1e-9)


@pytest.mark.full
def test_checkpoints_in_cpu_memory() -> None:
    """One input is on the device at a time: copies run in the order of the computation."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, tokens = 5, 256
    shape = LlamaConfig(**{**SIZES, "num_hidden_layers": layers}, use_cache=False)

    def peaks(on_cpu: bool) -> tuple[int, int, float]:
        options = {"checkpoint_units": "auto", "cpu_checkpointing": on_cpu}
        given = {
            "input_ids": torch.zeros(1, tokens, dtype=torch.long),
            "labels": torch.zeros(1, tokens, dtype=torch.long),
        }
        config = CONFIG | {"activation_checkpointing": options}
        plan = zeroshard.plan(
            lambda: LlamaForCausalLM(shape), config, world_size=1, batch=given, machine="h100", tile_tokens=32
        )
        host = plan.figures.host_peak.parts.get("activations", 0)
        return plan.parts["activations"], host, plan.figures.spent.get("copies", 0.0)

    one = tokens * shape.hidden_size * 4
    (kept, none, at_once), (moved, host, waited) = peaks(False), peaks(True)
    assert (none, at_once) == (0, 0.0)
    assert host == layers * one
    assert waited > 0
    assert kept - moved == (layers - 1) * one


def test_ranks_that_do_not_divide() -> None:
    with pytest.raises(UsageError, match="3 ranks cannot be divided into groups of 2"):
        planned(3, sequence_parallel=2)
    with pytest.raises(UsageError, match="sequence_parallel is 0"):
        planned(2, sequence_parallel=0)
    with pytest.raises(UsageError, match="4 attention heads"):
        planned(8, sequence_parallel=8)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {**llama().config.to_dict(), "architectures": ["LlamaForCausalLM"]}  # type: ignore[union-attr, operator]
    Path("config.json").write_text(json.dumps(config))
    Path("zero.json").write_text(json.dumps(CONFIG))
    options = [
        "--gpus",
        "4",
        "--sequence",
        "32",
        "--sequence-parallel",
        "2",
        "--tile-tokens",
        "8",
        "--config",
        "zero.json",
    ]
    done = CliRunner().invoke(app, ["plan", ".", *options, "--quick", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert (found["sequence_parallel"], found["tile_tokens"], found["ranks"]) == (2, 8, 4)
    assert found["step"]["sent"]["all_to_all"] > 0


def test_a_global_batch_counts_each_sample_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps({**llama().config.to_dict(), "architectures": ["LlamaForCausalLM"]}))  # type: ignore[union-attr, operator]
    options = ["plan", ".", "--gpus", "4", "--sequence", "32", "--sequence-parallel", "2", "--global-batch"]
    done = CliRunner().invoke(app, [*options, "2"])
    assert done.exit_code == 0, done.output
    assert "2 samples per step" in " ".join(done.stdout.split())
    assert "3 does not divide by 2 data-parallel ranks" in str(CliRunner().invoke(app, [*options, "3"]).exception)
