"""Checkpoints that lack something, or belong to a different run, are refused by name before anything is read."""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from collections import OrderedDict
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Stack, Untied, tokens
from ranks import on_ranks, run_ranks
from torch import nn
from twin import build, step

import zeroshard
from zeroshard import CheckpointError, CollectiveError, Policy, ZeroshardError
from zeroshard.checkpoint import saving
from zeroshard.checkpoint.loading import plan_for, requests_for
from zeroshard.checkpoint.manifest import RangeRecord, StateRecord, dtype_of, tags
from zeroshard.core.layout import Span
from zeroshard.core.placement import Placement


def sharded(groups: Any, stage: int = 2, seed: int = 0) -> tuple[nn.Module, zeroshard.Sharded]:
    torch.manual_seed(seed)
    model = Stack()
    optimizer = None if groups is None else torch.optim.AdamW(groups(model), lr=1e-2)
    return model, zeroshard.shard(model, optimizer, Policy.stage(stage))


def one(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def two(lr: float | None) -> Any:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        last = list(model.blocks[2].parameters())
        rest = [p for p in model.parameters() if all(p is not q for q in last)]
        return [{"params": rest}, {"params": last} | ({} if lr is None else {"lr": lr})]

    return groups


def rates(made: zeroshard.Sharded) -> list[float]:
    return [group["lr"] for group in made.optimizer.param_groups]


@pytest.mark.ranks(2)
def test_one_group_that_was_saved_does_not_become_two_that_differ(rank: int, tmp_path: Path) -> None:
    model, made = sharded(one)
    step(model, made, rank, 0)
    made.save(tmp_path, "one")
    other, again = sharded(two(0.5), seed=1)
    with zeroshard.unsharded(other):
        before = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(
        CheckpointError, match=r"param groups 0 \(.*\) and 1 \(blocks\.2.*\) .* here, .* saved as one group"
    ):
        again.load(tmp_path)
    assert rates(again) == [1e-2, 0.5]
    with zeroshard.unsharded(other):
        assert all(map(torch.equal, before, other.parameters())), "nothing was read"
    again.load(tmp_path, optimizer_states=False)
    assert rates(again) == [1e-2, 0.5]
    with zeroshard.unsharded(other), zeroshard.unsharded(model):
        assert torch.equal(other.blocks[0].up.weight, model.blocks[0].up.weight)


def test_one_group_becomes_two_that_are_alike(tmp_path: Path) -> None:
    model, made = sharded(one)
    step(model, made, 0, 0)
    made.optimizer.param_groups[0]["lr"] = 0.25
    made.save(tmp_path, "one")
    _, again = sharded(two(None), seed=1)
    again.load(tmp_path)
    assert rates(again) == [0.25, 0.25]


def test_two_groups_that_differ_do_not_become_one(tmp_path: Path) -> None:
    model, made = sharded(two(0.5))
    step(model, made, 0, 0)
    made.save(tmp_path, "two")
    _, again = sharded(one, seed=1)
    with pytest.raises(CheckpointError, match=r"param group 0 .* saved in groups with different"):
        again.load(tmp_path)
    assert rates(again) == [1e-2]


@pytest.mark.ranks(2)
def test_a_model_that_was_evaluated_has_no_optimizer_states(rank: int, tmp_path: Path) -> None:
    model, evaluated = sharded(None, stage=3)
    evaluated.save(tmp_path, "eval", {"step": 1})
    _, training = sharded(one, seed=1)
    with pytest.raises(CheckpointError, match=r"without an optimizer.*holds no states for this run's AdamW"):
        training.load(tmp_path)
    assert training.load(tmp_path, optimizer_states=False).values == {"step": 1}
    with zeroshard.unsharded(model), zeroshard.unsharded(training.model):
        assert torch.equal(training.model.head.weight, model.head.weight)
    _, other = sharded(None, stage=0, seed=1)
    other.load(tmp_path)


def test_an_engine_says_so_too(tmp_path: Path) -> None:
    def engine(**optimizer: Any) -> zeroshard.Engine:
        return zeroshard.initialize(model=Stack(), config={"train_micro_batch_size_per_gpu": 1, **optimizer})[0]

    engine().save_checkpoint(tmp_path)
    training = engine(optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    with pytest.raises(CheckpointError, match="without an optimizer"):
        training.load_checkpoint(tmp_path)
    training.load_checkpoint(tmp_path, load_optimizer_states=False)
    training.load_checkpoint(tmp_path, load_module_only=True)


def advised(error: CheckpointError, load: Callable[..., Any]) -> dict[str, bool]:
    """The argument of `load` that the message names."""
    found = [name for name in re.findall(r"(\w+)=False", str(error)) if name in signature(load).parameters]
    assert len(found) == 1, error
    return {found[0]: False}


def test_the_advice_of_an_error_can_be_followed_in_a_loop_and_in_an_engine(tmp_path: Path) -> None:
    _, made = sharded(one)
    made.save(tmp_path, "adamw")
    model = Stack()
    other = zeroshard.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    with pytest.raises(CheckpointError, match="saved with AdamW, and this run has SGD") as refused:
        other.load(tmp_path)
    other.load(tmp_path, **advised(refused.value, other.load))
    _, grouped = sharded(two(0.5), seed=1)
    with pytest.raises(CheckpointError, match="as one group") as refused:
        grouped.load(tmp_path)
    grouped.load(tmp_path, **advised(refused.value, grouped.load))
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = zeroshard.initialize(model=Stack(), config=config)[0]
    with pytest.raises(CheckpointError, match="saved with AdamW, and this run has SGD") as refused:
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, **advised(refused.value, engine.load_checkpoint))
    larger = zeroshard.initialize(model=nn.Sequential(Stack(), nn.Linear(2, 2)), config=config)[0]
    with pytest.raises(CheckpointError, match="is of a different model") as refused:
        larger.load_checkpoint(tmp_path, load_optimizer_states=False)
    larger.load_checkpoint(tmp_path, load_optimizer_states=False, **advised(refused.value, larger.load_checkpoint))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_among_the_values_is_true_or_refused(stage: int, tmp_path: Path) -> None:
    """Under stage 3 its values are elsewhere: it is refused by name, or what is loaded is what it was. Never NaN."""

    def body(rank: int) -> bool:
        model, made = build(stage)
        step(model, made, rank, 0)
        weight = model.blocks[0].up.weight
        with zeroshard.unsharded(model):
            expected = weight.detach().clone()
            alias = weight.data
        was_refused = False
        try:
            made.save(tmp_path, "a", {"deep": [{"w": weight}]})
        except ZeroshardError as error:
            was_refused = True
            assert "unsharded" in str(error)
            assert "blocks.0.up.weight" in str(error)
        else:
            assert torch.equal(made.load(tmp_path).values["deep"][0]["w"], expected)
        made.save(tmp_path, "b", {"w": expected})
        assert torch.equal(made.load(tmp_path, "b").values["w"], expected)
        made.save(tmp_path, "c", {"w": alias})  # as long as there is an alias, its memory is not given back
        assert torch.equal(made.load(tmp_path, "c").values["w"], expected)
        return was_refused

    assert on_ranks(body, 2) == [stage == 3] * 2


def test_ranges_with_a_hole_are_refused() -> None:
    first = RangeRecord(start=0, stop=4, file=0, offset=8)
    second = RangeRecord(start=6, stop=10, file=1, offset=8)
    state = StateRecord(dtype="float32", ranges=[first, second])
    for start, stop, file, offset in ((1, 3, 0, 12), (6, 8, 1, 8)):
        out = torch.empty(stop - start)
        plan = plan_for(state.over, Span("weight", start, stop), Placement.whole([12]))
        (request,) = requests_for(plan, dtype_of(state.dtype), out)
        assert (request.file, request.offset) == (file, offset)
    for start, stop, missing in ((2, 8, "4 to 8"), (4, 6, "4 to 6"), (9, 12, "10 to 12")):
        with pytest.raises(CheckpointError, match=f"holds no elements {missing} of weight"):
            plan_for(state.over, Span("weight", start, stop), Placement.whole([12]))


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EROFS, r"Check the folder's permissions and the space on its disk\."),
        (errno.EMFILE, r"Raise the limit on open files \(`ulimit -n`\)\."),
    ],
    ids=["read-only", "descriptors"],
)
def test_what_cannot_be_written_has_advice(
    number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the error comes from: the folder, or a file in it."""

    def fail(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    _, live = sharded(one)
    for patched, name in ((Path, "mkdir"), (os, "open")):
        with monkeypatch.context() as patch:
            patch.setattr(patched, name, fail)
            with pytest.raises(CheckpointError, match=f"{os.strerror(number)}. {advice}"):
                live.save(tmp_path / name, "one")


def test_a_users_own_file_of_states_makes_no_folder_deepspeeds(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
        engine = zeroshard.initialize(model=nn.Linear(2, 2), config=config)[0]
        with pytest.warns(UserWarning, match="no checkpoint was loaded"):
            assert engine.load_checkpoint(tmp_path) == (None, None)
        engine.save_checkpoint(tmp_path, "one")
        assert engine.load_checkpoint(tmp_path)[0] is not None

    (tmp_path / "rng_states.pt").touch()
    on_ranks(body, 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tag", [None, "a"])
def test_a_name_that_no_disk_takes_is_an_error_of_checkpoints(rank: int, tag: str | None) -> None:
    made = sharded(one)[1]
    with pytest.raises(CheckpointError):
        made.load("x" * 300, tag)


@pytest.mark.parametrize("keep_last", [0, -1, 1.5, True, "3"])
def test_a_number_of_checkpoints_that_keeps_none_is_refused(keep_last: Any, tmp_path: Path) -> None:
    """-1 keeps all in other libraries: it must not remove all but this one."""
    _, made = sharded(one)
    made.save(tmp_path, "first")
    with pytest.raises(ZeroshardError, match=rf"keep_last={keep_last!r}: give .*at least 1, or None to keep all"):
        made.save(tmp_path, "last", keep_last=keep_last)
    assert tags(tmp_path) == ["first"]
    made.remove()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("call", ["save", "load"])
def test_tags_that_differ_between_ranks_are_named(rank: int, call: str, tmp_path: Path) -> None:
    _, made = sharded(one)
    for tag in ("tag 0", "tag 1"):
        made.save(tmp_path, tag)
    with pytest.raises(
        ZeroshardError, match=rf"the tag is 'tag {rank}' on this rank and 'tag {1 - rank}' on rank {1 - rank}: pass"
    ):
        getattr(made, call)(tmp_path, f"tag {rank}")
    made.save(tmp_path, "then")
    assert tags(tmp_path)[0] == "then"


@pytest.mark.parametrize("transport", ["shared memory", pytest.param("gloo", marks=pytest.mark.full)], indirect=True)
def test_a_later_save_that_one_rank_alone_calls_is_named(transport: str, tmp_path: Path) -> None:
    """The first save made connections of its own. Over shared memory it is named long before the timeout, over gloo then."""

    def body(rank: int) -> None:
        model, made = sharded(one)
        step(model, made, rank, 0)
        made.save(tmp_path, "first")
        with pytest.raises(CollectiveError) as caught:
            if rank == 0:
                made.save(tmp_path, "second")
            step(model, made, rank, 1)
        assert 'rank 0 waited for save "second"' in str(caught.value)

    run_ranks(body, 2, collective_timeout=4 if transport == "gloo" else 600, timeout=60)


@pytest.mark.ranks(2, fresh=True, collective_timeout=600, timeout=60)
@pytest.mark.full
def test_after_an_interrupted_save_no_rank_waits_for_the_other(rank: int, tmp_path: Path) -> None:
    """The rank that was interrupted leaves the save, and the other one gets an error. The next save is whole."""
    model, made = sharded(one)
    step(model, made, rank, 0)
    write_part = saving.write_part

    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    if rank == 1:
        saving.write_part = interrupted
    with pytest.raises(KeyboardInterrupt if rank == 1 else CollectiveError):
        made.save(tmp_path, "torn")
    saving.write_part = write_part
    step(model, made, rank, 1)
    made.save(tmp_path, "whole")
    assert tags(tmp_path) == ["whole"]


@pytest.mark.ranks(2, fresh=True, collective_timeout=600, timeout=60)
def test_an_interrupted_wait_for_an_asynchronous_save_leaves_the_save_whole(rank: int, tmp_path: Path) -> None:
    """The thread that writes goes on, and a second call waits for it again."""
    model, made = sharded(one)
    step(model, made, rank, 0)
    write_part = saving.write_part
    is_waited_for = threading.Event()

    def late(*arguments: Any) -> Any:
        assert is_waited_for.wait(60)
        return write_part(*arguments)

    saving.write_part = late
    made.save(tmp_path, "behind", asynchronous=True)
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            made.save(tmp_path, "next")
    is_waited_for.set()
    made.save(tmp_path, "next")
    saving.write_part = write_part
    assert tags(tmp_path) == ["next", "behind"]
    assert made.load(tmp_path, "behind").tag == "behind"


@pytest.mark.ranks(2, fresh=True, collective_timeout=600, timeout=60)
def test_ranks_of_which_one_has_closed_its_connections_save_again(rank: int, tmp_path: Path) -> None:
    """As after an interrupt that came when the other ranks had finished the save."""
    _, made = sharded(one)
    made.save(tmp_path, "first")
    if rank == 1:
        with pytest.raises(KeyboardInterrupt), made.checkpoints.operation("save"):
            raise KeyboardInterrupt
    made.save(tmp_path, "second")
    assert tags(tmp_path) == ["second", "first"]


def test_after_a_step_without_an_optimizer_the_model_still_evaluates() -> None:
    model, made = sharded(None, 3)
    for arguments in ({}, {"closure": None}, {"scale": 2.0}):
        with pytest.raises(ZeroshardError, match="for evaluation only"):
            made.optimizer.step(**arguments)
    with torch.no_grad():
        model(*tokens(0, 0))
    assert made.consolidated_state_dict()
    made.remove()


def two_layers() -> Any:
    return nn.Sequential(OrderedDict(first=nn.Linear(8, 8, bias=False), last=nn.Linear(8, 8, bias=False)))


@pytest.mark.ranks(2)
def test_two_parameters_do_not_load_into_one(rank: int, tmp_path: Path) -> None:
    untied, made = build(2, make_model=Untied)
    tied, other = build(2, seed=1)
    made.save(tmp_path, "one")
    with pytest.raises(
        CheckpointError, match=r"embedding\.weight and head\.weight were saved as two tensors.*strict=False"
    ):
        other.load(tmp_path)
    other.load(tmp_path, strict=False, optimizer_states=False)
    assert torch.equal(tied.head.weight, untied.embedding.weight)


@pytest.mark.ranks(2)
def test_parameters_that_were_left_out_do_not_count_as_loaded_if_this_run_trains_them(
    rank: int, tmp_path: Path
) -> None:
    def made(frozen: bool) -> zeroshard.Sharded:
        model = two_layers()
        model.first.requires_grad_(not frozen)
        return build(2, make_model=lambda: model)[1]

    made(frozen=True).save(tmp_path, "adapters", exclude_frozen=True)
    made(frozen=True).load(tmp_path)
    with pytest.raises(CheckpointError, match=r"it lacks first\.weight.*strict=False"):
        made(frozen=False).load(tmp_path)


@pytest.mark.ranks(2)
def test_states_of_several_optimizers_load_only_into_the_same_classes(rank: int, tmp_path: Path) -> None:
    def made(first: Any, last: Any, turned: bool = False) -> tuple[nn.Module, zeroshard.Sharded]:
        model = two_layers()
        members = [first(model.first.parameters(), lr=0.1), last(model.last.parameters(), lr=0.2)]
        return model, zeroshard.shard(model, members[::-1] if turned else members, 1)

    model, sharded = made(torch.optim.SGD, torch.optim.AdamW)
    model(torch.ones(2, 8)).sum().backward()
    sharded.optimizer.step()
    sharded.save(tmp_path, "one")
    for first, last, name in (
        (torch.optim.SGD, torch.optim.SGD, "last"),
        (torch.optim.AdamW, torch.optim.AdamW, "first"),
    ):
        with pytest.raises(CheckpointError, match=rf"with .* for {name}\.weight, and this run has {first.__name__}"):
            made(first, last)[1].load(tmp_path)
    made(torch.optim.AdamW, torch.optim.SGD)[1].load(tmp_path, optimizer_states=False)
    _, again = made(torch.optim.SGD, torch.optim.AdamW, turned=True)
    again.load(tmp_path)
    assert torch.equal(again.states.get("last.weight", "exp_avg"), sharded.states.get("last.weight", "exp_avg"))
