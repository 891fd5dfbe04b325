"""The caller's tensors are his: what a call takes is neither kept nor changed, and what it returns does not change later.

Calls whose documentation says that they return the memory of the training are left out: `states.local`, `named_weights`,
`DistributedState.state_dict`, and torch's own `optimizer.state_dict()`, `parameter.grad` and, below stage 3, `model.state_dict()`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn
from twin import Setting, as_set, update

import zeroshard
from zeroshard import Offload, Policy, Precision, UsageError
from zeroshard.core.model_states import Range

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")
PLACES = ("accelerator", "cpu", "cpu apart", "disk", "parameters on cpu")


class Run:
    """A model that has taken two steps, and all that a call may need."""

    def __init__(self, stage: int, place: str, dtype: torch.dtype, folder: Path) -> None:
        policy = Policy.stage(stage)
        how = Offload(str(folder), buffer_numel=4096, block_nbytes=4096, sub_group_numel=16)
        if place == "parameters on cpu":
            policy = policy.offloaded(parameters="cpu", offload=how)
        elif place != "accelerator":
            policy = policy.offloaded(optimizer=place.split(maxsplit=1)[0], offload=how)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        self.model.register_buffer("scale", torch.ones(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), torch.tensor(0.1), weight_decay=0.1)
        self.sharded = zeroshard.shard(self.model, self.optimizer, policy, precision=Precision(dtype))
        self.folder, self.dtype, self.number, self.stage, self.place = folder, dtype, 0, stage, place
        self.step()
        self.step()

    def backward(self) -> None:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(self.number)).to(self.dtype)
        self.model(x).float().square().mean().backward()
        self.number += 1

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def goes_on(self) -> None:
        """Use and move everything: steps, a norm, a save and a load."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step()
        self.backward()
        self.sharded.clip_grad_norm_(0.01)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sharded.offload_states()
        self.sharded.reload_states()
        self.step()

    def everything(self) -> list[Tensor | None]:
        states = self.sharded.states
        return [states.get(name, state) for name in NAMES for state in ("parameters", "exp_avg", "exp_avg_sq", "step")]


def first(run: Run, state: str = "parameters") -> Tensor:
    value = run.sharded.states.get("0.weight", state)
    assert value is not None
    return value


def of_parameter(run: Run) -> zeroshard.ParameterStates:
    return zeroshard.parameter_states(run.model[0].weight)


def loaded_values(run: Run) -> Any:
    run.sharded.save(run.folder / "values", "one", {"given": torch.arange(3.0)})
    return run.sharded.load(run.folder / "values", "one").values


def state_dict(run: Run) -> Any:
    with zeroshard.unsharded(run.model):
        return {name: value.clone() for name, value in run.model.state_dict().items()}


GIVES: dict[str, Callable[[Run], Any]] = {
    "states.get, parameters": first,
    "states.get, exp_avg": partial(first, state="exp_avg"),
    "states.get, step": partial(first, state="step"),
    "states.get, gradients": partial(first, state="gradients"),
    "states.whole": lambda run: run.sharded.states.whole("1.weight", "exp_avg_sq"),
    "parameter_states.get": lambda run: of_parameter(run).get("exp_avg"),
    "parameter_states.flat": lambda run: of_parameter(run).flat("exp_avg"),
    "parameter_states.flat, gradients": lambda run: (first(run, "gradients"), of_parameter(run).flat("gradients"))[1],
    "parameter_states.own_gradient": lambda run: of_parameter(run).own_gradient(),
    "consolidated_state_dict": lambda run: run.sharded.consolidated_state_dict(),
    "values of a load": loaded_values,
    "sum_over_ranks": lambda run: run.sharded.sum_over_ranks(torch.arange(3.0)),
    "clip_grad_norm_": lambda run: run.sharded.clip_grad_norm_(None),
    "model.state_dict at stage 3": lambda run: run.model.state_dict() if run.stage == 3 else None,
    "optimizer.state_dict on disk": lambda run: run.optimizer.state_dict()["state"] if run.place == "disk" else None,
    "a copy of the model": lambda run: [*copied(run).parameters(), *copied(run).buffers()],
}  # fmt: skip


BETWEEN_STEPS = {
    "values of a load", "consolidated_state_dict", "a copy of the model", "model.state_dict at stage 3",
    "optimizer.state_dict on disk",
}  # fmt: skip


def copied(run: Run) -> nn.Module:
    with zeroshard.unsharded(run.model):
        return copy.deepcopy(run.model)


def ranges(run: Run, state: str) -> list[Range]:
    return [Range(one.start, one.tensor.clone()) for one in run.sharded.states.local("0.weight", state)]


def saves(run: Run, tensors: list[Tensor], **how: Any) -> Callable[[], None]:
    run.optimizer.zero_grad()
    tensors.append(torch.arange(4.0))
    run.sharded.save(run.folder / "taken", "one", {"mine": tensors[0]}, **how)

    def check() -> None:
        run.sharded.checkpoints.wait()
        found = run.sharded.load(run.folder / "taken", "one").values["mine"]
        assert torch.equal(found, torch.arange(4.0)), found

    return check


def loads_optimizer(run: Run, tensors: list[Tensor], plain: bool) -> None:
    run.optimizer.zero_grad()
    state = copy.deepcopy(run.optimizer.state_dict())
    if plain:
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(0.1))
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
    tensors += [value for values in state["state"].values() for value in values.values() if isinstance(value, Tensor)]
    tensors += [value for group in state["param_groups"] for value in group.values() if isinstance(value, Tensor)]
    run.optimizer.load_state_dict(state)


def loads_model(run: Run, tensors: list[Tensor]) -> None:
    run.optimizer.zero_grad()
    state = {name: torch.full_like(value, 0.5) for name, value in state_dict(run).items()}
    tensors += state.values()
    run.model.load_state_dict(state)


def loads_distributed(run: Run, tensors: list[Tensor]) -> None:
    run.optimizer.zero_grad()
    own = zeroshard.DistributedState(run.sharded)
    state = own.state_dict()
    counts = {name: values["step"] for name, values in state["optim"].items() if type(values.get("step")) is Tensor}
    counts = {name: value.clone() for name, value in counts.items()}
    tensors += counts.values()
    state["optim"] = {
        name: {**values, **({"step": counts[name]} if name in counts else {})}
        for name, values in state["optim"].items()
    }
    own.load_state_dict(state)


def writes(run: Run, tensors: list[Tensor]) -> None:
    run.optimizer.zero_grad()
    tensors.append(torch.full((7, 5), 0.25))
    with zeroshard.unsharded(run.model, modifier_rank=0), torch.no_grad():
        run.model[0].weight.copy_(tensors[-1])


def restores(run: Run, tensors: list[Tensor]) -> None:
    run.optimizer.zero_grad()
    states = run.sharded.states
    values = {name: states.whole("0.weight", name) for name in ("parameters", "exp_avg", "exp_avg_sq", "step")}
    tensors += [value for value in values.values() if isinstance(value, Tensor)]
    states.restore("0.weight", values)


def sets(state: str, how: str) -> Callable[[Run, list[Tensor]], None]:
    def call(run: Run, tensors: list[Tensor]) -> None:
        value = torch.full((7, 5), 0.25)
        if how == "whole":
            tensors.append(value)
            run.sharded.states.set("0.weight", state, value)
        elif how == "of the parameter":
            tensors.append(value)
            of_parameter(run).set(value, state)
        elif how == "flat":
            flat = of_parameter(run).flat(state)
            assert flat is not None
            tensors.append(flat)
            of_parameter(run).set_flat(flat, state)
        else:
            own = ranges(run, state)
            tensors += [one.tensor for one in own]
            run.sharded.states.set_local("0.weight", state, own)

    return call


def adds(run: Run, tensors: list[Tensor]) -> None:
    tensors.append(torch.arange(3.0))
    run.sharded.sum_over_ranks(tensors[-1])


TAKES: dict[str, Callable[[Run, list[Tensor]], Callable[[], None] | None]] = {
    **{
        f"set {state}, {how}": sets(state, how)
        for state in ("parameters", "exp_avg", "gradients")
        for how in ("whole", "of the parameter", "flat", "ranges")
    },
    "restore": restores,
    "optimizer.load_state_dict": lambda run, tensors: loads_optimizer(run, tensors, plain=False),
    "optimizer.load_state_dict of a plain run": lambda run, tensors: loads_optimizer(run, tensors, plain=True),
    "model.load_state_dict": loads_model,
    "DistributedState.load_state_dict": loads_distributed,
    "values of a save": saves,
    "values of an asynchronous save": partial(saves, asynchronous=True),
    "a write": writes,
    "sum_over_ranks": adds,
}  # fmt: skip


def settings(folder: Path) -> list[tuple[int, str, torch.dtype]]:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for place in PLACES:
            for stage in range(4):
                if stage or place == "accelerator":
                    found.append((stage, place, dtype))
    return found


def is_refused(call: Callable[[], Any]) -> bool:
    """Run a call. Some are refused by name in some places: then there is nothing to keep."""
    try:
        call()
    except UsageError:
        return True
    return False


@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GIVES)
def test_what_a_call_returns_stays_as_it_is(name: str, tmp_path: Path) -> None:
    def body(rank: int) -> list[str]:
        wrong = []
        for stage, place, dtype in settings(tmp_path):
            with as_set(Setting(Policy.stage(0), apart=place == "cpu apart")):
                run = Run(stage, place, dtype, tmp_path)
                if name not in BETWEEN_STEPS:
                    run.backward()
                value = GIVES[name](run)
                before = copy.deepcopy(value)
                run.goes_on()
                if not same(value, before):
                    wrong.append(f"{stage}, {place}, {dtype}: {value} was {before}")
                run.sharded.remove()
        return wrong

    assert on_ranks(body, 2) == [[], []]


@pytest.mark.quick(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TAKES)
def test_what_a_call_takes_is_neither_kept_nor_changed(name: str, tmp_path: Path) -> None:
    def body(rank: int) -> list[str]:
        wrong = []
        for stage, place, dtype in settings(tmp_path):
            with as_set(Setting(Policy.stage(0), apart=place == "cpu apart")):
                ends = []
                for spoils in (False, True):
                    run = Run(stage, place, dtype, tmp_path)
                    run.backward()
                    tensors: list[Tensor] = []
                    checks: list[Any] = []

                    def call(run: Run = run, tensors: list[Tensor] = tensors, checks: list[Any] = checks) -> None:
                        checks.append(TAKES[name](run, tensors))

                    if is_refused(call):
                        break
                    before = copy.deepcopy(tensors)
                    if spoils:
                        for one in tensors:
                            one.fill_(float("nan"))
                    run.goes_on()
                    if not spoils and not same(tensors, before):
                        wrong.append(f"{stage}, {place}, {dtype}: changed to {tensors}")
                    for check in filter(None, checks):
                        check()
                    ends.append(run.everything())
                    run.sharded.remove()
                if len(ends) == 2 and not same(*ends):
                    wrong.append(f"{stage}, {place}, {dtype}: kept")
        return wrong

    assert on_ranks(body, 2) == [[], []]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Tensor):
        return bool(torch.equal(one, other))
    return bool(one == other)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine(rank: int, stage: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW"},
    }
    engine, *_ = zeroshard.initialize(model=nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), config=config)

    def step() -> None:
        engine.backward(engine(torch.ones(2, 5)).square().mean())
        engine.step()

    step()
    mine = torch.arange(3.0)
    engine.save_checkpoint(tmp_path, "one", {"mine": mine})
    mine.fill_(-1)
    _, client = engine.load_checkpoint(tmp_path, "one")
    given = [client, engine.module_state_dict(), engine.consolidated_state_dict()]
    before = copy.deepcopy(given)
    assert torch.equal(client["mine"], torch.arange(3.0))
    step()
    engine.load_checkpoint(tmp_path, "one")
    step()
    assert same(given, before)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("flat", [False, True])
def test_zero_redundancy_optimizer(rank: int, flat: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.LayerNorm(3))
    optimizer = zeroshard.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=flat, lr=torch.tensor(0.1)
    )

    def steps() -> list[Tensor]:
        for number in range(2):
            update(model(torch.full((2, 5), number + 1.0)).square().mean(), optimizer)
        return [parameter.detach().clone() for parameter in model.parameters()]

    steps()
    optimizer.consolidate_state_dict(0)
    states = [optimizer.state_dict() if rank == 0 else None]
    torch.distributed.broadcast_object_list(states)
    (state,) = states
    saved = copy.deepcopy(state)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    ends = []
    for _ in range(2):  # a rollback
        model.load_state_dict(values)
        optimizer.load_state_dict(state)
        ends.append(steps())
        assert same(state, saved)
    assert same(*ends)
