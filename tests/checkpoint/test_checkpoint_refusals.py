"""Checkpoints that lack something, or belong to a different run, are refused by name before anything is read."""

from __future__ import annotations

import re
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from models import MODELS, Stack, sgd, tokens
from ranks import run_ranks
from torch import Tensor, nn
from twin import build, everything, refusal, same, step, update

import zeroshard
from zeroshard import CheckpointError, CollectiveError, Sharded, UsageError, ZeroshardError
from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint import saving
from zeroshard.checkpoint.manifest import tags


def made(stage: int = 2, **options: Any) -> Sharded:
    return build(stage, **options)[1]


def two_groups(parameters: Iterable[Tensor], lr: float = 1e-2) -> torch.optim.Optimizer:
    """The second group has the last block's parameters, with a learning rate of its own."""
    listed = list(parameters)
    return torch.optim.AdamW([{"params": listed[:-8]}, {"params": listed[-8:], "lr": lr}], lr=1e-2)


evaluated = partial(made, make_optimizer=None)


def two_layers() -> Any:
    return nn.Sequential(OrderedDict(first=nn.Linear(8, 8, bias=False), last=nn.Linear(8, 8, bias=False)))


def half_frozen() -> Any:
    model = two_layers()
    model.first.requires_grad_(False)
    return model


def trained_once(sharded: Sharded) -> Sharded:
    update(sharded.model(torch.ones(2, 8)).sum(), sharded.optimizer)
    return sharded


def several(first: Any, last: Any, turned: bool = False) -> Sharded:
    """Two layers, each with an optimizer of its own, after a step."""

    def members(parameters: list[Tensor]) -> list[torch.optim.Optimizer]:
        listed = [first(parameters[:1], lr=0.1), last(parameters[1:], lr=0.2)]
        return listed[::-1] if turned else listed

    return trained_once(made(1, make_model=two_layers, make_optimizer=members))


class Norm(nn.BatchNorm1d):
    """A model with a buffer `more` of the given size, or with a parameter of that name."""

    def __init__(self, size: int, is_parameter: bool = False) -> None:
        super().__init__(3)
        if is_parameter:
            self.more = nn.Parameter(torch.zeros(size))
        elif size:
            self.register_buffer("more", torch.zeros(size))


def norm(size: int, is_parameter: bool = False) -> Sharded:
    return made(make_model=partial(Norm, size, is_parameter), make_optimizer=sgd)


def made_as(**options: Any) -> Callable[[], Sharded]:
    return partial(made, seed=1, **options)


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
STATES, STRICT = ".*optimizer_states=False", ".*strict=False"
"""What helps."""
TWO_RATES = made_as(make_optimizer=partial(two_groups, lr=0.5))
REFUSED: dict[str, tuple[Callable[[], Sharded], Callable[[], Sharded], str]] = {
    "one group for two that differ": (
        made,
        TWO_RATES,
        rf"param groups 0 \(.*\) and 1 \(blocks\.2.*\) .* here, .* saved as one group{STATES}",
    ),
    "two groups that differ for one": (TWO_RATES, made, f"param group 0 .* saved in groups with different{STATES}"),
    "no optimizer": (evaluated, made_as(), f"without an optimizer.*holds no states for this run's AdamW{STATES}"),
    "another optimizer": (made, made_as(make_optimizer=sgd), f"saved with AdamW, and this run has SGD{STATES}"),
    "another last optimizer": (
        partial(several, SGD, ADAMW),
        partial(several, SGD, SGD),
        rf"with .* for last\.weight, and this run has SGD{STATES}",
    ),
    "another first optimizer": (
        partial(several, SGD, ADAMW),
        partial(several, ADAMW, ADAMW),
        rf"with .* for first\.weight, and this run has AdamW{STATES}",
    ),
    "other names": (
        made,
        made_as(make_model=two_layers),
        rf"it lacks first\.weight, last\.weight, and the model lacks embedding\.weight{STRICT}",
    ),
    "other shapes": (
        made,
        made_as(make_model=MODELS["skipping"]),
        r"blocks\.0\.up\.weight was saved with shape \(7, 12\), but has \(9, 12\)",
    ),
    "two tensors for one": (
        made_as(make_model=MODELS["untied"]),
        made,
        rf"embedding\.weight and head\.weight were saved as two tensors{STRICT}",
    ),
    "frozen parameters, left out, that are trained now": (
        lambda: trained_once(made(make_model=half_frozen)),
        made_as(make_model=two_layers),
        rf"it lacks first\.weight{STRICT}",
    ),
    "a buffer more": (partial(norm, 0), partial(norm, 2), f"it lacks the buffer more{STRICT}"),
    "a buffer of another shape": (partial(norm, 2), partial(norm, 1), r"the buffer more was saved with shape \(2,\)"),
    "a buffer for a parameter": (partial(norm, 2), partial(norm, 2, True), "is of a different model"),
    "a parameter for a buffer": (partial(norm, 2, True), partial(norm, 2), "is of a different model"),
}


def advised(error: BaseException, load: Callable[..., Any]) -> dict[str, bool]:
    """The argument of `load` that the message names."""
    return {name: False for name in re.findall(r"(\w+)=False", str(error)) if name in signature(load).parameters}


@pytest.mark.ranks(2)
@pytest.mark.quick(6)
@pytest.mark.parametrize("case", REFUSED)
def test_a_load_into_another_run_names_the_difference_and_what_helps(rank: int, case: str, tmp_path: Path) -> None:
    make_saved, make_loaded, says = REFUSED[case]
    saved = make_saved()
    saved.save(tmp_path, "a", {"step": 1}, exclude_frozen=case.startswith("frozen"))
    if case.startswith("frozen"):  # the same base, by the same seed
        again = made(make_model=half_frozen)
        again.load(tmp_path)
        assert same(everything(again), everything(saved))
    loaded = make_loaded()
    before, rates = everything(loaded), [group["lr"] for group in loaded.optimizer.param_groups]
    with pytest.raises(CheckpointError, match=says) as refused:
        loaded.load(tmp_path)
    assert same(everything(loaded), before), "nothing was read"
    if "=False" not in says:
        return
    helps = advised(refused.value, loaded.load)
    assert len(helps) == 1
    assert loaded.load(tmp_path, **helps).values == {"step": 1}
    assert [group["lr"] for group in loaded.optimizer.param_groups] == rates
    there = files.read_manifest(tmp_path / "a").parameters
    for fqn, _ in loaded.model.named_parameters():
        if fqn in there and there[fqn].states:
            assert torch.equal(loaded.states.get(fqn), saved.states.get(fqn))


def test_the_advice_for_an_engine_can_be_followed(tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    made().save(tmp_path, "adamw")
    evaluated(0).save(tmp_path / "evaluated", "a")
    for model, folder, says, more in (
        (Stack(), tmp_path, "saved with AdamW, and this run has SGD", {}),
        (Stack(), tmp_path / "evaluated", "without an optimizer", {}),
        (two_layers(), tmp_path, "is of a different model", {"load_optimizer_states": False}),
    ):
        engine = zeroshard.initialize(model=model, config=config)[0]
        with pytest.raises(CheckpointError, match=says) as refused:
            engine.load_checkpoint(folder, **more)
        helps = advised(refused.value, engine.load_checkpoint)
        assert len(helps) == 1
        engine.load_checkpoint(folder, **more, **helps)
        engine.load_checkpoint(folder, load_module_only=True, load_module_strict=False)


def test_one_group_becomes_two_that_are_alike(tmp_path: Path) -> None:
    saved, loaded = made(), made(make_optimizer=two_groups, seed=1)
    saved.optimizer.param_groups[0]["lr"] = 0.25
    saved.save(tmp_path, "one")
    loaded.load(tmp_path)
    assert [group["lr"] for group in loaded.optimizer.param_groups] == [0.25, 0.25]


@pytest.mark.ranks(2)
def test_states_of_several_optimizers_load_in_any_order(rank: int, tmp_path: Path) -> None:
    saved, loaded = several(SGD, ADAMW), several(SGD, ADAMW, turned=True)
    saved.save(tmp_path, "one")
    loaded.load(tmp_path)
    assert same(everything(loaded), everything(saved))


def test_a_model_without_an_optimizer_evaluates_saves_and_loads(tmp_path: Path) -> None:
    sharded = evaluated(3)
    for arguments in ({}, {"closure": None}, {"scale": 2.0}):
        with pytest.raises(ZeroshardError, match="for evaluation only"):
            sharded.optimizer.step(**arguments)
    with torch.no_grad():
        sharded.model(*tokens(0, 0))
    sharded.save(tmp_path, "a")
    other = evaluated(0)
    other.load(tmp_path)
    assert same(everything(other), everything(sharded))


def test_between_backward_and_step_there_is_no_checkpoint(tmp_path: Path) -> None:
    sharded = made()
    sharded.model(*tokens(0, 0)).backward()
    for call in (sharded.save, sharded.load):
        with pytest.raises(UsageError, match="between backward and step"):
            call(tmp_path, "a")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_among_the_values_is_true_or_refused(rank: int, stage: int, tmp_path: Path) -> None:
    """Under stage 3 its values are elsewhere, and it is refused by name. Otherwise what is loaded is what it was."""
    model, sharded = build(stage)
    step(model, sharded, rank, 0)
    weight = model.blocks[0].up.weight
    with zeroshard.unsharded(model):
        expected = weight.detach().clone()
        alias = weight.data
    if stage == 3:
        text = refusal(lambda: sharded.save(tmp_path, "a", {"deep": [{"w": weight}]}))
        assert "unsharded" in text and "blocks.0.up.weight" in text
    else:
        sharded.save(tmp_path, "a", {"deep": [{"w": weight}]})
        assert torch.equal(sharded.load(tmp_path).values["deep"][0]["w"], expected)
    sharded.save(tmp_path, "b", {"w": expected})
    assert torch.equal(sharded.load(tmp_path, "b").values["w"], expected)
    sharded.save(tmp_path, "c", {"w": alias})  # as long as there is an alias, its memory is not given back
    assert torch.equal(sharded.load(tmp_path, "c").values["w"], expected)


def test_a_users_own_file_of_states_makes_no_folder_deepspeeds(tmp_path: Path) -> None:
    (tmp_path / "rng_states.pt").touch()
    engine = zeroshard.initialize(model=Stack(), config={"train_micro_batch_size_per_gpu": 1})[0]
    with pytest.warns(UserWarning, match="no checkpoint was loaded"):
        assert engine.load_checkpoint(tmp_path) == (None, None)
    engine.save_checkpoint(tmp_path, "one")
    assert engine.load_checkpoint(tmp_path)[0] is not None


TAGS: list[Any] = [
    "", "a/b", "..", ".hidden", "latest", "one ", " one", "\tone", "one\n", "a\0b", "a\nb", "x" * 300, 5, b"five", 5.0,
]  # fmt: skip
"""What `latest` would not find again, or no disk takes."""


@pytest.mark.ranks(2)
def test_what_cannot_be_a_tag_a_folder_or_a_number_to_keep_is_refused_on_every_rank(rank: int, tmp_path: Path) -> None:
    sharded = made()
    sharded.save(tmp_path, "first")
    for tag in TAGS:
        for call in (sharded.save, partial(sharded.save, asynchronous=True), sharded.load):
            with pytest.raises(CheckpointError, match="cannot be a tag"):
                call(tmp_path, tag)
    for keep_last in (0, -1, 1.5, True, "3"):  # -1 keeps all in other libraries: it must not remove all but this one
        with pytest.raises(ZeroshardError, match=rf"keep_last={keep_last!r}: give .*at least 1, or None to keep all"):
            sharded.save(tmp_path, "last", keep_last=keep_last)  # type: ignore[arg-type]
    for absent in (None, "a"):
        with pytest.raises(CheckpointError):
            sharded.load("x" * 300, absent)
    assert tags(tmp_path) == ["first"]


@pytest.mark.parametrize(
    ("content", "says"), [("", r"latest is empty.*fall_back=True"), ("x" * 1_000_000, "cannot be a tag")], ids=len
)
def test_a_latest_that_names_no_tag_is_a_short_error(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / files.LATEST).write_text(content)
    with pytest.raises(CheckpointError, match=says) as caught:
        files.latest_tag(tmp_path)
    assert len(str(caught.value)) < 400


@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", ["save", "load"])
def test_tags_that_differ_between_ranks_are_named(rank: int, call: str, tmp_path: Path) -> None:
    sharded = made()
    for tag in ("tag 0", "tag 1"):
        sharded.save(tmp_path, tag)
    with pytest.raises(
        ZeroshardError, match=rf"the tag is 'tag {rank}' on this rank and 'tag {1 - rank}' on rank {1 - rank}: pass"
    ):
        getattr(sharded, call)(tmp_path, f"tag {rank}")
    sharded.save(tmp_path, "then")
    assert tags(tmp_path)[0] == "then"


@pytest.mark.parametrize("transport", ["shared memory", pytest.param("gloo", marks=pytest.mark.full)], indirect=True)
def test_a_later_save_that_one_rank_alone_calls_is_named(transport: str, tmp_path: Path) -> None:
    """The first save made connections of its own. Over shared memory it is named long before the timeout, over gloo then."""

    def body(rank: int) -> None:
        model, sharded = build(2)
        step(model, sharded, rank, 0)
        sharded.save(tmp_path, "first")
        with pytest.raises(CollectiveError) as caught:
            if rank == 0:
                sharded.save(tmp_path, "second")
            step(model, sharded, rank, 1)
        assert 'rank 0 waited for save "second"' in str(caught.value)

    run_ranks(body, 2, collective_timeout=4 if transport == "gloo" else 600, timeout=60)


@pytest.mark.ranks(2, fresh=True, collective_timeout=600, timeout=60)
def test_after_an_interrupted_save_no_rank_waits_for_the_other(rank: int, tmp_path: Path) -> None:
    """The rank that was interrupted leaves the save, and the other one gets an error. The next save is whole."""
    sharded = made()
    sharded.save(tmp_path, "first")
    if rank == 1:  # the interrupt comes when rank 0 has finished the save
        with pytest.raises(KeyboardInterrupt), sharded.checkpoints.operation("save"):
            raise KeyboardInterrupt
    sharded.save(tmp_path, "second")

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setattr(saving, "write_part", interrupted)
        with pytest.raises(KeyboardInterrupt if rank == 1 else CollectiveError):
            sharded.save(tmp_path, "torn")
    step(sharded.model, sharded, rank, 0)
    sharded.save(tmp_path, "whole")
    assert tags(tmp_path) == ["whole", "second", "first"]


@pytest.mark.ranks(2, fresh=True, collective_timeout=600, timeout=60)
def test_an_interrupted_wait_for_an_asynchronous_save_leaves_the_save_whole(rank: int, tmp_path: Path) -> None:
    """The thread that writes goes on, and a second call waits for it again."""
    model, sharded = build(2)
    step(model, sharded, rank, 0)
    write_part = saving.write_part
    is_waited_for = threading.Event()

    def late(*arguments: Any) -> Any:
        assert is_waited_for.wait(60)
        return write_part(*arguments)

    saving.write_part = late
    sharded.save(tmp_path, "behind", asynchronous=True)
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            sharded.save(tmp_path, "next")
    is_waited_for.set()
    sharded.save(tmp_path, "next")
    saving.write_part = write_part
    assert tags(tmp_path) == ["next", "behind"]
    assert sharded.load(tmp_path, "behind").tag == "behind"
