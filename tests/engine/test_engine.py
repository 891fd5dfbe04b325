"""Training with a JSON config gives the same bits as without one, and accepts the configs of DeepSpeed users."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from models import Stack, tokens
from torch.utils.data import TensorDataset
from twin import LARGE_BUCKETS, build, engine_steps, same, whole

import zeroshard
from zeroshard import Precision


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


@pytest.mark.ranks(2)
def test_training_data_is_split_over_ranks(rank: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 5, "optimizer": {"type": "Adam"}}
    data = TensorDataset(torch.arange(20))
    _, _, loader, _ = zeroshard.initialize(model=Stack(), config=config, training_data=data)
    assert loader is not None
    mine = torch.cat([batch for (batch,) in loader])
    everyone = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(everyone, mine)
    assert torch.cat(everyone).sort().values.tolist() == list(range(20))
