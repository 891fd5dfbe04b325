"""Unusual loops that plain PyTorch allows give its result at every stage, or raise by name."""

from __future__ import annotations

import copy
import linecache
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from insides import live_numel, transport_of, units
from models import Checkpointed, Frozen, Stack, bfloats, floats, sgd, tokens
from safetensors.torch import load_file, save_model
from test_parametrized import Halves
from torch import Tensor, nn
from twin import FEW_STAGES, build, plain_torch, same, same_on_all_ranks, step, steps, update, whole

import zeroshard
from zeroshard import Policy, UsageError
from zeroshard.torch_private import saved_tensors_hooks_in_force

# ------------------------------------------------------------------ gradients of the user's own


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_gradient_that_the_user_sets_is_this_ranks_gradient(rank: int, stage: int) -> None:
    """As PCGrad and MAML do: gradients come from torch.autograd.grad, and are put into `grad`."""

    def run(by_hand: bool) -> dict[str, Tensor]:
        model, sharded = build(stage, make_optimizer=sgd)
        for number in range(3):
            loss = model(*tokens(rank, number))
            if by_hand:
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.grad = gradient
            else:
                loss.backward()
            sharded.clip_grad_norm_(1.0)
            sharded.optimizer.step()
            sharded.optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        return whole(model)

    assert same(run(False), run(True))


# ------------------------------------------------------------------ parameters and options that change


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_conversion_that_changes_nothing_is_allowed(rank: int, stage: int) -> None:
    """`model.to(device)` at the beginning of an evaluation, with gradients or without."""

    def run(convert: Callable[[nn.Module], object]) -> dict[str, Tensor]:
        model, sharded = build(stage, make_optimizer=sgd)
        for number in range(2):
            model(*tokens(rank, number)).backward()
            for end in (sharded.optimizer.step, sharded.optimizer.zero_grad, lambda: None):
                convert(model)
                end()
        return whole(model)

    expected = run(lambda _: None)
    for convert in (lambda model: model.to("cpu", non_blocking=True), nn.Module.float, nn.Module.cpu):
        assert same(run(convert), expected)


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize(
    ("option", "other", "told"),
    [
        ("lr", 0.05, "0.01 on rank 0 and 0.05 on rank 1"),
        ("betas", (0.9, 0.99), "0.9, 0.999 on rank 0 and 0.9, 0.99 on rank 1"),
    ],
)
def test_options_that_differ_between_ranks_are_refused_by_name(
    rank: int, stage: int, option: str, other: object, told: str
) -> None:
    model, sharded = build(stage)
    (group,) = sharded.optimizer.param_groups
    step(model, sharded, rank, 0)
    kept = group[option]
    group[option] = other if rank else kept
    with pytest.raises(UsageError, match=f"{option} of param group 0 of AdamW is {told}.*ReduceLROnPlateau"):
        step(model, sharded, rank, 1)
    group[option] = kept
    sharded.optimizer.zero_grad()
    step(model, sharded, rank, 1)
    assert same_on_all_ranks(whole(model))


def by_set(model: nn.Module) -> Tensor:
    with torch.no_grad():
        model.blocks[1].up.weight.set_(torch.full((33, 12), 0.5))
    return model.blocks[1].up.weight


def parametrized() -> Stack:
    model = Stack()
    nn.utils.parametrize.register_parametrization(model.blocks[0].up, "weight", Halves())
    return model


def by_parametrization(model: nn.Module) -> Tensor:
    model.blocks[0].up.weight = torch.full((7, 12), 1.0)
    return model.blocks[0].up.parametrizations.weight.original


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize("write", [by_set, by_parametrization])
def test_a_write_that_torch_hides_takes_effect_or_is_refused_by_name(
    rank: int, stage: int, write: Callable[[nn.Module], Tensor], tmp_path: Path
) -> None:
    """`Tensor.set_`, with which parametrized weights are assigned too, comes to no class."""
    model, sharded = build(stage, make_model=parametrized, make_optimizer=partial(sgd, lr=0.0))
    step(model, sharded, rank, 0)
    written = write(model)
    if stage < 3:
        step(model, sharded, rank, 1)
        assert torch.equal(written, torch.full_like(written, 0.5))
        return
    for use in (lambda: sharded.save(tmp_path, "one"), lambda: model(*tokens(rank, 1))):
        with pytest.raises(UsageError, match=r"no effect: blocks\.\d\.up.*weight"):
            use()
    step(model, sharded, rank, 1)
    assert whole(model)["blocks.1.up.weight"].std() > 0


def swapped(model: Any) -> None:
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


SURGERY: dict[str, Callable[[Any], object]] = {
    "replaced": lambda model: setattr(model.blocks[1], "up", nn.Linear(12, 33)),
    "added": lambda model: setattr(model.blocks[1], "adapter", nn.Linear(12, 2)),
    "removed": lambda model: delattr(model.blocks[1], "up"),
    "swapped": swapped,
}


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize("change", SURGERY)
def test_a_model_whose_modules_changed_is_refused_by_name(rank: int, stage: int, change: str, tmp_path: Path) -> None:
    model, sharded = build(stage, make_optimizer=sgd)
    step(model, sharded, rank, 0)
    model(*tokens(rank, 1)).backward()
    SURGERY[change](model)
    name = r"blocks\.[01]\.\w+(\.weight)? (is no longer part|was put into|is not the parameter)"
    for call in (sharded.optimizer.step, lambda: sharded.save(tmp_path, "changed"), lambda: sharded.export(tmp_path)):
        with pytest.raises(UsageError, match=name):
            call()
        sharded.optimizer.zero_grad()
    assert not [*tmp_path.iterdir()]
    if change in ("replaced", "removed"):
        with pytest.raises(UsageError, match="is no longer part"), torch.no_grad():
            model(*tokens(rank, 2))


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_module_that_is_wrapped_in_another_trains_on(rank: int, stage: int, tmp_path: Path) -> None:
    found = []
    for wraps in (False, True):
        model, sharded = build(stage, make_optimizer=sgd)
        step(model, sharded, rank, 0)
        if wraps:
            model.blocks[1] = nn.Sequential(model.blocks[1], nn.Dropout(0.0))
        step(model, sharded, rank, 1)
        sharded.save(tmp_path, f"wrapped {wraps}")
        found.append([*whole(model).values()])
    assert all(map(torch.equal, *found))


@pytest.mark.ranks(2)
@FEW_STAGES
def test_an_unfrozen_parameter_is_noticed_at_the_next_forward(rank: int, stage: int) -> None:
    model = Frozen()
    sharded = zeroshard.shard(model, sgd(model.parameters()), stage)
    step(model, sharded, rank, 0)
    model.blocks[1].requires_grad_(True)
    with pytest.raises(UsageError, match=r"blocks\.1\..* was unfrozen.*update_trainable"):
        model(*tokens(rank, 1))


@pytest.mark.ranks(2)
@FEW_STAGES
def test_a_hook_on_gradients_that_is_registered_after_a_forward_sees_and_changes_them(rank: int, stage: int) -> None:
    """As one that was registered before `shard`."""

    def run(is_late: bool) -> tuple[dict[str, Tensor], list[float]]:
        seen: list[float] = []

        def halve(parameter: Tensor) -> None:
            assert parameter.grad is not None
            seen.append(float(parameter.grad.norm()))
            parameter.grad.mul_(0.5)

        def hooked(model: Stack) -> Stack:
            for parameter in model.blocks[1].parameters():
                parameter.register_post_accumulate_grad_hook(halve)
            return model

        model, sharded = build(stage, make_optimizer=sgd, make_model=lambda: Stack() if is_late else hooked(Stack()))
        for number in range(3):
            loss = model(*tokens(rank, number))
            if is_late and number == 0:
                hooked(model)
            update(loss, sharded.optimizer)
        return whole(model), seen

    (expected, expected_norms), (found, norms) = run(False), run(True)
    assert norms == expected_norms and len(norms) == 3 * len([fqn for fqn in found if fqn.startswith("blocks.1")])
    assert same(found, expected)


# ------------------------------------------------------------------ copies


def written_by_safetensors(model: nn.Module, rank: int, folder: Path) -> dict[str, Tensor]:
    save_model(model, str(folder / f"{rank}.safetensors"))
    return load_file(folder / f"{rank}.safetensors")


COPIES: dict[str, Callable[[nn.Module, int, Path], dict[str, Tensor]]] = {
    "deepcopy": lambda model, rank, folder: dict(copy.deepcopy(model).named_parameters()),
    "safetensors' save_model": written_by_safetensors,
    "state_dict": lambda model, rank, folder: {fqn: value.clone() for fqn, value in model.state_dict().items()},
    "a part's state_dict": lambda model, rank, folder: {
        f"blocks.0.up.{name}": value.clone() for name, value in model.blocks[0].up.state_dict().items()
    },
}


@pytest.mark.ranks(2)
@FEW_STAGES
@pytest.mark.parametrize("way", COPIES)
def test_copies_hold_true_values(rank: int, stage: int, way: str, tmp_path: Path) -> None:
    model, sharded = build(stage, make_optimizer=sgd)
    step(model, sharded, rank, 0)
    copied = COPIES[way](model, rank, tmp_path)
    expected = whole(model)
    step(model, sharded, rank, 1)
    assert way == "a part's state_dict" or len(copied) >= len(expected)
    for fqn, value in copied.items():
        known = expected.get(fqn, expected["embedding.weight"])  # the tied head goes by one name
        assert type(value) in (Tensor, nn.Parameter) and torch.equal(value, known), fqn


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", range(3))
def test_parameters_that_were_shared_with_a_process_train_on(
    rank: int, stage: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """torch moves what it shares to other memory, and leaves the parameter's storage the same object."""
    models = []
    for shares in (False, True):
        model, sharded = build(stage, precision=dtype, make_optimizer=sgd)
        for number in range(3):
            if shares and number:
                model.share_memory() if number == 1 else model.head.weight.share_memory_()
            step(model, sharded, rank, number)
        models.append(model)
    assert same(*map(whole, models))
    torch.save(model.head.weight, tmp_path / str(rank))
    assert (tmp_path / str(rank)).stat().st_size < model.head.weight.nbytes + 2000, "a file has one parameter"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["model", "parameter"])
def test_pickling_what_is_sharded_names_the_remedy(rank: int, what: str, tmp_path: Path) -> None:
    model, _ = build(3)
    with pytest.raises(UsageError, match=r"unsharded.*export"):
        torch.save(model if what == "model" else model.head.weight, tmp_path / str(rank))


class Unsaveable(nn.Linear):
    """A layer whose state dict can be made only while it is ready."""

    is_ready = True

    def get_extra_state(self) -> int:
        if not self.is_ready:
            raise ValueError("not ready")
        return 1

    def set_extra_state(self, state: Any) -> None:
        pass


@pytest.mark.ranks(2)
def test_a_state_dict_that_raised_does_not_keep_units_whole(rank: int) -> None:
    model, sharded = build(3, make_model=lambda: nn.Sequential(Unsaveable(4, 4), nn.Linear(4, 4)))
    before = whole(model)
    model[0].is_ready = False
    with pytest.raises(ValueError, match="not ready"):
        model.state_dict()
    model[0].is_ready = True
    update(model(torch.ones(2, 4)).sum(), sharded.optimizer)
    assert not same(before, whole(model))
    assert same(whole(model), {name: model.state_dict()[name] for name in before})


@pytest.mark.ranks(2)
def test_a_step_while_a_state_dict_is_made_is_refused_and_leaves_nothing_behind(rank: int) -> None:
    model, sharded = build(3, make_model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))

    def train(*_: Any) -> None:
        update(model(torch.ones(2, 4)).sum(), sharded.optimizer)

    handle = model[1].register_state_dict_pre_hook(train)
    for _ in range(2):
        with pytest.raises(UsageError, match=r"1\.weight is sharded at rest"):
            model.state_dict()
    handle.remove()
    before = whole(model)
    train()
    assert not same(before, whole(model))
    assert not any(unit.is_pinned for unit in units(sharded))
    assert same(whole(model), model.state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.full), 3])
def test_a_module_that_a_rank_runs_alone_gathers_no_others(rank: int, stage: int) -> None:
    """PEFT's save of prompts runs their encoder inside `unsharded` on rank 0. No other rank would gather the next units with it."""

    def run(alone: bool) -> dict[str, Tensor]:
        model, sharded = build(stage, make_optimizer=sgd)
        steps(model, sharded, rank, range(2))
        if alone:
            with zeroshard.unsharded(model.blocks[0].parameters()):
                before = transport_of(sharded).sent.copy()
                if rank == 0:
                    model.blocks[0](torch.zeros(2, 12))
                assert transport_of(sharded).sent == before
        steps(model, sharded, rank, range(2, 4))
        return whole(model)

    assert same(run(False), run(True))


@pytest.mark.ranks(2)
def test_arrays_made_inside_unsharded_are_allowed(rank: int) -> None:
    """torch cannot free memory that an array was made of: the unit stays whole then, and trains on."""

    def run(look: bool) -> dict[str, Tensor]:
        model, sharded = build(3, make_optimizer=sgd)
        step(model, sharded, rank, 0)
        if look:
            with pytest.warns(UserWarning, match=r"numpy array .* blocks\.0"), zeroshard.unsharded(model):
                array = model.blocks[0].up.weight.detach().numpy()
                assert array.shape == (7, 12)
                del array  # as long as there is one, the memory stays without a word
        steps(model, sharded, rank, range(1, 3))
        return whole(model)

    assert same(run(False), run(True))


# ---------------------------------------------------------------------- threads


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", range(4))
def test_threads_that_evaluate_at_once_are_right_or_refused(rank: int, stage: int) -> None:
    """At stage 3 the one gave back the parameters that the other read: the process died. One after the other they may."""
    model, _ = build(stage)
    batches = [tokens(0, number) for number in range(3)]
    expected = [model(*batch).item() for batch in batches]
    found: list[Any] = []

    def evaluate(number: int, times: int) -> None:
        try:
            with torch.no_grad():
                found.extend(model(*batches[number]).item() == expected[number] for _ in range(times))
        except UsageError as error:
            found.append(error)

    threads = [threading.Thread(target=evaluate, args=(number, 100)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [one for one in found if one is not True]
    assert all("one thread at a time" in str(one) for one in refused)
    assert bool(refused) <= (stage == 3)
    found.clear()
    evaluate(0, 1)
    last = threading.Thread(target=evaluate, args=(1, 1))
    last.start()
    last.join()
    assert found == [True, True]


@pytest.mark.ranks(1)
def test_a_forward_that_aborted_in_a_thread_that_ended_is_forgotten(rank: int) -> None:
    model, _ = build(3)

    def abort() -> None:
        with pytest.raises(IndexError):
            model(torch.full((1, 3), 1 << 20))

    thread = threading.Thread(target=abort)
    thread.start()
    thread.join()
    assert model(*tokens(0, 0)).isfinite()


# ------------------------------------------------------------------ tensors that show the same memory in another way


def transposed_data(weight: Tensor) -> None:
    weight.data = weight.data.t()


def transposed_in_place(weight: Tensor) -> None:
    weight.t_()


@FEW_STAGES
@pytest.mark.parametrize("transpose", [transposed_data, transposed_in_place])
def test_a_transposed_parameter_trains_as_a_transposed_copy(stage: int, transpose: Callable[[Tensor], None]) -> None:
    def trained(is_sharded: bool) -> dict[str, Tensor]:
        make_model = lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))  # noqa: E731
        model, optimizer = plain_torch(partial(sgd, lr=0.5), make_model)
        if is_sharded:
            zeroshard.shard(model, optimizer, stage)
        for number in range(3):
            if number == 1 and is_sharded:
                with zeroshard.unsharded(model, modifier_rank=0), torch.no_grad():
                    transpose(model[0].weight)
            elif number == 1:
                model[0].weight.data = model[0].weight.data.t().contiguous()
            update(model(*floats(0, number)).square().mean(), optimizer)
        return whole(model)

    assert same(trained(True), trained(False))


@pytest.mark.parametrize("stage", [0, 2])
def test_a_pickled_model_keeps_attributes_of_its_parameters(stage: int, tmp_path: Path) -> None:
    def marked() -> nn.Linear:
        model = nn.Linear(5, 4, dtype=torch.bfloat16)
        model.weight.no_decay = True  # type: ignore[assignment]
        return model

    model, sharded = build(stage, make_model=marked)
    update(model(*bfloats(0, 0)).sum(), sharded.optimizer)
    torch.save(model, tmp_path / "model")
    loaded = torch.load(tmp_path / "model", weights_only=False)
    assert loaded.weight.no_decay and type(loaded.weight) is nn.Parameter and torch.equal(loaded.weight, model.weight)


@FEW_STAGES
def test_a_unit_of_empty_parameters_trains(stage: int) -> None:
    """The root's only parameter has no elements."""

    def make() -> nn.Sequential:
        model = nn.Sequential(nn.ModuleList([nn.Linear(5, 8), nn.Linear(8, 8)]))
        model.nothing = nn.Parameter(torch.empty(0, 8))
        model.forward = lambda x: model[0][1](model[0][0](x)).square().sum() + model.nothing.sum()  # type: ignore[method-assign]
        return model

    model, sharded = build(stage, make_model=make, make_optimizer=partial(sgd, lr=0.01))
    losses = [step(model, sharded, 0, 0, floats) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_update_trainable_forgets_units_kept_for_a_backward_that_never_came() -> None:
    policy = replace(Policy.stage(3, reshard_after_forward=False), max_live_numel=200)
    model, sharded = build(policy, make_model=lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]))
    model(torch.ones(2, 8))
    model[2].bias.requires_grad_(False)
    sharded.update_trainable()
    for _ in range(2):
        update(model(torch.ones(2, 8)).sum(), sharded.optimizer)
    assert all(value.isfinite().all() for value in whole(model).values())


CORE = Path(zeroshard.__file__).parent / "core"
INTERRUPTED = {
    "hooks", "module_hooks", "saved_parameters", "schedule", "state_dicts", "unit", "appearance", "writes", "classes", "context",
    "parameter_bucket", "step", "gradient_bucket", "norm", "reductions", "storage",
}  # fmt: skip
"""The files, and the folder, of the core in which an interrupt comes."""


def interrupt_at(line: int, function: Callable[[], None]) -> bool:
    """Call a function, and raise KeyboardInterrupt at this line of those that run in INTERRUPTED. Return whether it came so far."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if event == "call":
            path = Path(frame.f_code.co_filename)
            is_inside = CORE in path.parents and not INTERRUPTED.isdisjoint(
                path.relative_to(CORE).with_suffix("").parts
            )
            return trace if is_inside and frame.f_code.co_name != "__del__" else None
        # At the end of a block, Python delivers no signal between the line of `with` and the exit that this line stands for.
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(
            "with "
        ):
            count += 1
            if count == line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


@pytest.mark.parametrize(
    ("stage", "every"), [(3, 29), *(pytest.param(stage, 5, marks=pytest.mark.full) for stage in (0, 2, 3))]
)
def test_an_interrupt_anywhere_in_a_forward_or_backward_changes_nothing(stage: int, every: int) -> None:
    """The next step is that of plain PyTorch. Among the lines that run, each of this distance is interrupted."""

    make_optimizer = partial(sgd, lr=0.01)

    def make() -> nn.Module:
        model = nn.Sequential(nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]), nn.Linear(8, 1))
        model.forward = lambda x: model[1](model[0][2](model[0][1](model[0][0](x)))).sum()  # type: ignore[method-assign]
        return model

    def forward_and_backward(model: nn.Module, number: int) -> None:
        model(torch.full((2, 8), 0.01 * number)).backward()

    model, sharded = build(stage, make_model=make, make_optimizer=make_optimizer)
    plain, own = plain_torch(make_optimizer, make)
    line = 1
    came = True
    while came:
        came = interrupt_at(line, partial(forward_and_backward, model, line))
        for one, its in ((model, sharded.optimizer), (plain, own)):
            its.zero_grad()
            forward_and_backward(one, line)
            its.step()
            its.zero_grad()
        with zeroshard.unsharded(model):
            assert all(map(torch.equal, model.parameters(), plain.parameters())), line
        assert live_numel(sharded) == 0, line
        assert saved_tensors_hooks_in_force() is None, line
        line += every
    assert line > 300


def test_an_interrupt_inside_of_other_hooks_leaves_none_in_force() -> None:
    """torch runs no forward hook after an interrupt, so checkpointing's hooks end ours in place of their own."""
    model, sharded = build(3, make_model=partial(Checkpointed, False), make_optimizer=sgd)
    plain, own = plain_torch(sgd, partial(Checkpointed, False))
    step(plain, own, 0, 0)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    forward, model.blocks[1].up.forward = model.blocks[1].up.forward, interrupt
    with pytest.raises(KeyboardInterrupt):
        model(*tokens(0, 0))
    model.blocks[1].up.forward = forward
    step(model, sharded, 0, 0)
    assert saved_tensors_hooks_in_force() is None
    assert same(whole(model), whole(plain))
