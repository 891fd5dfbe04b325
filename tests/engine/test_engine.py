"""Training with a JSON config gives the same bits as without one, and accepts the configs of DeepSpeed users."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from models import Stack, tokens
from ranks import on_ranks
from torch.utils.data import TensorDataset
from twin import LARGE_BUCKETS, build, engine_steps, same, whole

import zeroshard
from zeroshard import ConfigError, Precision
from zeroshard.engine.config.load import load_config
from zeroshard.optim.lr_schedules import WarmupLR

ZERO1 = {  # as a user has it: no batch size at all
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8},
    "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-5, "warmup_num_steps": 100}},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_engine_and_plain_road_give_the_same_bits(rank: int, stage: int, accumulation: int, bf16: bool) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    torch.manual_seed(0)
    model = Stack()
    engine, *_ = zeroshard.initialize(model=model, config=config)
    assert engine.module is model
    losses = engine_steps(engine, rank, range(4 * accumulation))
    assert engine.global_steps == 4
    assert engine.global_samples == 4 * 3 * accumulation * 2
    mine = whole(model)
    norm = engine.get_global_grad_norm()

    dtype = torch.bfloat16 if bf16 else None
    precision = Precision(dtype, accumulate_dtype=dtype if accumulation == 1 else None)
    adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True)
    plain, sharded = build(stage, precision=precision, make_optimizer=adamw, bucket_numel=LARGE_BUCKETS)
    norms: list[float] = []
    for step in range(4):
        for microbatch in range(accumulation):
            with sharded.accumulate(microbatch < accumulation - 1):
                loss = plain(*tokens(rank, step * accumulation + microbatch))
                assert torch.equal(loss, losses[step * accumulation + microbatch])
                (loss / accumulation).backward()
        norms.append(sharded.clip_grad_norm_(0.5))
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    assert norms[-1] == norm
    assert same(whole(plain), mine)


@pytest.mark.parametrize("form", ["path", "dict", "mapping"])
def test_a_config_without_batch_sizes_runs_with_the_callers(form: str, tmp_path: Path) -> None:
    path = tmp_path / "zero1.json"
    path.write_text("// as DeepSpeed users write it\n" + json.dumps(ZERO1)[:-1] + ",}")
    config = {"path": path, "dict": ZERO1, "mapping": MappingProxyType(ZERO1)}[form]

    def body(rank: int) -> list[float]:
        with pytest.raises(ConfigError, match="names no batch size"):
            zeroshard.initialize(model=Stack(), config=config)
        auto = {"train_micro_batch_size_per_gpu": 3}
        engine, _, _, scheduler = zeroshard.initialize(model=Stack(), config=config, auto=auto)
        assert engine.train_batch_size() == 6
        rates = []
        for number in range(4):
            rates.append(engine.get_lr()[0])
            engine_steps(engine, rank, [number])
        assert isinstance(scheduler, WarmupLR)
        assert engine.zero_optimization_stage() == 1
        return rates

    rates = on_ranks(body, 2)[0]
    log_warmup = [0.0, 0.0, *(1e-5 * torch.log(torch.tensor([2.0, 3.0])) / torch.log(torch.tensor(100.0))).tolist()]
    assert rates == pytest.approx(log_warmup, rel=1e-5)


def test_training_data_is_split_over_ranks() -> None:
    data = TensorDataset(torch.arange(20))

    def body(rank: int) -> list[int]:
        config = {**ZERO1, "train_micro_batch_size_per_gpu": 5}
        _, _, loader, _ = zeroshard.initialize(model=Stack(), config=config, training_data=data)
        assert loader is not None
        return [int(x) for (batch,) in loader for x in batch]

    first, second = on_ranks(body, 2)
    assert sorted(first + second) == list(range(20))


@pytest.mark.parametrize(
    ("given", "train", "micro", "accumulation"),
    [
        ((24, 3, 2), 24, 3, 2), ((24, 3, None), 24, 3, 2), ((24, None, 2), 24, 3, 2), ((None, 3, 2), 24, 3, 2),
        ((24, None, None), 24, 6, 1), ((None, 3, None), 12, 3, 1), ((None, None, None), 4, 1, 1),
        (("auto", 3, "auto"), 12, 3, 1), ((24, "auto", "auto"), 24, 6, 1), ((24, 3, "auto"), 24, 3, 2),
        ((24, "auto", 2), 24, 3, 2), (("auto", 3, 2), 24, 3, 2), ((24, "auto", None), 24, 6, 1),
    ],
)  # fmt: skip
def test_batch_sizes(given: tuple[int | None, ...], train: int, micro: int, accumulation: int) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {key: value for key, value in zip(keys, given, strict=True) if value is not None}
    batch = load_config(config, world_size=4).batch
    assert (batch.train, batch.micro, batch.accumulation) == (train, micro, accumulation)


def test_numbers_as_people_write_them() -> None:
    config = load_config({"zero_optimization": {"reduce_bucket_size": "5e7", "allgather_bucket_size": 2e8}}, 1)
    assert config.bucket_numel == 50_000_000


def test_an_unknown_key_at_the_top_is_an_error() -> None:
    with pytest.raises(ConfigError, match="gradient_cliping: unknown key; did you mean 'gradient_clipping'"):
        load_config({"gradient_cliping": 1.0}, 1)
