"""Owns the checkpoints of one sharded model: save, load, and the asynchronous save that is being written."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.agreement import together
from zeroshard.checkpoint.live_model import LiveModel
from zeroshard.checkpoint.loading import Loader, Reader
from zeroshard.checkpoint.manifest import Manifest
from zeroshard.checkpoint.node_local import Holdings, Hosts
from zeroshard.checkpoint.saving import Destination, Part, take_snapshot, write_checkpoint
from zeroshard.checkpoint.values import random_state, set_random_state
from zeroshard.collectives.base import Collectives
from zeroshard.collectives.watch import make_current
from zeroshard.errors import CheckpointError, UsageError, ZeroshardError
from zeroshard.observe.display import Display

_ATTEMPTS = 50
"""The most attempts to read a checkpoint that is replaced meanwhile, in case a writer saves without a pause."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that was loaded.

    Attributes:
        path: the checkpoint's folder.
        tag: its tag.
        values: the values that were saved beside the model states, by key.
        world_size: the number of ranks that saved it.
        nbytes: the bytes that this rank read.
    """

    path: Path
    tag: str
    values: dict[str, Any]
    world_size: int
    nbytes: int


def _tell_failure_at_exit(checkpoints: weakref.ref[Checkpoints]) -> None:
    """Print the error of the last asynchronous save and fail the program at its end, if it was never raised."""
    there = checkpoints()
    if there is None or there._pending is None or there._pending.cancelled() or there._pending.exception() is None:
        return
    print(f"zeroshard: the last asynchronous save failed: {there._pending.exception()}", file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class Checkpoints:
    """The checkpoints of one sharded model, `live`. `display` shows the progress of a long save or load."""

    def __init__(self, live: LiveModel, display: Display) -> None:
        self.live = live
        self.display = display
        self._hosts: Hosts | None = None
        self._pending: Future[None] | None = None
        self._staging: dict[str, Tensor] = {}  # a copy of this rank's part of all states, for asynchronous saves
        atexit.register(_tell_failure_at_exit, weakref.ref(self))

    @cached_property
    def control(self) -> Collectives:
        """The connections of saves, made at first use: an asynchronous save must not mix with the training's messages."""
        return self.live.collectives.control()

    @property
    def _device(self) -> torch.device:
        return self.live.units[0].flat.tensor.device

    def together(self, what: str) -> AbstractContextManager[None]:
        """Make an exception in the block, on any rank, a `CheckpointError` on all. Every rank must enter it."""
        return together(self.control, what)

    def _hosts_of(self, node_local: bool) -> Hosts:
        """Find the ranks that share a folder: those of each host, or all. Every rank must call it."""
        answers = self.control.exchange_json(node_local, "whether each host has the folder for itself")
        for rank, answer in enumerate(answers):
            if answer != answers[0]:
                raise UsageError(
                    f"node_local is {answers[0]} on rank 0 and {answer} on rank {rank}: pass the same on every rank."
                )
        if not node_local:
            return Hosts([list(range(self.control.world_size))])
        if self.live.mesh is not None:
            raise UsageError(
                "node_local copies files between hosts of data-parallel ranks, and tensors of this model are divided "
                "over others: save to a folder that all ranks see."
            )
        if self._hosts is None:
            self._hosts = Hosts.of(self.control)
        return self._hosts

    def save(
        self, folder: str | os.PathLike[str], tag: str, values: Mapping[str, Any] | None = None, *, save_latest: bool = True,
        exclude_frozen: bool = False, asynchronous: bool = False, keep_last: int | None = None, within_step: bool = False,
        node_local: bool = False,
    ) -> None:  # fmt: skip
        """Save a checkpoint: model states, buffers, every rank's random state, `values`. Every rank must call it, after a step.

        The checkpoint loads at any world size and under any policy, and exists whole or not at all.

        Args:
            folder: the folder of all checkpoints.
            tag: this checkpoint's name. An older one of the same name stays until this one is whole.
            values: JSON and tensors, such as `{"scheduler": scheduler.state_dict(), "step": 100}`; rank 0's are saved.
            save_latest: `load` without a tag loads this one.
            exclude_frozen: leave out parameters that are not trained.
            asynchronous: copy to CPU memory, and write while training continues. The next save, `checkpoints.wait()`
                and `remove` wait for it, and raise its error. Without any of these, a program whose last save failed
                prints the error at its end, and exits with status 1.
            keep_last: the number of newest checkpoints to keep; older ones are removed. None keeps all.
            within_step: allow a save between a backward and its step. Gradients are not saved, and a load begins the
                step again.
            node_local: the folder is local to each host (a local disk, or memory, /dev/shm). Each rank's file is copied
                to the next host, so that the loss of one host loses nothing.

        Raises:
            CheckpointError: some rank could not write, or the last asynchronous save failed. Every rank raises it; the
                message names the file and the cause. Earlier checkpoints do not change.
        """
        if self.live.schedule.awaits_step and not within_step:
            raise UsageError("a checkpoint between backward and step would lose the gradients: save after the step.")
        steps = self.live.step.steps_begun
        self.live.step.refuse_inside()
        self.live.schedule.refuse_unseen_changes()
        with self.live.collectives.operation(f'save "{tag}"'):
            files.check_tag(tag)
            if asynchronous and self.live.context.policy.uses_disk:
                raise UsageError(
                    "an asynchronous save copies this rank's model states to CPU memory first, and under this policy "
                    "they rest on disk, where there is room for them: save without asynchronous=True."
                )
            self.wait_together()
            with self.together("the values that are saved"):
                path = files.whole_path(folder)
                own = {"random": random_state()}
                outline, part = take_snapshot(self.live, values or {}, own, exclude_frozen=exclude_frozen)
                if asynchronous:
                    part = part.staged(self._staging, self._device)
                    self._refuse_later_steps(steps)
            to = Destination(path, tag, self._hosts_of(node_local), save_latest, keep_last)
            if asynchronous:
                thread = ThreadPoolExecutor(1, "zeroshard checkpoint")
                self._pending = thread.submit(self._write_behind, outline, part, to)
                thread.shutdown(wait=False)
            else:
                part.arrived()
                with self.display.task(f'saving "{tag}"', part.nbytes) as row:
                    refuse = partial(self._refuse_later_steps, steps)
                    write_checkpoint(outline, part, to, self.control, row.advance, refuse)

    def _refuse_later_steps(self, steps: int) -> None:
        if self.live.step.steps_begun != steps:
            raise CheckpointError(
                "a step began while the save copied its values, which would be of two steps. Save on the thread that trains, "
                "after the step; with asynchronous=True the files are written behind the training."
            )

    def _write_behind(self, outline: dict[str, Any], part: Part, to: Destination) -> None:
        make_current(self._device)
        with self.control.operation(f'asynchronous save "{to.tag}"'):
            part.arrived()
            write_checkpoint(outline, part, to, self.control)

    def wait(self) -> None:
        """Block until an asynchronous save is whole; raise its error, once."""
        if self._pending is not None:
            pending = self._pending
            self._pending = None
            pending.result()

    def wait_together(self) -> None:
        """Wait as `wait` does; every rank raises the error now, even if it was raised before. Every rank must call it."""
        with together(self.control, "the asynchronous save before", "the asynchronous save before failed: "):
            self.wait()

    def raise_if_failed(self) -> None:
        """Raise the error of an asynchronous save that has ended."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def close(self) -> None:
        """Wait for an asynchronous save, and close the connections."""
        try:
            self.wait()
        finally:
            self._staging.clear()
            if "control" in vars(self):
                self.control.close()
                del self.control

    def load(
        self, folder: str | os.PathLike[str], tag: str | None = None, *, strict: bool = True, optimizer_states: bool = True,
        random: bool = True, fall_back: bool = False, node_local: bool = False,
    ) -> Loaded:  # fmt: skip
        """Load a checkpoint of any world size and policy; each rank reads its part. Every rank must call it.

        Args:
            folder: the folder that holds all checkpoints.
            tag: default: the newest, by the file `latest`.
            strict: raise an error for parameters that the checkpoint or the model lacks.
            optimizer_states: load the optimizer's states and hyperparameters too.
            random: restore every rank's random state, if the world size is the same.
            fall_back: if a checkpoint is damaged, load the newest whole one instead.
            node_local: the folder is local to each host, see `save`. Hosts first get the files that they lack from the
                others.

        Returns:
            Its path, tag, world size, and `values`.

        Raises:
            CheckpointError: a file is missing, damaged or of another model. Every rank raises it; the message names the
                file and the cause. Some parameters may have been overwritten: load another checkpoint, or start again.
        """
        self.live.schedule.refuse_unseen_changes()
        operation = f'load of "{folder}"' if tag is None else f'load "{tag}"'
        with self.live.collectives.operation(operation):
            self.wait_together()
            if self.live.schedule.awaits_step:
                raise UsageError("a checkpoint cannot be loaded between backward and step: call zero_grad() first.")
            self.live.step.schedule.refuse_parked("a load")
            self.live.step.sub_groups.abandon()
            wanted = {"strict": strict, "optimizer_states": optimizer_states, "random": random}
            loaded = self._load_any(Path(folder), tag, fall_back, node_local, wanted)
            self.live.step.forget_broken_step()
            return loaded

    def _load_any(
        self, folder: Path, tag: str | None, fall_back: bool, node_local: bool, wanted: dict[str, bool]
    ) -> Loaded:
        """Load the first checkpoint that is whole, of those that may be loaded."""
        hosts = self._hosts_of(node_local)
        holdings = None
        if not node_local:
            candidates = self._candidates(folder, tag, fall_back)
        else:
            holdings = Holdings(self.control, hosts, folder)
            candidates = holdings.tags(tag, fall_back=fall_back)
        problems = {}
        for candidate in candidates:
            may_be_whole = True
            while may_be_whole:
                if holdings is not None:
                    holdings.bring(candidate)
                try:
                    return self._load_one(folder / candidate, candidate, **wanted)
                except CheckpointError as error:
                    problems[candidate] = str(error)
                may_be_whole = holdings is not None and holdings.leave_out_damaged(candidate)
        raise CheckpointError("\n".join(problems.values()) or f"{folder} holds no whole checkpoint.")

    def _candidates(self, folder: Path, tag: str | None, fall_back: bool) -> list[str]:
        """List the tags to try, as rank 0 sees them."""
        tags: list[str] = []
        problem = None
        if self.control.rank == 0:
            try:
                if tag is None:
                    tag = files.latest_tag(folder)
                tags = [files.check_tag(tag)]
            except CheckpointError as error:
                problem = str(error)
            if fall_back:
                with suppress(OSError):
                    tags += [one for one in files.tags(folder) if one not in tags]
                    problem = None
        tags, problem = self.control.exchange_json((tags, problem), "the tags of checkpoints")[0]
        if problem is not None:
            raise CheckpointError(problem)
        return tags

    def _load_one(self, path: Path, tag: str, **wanted: bool) -> Loaded:
        """Load one checkpoint. If it is replaced while it is read, read it again."""
        failed: tuple[list[str], CheckpointError] | None = None  # files that could not be read, and why
        for _ in range(_ATTEMPTS):
            with self.together("the manifest that is read"):
                manifest = files.read_manifest(path)
            names = [record.name for record in manifest.files]
            everyone = self.control.exchange_json(names, "the files that are read")
            if any(one != everyone[0] for one in everyone):
                continue
            if failed is not None and failed[0] == names:
                raise failed[1]
            try:
                return self._read(path, tag, manifest, **wanted)
            except CheckpointError as error:
                failed = (names, error)
        raise CheckpointError(f"{path} is replaced again and again while it is read. Load another tag.")

    def _read(
        self, path: Path, tag: str, manifest: Manifest, *, strict: bool, optimizer_states: bool, random: bool
    ) -> Loaded:
        reader = Reader(path, manifest)
        loader = Loader(reader, self.live, optimizer_states=optimizer_states and self.live.inner is not None)
        with self.together("what is to be read"):
            loader.prepare(strict=strict)
        state = None
        with self.together("what was read"):
            try:
                with self.display.task(f'loading "{tag}"', loader.nbytes) as row:
                    reader.advance = row.advance
                    loader.read()
                values = reader.values(manifest.values["shared"])
                if random and manifest.world_size == self.live.collectives.world_size:
                    state = reader.values(manifest.values["ranks"][self.live.rank].get("random"))
            except ZeroshardError:
                raise
            except Exception as error:
                raise CheckpointError(f"{path} is damaged: {error!r}. {files.ANOTHER}") from error
        loader.apply()
        with self.together("the random state"):
            try:
                if state is not None:
                    set_random_state(state)
            except Exception as error:  # torch, numpy and Python each refuse in their own way
                raise CheckpointError(
                    f"{path} is damaged: its random state cannot be set ({error}). load(random=False) leaves it out."
                ) from error
        return Loaded(path, tag, values, manifest.world_size, reader.nbytes)
