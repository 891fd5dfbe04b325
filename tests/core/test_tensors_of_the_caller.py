"""The caller's tensors are his: what a call takes is neither kept nor changed, and what it returns does not change later.

Calls whose documentation says that they return the memory of the training are left out: `states.local`, `named_weights`,
`DistributedState.state_dict`, and torch's own `optimizer.state_dict()`, `parameter.grad` and, below stage 3, `model.state_dict()`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing_comparison import difference
from models import Stack, floats
from torch import Tensor, nn
from twin import Setting, as_set, build, engine_steps, plain_torch, steps, update, whole

import zeroshard
from zeroshard import Offload, Policy, UsageError
from zeroshard.core.model_states import Range

NAMES = ("0.weight", "0.bias", "1.weight", "1.bias")
PLACES = ("accelerator", "cpu", "cpu apart", "disk", "parameters on cpu")


def make() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    model.register_buffer("scale", torch.ones(3))
    return model


class Run:
    """A model that has taken two steps, and all that a call may need."""

    def __init__(self, stage: int, place: str, dtype: torch.dtype, folder: Path) -> None:
        policy = Policy.stage(stage)
        how = Offload(str(folder), buffer_numel=4096, block_nbytes=4096, sub_group_numel=16)
        if place == "parameters on cpu":
            policy = policy.offloaded(parameters="cpu", offload=how)
        elif place != "accelerator":
            policy = policy.offloaded(optimizer=place.split(maxsplit=1)[0], offload=how)
        make_optimizer = partial(torch.optim.AdamW, lr=torch.tensor(0.1), weight_decay=0.1)
        self.model, self.sharded = build(policy, make_model=make, make_optimizer=make_optimizer, precision=dtype)
        self.optimizer: Any = self.sharded.optimizer
        self.folder, self.dtype, self.number, self.stage, self.place = folder, dtype, 0, stage, place
        self.step()
        self.step()

    def backward(self) -> None:
        (x,) = floats(0, self.number)
        self.model(x.to(self.dtype)).float().square().mean().backward()
        self.number += 1

    def end_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.backward()
        self.end_step()

    def goes_on(self) -> None:
        """Use and move everything: steps, a norm, a park and a reload."""
        self.end_step()
        self.step()
        self.backward()
        self.sharded.clip_grad_norm_(0.01)
        self.end_step()
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


def saves(run: Run, tensors: list[Tensor], **how: Any) -> Callable[[], None]:
    tensors.append(torch.arange(4.0))
    run.sharded.save(run.folder / "taken", "one", {"mine": tensors[0]}, **how)

    def check() -> None:
        run.sharded.checkpoints.wait()
        found = run.sharded.load(run.folder / "taken", "one").values["mine"]
        assert torch.equal(found, torch.arange(4.0)), found

    return check


def loads_optimizer(run: Run, tensors: list[Tensor], plain: bool) -> None:
    optimizer = run.optimizer
    if plain:
        model, optimizer = plain_torch(partial(torch.optim.AdamW, lr=torch.tensor(0.1)), make)
        update(model(torch.ones(1, 5)).sum(), optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    options = [*state["state"].values(), *state["param_groups"]]
    tensors += [value for one in options for value in one.values() if isinstance(value, Tensor)]
    run.optimizer.load_state_dict(state)


def loads_model(run: Run, tensors: list[Tensor]) -> None:
    state = {name: torch.full(value.shape, 0.5, dtype=value.dtype) for name, value in run.model.state_dict().items()}
    tensors += state.values()
    run.model.load_state_dict(state)


def loads_distributed(run: Run, tensors: list[Tensor]) -> None:
    own = zeroshard.DistributedState(run.sharded)
    state = own.state_dict()
    for name, values in state["optim"].items():
        if type(values.get("step")) is Tensor:
            tensors.append(values["step"].clone())
            state["optim"][name] = {**values, "step": tensors[-1]}
    own.load_state_dict(state)


def writes(run: Run, tensors: list[Tensor]) -> None:
    tensors.append(torch.full((7, 5), 0.25))
    with zeroshard.unsharded(run.model, modifier_rank=0), torch.no_grad():
        run.model[0].weight.copy_(tensors[0])


def adds(run: Run, tensors: list[Tensor]) -> None:
    tensors.append(torch.arange(3.0))
    run.sharded.sum_over_ranks(tensors[0])


def restores(run: Run, tensors: list[Tensor]) -> None:
    states = run.sharded.states
    values = {name: states.whole("0.weight", name) for name in ("parameters", "exp_avg", "exp_avg_sq", "step")}
    tensors += [value for value in values.values() if isinstance(value, Tensor)]
    states.restore("0.weight", values)


def sets(state: str, how: str) -> Callable[[Run, list[Tensor]], None]:
    def call(run: Run, tensors: list[Tensor]) -> None:
        states = run.sharded.states
        tensors.append(torch.full((7, 5), 0.25))
        if how == "whole":
            states.set("0.weight", state, tensors[0])
        elif how == "of the parameter":
            of_parameter(run).set(tensors[0], state)
        elif how == "flat":
            flat = of_parameter(run).flat(state)
            assert flat is not None
            tensors.append(flat)
            of_parameter(run).set_flat(flat, state)
        else:
            own = [Range(one.start, one.tensor.clone()) for one in states.local("0.weight", state)]
            tensors += [one.tensor for one in own]
            states.set_local("0.weight", state, own)

    return call


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


def runs(folder: Path, times: int) -> Iterator[list[Run]]:
    """Return equal runs, in each setting, inside of it."""
    for dtype, place, stage in product((torch.float32, torch.bfloat16), PLACES, range(4)):
        if stage or place == "accelerator":
            with as_set(Setting(Policy.stage(0), apart=place == "cpu apart")):
                found = [Run(stage, place, dtype, folder) for _ in range(times)]
                yield found
                for run in found:
                    run.sharded.remove()


@pytest.mark.ranks(2)
@pytest.mark.quick(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", GIVES)
def test_what_a_call_returns_stays_as_it_is(rank: int, name: str, tmp_path: Path) -> None:
    for (run,) in runs(tmp_path, times=1):
        if name not in BETWEEN_STEPS:
            run.backward()
        value = GIVES[name](run)
        before = copy.deepcopy(value)
        run.goes_on()
        assert difference(value, before) is None, f"{run.stage}, {run.place}, {run.dtype}"


@pytest.mark.ranks(2)
@pytest.mark.quick(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TAKES)
def test_what_a_call_takes_is_neither_kept_nor_changed(rank: int, name: str, tmp_path: Path) -> None:
    for pair in runs(tmp_path, times=2):
        ends = []
        for run, spoils in zip(pair, (False, True), strict=True):
            what = f"{run.stage}, {run.place}, {run.dtype}"
            if name.startswith("set "):
                run.backward()
            tensors: list[Tensor] = []
            try:
                check = TAKES[name](run, tensors)
            except UsageError:  # some are refused by name in some places: then there is nothing to keep
                break
            before = copy.deepcopy(tensors)
            if spoils:
                for one in tensors:
                    one.fill_(float("nan"))
            run.goes_on()
            assert spoils or difference(tensors, before) is None, f"changed: {what}"
            if check:
                check()
            ends.append(run.everything())
        assert len(ends) < 2 or difference(*ends) is None, f"kept: {what}"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine(rank: int, stage: int, tmp_path: Path) -> None:
    block = {"stage": stage}
    config = {"train_micro_batch_size_per_gpu": 3, "zero_optimization": block, "optimizer": {"type": "AdamW"}}
    engine, *_ = zeroshard.initialize(model=Stack(), config=config)
    engine_steps(engine, rank, [0])
    mine = torch.arange(3.0)
    engine.save_checkpoint(tmp_path, "one", {"mine": mine})
    mine.fill_(-1)
    _, client = engine.load_checkpoint(tmp_path, "one")
    given = [client, engine.module_state_dict(), engine.consolidated_state_dict()]
    before = copy.deepcopy(given)
    assert torch.equal(client["mine"], torch.arange(3.0))
    engine_steps(engine, rank, [1])
    engine.load_checkpoint(tmp_path, "one")
    engine_steps(engine, rank, [2])
    assert difference(given, before) is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("flat", [False, True])
def test_zero_redundancy_optimizer(rank: int, flat: bool) -> None:
    torch.manual_seed(0)
    model = Stack()
    optimizer = zeroshard.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=flat, lr=torch.tensor(0.1)
    )

    def trained() -> dict[str, Tensor]:
        steps(model, optimizer, 0, range(2))
        return whole(model)

    trained()
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
        ends.append(trained())
        assert difference(state, saved) is None
    assert difference(*ends) is None
