"""The same promises where there is an accelerator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import Stack, tokens

import zeroshard
from zeroshard import Place, Policy, Precision


@pytest.mark.full
@pytest.mark.accelerator
@pytest.mark.parametrize("precision", [None, Precision(torch.bfloat16)], ids=["fp32", "bf16"])
def test_stages_are_bit_equal_on_one_accelerator(precision: Precision | None) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    results = []
    for stage in range(4):
        torch.manual_seed(0)
        model = Stack().to(device)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        sharded = zeroshard.shard(model, adamw, Policy.stage(stage), precision=precision, bucket_numel=256)
        for step in range(10):
            model(tokens(0, step)[0].to(device)).backward()
            sharded.clip_grad_norm_(0.5)
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
        with zeroshard.unsharded(model):
            results.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        sharded.remove()
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.full
@pytest.mark.accelerator
@pytest.mark.parametrize("precision", [None, Precision(torch.bfloat16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("stage", "parameters"), [(2, Place.CPU), (3, Place.CPU), (3, Place.DISK)])
def test_where_parameters_rest_changes_no_bit(
    stage: int, parameters: Place, precision: Precision | None, tmp_path: Path
) -> None:
    """The accelerator steps in both, so the bits are the same; the copies there and back are real ones."""
    expected = _trained(Policy.stage(stage), precision)
    assert torch.equal(
        _trained(Policy.stage(stage).offloaded(parameters=parameters, path=str(tmp_path)), precision), expected
    )


@pytest.mark.full
@pytest.mark.accelerator
@pytest.mark.parametrize("precision", [None, Precision(torch.bfloat16)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("stage", "parameters"),
    [(stage, place) for stage in (1, 2, 3) for place in Place if stage == 3 or place is not Place.DISK],
)
def test_the_cpu_steps_alike_wherever_states_rest(
    stage: int, parameters: Place, precision: Precision | None, tmp_path: Path
) -> None:
    """CPU memory and disk: the same bits. The accelerator's own step rounds in its own way, so that is close."""
    base = Policy.stage(stage)
    runs = [
        _trained(base.offloaded(optimizer=place, parameters=parameters, path=str(tmp_path)), precision)
        for place in (Place.CPU, Place.DISK)
    ]
    assert torch.equal(runs[0], runs[1])
    torch.testing.assert_close(runs[0], _trained(base, precision), rtol=2e-2 if precision else 1e-3, atol=1e-3)


def _trained(policy: Policy, precision: Precision | None) -> torch.Tensor:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch.manual_seed(0)
    model = Stack().to(device)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    sharded = zeroshard.shard(model, adamw, policy, precision=precision, bucket_numel=256)
    for step in range(6):
        for microbatch in range(2):
            with sharded.accumulate(microbatch == 0):
                model(tokens(0, 2 * step + microbatch)[0].to(device)).backward()
        sharded.clip_grad_norm_(0.5)
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()
    sharded.remove()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
