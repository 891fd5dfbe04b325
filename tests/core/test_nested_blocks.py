"""Random nestings of blocks that give access to parameters, left by exceptions at any point, on two ranks.

What the parameters show, what rests and the master weights agree on all ranks, and are what a few rules say. Each value is one
number, with which a write fills a block's weight.
"""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import Boom
from models import sgd
from ranks import on_ranks
from torch import Tensor, nn
from twin import CPU, DISK, as_set, build, kept, offloaded, same, update, whole
from twin import Setting as Twin

import zeroshard
from zeroshard import Policy, UsageError

BLOCKS, RANKS, WIDTH = 3, 2, 5


class Runs(nn.Module):
    """A module that borrows, and whose forward is what a test wants."""

    def forward(self, body: Callable[[], object]) -> None:
        body()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        for number, block in enumerate(self.blocks):
            block.weight.data.fill_(number + 1.0)
        self.runs = nn.ModuleList(Runs() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


small = partial(build, make_model=Net, make_optimizer=partial(sgd, lr=0.5), bucket_numel=16)


@dataclass
class Block:
    """What is expected of one block: of the numbers that fill its weight.

    Attributes:
        kept: the number at rest.
        shown: what each rank shows while a block of access is open.
        opened: the kinds of access that are open, outermost first.
        is_written: whether a write may be stored where the unit comes to rest.
    """

    kept: float
    shown: list[float]
    opened: list[str]
    is_written: bool = False
    writes: int = 0


class Program:
    """One random program on one rank, beside what is expected of it."""

    def __init__(
        self, rank: int, model: Net, sharded: zeroshard.Sharded, choice: random.Random, *, is_sharded: bool
    ) -> None:
        self.rank, self.model, self.sharded, self.choice = rank, model, sharded, choice
        self.is_sharded = is_sharded
        self.blocks = [Block(number + 1.0, [number + 1.0] * RANKS, []) for number in range(BLOCKS)]
        self.number = 10
        self.loops = 0
        """The loops over `named_weights` that are open."""
        self.log: list[str] = []

    def some(self) -> list[int]:
        return sorted(self.choice.sample(range(BLOCKS), self.choice.randint(1, BLOCKS)))

    def body(self, depth: int) -> None:
        """Do a few things, of which any may raise, and some are caught."""
        for _ in range(self.choice.randint(1, 3)):
            kinds = ["read", "modify", "borrow", "weights"] * (depth < 4)
            kind = self.choice.choice(
                [*kinds, *kinds, "write", "write", "raise", "deepcopy", "state_dict", "load", "states"]
            )
            self.log.append("  " * depth + kind)
            is_caught = depth == 0 or self.choice.random() < 0.4
            try:
                getattr(self, f"do_{kind}")(depth)
            except (Boom, UsageError) as error:
                self.log.append("  " * depth + f"{type(error).__name__} {'caught' if is_caught else ''}")
                if not is_caught:
                    raise
            self.check()

    def check(self) -> None:
        for block, module in zip(self.blocks, self.model.blocks, strict=True):
            if block.opened or not self.is_sharded:
                wanted = block.shown[self.rank]
                assert bool((module.weight == wanted).all()), (block, module.weight)

    # ------------------------------------------------------------------ blocks of access

    def enter(self, numbers: Sequence[int], kind: str) -> list[int]:
        for number in numbers:
            block = self.blocks[number]
            if not block.opened and self.is_sharded:
                block.shown = [block.kept] * RANKS
                block.is_written = False
            if block.is_written and kind != "borrow" and not {"read", "modify"} & set(block.opened):
                block.kept, block.is_written = block.shown[0], False  # written in a borrower's forward, before this
            block.opened.append(kind)
        return [self.blocks[number].writes for number in numbers]

    def leave(self, numbers: Sequence[int], *, stores: bool) -> None:
        for number in numbers:
            block = self.blocks[number]
            kind = block.opened.pop()
            if stores:
                block.kept = block.shown[0]
                block.is_written = False
            elif kind != "borrow":
                block.is_written = False
            if not block.opened and (block.is_written or not self.is_sharded):
                assert block.shown[0] == block.shown[1]
                block.kept = block.shown[0]

    def do_read(self, depth: int) -> None:
        numbers = self.some()
        targets: list[Any] = [self.model.blocks[number] for number in numbers]
        self.log[-1] += f" {numbers}"
        before = [0]
        is_over = False
        try:
            with zeroshard.unsharded([one.weight for one in targets] if self.choice.random() < 0.5 else targets):
                before = self.enter(numbers, "read")
                self.check()
                self.body(depth + 1)
                is_over = True
        except UsageError as error:
            is_written = [self.blocks[number].writes for number in numbers] != before
            assert not is_over or (is_written and "without a modifier rank" in str(error)), error
            raise
        else:
            assert [self.blocks[number].writes for number in numbers] == before, "a write was not reported"
        finally:
            self.leave(numbers, stores=False)

    def do_modify(self, depth: int) -> None:
        numbers, modifier = self.some(), self.choice.randrange(RANKS)
        self.log[-1] += f" {numbers} {modifier}"
        is_over = False
        before = [0]
        try:
            with zeroshard.unsharded([self.model.blocks[number] for number in numbers], modifier_rank=modifier):
                before = self.enter(numbers, "modify")
                self.check()
                self.body(depth + 1)
                is_over = True
        finally:
            counts = is_over or not self.is_sharded
            for number, count in zip(numbers, before, strict=True):
                if counts:
                    self.blocks[number].shown = [self.blocks[number].shown[modifier]] * RANKS
                    self.blocks[number].writes = count  # no outer block reports them
            self.leave(numbers, stores=counts)

    def do_borrow(self, depth: int) -> None:
        number = self.choice.randrange(BLOCKS)
        self.log[-1] += f" {number}"
        runs = self.model.runs[number]
        handle = zeroshard.borrow(runs, self.model.blocks[number].weight)
        self.enter([number], "borrow")
        try:
            runs(lambda: (self.check(), self.body(depth + 1)))
        finally:
            self.leave([number], stores=False)
            handle.remove()

    def do_weights(self, depth: int) -> None:
        self.loops += 1
        try:
            self.loop_over_weights(depth)
        finally:
            self.loops -= 1

    def loop_over_weights(self, depth: int) -> None:
        wanted = self.choice.randrange(BLOCKS)
        breaks = self.choice.random() < 0.5
        self.log[-1] += f" {wanted} {breaks=}"
        entered = False
        for name, value in self.sharded.named_weights():
            if name != f"blocks.{wanted}.weight":
                continue
            block = self.blocks[wanted]
            assert bool((value == (block.shown[self.rank] if block.opened else block.kept)).all())
            if block.opened and self.choice.random() < 0.5:
                self.body(depth + 1)
                if breaks:
                    break
                continue
            # The loop's own block is a read: a write inside it is reported when its unit ends.
            if block.opened:
                continue
            before = self.enter([wanted], "read")
            entered = True
            try:
                self.body(depth + 1)
            except BaseException:
                self.leave([wanted], stores=False)
                raise
            if breaks or before != [block.writes]:
                break
            self.leave([wanted], stores=False)
            entered = False
        if entered:
            self.leave([wanted], stores=False)

    # ------------------------------------------------------------------ in them

    def do_raise(self, _: int) -> None:
        raise Boom

    def do_write(self, _: int) -> None:
        number = self.choice.randrange(BLOCKS)
        block, weight = self.blocks[number], self.model.blocks[number].weight
        how = self.choice.randrange(4)
        if how == 2 and self.loops:
            how = 0  # the loop keeps what `data` was before, which is refused (test_swaps.py)
        self.log[-1] += f" {number} {how}"
        if not block.opened and self.is_sharded:
            with pytest.raises(UsageError, match="sharded at rest"), torch.no_grad():
                weight.fill_(1.0)
            return
        # A write through `.data` counts only where a modifier rank's values do, or where values stay whole.
        new = self.written(block, counts=how != 1)
        with torch.no_grad():
            if how == 0:
                weight.fill_(new)
            elif how == 1:
                weight.data.fill_(new)
            elif how == 2:
                weight.data = torch.full_like(weight, new)
            else:
                weight.detach().fill_(new)

    def written(self, block: Block, *, counts: bool = True) -> float:
        """Return a new number for this rank, and expect it. Inside a modifying block, ranks write different ones."""
        self.number += 1
        differs = "modify" in block.opened
        block.shown = [float(self.number + differs * 100 * rank) for rank in range(RANKS)]
        if counts:
            block.is_written = True
            block.writes += 1
        if not block.opened:
            block.kept = block.shown[0]
        return block.shown[self.rank]

    def value(self, number: int) -> float:
        block = self.blocks[number]
        return block.shown[self.rank] if block.opened or not self.is_sharded else block.kept

    def do_deepcopy(self, _: int) -> None:
        copied = copy.deepcopy(self.model)
        for number, block in enumerate(copied.blocks):
            assert bool((block.weight == self.value(number)).all())

    def do_state_dict(self, _: int) -> None:
        state = self.model.state_dict()
        for number in range(BLOCKS):
            assert bool((state[f"blocks.{number}.weight"] == self.value(number)).all())

    def do_load(self, _: int) -> None:
        """Load what is there: it changes nothing, but counts as a write."""
        number = self.choice.randrange(BLOCKS)
        block = self.blocks[number]
        if "read" in block.opened or "borrow" in block.opened:
            return
        module, new = self.model.blocks[number], self.written(block)
        module.load_state_dict({"weight": torch.full((WIDTH, WIDTH), new), "bias": module.state_dict()["bias"]})

    def do_states(self, _: int) -> None:
        if any("modify" in block.opened for block in self.blocks):
            with pytest.raises(UsageError, match=r"inside unsharded\(modifier_rank=...\)"):
                self.sharded.states.get("blocks.0.weight")
            return
        for number, block in enumerate(self.blocks):
            if not block.opened:
                assert bool((self.sharded.states.get(f"blocks.{number}.weight") == block.kept).all()), block

    # ------------------------------------------------------------------ at the end

    def end(self) -> None:
        """Everything is at rest and agrees, and the next step is the same on all ranks."""
        assert not any(block.opened for block in self.blocks)
        shown, states = whole(self.model), self.sharded.states
        for number, block in enumerate(self.blocks):
            name = f"blocks.{number}.weight"
            assert bool((shown[name] == block.kept).all()), (name, block, shown[name])
            assert bool((states.get(name) == block.kept).all()), (name, block, states.get(name))
        update(self.model(torch.ones(2, WIDTH, dtype=shown[name].dtype)), self.sharded.optimizer)
        after, states = whole(self.model), self.sharded.states
        for name, value in after.items():
            assert torch.equal(states.get(name).to(value.dtype), value), name
        others: list[Any] = [None] * RANKS
        torch.distributed.all_gather_object(others, after)
        assert same(after, others[0])


def settings(folder: Path) -> dict[str, Twin]:
    return {
        **{f"stage {stage}": Twin(Policy.stage(stage)) for stage in range(4)},
        "stage 3, kept": Twin(kept(Policy.stage(3))),
        "stage 2, on the CPU": Twin(offloaded(2, CPU, folder), apart=True),
        "stage 3, on disk, over gloo": Twin(offloaded(3, DISK, folder), "gloo", apart=True),
    }


def run(rank: int, name: str, dtype: torch.dtype | None, seeds: Sequence[int], folder: Path) -> None:
    with as_set(settings(folder)[name]):
        for seed in seeds:
            model, sharded = small(settings(folder)[name].policy, precision=dtype)
            program = Program(rank, model, sharded, random.Random(seed), is_sharded=name.startswith("stage 3"))
            try:
                for _ in range(4):
                    program.body(0)
                program.end()
            except BaseException as error:
                error.add_note(f"rank {rank}, seed {seed}, {name}, {dtype}:\n" + "\n".join(program.log))
                raise
            sharded.remove()


def each(test: Any) -> Any:
    dtypes = pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
    return dtypes(pytest.mark.parametrize("name", [*settings(Path())])(test))


@pytest.mark.quick(4)
@each
def test_what_is_shown_and_what_rests_agree_after_nested_blocks(
    name: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    on_ranks(run, RANKS, name, dtype, range(20), tmp_path)


@pytest.mark.full
@each
def test_nested_blocks_at_length(name: str, dtype: torch.dtype | None, tmp_path: Path, times: int) -> None:
    on_ranks(run, RANKS, name, dtype, range(100, 100 + 60 * times), tmp_path, timeout=300.0 * times)


@pytest.mark.ranks(2)
def test_writes_through_data_in_a_block_that_only_reads_are_lost_with_a_warning(rank: int) -> None:
    """PEFT's merges write so, and take the change back. Pickles, copies and reads are no writes."""
    model, sharded = small(3)
    weight = model.blocks[0].weight
    before = whole(model)["blocks.0.weight"]
    for _ in range(2):  # the second time, between a backward and its step
        for first in (0, 3):
            with (
                pytest.warns(UserWarning, match=r"`data` inside unsharded\(\).*: blocks.0.weight. .* modifier_rank=0"),
                zeroshard.unsharded(model),
            ):
                with zeroshard.unsharded(weight):
                    assert type(weight.data) is Tensor
                    weight.data.view(-1)[first:].fill_(7.0)
                assert not torch.equal(weight, before)
            assert torch.equal(whole(model)["blocks.0.weight"], before)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with zeroshard.unsharded(model):
                assert bool((weight.data == weight).all())
                assert type(pickle.loads(pickle.dumps(weight))) is nn.Parameter
                assert type(copy.deepcopy(weight)) is type(nn.Parameter(weight)) is nn.Parameter
                model(torch.ones(2, WIDTH))
                with zeroshard.unsharded(weight, modifier_rank=0):
                    weight.data.mul_(1.0)
        model(torch.ones(2, WIDTH)).backward()
        assert weight.grad is not None
    sharded.optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_copy_inside_a_borrowers_forward_borrows_nothing(rank: int, stage: int) -> None:
    """One rank alone can run it: its hooks do not gather the parameters of the original."""
    model, _ = small(stage)
    zeroshard.borrow(model.runs[0], model.blocks[0].weight)
    copies: list[Net] = []

    def keep() -> None:
        copies.append(copy.deepcopy(model))

    model.runs[0](keep)
    if rank == 0:
        copies[0].runs[0](lambda: None)
    assert bool((copies[0].blocks[0].weight == 1).all())
