"""Optimizer states that rest in bfloat16 or 8 bits: the same bits over any ranks, stage and bucket size, in fewer bytes."""

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from twin import (
    CPU,
    DISK,
    LOSS_SCALES,
    Setting,
    build,
    engine_steps,
    every_state,
    expect_equal,
    gpt_batch,
    plain_torch,
    refusal,
    same,
    steps,
    update,
)

import zeroshard
from zeroshard import Offload, Policy, Precision, UsageError
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.core.eight_bits import BLOCK_NUMEL, EightBits
from zeroshard.core.rounding import CHUNK_NUMEL, key_of, round_
from zeroshard.engine.config.load import load_config
from zeroshard.errors import ConfigError
from zeroshard.optim.lion import Lion
from zeroshard.testing import Workload, train
from zeroshard.testing.gpt import GPT, GPTConfig

KINDS = {
    "bf16": Precision(state_dtype=torch.bfloat16),
    "uint8 to the nearest": Precision(state_dtype=torch.uint8, state_rounding="nearest"),
    "uint8": Precision(state_dtype=torch.uint8),
}
EACH = pytest.mark.parametrize("kind", ["bf16", "uint8"])
ADAMW_OR_SGD = pytest.mark.parametrize("name", ["fused AdamW", "SGD"])
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
    "Muon with AdamW": muon_with_adamw,
}


class GivenBlock(nn.Module):
    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.small, self.large = (nn.Parameter(torch.randn(*shape)) for shape in shapes)

    def forward(self, drawn: torch.Generator) -> Tensor:
        small, large = (torch.randint(-64, 65, p.shape, generator=drawn) / 256 for p in (self.small, self.large))
        return (self.small * small).sum() + (self.large * large).sum()


class Given(nn.Module):
    """A model whose gradients are given, with few bits each, so that their mean over ranks is exact however many they are.

    The large parameters have states in 8 bits; neither ends at the end of a block of these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([GivenBlock((7, 5), (91, 53)), GivenBlock((4095,), (4100,))])
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, number: int) -> Tensor:
        drawn = torch.Generator().manual_seed(number)
        return sum((block(drawn) for block in self.blocks), start=self.scale / 4)


def numbers(rank: int, number: int) -> tuple[int]:
    return (number,)


def given(policy: Policy | int, kind: str | None, count: int = 0, **options: Any) -> tuple[Any, zeroshard.Sharded]:
    """Return the model, after `count` steps."""
    model, sharded = build(policy, precision=KINDS[kind] if kind else None, make_model=Given, **options)
    steps(model, sharded, 0, range(count), numbers)
    return model, sharded


def is_narrow(kind: str, key: str) -> bool:
    """Return whether a kind rounds a state, named as by `every_state`."""
    return not key.endswith(("parameters", "step")) and (kind == "bf16" or "large" in key)


# ---------------------------------------------------------------------- the rounding itself


def _hash(number: np.ndarray) -> np.ndarray:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        number = (number ^ (number >> np.uint32(shift))) * np.uint32(factor)
    return number ^ (number >> np.uint32(16))


def _random_bits(numel: int, name: str, count: int) -> np.ndarray:
    """Return 16 random bits of each element of a parameter's state."""
    start = _hash(np.array([(count * 0x9E3779B9 + zlib.crc32(name.encode())) & 0xFFFFFFFF], dtype=np.uint32))
    return _hash(np.arange(numel, dtype=np.uint32) * np.uint32(0x9E3779B9) + start) >> np.uint32(16)


def _in_16_bits(values: Tensor, name: str, count: int | None) -> Tensor:
    if count is None:
        return values.bfloat16().float()
    bits = _random_bits(values.numel(), name, count)
    rounded = (values.reshape(-1).numpy().view(np.uint32) + bits) & np.uint32(0xFFFF0000)
    return torch.from_numpy(rounded.view(np.float32)).view(values.shape)


def _shares(most: int) -> np.ndarray:
    """Return the share of the scale that each code represents."""
    fine, middle = (10, 18) if most == 255 else (5, 9)
    found = [1.0]
    for power in range(30):
        count = 16 if power < fine else 8 if power < middle else 4
        found += [2.0 ** -(power + 1) * (1 + place / count) for place in range(count - 1, -1, -1)]
    return np.array([0.0, *found[most - 1 :: -1]])


def _in_8_bits(values: Tensor, name: str, count: int | None) -> Tensor:
    flat = values.reshape(-1).double().numpy()
    bits = None if count is None else _random_bits(flat.size, name, count) * 32.0 + 16
    found = np.empty_like(flat)
    for low in range(0, flat.size, BLOCK_NUMEL):
        block = flat[low : low + BLOCK_NUMEL]
        is_signed = (block < 0).any()
        shares = _shares(127 if is_signed else 255)
        scale = np.abs(block).max()
        # Divided in fp32, as the code does.
        part = (np.abs(block).astype(np.float32) / np.float32(scale or 1)).astype(np.float64)
        above = np.searchsorted(shares, part).clip(1)
        gap = shares[above] - shares[above - 1]
        draw = 0.5 if bits is None else 1 - bits[low : low + BLOCK_NUMEL] / 2**21
        code = np.where((part - shares[above - 1]) / gap >= draw, above, above - 1)
        if not is_signed:
            code = np.where((part > 0) & (code == 0), 1, code)
        found[low : low + BLOCK_NUMEL] = np.sign(block) * (shares[code].astype(np.float32) * np.float32(scale))
    return torch.from_numpy(found).float().view(values.shape)


def reference(kind: str, values: Tensor, name: str = "", count: int | None = None) -> Tensor:
    """Round a whole parameter's state as the page says, independently of the package's code.

    Without a count of steps, and where the kind says so, values are rounded to the nearest.
    """
    rounded = _in_16_bits if kind == "bf16" else _in_8_bits
    return rounded(values, name, None if "nearest" in kind else count)


def through(kind: str, values: Tensor, key: int) -> Tensor:
    """Return what the package's code keeps of values, with the random bits of a key."""
    parts = [(0, values.numel(), 0, key)]
    if kind == "bf16":
        found = values.clone()
        round_(found, torch.bfloat16, parts)
        return found
    code, found = EightBits(values.numel(), []), torch.empty_like(values)
    rest = torch.empty(code.nbytes(torch.float32), dtype=torch.uint8)
    code.close(values, rest, parts)
    code.open(rest, found)
    return found


def test_random_bits_are_those_of_the_page_in_chunks_and_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    expected = reference("bf16", values, "w/exp_avg", 7)
    key = key_of("w/exp_avg", torch.tensor(7.0))
    for chunk in (1 << 20, 100, 7):
        monkeypatch.setitem(CHUNK_NUMEL, "cpu", chunk)
        assert torch.equal(through("bf16", values, key), expected)
        shard = torch.zeros(400)  # another parameter, 300 elements of this one, and padding
        shard[90:390] = values[500:800]
        round_(shard, torch.bfloat16, [(0, 90, 5, key_of("v", 1)), (90, 300, 500, key)])
        assert torch.equal(shard[90:390], expected[500:800])
        assert not shard[390:].any()
    assert torch.equal(through("bf16", values.double(), key).float(), expected)
    assert len({key_of(*one) for one in (("w", 7), ("v", 7), ("w", 8))}) == 3


@pytest.mark.quick(2)
@EACH
def test_the_mean_of_rounded_values_is_the_value(kind: str) -> None:
    values = torch.full((100 * BLOCK_NUMEL,), -0.7)
    values[::BLOCK_NUMEL] = 1.0
    values[1::BLOCK_NUMEL] = 2.0**-20  # of 8 bits, below the first code's share
    found = [through(kind, values, key_of("w/exp_avg", count)).double() for count in range(40)]
    assert len({one.mean().item() for one in found}) > 30  # other bits in each step
    mean = torch.stack(found).mean(0).view(-1, BLOCK_NUMEL)
    assert mean[:, 2:].mean().item() == pytest.approx(-0.7, rel=1e-4)
    assert (mean[:, 0] == 1).all()
    assert mean[:, 1].mean().item() == pytest.approx(2.0**-20, rel=0.5)


def test_values_that_fit_16_bits_do_not_change_and_nan_stays() -> None:
    odd = torch.tensor([0.0, -0.0, 1.5, -3.0, float("inf"), -float("inf"), 2.0**-130])
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32)  # NaNs that a carry would change
    values = through("bf16", torch.cat([odd, bits.view(torch.float32)]), 0xFFFFFFF0)
    assert torch.equal(values[:7], odd)
    assert values[7:].isnan().all()


@pytest.mark.parametrize("count", [None, 7])
@pytest.mark.parametrize("is_square", [False, True])
def test_the_code_of_8_bits_is_the_pages(is_square: bool, count: int | None) -> None:
    """Squares vary by far more than the code's range: none becomes zero."""
    drawn = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=drawn) * torch.randn(1000, generator=drawn).mul(4).exp()
    values[500:510] = 0.0
    values = values.square() if is_square else values
    padded = torch.zeros(1024)
    padded[:1000] = values
    code = EightBits(1024, [])
    rest = torch.empty(code.nbytes(torch.float32), dtype=torch.uint8)
    assert rest.numel() == 1024 + 4 * 4
    code.close(padded, rest, None if count is None else [(0, 1000, 0, key_of("w/exp_avg", count))])
    found = torch.full((1024,), torch.nan)
    code.open(rest, found)
    assert torch.equal(found[:1000], reference("uint8", values, "w/exp_avg", count))
    assert not found[1000:].any()
    assert not is_square or torch.equal(found > 0, padded > 0)
    for parts in (None, [(0, 1000, 0, key_of("w/exp_avg", 8))]):  # what a code represents stays
        again = torch.empty(1024)
        code.close(found, rest, parts)
        code.open(rest, again)
        assert torch.equal(again, found)


def test_a_block_that_is_not_finite_is_nan_and_others_are_not() -> None:
    code = EightBits(3 * BLOCK_NUMEL, [(2 * BLOCK_NUMEL, 5)])
    for bad in (torch.nan, torch.inf, -torch.inf):
        values = torch.ones(3 * BLOCK_NUMEL)
        values[7] = bad
        values[2 * BLOCK_NUMEL + 5 :] = 0
        rest, found = torch.empty(code.nbytes(values.dtype), dtype=torch.uint8), torch.empty_like(values)
        code.close(values, rest, None)
        code.open(rest, found)
        assert found[:BLOCK_NUMEL].isnan().all()
        assert torch.equal(found[BLOCK_NUMEL:], values[BLOCK_NUMEL:])


# ---------------------------------------------------------------------- the same bits everywhere


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", ["uint8 to the nearest", "bf16", "uint8"])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_any_number_of_ranks_any_stage_and_bucket_size(name: str, kind: str) -> None:
    cases = [(stage, numel) for stage in (0, 1, 2, 3) for numel in (10**6, 2000)]

    def body(rank: int) -> list[dict[str, Tensor]]:
        return [
            every_state(given(stage, kind, 4, make_optimizer=KNOWN[name], bucket_numel=numel)[1])
            for stage, numel in cases
        ]

    found = {}
    for ranks in (1, 2, 3):
        for case, one in zip(cases, on_ranks(body, ranks)[0], strict=True):
            found[ranks, *case] = one
    first = found[1, 0, 10**6]
    assert not [case for case, one in found.items() if not same(one, first)]
    narrow = {key: value for key, value in first.items() if is_narrow(kind, key)}
    assert len(narrow) >= (5 if kind == "bf16" else 2)
    for key, value in narrow.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, reference(kind, value)), key


@pytest.mark.ranks(2)
def test_parameters_that_are_kept_whole_have_the_same_states(rank: int) -> None:
    whole, cut = (given(2, "uint8", 3, make_optimizer=KNOWN["AdamW"], elementwise=one)[1] for one in (False, None))
    assert same(every_state(whole), every_state(cut))


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", ["uint8 to the nearest", "bf16", "uint8"])
def test_a_run_is_plain_pytorch_with_rounded_states(kind: str) -> None:
    """A plain loop whose states are rounded after each step, by the other implementation."""
    make = lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False)  # noqa: E731
    model, optimizer = plain_torch(make, Given)
    for number in range(4):
        update(model(number), optimizer)
        for fqn, parameter in model.named_parameters():
            state = optimizer.state[parameter]
            for name in ("exp_avg", "exp_avg_sq"):
                if is_narrow(kind, f"{fqn} {name}"):
                    state[name] = reference(kind, state[name], f"{fqn}/{name}", number + 1)

    def body(rank: int) -> dict[str, Tensor]:
        return every_state(given(2, kind, 4, make_optimizer=make, bucket_numel=100)[1])

    found = on_ranks(body, 2)[0]
    for fqn, parameter in model.named_parameters():
        assert torch.equal(found[f"{fqn} parameters"], parameter)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[f"{fqn} {name}"], optimizer.state[parameter][name]), (fqn, name)


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("tied", "bf16 states"),
        ("frozen base", "bf16, states too"),
        ("skipping", "bf16 states"),
        ("skipping", "bf16, states too"),
        ("given", "8-bit states"),
    ],
)
def test_stages_and_places(rank: int, name: str, precision: str, tmp_path: Path) -> None:
    how = Offload(str(tmp_path), buffer_numel=8192, block_nbytes=4096)
    work = Workload(Given, numbers, steps=3)
    if name != "given":
        work = workload(name, steps=3, max_norm=0.5, loss_scale=LOSS_SCALES[precision])
    settings = {f"stage {stage}": Setting(Policy.stage(stage)) for stage in range(4)}
    settings |= {
        "over gloo": Setting(Policy.stage(2), "gloo"),
        "in CPU memory": Setting(Policy.stage(2).offloaded(optimizer=CPU), apart=True),
        "on disk": Setting(Policy.stage(2).offloaded(optimizer=DISK, offload=how)),
        "on disk, apart": Setting(Policy.stage(3).offloaded(optimizer=DISK, parameters=DISK, offload=how), apart=True),
        "parked": Setting(Policy.stage(2), apart=True, parks=CPU),
    }  # fmt: skip
    expect_equal(rank, work, settings, precision, bucket_numel=2000 if name == "given" else 256)


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@EACH
@pytest.mark.parametrize("name", KNOWN)
def test_every_optimizer_comes_close_to_its_states_in_fp32(rank: int, name: str, kind: str) -> None:
    if kind == "uint8" and name in ("ASGD", "Muon with AdamW"):
        return  # refused: see below
    ends = []
    for precision, bucket_numel in ((None, 256), (kind, 2000), (kind, 10**6)):
        model, sharded = given(1, precision, make_optimizer=KNOWN[name], bucket_numel=bucket_numel)
        before = {fqn: value.detach().clone() for fqn, value in model.named_parameters()}
        steps(model, sharded, 0, range(4), numbers)
        moved = {fqn: value.detach() - before[fqn] for fqn, value in model.named_parameters()}
        ends.append((every_state(sharded), moved))
    assert same(ends[1][0], ends[2][0])
    for fqn, wide in ends[0][1].items():
        moved = ends[1][1][fqn]
        assert (moved - wide).norm() <= (0.05 if kind == "bf16" else 0.1) * wide.norm() + 1e-6, fqn
        if kind == "uint8":
            assert torch.equal(moved, wide) == (not fqn.endswith("large") or name == "SGD without momentum"), fqn


@pytest.mark.ranks(1)
def test_a_state_without_gradients_decays(rank: int) -> None:
    """Rounded to the nearest, a second moment would keep its value: a step takes a thousandth of it, an eighth of a gap."""
    make = lambda p: torch.optim.Adam(p, foreach=False)  # noqa: E731
    model, sharded = build(1, precision=KINDS["bf16"], make_model=lambda: nn.Linear(40, 50), make_optimizer=make)
    update(model(torch.ones(1, 40)).sum() * 100, sharded.optimizer)
    first = sharded.states.get("weight", "exp_avg_sq")
    for _ in range(100):
        update((model(torch.zeros(1, 40)) * 0).sum(), sharded.optimizer)
    mean = (sharded.states.get("weight", "exp_avg_sq") / first).mean().item()
    assert mean == pytest.approx(0.999**100, rel=2e-3)


# ---------------------------------------------------------------------- bytes

OF_STATES = 2 + 8 / BLOCK_NUMEL
NBYTES = {
    "bf16": (12, 4 + 8 / 2, 2 + 10 / 2, 10 / 2),
    "uint8": (8 + OF_STATES, 8 + OF_STATES / 2, 4 + (4 + OF_STATES) / 2, (8 + OF_STATES) / 2),
}
"""Bytes of a parameter with Adam at each stage on two ranks: all else in 16 bits as far as it may be, or in fp32."""


@pytest.mark.ranks(2, fresh=True)
@EACH
def test_bytes_of_a_parameter(rank: int, kind: str, tmp_path: Path) -> None:
    config = GPTConfig(layers=4, width=96, heads=4, context=16)
    numel = sum(parameter.numel() for parameter in GPT(config).parameters())
    precision, on_disk = KINDS[kind], 4 + 2  # gradients, and two states
    if kind == "bf16":
        precision = Precision(torch.bfloat16, accumulate_dtype=torch.bfloat16, state_dtype=torch.bfloat16)
        on_disk = 4 + 2 + 2 + 2  # master weights, gradients, and two states
    work = Workload(lambda: GPT(config), gpt_batch, steps=2)
    for stage, nbytes in enumerate(NBYTES[kind]):
        run = train(rank, work, Policy.stage(stage), precision=precision)
        assert sum(run.formula.values()) == pytest.approx(nbytes * numel)
        for state, expected in run.formula.items():
            assert run.memory[state] == pytest.approx(expected, rel=0.02 if kind == "bf16" else 0.08), (stage, state)
    policy = Policy.stage(2).offloaded(optimizer=DISK, offload=Offload(str(tmp_path)))
    assert train(rank, work, policy, precision=precision).memory["disk"] == pytest.approx(on_disk * numel / 2, rel=0.08)


@pytest.mark.ranks(2)
def test_no_state_is_opened_before_the_step(rank: int) -> None:
    """It would take memory from the forward. An accelerator keeps no frame (test_simgpu)."""
    model, sharded = build(2, precision=KINDS["bf16"])
    for number in range(3):
        steps(model, sharded, rank, [number])
        assert frames_between_steps(sharded) == (1, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_plan_has_the_bytes_that_a_run_measures(stage: int, dtype: str) -> None:
    from zeroshard.tools.planning import plan

    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "data_types": {"state_dtype": dtype},
        "optimizer": {"type": "AdamW", "params": {}}, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    make = lambda: GPT(GPTConfig(layers=3, width=128, heads=4))  # noqa: E731
    batch = (torch.zeros(1, 16, dtype=torch.long),) * 2

    def body(rank: int) -> dict[str, int]:
        engine, *_ = zeroshard.initialize(model=make(), config=config)
        engine_steps(engine, rank, range(2), lambda *_: batch)
        report: dict[str, int] = engine.memory_report()
        return report

    measured = on_ranks(body, 2)[0]
    planned = plan(make, config, world_size=2, batch=batch, presets=False).rows[0].figures.rest
    tensors = len(list(make().parameters()))
    for state in ("parameters", "gradients", "optimizer"):
        # An accelerator rounds each tensor up to 512 bytes: a parameter's step count, and placeholders of its two states.
        more = planned.get(state, 0) - measured[state]
        assert 0 <= more <= 512 * 3 * tensors, state


# ---------------------------------------------------------------------- states by name, and checkpoints


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@EACH
def test_get_gives_fp32_and_set_rounds_to_the_nearest(rank: int, kind: str) -> None:
    _, sharded = given(3, kind, 1)
    expected = every_state(sharded)
    for fqn in ("blocks.0.large", "blocks.1.large", "blocks.1.small"):
        key = f"{fqn} exp_avg"
        value = torch.randn(expected[key].shape, generator=torch.Generator().manual_seed(1))
        sharded.states.set(fqn, "exp_avg", value * torch.nan)  # no block stays so
        sharded.states.set(fqn, "exp_avg", value)
        expected[key] = reference(kind, value) if is_narrow(kind, key) else value
        found = every_state(sharded)
        assert found[key].dtype == torch.float32
        assert same(found, expected)
    text = refusal(lambda: dcp.save({"app": zeroshard.DistributedState(sharded)}, checkpoint_id="/nowhere"))
    assert "some elsewhere, in 16 bits or in 8. Use sharded.save" in text


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@EACH
@ADAMW_OR_SGD
def test_states_outlive_a_change_of_what_trains(rank: int, name: str, kind: str) -> None:
    ends = []
    for bucket_numel in (64, 10**6):
        model, sharded = given(2, kind, 2, make_optimizer=OPTIMIZERS[name], bucket_numel=bucket_numel)
        before = every_state(sharded)
        model.blocks[0].small.requires_grad_(False)
        sharded.update_trainable()
        after = every_state(sharded)
        assert "blocks.0.small parameters" in after
        assert same({key: before[key] for key in after}, after)
        steps(model, sharded, 0, [2], numbers)
        ends.append(every_state(sharded))
    assert same(ends[0], ends[1])


@pytest.mark.quick(2)
@EACH
@ADAMW_OR_SGD
def test_a_checkpoint_continues_with_the_same_bits(name: str, kind: str, tmp_path: Path) -> None:
    """On other ranks, at another stage, and through `state_dict`."""
    options: dict[str, Any] = {"make_optimizer": OPTIMIZERS[name]}

    def saves(rank: int) -> dict[str, Tensor]:
        model, sharded = given(2, kind, 3, **options)
        sharded.save(tmp_path, "three")
        steps(model, sharded, 0, [3], numbers)
        return every_state(sharded)

    def loads(rank: int) -> list[dict[str, Tensor]]:
        ends = []
        for stage, bucket_numel in ((3, 10**6), (2, 256)):
            model, sharded = given(stage, kind, **options, bucket_numel=bucket_numel)
            sharded.load(tmp_path, "three")
            if stage == 2:
                sharded.optimizer.load_state_dict(sharded.optimizer.state_dict())
            steps(model, sharded, 0, [3], numbers)
            ends.append(every_state(sharded))
        return ends

    expected = on_ranks(saves, 2)[0]
    for found in on_ranks(loads, 3)[0]:
        assert same(found, expected)
    manifest = open_checkpoint(tmp_path, "three").manifest
    assert manifest.policy["state_dtype"] == str(KINDS[kind].state_dtype).removeprefix("torch.")
    states = [one for record in manifest.parameters.values() for one in record.states.items()]
    assert {state.dtype for key, state in states if key != "parameters"} == {
        "bfloat16" if kind == "bf16" else "float32"
    }


@pytest.mark.quick(2)
@EACH
def test_a_checkpoint_in_fp32_continues_in_narrow_states_and_back(kind: str, tmp_path: Path) -> None:
    def body(rank: int) -> list[str]:
        _, sharded = given(2, None, 2)
        sharded.save(tmp_path, "wide")
        wide = every_state(sharded)
        log = Lines()
        other, narrow = given(3, kind)
        narrow.load(tmp_path, "wide")
        rounded = {key: reference(kind, value) if is_narrow(kind, key) else value for key, value in wide.items()}
        assert same(every_state(narrow), rounded)
        steps(other, narrow, 0, [2], numbers)
        narrow.save(tmp_path, "narrow")
        before = every_state(narrow)
        third, back = given(1, None)
        back.load(tmp_path, "narrow")
        assert same(every_state(back), before)
        kept = back.sharded_step.inner.state.values()
        assert {value.dtype for state in kept for key, value in state.items() if key != "step"} == {torch.float32}
        steps(third, back, 0, [3], numbers)
        return log.lines

    lines, others = on_ranks(body, 2)
    dtype = str(KINDS[kind].state_dtype).removeprefix("torch.")
    assert len(lines) == 2
    assert f"states in their own dtype, and this run continues with {dtype}" in lines[0]
    assert f"states in {dtype}, and this run continues with their own dtype" in lines[1]
    assert not others


# ---------------------------------------------------------------------- configs and refusals


def test_keys_of_a_config() -> None:
    def precision(**blocks: Any) -> Precision:
        return load_config({"train_batch_size": 1, **blocks}, world_size=1).precision

    assert precision().state_dtype is None
    found = precision(data_types={"state_dtype": "uint8", "state_rounding": "nearest"})
    assert (found.state_dtype, found.state_rounding) == (torch.uint8, "nearest")
    deepspeeds = {"bf16": {"enabled": True, "bf16_optimizer_states": True}}
    found = precision(**deepspeeds)
    assert (found.state_dtype, found.resolve(torch.float32).master) == (torch.bfloat16, torch.float32)
    assert precision(**deepspeeds, data_types={"state_dtype": "bf16"}).state_dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="rest in one dtype"):
        _ = precision(**deepspeeds, data_types={"state_dtype": "uint8"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"state_dtype": torch.float16}, r"state_dtype is torch\.float16"),
        ({"state_dtype": torch.int8}, r"state_dtype is torch\.int8"),
        ({"state_rounding": "up"}, "state_rounding is 'up'"),
        ({"state_dtype": torch.uint8, "master_dtype": torch.bfloat16}, "Leave master_dtype in fp32"),
    ],
    ids=str,
)
@pytest.mark.quick(4)
def test_what_precision_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Precision(**options)


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


ROOT = "RMSprop(centered=True) takes the root of their difference, which rounding can make negative"


@pytest.mark.ranks(1)
@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda p: Own(p, lr=0.1), "bf16", "Own.step() is not torch's"),
        (lambda p: torch.optim.RMSprop(p, centered=True), "bf16", ROOT),
        (lambda p: torch.optim.RMSprop(p, centered=True), "uint8", ROOT),
        (lambda p: torch.optim.Muon([one for one in p if one.ndim == 2]), "uint8", "Muon needs whole parameters"),
        (torch.optim.Adafactor, "uint8", "Adafactor needs whole parameters"),
        (torch.optim.ASGD, "uint8", "ASGD are averaged weights"),
    ],
)
def test_optimizers_that_are_refused(rank: int, make: Callable[..., Any], kind: str, message: str) -> None:
    elementwise = True if "Own" in message else None  # torch's own need no word
    assert message in refusal(lambda: build(2, precision=KINDS[kind], make_optimizer=make, elementwise=elementwise))


@pytest.mark.ranks(2)
def test_parts_that_are_divided_inside_a_block_are_refused(rank: int) -> None:
    """Tensor parallelism over rows of 256 elements divides between blocks; over shorter rows, or columns, it does not."""

    def take(width: int, how: Any) -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(nn.Sequential(nn.Linear(width, 64, bias=False)), mesh["tp"], {"0": how()})
        build(2, precision=KINDS["uint8"], make_model=lambda: model, group=mesh["dp"])

    take(256, ColwiseParallel)
    divided = "0.weight is divided over 2 ranks in dimension"
    assert f"{divided} 0, not between blocks of 256 elements" in refusal(lambda: take(255, ColwiseParallel))
    assert f"{divided} 1" in refusal(lambda: take(256, RowwiseParallel))


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW of 8 bits", "a class of the user's"])
def test_blocks_of_other_packages_run_only_whole(name: str) -> None:
    optim = pytest.importorskip("bitsandbytes").optim
    make = optim.AdamW8bit if name == "AdamW8bit" else lambda p: optim.AdamW(p, optim_bits=8)
    if name == "a class of the user's":
        make = type("OwnAdamW", (optim.AdamW8bit,), {})

    def body(rank: int) -> list[str]:
        given(2, None, 1, make_optimizer=make, elementwise=False)
        return [refusal(lambda: given(2, None, make_optimizer=make, elementwise=one)) for one in (None, True)]  # noqa: B023

    for text in on_ranks(body, 2)[0]:
        assert "AdamW" in text
        assert "number of ranks. Use the class of torch.optim with Precision(state_dtype=torch.uint8)" in text


@pytest.mark.parametrize("package", ["torchao", "a class of the user's", "a stand-in"])
def test_states_of_torchao_are_refused(package: str) -> None:
    """Its tensors cannot be divided: a run would train, and fail at its first save."""
    classes: dict[str, Any] = {}
    for name in ("AdamW8bit", "Adam4bit", "AdamWFp8"):
        classes[name] = type(name, (torch.optim.AdamW,), {"__module__": "torchao.optim.adam"})
        if package == "torchao":
            classes[name] = getattr(pytest.importorskip("torchao.optim", reason="torchao is not installed"), name)
    if package == "a class of the user's":
        classes = {"Own": type("Own", (classes["Adam4bit"],), {})}

    def body(rank: int) -> list[tuple[str, str]]:
        return [
            (name, refusal(lambda: given(stage, None, make_optimizer=make, elementwise=elementwise)))  # noqa: B023
            for name, make in classes.items()
            for stage, elementwise in ((1, None), (3, False))
        ]

    for name, text in on_ranks(body, 2)[0]:
        assert f"{name} keeps states in torchao's own classes of tensors" in text
        assert text.endswith("with Precision(state_dtype=torch.uint8) (in a config, data_types.state_dtype).")
