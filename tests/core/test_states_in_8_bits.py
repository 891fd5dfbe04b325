"""Optimizer states that rest in 8 bits: the same bits over any ranks, stage and bucket size, and about a quarter of their bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import OPTIMIZERS
from ranks import Lines, on_ranks
from test_states_in_16_bits import KNOWN, key_and_hash
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from twin import CPU, DISK, Setting, as_set, build, every_state, gpt_batch, refusal, same

import zeroshard
from zeroshard import Offload, Policy, Precision, UsageError
from zeroshard.checkpoint.loading import open_checkpoint
from zeroshard.core.eight_bits import BLOCK_NUMEL, EightBits
from zeroshard.core.layout import lay_out
from zeroshard.core.rounding import key_of
from zeroshard.engine.config.load import load_config
from zeroshard.errors import ConfigError
from zeroshard.testing import Workload, train
from zeroshard.testing.gpt import GPT, GPTConfig

EIGHT = Precision(state_dtype=torch.uint8)


class Given(nn.Module):
    """A model whose gradients are given, with few bits each, so that their mean over ranks is exact however many they are.

    Two parameters have states in 8 bits; neither ends at the end of a block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ParameterList(
            nn.Parameter(torch.randn(*shape)) for shape in ((7, 5), (91, 53), (4095,), (4100,))
        )
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, number: int) -> Tensor:
        drawn = torch.Generator().manual_seed(number)
        found = self.scale / 4
        for parameter in self.blocks:
            found = found + (parameter * (torch.randint(-64, 65, parameter.shape, generator=drawn) / 256)).sum()
        return found


CODED = ("blocks.1", "blocks.3")


def steps(model: nn.Module, sharded: zeroshard.Sharded, numbers: range) -> None:
    for number in numbers:
        model(number).backward()
        sharded.optimizer.step()
        sharded.optimizer.zero_grad()


# ---------------------------------------------------------------------- the code itself


def _shares(most: int) -> np.ndarray:
    """Return the share of the scale that each code stands for, as the page says: independent of the package's code."""
    fine, middle = (10, 18) if most == 255 else (5, 9)
    found = [1.0]
    for power in range(30):
        count = 16 if power < fine else 8 if power < middle else 4
        found += [2.0 ** -(power + 1) * (1 + place / count) for place in range(count - 1, -1, -1)]
    return np.array([0.0, *found[most - 1 :: -1]])


def _rounded(values: Tensor, name: str, count: int | None) -> Tensor:
    """Round a whole parameter's state: each block, to the nearest (without a count) or stochastically."""
    flat = values.reshape(-1).double().numpy()
    bits = None if count is None else key_and_hash(flat.size, name, count) * 32.0 + 16
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


@pytest.mark.parametrize("count", [None, 7])
@pytest.mark.parametrize("is_square", [False, True])
def test_the_code_is_the_pages(is_square: bool, count: int | None) -> None:
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
    assert torch.equal(found[:1000], _rounded(values, "w/exp_avg", count))
    assert not found[1000:].any()
    for parts in (None, [(0, 1000, 0, key_of("w/exp_avg", 8))]):  # what a code represents stays
        again = torch.empty(1024)
        code.close(found, rest, parts)
        code.open(rest, again)
        assert torch.equal(again, found)


def test_the_mean_of_rounded_values_is_the_value_and_squares_do_not_vanish() -> None:
    code = EightBits(BLOCK_NUMEL * 100, [])
    rest = torch.empty(code.nbytes(torch.float32), dtype=torch.uint8)
    values, found = torch.full((BLOCK_NUMEL * 100,), -0.7), torch.empty(BLOCK_NUMEL * 100)
    values.view(-1, BLOCK_NUMEL)[:, 0] = 1.0
    values.view(-1, BLOCK_NUMEL)[:, 1] = 2.0**-20  # below the first code's share
    mean = torch.zeros(BLOCK_NUMEL * 100, dtype=torch.float64)
    for count in range(40):
        code.close(values, rest, [(0, values.numel(), 0, key_of("w/exp_avg", count))])
        code.open(rest, found)
        mean += found
    mean /= 40
    assert mean.view(-1, BLOCK_NUMEL)[:, 2:].mean().item() == pytest.approx(-0.7, rel=1e-4)
    assert (mean.view(-1, BLOCK_NUMEL)[:, 0] == 1).all()
    assert mean.view(-1, BLOCK_NUMEL)[:, 1].mean().item() == pytest.approx(2.0**-20, rel=0.5)
    squares = torch.full((BLOCK_NUMEL * 100,), 1e-30)
    squares[0] = 1.0
    code.close(squares, rest, None)
    code.open(rest, found)
    assert (found > 0).all()


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


def test_parameters_are_cut_between_blocks() -> None:
    for ranks in (1, 2, 3, 5):
        for bucket_numel in (1, 3000, 10**6):
            layout = lay_out(
                [5, 4096, 10_000, 256 * 60, 1], ranks, bucket_numel, solo_numel=2**12, alignment=BLOCK_NUMEL
            )
            for bucket in layout.buckets:
                for shard in range(ranks):
                    for piece in bucket.shard_pieces(shard):
                        assert piece.parameter_start % BLOCK_NUMEL == piece.start % BLOCK_NUMEL == 0


# ---------------------------------------------------------------------- the same bits everywhere


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_any_number_of_ranks_any_stage_and_bucket_size(name: str, rounding: Any) -> None:
    found: dict[tuple[int, int, int], dict[str, Tensor]] = {}
    cases = [(stage, numel) for stage in (0, 1, 2, 3) for numel in (10**6, 2000)]

    def body(rank: int) -> list[dict[str, Tensor]]:
        ends = []
        for stage, bucket_numel in cases:
            precision = Precision(state_dtype=torch.uint8, state_rounding=rounding)
            model, sharded = build(
                stage, precision=precision, make_model=Given, make_optimizer=KNOWN[name], bucket_numel=bucket_numel
            )
            steps(model, sharded, range(4))
            ends.append(every_state(sharded))
        return ends

    for ranks in (1, 2, 3):
        for case, one in zip(cases, on_ranks(body, ranks)[0], strict=True):
            found[ranks, *case] = one
    first = found[1, 0, 10**6]
    assert not [case for case, one in found.items() if not same(one, first)]
    moments = {
        key: value
        for key, value in first.items()
        if key.split()[0] in CODED and not key.endswith(("parameters", "step"))
    }
    assert len(moments) >= 2
    for key, value in moments.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, _rounded(value, key, None)), key


@pytest.mark.ranks(2)
def test_parameters_that_are_kept_whole(rank: int) -> None:
    ends = []
    for elementwise in (None, False):
        model, sharded = build(
            2, precision=EIGHT, make_model=Given, make_optimizer=KNOWN["AdamW"], elementwise=elementwise
        )
        steps(model, sharded, range(3))
        ends.append(every_state(sharded))
    assert same(*ends)


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_a_run_is_plain_pytorch_with_rounded_states(rounding: Any) -> None:
    """A plain loop whose states are rounded after each step, by the other implementation; those of small parameters are not."""
    torch.manual_seed(0)
    model = Given()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    for number in range(4):
        model(number).backward()
        optimizer.step()
        optimizer.zero_grad()
        for fqn in CODED:
            state = optimizer.state[model.get_parameter(fqn)]
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = _rounded(state[name], f"{fqn}/{name}", number + 1 if rounding == "stochastic" else None)

    def body(rank: int) -> dict[str, Tensor]:
        precision = Precision(state_dtype=torch.uint8, state_rounding=rounding)
        own, sharded = build(
            2, precision=precision, make_model=Given, bucket_numel=100,
            make_optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
        )  # fmt: skip
        steps(own, sharded, range(4))
        return every_state(sharded)

    found = on_ranks(body, 2)[0]
    for fqn, parameter in model.named_parameters():
        assert torch.equal(found[f"{fqn} parameters"], parameter)
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found[f"{fqn} {name}"], optimizer.state[parameter][name]), (fqn, name)


@pytest.mark.ranks(2)
def test_places(rank: int, tmp_path: Path) -> None:
    how = Offload(str(tmp_path), block_nbytes=4096)
    settings = {
        "stage 0": Setting(Policy.stage(0)),
        "over gloo": Setting(Policy.stage(2), "gloo"),
        "in CPU memory": Setting(Policy.stage(2).offloaded(optimizer=CPU), apart=True),
        "on disk": Setting(Policy.stage(2).offloaded(optimizer=DISK, offload=how)),
        "on disk, apart": Setting(Policy.stage(3).offloaded(optimizer=DISK, parameters=DISK, offload=how), apart=True),
        "parked": Setting(Policy.stage(2), apart=True, parks=CPU),
    }
    ends = {}
    for name, setting in settings.items():
        with as_set(setting):
            model, sharded = build(setting.policy, precision=EIGHT, make_model=Given, bucket_numel=2000)
            for number in range(3):
                steps(model, sharded, range(number, number + 1))
                if setting.parks is not None:
                    sharded.offload_states(place=setting.parks)
                    sharded.reload_states()
            ends[name] = every_state(sharded)
    differ = [name for name, one in ends.items() if not same(one, ends["stage 0"])]
    assert not differ


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [name for name in KNOWN if name != "ASGD"])
def test_every_optimizer_comes_close_to_its_states_in_fp32(rank: int, name: str) -> None:
    ends = []
    for precision in (None, EIGHT):
        model, sharded = build(1, precision=precision, make_model=Given, make_optimizer=KNOWN[name])
        before = {fqn: value.detach().clone() for fqn, value in model.named_parameters()}
        steps(model, sharded, range(4))
        ends.append({fqn: value.detach() - before[fqn] for fqn, value in model.named_parameters()})
    for fqn, moved in ends[0].items():
        assert (ends[1][fqn] - moved).norm() <= 0.1 * moved.norm() + 1e-6, fqn
        assert torch.equal(ends[1][fqn], moved) == (fqn not in CODED or name == "SGD without momentum"), fqn


# ---------------------------------------------------------------------- bytes


@pytest.mark.ranks(2, fresh=True)
def test_six_bytes_less(rank: int, tmp_path: Path) -> None:
    config = GPTConfig(layers=4, width=96, heads=4, context=16)
    numel = sum(parameter.numel() for parameter in GPT(config).parameters())
    work = Workload(lambda: GPT(config), gpt_batch, steps=2)
    for stage in range(4):
        run = train(rank, work, Policy.stage(stage), precision=EIGHT)
        for kind, expected in run.formula.items():
            assert run.memory[kind] == pytest.approx(expected, rel=0.08), (stage, kind)
        each = run.formula["optimizer"] * (2 if stage else 1) / numel
        assert each == pytest.approx(2 + 8 / BLOCK_NUMEL)
    how = Offload(str(tmp_path))
    run = train(rank, work, Policy.stage(2).offloaded(optimizer=DISK, offload=how), precision=EIGHT)
    assert run.memory["disk"] == pytest.approx((4 + 2) * numel / 2, rel=0.08)  # gradients and states


@pytest.mark.parametrize("dtype", [None, "bfloat16", "uint8"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_plan_has_the_bytes_that_a_run_measures(stage: int, dtype: str | None) -> None:
    from zeroshard.tools.planning import plan

    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "data_types": {"state_dtype": dtype},
        "optimizer": {"type": "AdamW", "params": {}}, "zero_optimization": {"stage": stage},
    }  # fmt: skip
    make = lambda: GPT(GPTConfig(layers=3, width=128, heads=4))  # noqa: E731
    batch = (torch.zeros(1, 16, dtype=torch.long),) * 2

    def body(rank: int) -> dict[str, int]:
        engine, *_ = zeroshard.initialize(model=make(), config=config)
        for _ in range(2):
            engine.backward(engine(*batch))
            engine.step()
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
def test_get_gives_fp32_and_set_takes_it(rank: int) -> None:
    model, sharded = build(3, precision=EIGHT, make_model=Given)
    steps(model, sharded, range(1))
    before = every_state(sharded)
    for fqn in ("blocks.1", "blocks.2"):
        value = torch.randn(before[f"{fqn} exp_avg"].shape, generator=torch.Generator().manual_seed(1))
        sharded.states.set(fqn, "exp_avg", value)
        after = every_state(sharded)
        changed = after.pop(f"{fqn} exp_avg")
        assert torch.equal(changed, _rounded(value, "", None) if fqn in CODED else value)
        del before[f"{fqn} exp_avg"]
        assert same(before, {key: after[key] for key in before})


@pytest.mark.ranks(2)
def test_values_that_are_set_replace_a_block_of_nan(rank: int) -> None:
    model, sharded = build(2, precision=EIGHT, make_model=Given)
    steps(model, sharded, range(1))
    for fqn in CODED:
        ones = torch.ones(model.get_parameter(fqn).shape)
        sharded.states.set(fqn, "exp_avg", ones * torch.nan)
        sharded.states.set(fqn, "exp_avg", ones)
        assert torch.equal(every_state(sharded)[f"{fqn} exp_avg"], ones)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["fused AdamW", "SGD"])
def test_states_outlive_a_change_of_what_trains(rank: int, name: str) -> None:
    ends = []
    for bucket_numel in (64, 10**6):
        model, sharded = build(
            2, precision=EIGHT, make_model=Given, make_optimizer=OPTIMIZERS[name], bucket_numel=bucket_numel
        )
        steps(model, sharded, range(2))
        before = every_state(sharded)
        model.blocks[0].requires_grad_(False)
        sharded.update_trainable()
        after = every_state(sharded)
        assert same({key: before[key] for key in after}, after)
        steps(model, sharded, range(2, 3))
        ends.append(every_state(sharded))
    assert same(ends[0], ends[1])


@pytest.mark.parametrize("name", ["fused AdamW", "SGD"])
def test_a_checkpoint_continues_with_the_same_bits(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": EIGHT, "make_model": Given, "make_optimizer": OPTIMIZERS[name]}

    def saves(rank: int) -> dict[str, Tensor]:
        model, sharded = build(2, **options)
        steps(model, sharded, range(3))
        sharded.save(tmp_path, "three")
        steps(model, sharded, range(3, 4))
        return every_state(sharded)

    def loads(rank: int) -> list[dict[str, Tensor]]:
        other, again = build(3, **options, bucket_numel=10**6)
        again.load(tmp_path, "three")
        steps(other, again, range(3, 4))
        third, by_dict = build(2, **options)
        by_dict.load(tmp_path, "three")
        by_dict.optimizer.load_state_dict(by_dict.optimizer.state_dict())
        steps(third, by_dict, range(3, 4))
        return [every_state(again), every_state(by_dict)]

    expected = on_ranks(saves, 2)[0]
    for found in on_ranks(loads, 3)[0]:
        assert same(found, expected)
    manifest = open_checkpoint(tmp_path, "three").manifest
    assert manifest.policy["state_dtype"] == "uint8"
    assert {state.dtype for record in manifest.parameters.values() for state in record.states.values()} == {"float32"}


def test_a_checkpoint_in_fp32_continues_in_8_bits_and_back(tmp_path: Path) -> None:
    def body(rank: int) -> list[str]:
        model, sharded = build(2, make_model=Given)
        steps(model, sharded, range(2))
        sharded.save(tmp_path, "wide")
        wide = every_state(sharded)
        log = Lines()
        other, narrow = build(3, precision=EIGHT, make_model=Given)
        narrow.load(tmp_path, "wide")
        for key, value in every_state(narrow).items():
            is_coded = key.endswith(("exp_avg", "exp_avg_sq")) and key.split()[0] in CODED
            assert torch.equal(value, _rounded(wide[key], "", None) if is_coded else wide[key]), key
        steps(other, narrow, range(2, 3))
        narrow.save(tmp_path, "narrow")
        before = every_state(narrow)
        third, back = build(1, make_model=Given)
        back.load(tmp_path, "narrow")
        assert same(every_state(back), before)
        steps(third, back, range(3, 4))
        return log.lines

    lines, others = on_ranks(body, 2)
    assert len(lines) == 2
    assert "states in their own dtype, and this run continues with uint8" in lines[0]
    assert "states in uint8, and this run continues with their own dtype" in lines[1]
    assert not others


# ---------------------------------------------------------------------- configs and refusals


def test_keys() -> None:
    def precision(**blocks: Any) -> Precision:
        return load_config({"train_batch_size": 1, **blocks}, world_size=1).precision

    assert precision().state_dtype is None
    found = precision(data_types={"state_dtype": "uint8", "state_rounding": "nearest"})
    assert (found.state_dtype, found.state_rounding) == (torch.uint8, "nearest")
    assert (
        precision(data_types={"state_dtype": "bf16"}, bf16={"bf16_optimizer_states": True}).state_dtype
        is torch.bfloat16
    )
    with pytest.raises(ConfigError, match="rest in one dtype"):
        _ = precision(data_types={"state_dtype": "uint8"}, bf16={"bf16_optimizer_states": True})


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "Muon": (lambda p: torch.optim.Muon([one for one in p if one.ndim == 2]), "Muon needs whole parameters"),
    "Adafactor": (torch.optim.Adafactor, "Adafactor needs whole parameters"),
    "ASGD": (torch.optim.ASGD, "ASGD are averaged weights"),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, centered=True), "RMSprop(centered=True) takes the root"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    assert message in on_ranks(lambda rank: refusal(lambda: build(2, precision=EIGHT, make_optimizer=make)), 1)[0]


def test_parts_that_are_divided_inside_a_block_are_refused() -> None:
    """Tensor parallelism over rows of 256 elements divides between blocks; over shorter rows, or columns, it does not."""

    def body(rank: int) -> list[str]:
        found = []
        for width, how in ((256, ColwiseParallel), (255, ColwiseParallel), (256, RowwiseParallel)):
            mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
            model = parallelize_module(nn.Sequential(nn.Linear(width, 64, bias=False)), mesh["tp"], {"0": how()})
            optimizer = torch.optim.AdamW(model.parameters())

            def take(model: nn.Module = model, optimizer: Any = optimizer, mesh: Any = mesh) -> None:
                zeroshard.shard(model, optimizer, 2, precision=EIGHT, group=mesh["dp"])

            if (width, how) == (256, ColwiseParallel):
                take()
            else:
                found.append(refusal(take))
        return found

    rows, columns = on_ranks(body, 2)[0]
    assert "0.weight is divided over 2 ranks in dimension 0, not between blocks of 256 elements" in rows
    assert "0.weight is divided over 2 ranks in dimension 1" in columns


@pytest.mark.parametrize("elementwise", [None, True])
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW of 8 bits", "a class of the user's"])
def test_blocks_of_other_packages_run_only_whole(name: str, elementwise: bool | None) -> None:
    optim = pytest.importorskip("bitsandbytes").optim
    make = optim.AdamW8bit if name == "AdamW8bit" else lambda p: optim.AdamW(p, optim_bits=8)
    if name == "a class of the user's":
        make = type("OwnAdamW", (optim.AdamW8bit,), {})

    def body(rank: int) -> str:
        model, sharded = build(2, make_model=Given, make_optimizer=make, elementwise=False)
        steps(model, sharded, range(1))
        return refusal(lambda: build(2, make_model=Given, make_optimizer=make, elementwise=elementwise))

    assert "AdamW" in (found := on_ranks(body, 2)[0])
    assert (
        "depend on the number of ranks. Use the class of torch.optim with Precision(state_dtype=torch.uint8)" in found
    )


@pytest.mark.parametrize("elementwise", [None, False])
@pytest.mark.parametrize("name", ["AdamW8bit", "Adam4bit", "AdamWFp8"])
@pytest.mark.parametrize("package", ["torchao", "a stand-in", "a class of the user's"])
def test_states_of_torchao_are_refused(package: str, name: str, elementwise: bool | None) -> None:
    """Its tensors cannot be divided: a run would train, and fail at its first save."""
    if package == "torchao":
        make = getattr(pytest.importorskip("torchao.optim", reason="torchao is not installed"), name)
    else:
        make = type(name, (torch.optim.AdamW,), {"__module__": "torchao.optim.adam"})
    if package == "a class of the user's":
        name, make = "Own", type("Own", (make,), {})

    def body(rank: int) -> list[str]:
        return [
            refusal(lambda: build(stage, make_model=Given, make_optimizer=make, elementwise=elementwise))  # noqa: B023
            for stage in (1, 3)
        ]

    for text in on_ranks(body, 2)[0]:
        assert f"{name} keeps states in torchao's own classes of tensors" in text
        assert text.endswith("with Precision(state_dtype=torch.uint8) (in a config, data_types.state_dtype).")


def test_what_precision_refuses() -> None:
    with pytest.raises(UsageError, match=r"state_dtype is torch\.int8"):
        Precision(state_dtype=torch.int8)
    with pytest.raises(UsageError, match="state_rounding is 'up'"):
        Precision(state_rounding="up")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Leave master_dtype in fp32"):
        Precision(state_dtype=torch.uint8, master_dtype=torch.bfloat16)
