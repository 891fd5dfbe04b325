"""Optimizer states that rest in bfloat16: the same bits over any ranks, stage and bucket size, and half their bytes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from insides import frames_between_steps
from models import OPTIMIZERS, muon_with_adamw, workload
from ranks import Lines, on_ranks
from torch import Tensor, nn
from twin import (
    CPU,
    DISK,
    LOSS_SCALES,
    Setting,
    build,
    every_state,
    expect_equal,
    gpt_batch,
    refusal,
    same,
    step,
    update,
)

import zeroshard
from zeroshard import Offload, Policy, Precision, UsageError
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.core.rounding import CHUNK_NUMEL, key_of, round_
from zeroshard.engine.config.load import load_config
from zeroshard.optim.lion import Lion
from zeroshard.testing import Workload, train
from zeroshard.testing.gpt import GPT, GPTConfig

BF16 = Precision(state_dtype=torch.bfloat16)
KNOWN = {
    "ASGD": lambda p: torch.optim.ASGD(p, foreach=False),
    "Adadelta": lambda p: torch.optim.Adadelta(p, foreach=False),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.3, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=False),
    "Adamax": lambda p: torch.optim.Adamax(p, foreach=False),
    "Lion": Lion,
    "NAdam": lambda p: torch.optim.NAdam(p, foreach=False),
    "RAdam": lambda p: torch.optim.RAdam(p, foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, foreach=False),
    "Rprop": lambda p: torch.optim.Rprop(p, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD without momentum": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
}


class GivenBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, 23)), nn.Parameter(torch.randn(width))

    def forward(self, drawn: torch.Generator) -> Tensor:
        weight, bias = (torch.randint(-64, 65, p.shape, generator=drawn) / 256 for p in (self.weight, self.bias))
        return (self.weight * weight).sum() + (self.bias * bias).sum()


class Given(nn.Module):
    """A model whose gradients are given, with few bits each, so that their mean over ranks is exact however many they are."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GivenBlock(3 + number) for number in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, number: int) -> Tensor:
        drawn = torch.Generator().manual_seed(number)
        return sum((block(drawn) for block in self.blocks), start=self.scale / 4)


# ---------------------------------------------------------------------- the rounding itself


def _hash(number: np.ndarray) -> np.ndarray:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        number = (number ^ (number >> np.uint32(shift))) * np.uint32(factor)
    return number ^ (number >> np.uint32(16))


def key_and_hash(numel: int, name: str, count: int) -> np.ndarray:
    """Return 16 random bits of each element of a parameter's state, as the page says."""
    start = _hash(np.array([(count * 0x9E3779B9 + zlib.crc32(name.encode())) & 0xFFFFFFFF], dtype=np.uint32))
    return _hash(np.arange(numel, dtype=np.uint32) * np.uint32(0x9E3779B9) + start) >> np.uint32(16)


def _reference(values: Tensor, name: str, count: int) -> Tensor:
    """Round a whole parameter's state as the page says: independent of the package's code."""
    bits = key_and_hash(values.numel(), name, count)
    rounded = (values.reshape(-1).numpy().view(np.uint32) + bits) & np.uint32(0xFFFF0000)
    return torch.from_numpy(rounded.view(np.float32)).view(values.shape)


def test_random_bits_depend_on_name_step_and_place_only(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    expected = _reference(values, "w/exp_avg", 7)
    key = key_of("w/exp_avg", torch.tensor(7.0))
    for chunk in (1 << 20, 100, 7):
        monkeypatch.setitem(CHUNK_NUMEL, "cpu", chunk)
        whole = values.clone()
        round_(whole, torch.bfloat16, [(0, 1000, 0, key)])
        assert torch.equal(whole, expected)
        shard = torch.zeros(400)  # another parameter, 300 elements of this one, and padding
        shard[90:390] = values[500:800]
        round_(shard, torch.bfloat16, [(0, 90, 5, key_of("v", 1)), (90, 300, 500, key)])
        assert torch.equal(shard[90:390], expected[500:800])
        assert not shard[390:].any()
    others = [key_of("w/exp_avg_sq", 7), key_of("v/exp_avg", 7), key_of("w/exp_avg", 8)]
    for other in others:
        assert other != key
        again = values.clone()
        round_(again, torch.bfloat16, [(0, 1000, 0, other)])
        assert not torch.equal(again, expected)
    double = values.double()
    round_(double, torch.bfloat16, [(0, 1000, 0, key)])
    assert torch.equal(double.float(), expected)


def test_the_mean_of_rounded_values_is_the_value() -> None:
    value = 1.0 + 2.0**-7 / 5  # a fifth of the way to its upper neighbour
    means = []
    for count in range(50):
        values = torch.full((20_000,), value)
        round_(values, torch.bfloat16, [(0, values.numel(), 0, key_of("w/exp_avg", count))])
        assert set(values.tolist()) == {1.0, 1.0 + 2.0**-7}
        means.append(values.double().mean().item())
    assert sum(means) / len(means) == pytest.approx(value, abs=2e-5)  # 5 standard errors are 1.6e-5
    assert len({*means}) > 40  # other bits in each step


def test_values_that_fit_do_not_change_and_nan_stays() -> None:
    odd = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), -float("inf"), 2.0**-130])
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(
        torch.float32
    )  # NaNs that a carry would change
    values = torch.cat([odd, bits])
    round_(values, torch.bfloat16, [(0, values.numel(), 0, 0xFFFFFFF0)])
    assert torch.equal(values[:7], odd)
    assert values[7:].isnan().all()


# ---------------------------------------------------------------------- the same bits everywhere


def _trained(
    rank: int, stage: int, bucket_numel: int, make_optimizer: Callable[..., Any], steps: int = 4
) -> dict[str, Tensor]:
    model, sharded = build(
        stage, precision=BF16, make_model=Given, make_optimizer=make_optimizer, bucket_numel=bucket_numel
    )
    for number in range(steps):
        update(model(number), sharded.optimizer)
    return every_state(sharded)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_any_number_of_ranks_any_stage_and_bucket_size(name: str) -> None:
    found: dict[tuple[int, int, int], dict[str, Tensor]] = {}
    cases = [(stage, numel) for stage in (0, 1, 2, 3) for numel in (10**6, 64)]

    def body(rank: int) -> list[dict[str, Tensor]]:
        return [_trained(rank, *case, KNOWN[name]) for case in cases]

    for ranks in (1, 2, 4):
        for case, one in zip(cases, on_ranks(body, ranks)[0], strict=True):
            found[ranks, *case] = one
    first = found[1, 0, 10**6]
    differ = [case for case, one in found.items() if not same(one, first)]
    assert not differ
    moments = {key: value for key, value in first.items() if not key.endswith(("parameters", "step"))}
    assert len(moments) >= 7
    for key, value in moments.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, value.bfloat16().float()), key


def test_a_run_is_plain_pytorch_with_rounded_states() -> None:
    """A plain loop whose states are rounded after each step, by the other implementation."""
    torch.manual_seed(0)
    model = Given()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for number in range(4):
        update(model(number), optimizer)
        for fqn, parameter in model.named_parameters():
            state = optimizer.state[parameter]
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = _reference(state[name], f"{fqn}/{name}", number + 1)
    (found,) = on_ranks(lambda rank: _trained(rank, 2, 100, lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False)), 1)
    for fqn, parameter in model.named_parameters():
        assert torch.equal(found[f"{fqn} parameters"], parameter)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[f"{fqn} {name}"], optimizer.state[parameter][name]), (fqn, name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("precision", ["bf16 states", "bf16, states too"])
@pytest.mark.parametrize("name", ["tied", "frozen base", "skipping"])
def test_stages_and_places(rank: int, name: str, precision: str, tmp_path: Path) -> None:
    how = Offload(str(tmp_path), buffer_numel=8192, block_nbytes=4096)
    work = workload(name, steps=3, max_norm=0.5, loss_scale=LOSS_SCALES[precision])
    settings = {f"stage {stage}": Setting(Policy.stage(stage)) for stage in range(4)}
    settings |= {
        "over gloo": Setting(Policy.stage(2), "gloo"),
        "in CPU memory": Setting(Policy.stage(2).offloaded(optimizer=CPU), apart=True),
        "on disk": Setting(Policy.stage(2).offloaded(optimizer=DISK, offload=how)),
        "on disk, apart": Setting(Policy.stage(3).offloaded(optimizer=DISK, parameters=DISK, offload=how), apart=True),
        "parked": Setting(Policy.stage(2), apart=True, parks=CPU),
    }  # fmt: skip
    expect_equal(rank, work, settings, precision)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [*KNOWN, "Muon with AdamW"])
def test_every_optimizer_comes_close_to_its_states_in_fp32(rank: int, name: str) -> None:
    make = KNOWN.get(name, muon_with_adamw)
    ends = []
    for precision in (None, BF16):
        for bucket_numel in (64, 10**6):
            model, sharded = build(1, precision=precision, make_optimizer=make, bucket_numel=bucket_numel)
            before = {fqn: value.detach().clone() for fqn, value in model.named_parameters()}
            for number in range(4):
                step(model, sharded, rank, number)
            ends.append((every_state(sharded), {fqn: value - before[fqn] for fqn, value in model.named_parameters()}))
    assert same(ends[2][0], ends[3][0])
    for fqn, moved in ends[0][1].items():
        assert (ends[2][1][fqn] - moved).norm() <= 0.05 * moved.norm() + 1e-6, fqn


@pytest.mark.ranks(1)
def test_a_state_without_gradients_decays(rank: int) -> None:
    """Rounded to the nearest, a second moment would keep its value: a step takes a thousandth of it, an eighth of a gap."""
    make = lambda p: torch.optim.Adam(p, foreach=False)  # noqa: E731
    model, sharded = build(1, precision=BF16, make_model=lambda: nn.Linear(40, 50), make_optimizer=make)
    update(model(torch.ones(1, 40)).sum() * 100, sharded.optimizer)
    first = sharded.states.get("weight", "exp_avg_sq")
    for _ in range(100):
        update((model(torch.zeros(1, 40)) * 0).sum(), sharded.optimizer)
    mean = (sharded.states.get("weight", "exp_avg_sq") / first).mean().item()
    assert mean == pytest.approx(0.999**100, rel=2e-3)


# ---------------------------------------------------------------------- bytes


@pytest.mark.ranks("ranks", fresh=True)
@pytest.mark.parametrize("ranks", [1, 2])
def test_twelve_bytes_a_parameter(rank: int, ranks: int, tmp_path: Path) -> None:
    config = GPTConfig(layers=4, width=96, heads=4, context=16)
    numel = sum(parameter.numel() for parameter in GPT(config).parameters())
    precision = Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    work = Workload(lambda: GPT(config), gpt_batch, steps=2)
    for stage, nbytes in ((0, 12), (1, 4 + 8 / ranks), (2, 2 + 10 / ranks), (3, 10 / ranks)):
        run = train(rank, work, Policy.stage(stage), precision=precision)
        assert sum(run.formula.values()) == pytest.approx(nbytes * numel)
        for kind, expected in run.formula.items():
            assert run.memory[kind] == pytest.approx(expected, rel=0.02), kind
    how = Offload(str(tmp_path))
    run = train(rank, work, Policy.stage(2).offloaded(optimizer=DISK, offload=how), precision=precision)
    # Master weights, gradients and two states.
    assert run.memory["disk"] == pytest.approx((4 + 2 + 2 + 2) * numel / ranks, rel=0.05)


@pytest.mark.ranks(2)
def test_one_frame_and_no_read_ahead(rank: int) -> None:
    """No state is opened before the step, which would take memory from the forward. An accelerator keeps no frame (test_simgpu)."""
    model, sharded = build(2, precision=BF16)
    for number in range(3):
        step(model, sharded, rank, number)
        assert frames_between_steps(sharded) == (1, 0)


def test_a_plan_counts_them() -> None:
    from zeroshard.tools.planning import plan

    def config(narrow: bool) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True, "bf16_optimizer_states": narrow},
            "optimizer": {"type": "AdamW", "params": {}}, "zero_optimization": {"stage": 2},
        }  # fmt: skip

    rest = {}
    for narrow in (False, True):
        make = lambda: GPT(GPTConfig(layers=3, width=256, heads=4))  # noqa: E731
        found = plan(
            make, config(narrow), world_size=2, batch=(torch.zeros(1, 16, dtype=torch.long),) * 2, presets=False
        )
        rest[narrow] = found.rows[0].figures.rest["optimizer"]
    assert rest[True] == pytest.approx(rest[False] * 8 / 12, rel=0.03)


# ---------------------------------------------------------------------- states by name, and checkpoints


@pytest.mark.ranks(2)
def test_get_gives_fp32_and_set_takes_it(rank: int) -> None:
    model, sharded = build(3, precision=BF16)
    step(model, sharded, rank, 0)
    fqn = "blocks.1.up.weight"
    before = every_state(sharded)
    value = torch.randn(before[f"{fqn} exp_avg"].shape, generator=torch.Generator().manual_seed(1))
    sharded.states.set(fqn, "exp_avg", value)
    after = every_state(sharded)
    changed = after.pop(f"{fqn} exp_avg")
    assert changed.dtype == torch.float32
    assert torch.equal(changed, value.bfloat16().float())  # to the nearest: no step's random bits
    del before[f"{fqn} exp_avg"]
    assert same(before, after)
    text = refusal(lambda: dcp.save({"app": zeroshard.DistributedState(sharded)}, checkpoint_id="/nowhere"))
    assert "in 16 bits" in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["fused AdamW", "SGD"])
def test_states_outlive_a_change_of_what_trains(rank: int, name: str) -> None:
    ends = []
    for bucket_numel in (64, 10**6):
        model, sharded = build(2, precision=BF16, make_optimizer=OPTIMIZERS[name], bucket_numel=bucket_numel)
        for number in range(2):
            step(model, sharded, rank, number)
        before = every_state(sharded)
        model.blocks[1].up.weight.requires_grad_(False)
        sharded.update_trainable()
        after = every_state(sharded)
        assert "blocks.1.up.weight parameters" in after
        assert same({key: before[key] for key in after}, after)
        step(model, sharded, rank, 2)
        ends.append(every_state(sharded))
    assert same(ends[0], ends[1])


@pytest.mark.parametrize("name", ["fused AdamW", "SGD"])
def test_a_checkpoint_continues_with_the_same_bits(name: str, tmp_path: Path) -> None:
    def body(rank: int) -> None:
        options = {"precision": BF16, "make_optimizer": OPTIMIZERS[name]}
        model, sharded = build(2, **options)
        for number in range(3):
            step(model, sharded, rank, number)
        sharded.save(tmp_path, "three")
        step(model, sharded, rank, 3)
        other, again = build(3, **options, bucket_numel=10**6)
        again.load(tmp_path, "three")
        step(other, again, rank, 3)
        assert same(every_state(sharded), every_state(again))
        third, by_dict = build(2, **options)
        by_dict.load(tmp_path, "three")
        with_dict = by_dict.optimizer.state_dict()
        by_dict.optimizer.load_state_dict(with_dict)
        step(third, by_dict, rank, 3)
        assert same(every_state(sharded), every_state(by_dict))

    on_ranks(body, 2)
    manifest = open_checkpoint(tmp_path, "three").manifest
    assert manifest.policy["state_dtype"] == "bfloat16"
    narrow = {
        state.dtype
        for record in manifest.parameters.values()
        for key, state in record.states.items()
        if key != "parameters"
    }
    assert narrow == {"bfloat16"}


def test_a_checkpoint_in_fp32_continues_in_16_bits_and_back(tmp_path: Path) -> None:
    def body(rank: int) -> list[str]:
        model, sharded = build(2)
        for number in range(2):
            step(model, sharded, rank, number)
        sharded.save(tmp_path, "wide")
        wide = every_state(sharded)
        log = Lines()
        other, narrow = build(3, precision=BF16)
        narrow.load(tmp_path, "wide")
        for key, value in every_state(narrow).items():
            is_moment = key.endswith(("exp_avg", "exp_avg_sq"))
            assert torch.equal(value, wide[key].bfloat16().float() if is_moment else wide[key]), key
        step(other, narrow, rank, 2)
        narrow.save(tmp_path, "narrow")
        before = every_state(narrow)
        third, back = build(1)
        back.load(tmp_path, "narrow")
        assert same(every_state(back), before)
        kept = back.sharded_step.inner.state.values()
        assert {value.dtype for state in kept for key, value in state.items() if key != "step"} == {torch.float32}
        step(third, back, rank, 3)
        return log.lines

    lines, others = on_ranks(body, 2)
    assert len(lines) == 2
    assert "states in their own dtype, and this run continues with bfloat16" in lines[0]
    assert "states in bfloat16, and this run continues with their own dtype" in lines[1]
    assert not others


# ---------------------------------------------------------------------- configs and refusals


def test_deepspeeds_key() -> None:
    config = {"train_batch_size": 1, "bf16": {"enabled": True, "bf16_optimizer_states": True}}
    precision = load_config(config, world_size=1).precision
    assert precision.state_dtype is torch.bfloat16
    assert precision.resolve(torch.float32).master is torch.float32


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match=r"state_dtype is torch\.float16"):
        Precision(state_dtype=torch.float16)

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    def centered(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(parameters, centered=True)

    def body(rank: int) -> list[str]:
        own = refusal(lambda: build(2, precision=BF16, make_optimizer=lambda p: Own(p, lr=0.1), elementwise=True))
        return [own, refusal(lambda: build(2, precision=BF16, make_optimizer=centered))]

    found = on_ranks(body, 1)[0]
    assert "Own.step() is not torch's" in found[0]
    assert "takes the root of their difference, which rounding can make negative" in found[1]
