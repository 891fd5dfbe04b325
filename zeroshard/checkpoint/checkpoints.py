"""Owns the checkpoints of one sharded model: save, load, and the asynchronous save that is being written."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.agreement import first_two, of_first, problem_of, together
from zeroshard.checkpoint.display import Display
from zeroshard.checkpoint.live_model import LiveModel
from zeroshard.checkpoint.loading import CheckpointLoader, Reader, files_for
from zeroshard.checkpoint.manifest import Manifest
from zeroshard.checkpoint.node_local import Holdings, Hosts
from zeroshard.checkpoint.saving import Destination, Part, take_snapshot, write_checkpoint
from zeroshard.checkpoint.values import set_random_state
from zeroshard.core.named_parameter import name_of
from zeroshard.core.transport.base import Collectives
from zeroshard.core.transport.tree import spread
from zeroshard.core.transport.watch import make_current
from zeroshard.core.unit import refuse_undecided
from zeroshard.errors import CheckpointError, CollectiveError, UsageError, ZeroshardError

_ATTEMPTS = 50
"""The maximum number of attempts to read a checkpoint that a writer keeps replacing."""


@dataclass(frozen=True)
class Loaded:
    """A loaded checkpoint.

    Attributes:
        path: the checkpoint's folder.
        tag: the checkpoint's tag.
        values: the values that were saved with the model states, by key.
        world_size: the number of ranks that saved it.
        nbytes: the number of bytes that this rank read.
    """

    path: Path
    tag: str
    values: dict[str, Any]
    world_size: int
    nbytes: int


def _tell_failure_at_exit(checkpoints: weakref.ref[Checkpoints]) -> None:
    """Print the error of the last asynchronous save if nothing has raised it, and exit with status 1."""
    there = checkpoints()
    if there is None or there._pending is None or there._pending.cancelled() or there._pending.exception() is None:
        return
    print(f"zeroshard: the last asynchronous save failed: {there._pending.exception()}", file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


class Checkpoints:
    """The checkpoints of one sharded model.

    Args:
        live: the model.
        display: the display of the progress of a long save or load.
    """

    def __init__(self, live: LiveModel, display: Display) -> None:
        self.live = live
        self.display = display
        self._pending: Future[None] | None = None
        self._is_unreported = False
        """Whether the ranks still have to exchange the outcome of an asynchronous save. It is the same on every rank."""
        self._staging: dict[str, Tensor] = {}  # memory for a copy of this rank's part, for asynchronous saves
        atexit.register(_tell_failure_at_exit, weakref.ref(self))

    @cached_property
    def control(self) -> Collectives:
        """The connections for saves, opened at first use: their messages must not mix with those of training."""
        return self.live.collectives.control()

    @cached_property
    def _hosts(self) -> Hosts:
        return Hosts.of(self.control)

    @property
    def _device(self) -> torch.device:
        return self.live.units[0].flat.tensor.device

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        """Name the waits of a save, a load or an export. Every rank must enter it.

        After an error that other ranks may not have, such as an interrupt, this rank closes the connections, unless an
        asynchronous save is using them, so no other rank waits for it. The next call opens new connections.
        """
        try:
            with self.live.collectives.operation(name):
                yield
        except BaseException as error:
            is_writing = self._pending is not None and not self._pending.done()
            if (isinstance(error, CollectiveError) or not isinstance(error, Exception)) and not is_writing:
                self._disconnect()
            raise

    def _disconnect(self) -> None:
        if "control" in vars(self):
            self.control.close()
            del self.control

    def together(self, what: str) -> AbstractContextManager[None]:
        """If the block raises on any rank, raise a `CheckpointError` on all ranks. Every rank must enter it."""
        return together(self.control, what)

    def _hosts_of(self, node_local: bool) -> Hosts:
        """Find the ranks that share a folder: the ranks of each host, or all ranks. Every rank must call it."""
        (_, first), *others = first_two(self.control, node_local, "whether the folder is local to each host")
        for rank, answer in others:
            raise UsageError(
                f"node_local is {first} on rank 0 and {answer} on rank {rank}: pass the same on every rank."
            )
        if not node_local:
            return Hosts([list(range(self.control.world_size))])
        if self.live.mesh is not None:
            raise UsageError(
                "node_local copies files between hosts of data-parallel ranks, but other ranks divide tensors of this "
                "model. Save to a folder that all ranks see."
            )
        return self._hosts

    def save(
        self, folder: str | os.PathLike[str], tag: str, values: Mapping[str, Any] | None = None, *, save_latest: bool = True,
        exclude_frozen: bool = False, asynchronous: bool = False, keep_last: int | None = None, within_step: bool = False,
        node_local: bool = False,
    ) -> None:  # fmt: skip
        """Save parameters, optimizer states, buffers, modules' extra states, every rank's random state and `values`.

        Every rank must call it, after a step. Extra states other than JSON values and tensors are left out, with a warning.
        The checkpoint loads at any world size and under any policy. It is either complete or absent.

        Args:
            folder: the folder of all checkpoints.
            tag: this checkpoint's name. An older checkpoint of the same name is kept until this one is complete.
            values: JSON values and tensors, such as `{"scheduler": scheduler.state_dict(), "step": 100}`. Only
                rank 0's values are saved.
            save_latest: whether `load` without a tag loads this checkpoint.
            exclude_frozen: whether to leave out frozen parameters.
            asynchronous: whether to copy the states to CPU memory and write them while training continues. The next
                save, load or export, `checkpoints.wait()` and `remove` wait for this save and raise its error. If none of them is
                called, the program prints the error when it ends and exits with status 1.
            keep_last: the number of newest checkpoints to keep, at least 1; older ones are removed, except the one in
                `latest`. None keeps all.
            within_step: whether to allow a save between a backward and its step. Gradients are not saved: after a load,
                the step begins again at its first microbatch.
            node_local: whether the folder is local to each host, on a disk or in memory (/dev/shm). Each rank's file is
                copied to the next host, so that no data is lost if one host fails.

        Raises:
            CheckpointError: `tag` is not a folder name, a value cannot be packed, a step began during the save, some rank could
                not write, or the last asynchronous save failed. The message names the cause. Earlier checkpoints do not change.
            UsageError: a backward is waiting for its step, an `optimizer.step()` is running or was aborted, `values` is not a
                dict, `keep_last` is less than 1, `asynchronous` is set and model states are on disk, `tag` or `node_local`
                differs between ranks, `node_local` is set for a model with DTensors, or a change to the model did not
                reach its states.
        """
        if keep_last is not None and (
            isinstance(keep_last, bool) or not isinstance(keep_last, Integral) or keep_last < 1
        ):
            raise UsageError(
                f"keep_last={keep_last!r}: give the number of checkpoints to keep, at least 1, or None to keep all."
            )
        if values is not None and not isinstance(values, Mapping):
            raise UsageError(f"save(values=...) takes a dict, not a {type(values).__name__}: name each value.")
        if self.live.schedule.awaits_step and not within_step:
            raise UsageError("a checkpoint between backward and step would lose the gradients: save after the step.")
        begun = self.live.step.begun
        self.live.step.refuse_inside()
        refuse_undecided(self.live.schedule.units, "a save")
        self.live.schedule.refuse_unseen_changes()
        with self.operation(f'save "{tag}"'):
            files.check_tag(tag)
            if asynchronous and self.live.context.policy.uses_disk:
                raise UsageError(
                    "an asynchronous save needs CPU memory for this rank's model states, which this policy stores on "
                    "disk. Save without asynchronous=True."
                )
            self.wait_together(tag)
            with self.together("the values that are saved"):
                path = files.whole_path(folder)
                outline, part = take_snapshot(self.live, values or {}, exclude_frozen=exclude_frozen)
                if asynchronous:
                    part = part.staged(self._staging, self._device)
                    self._refuse_later_steps(begun)
            to = Destination(path, tag, self._hosts_of(node_local), save_latest, keep_last)
            if asynchronous:
                self._is_unreported = True
                thread = ThreadPoolExecutor(1, "zeroshard checkpoint")
                self._pending = thread.submit(self._write_behind, outline, part, to)
                thread.shutdown(wait=False)
            else:
                part.arrived()
                with self.display.task(f'saving "{tag}"', part.nbytes) as row:
                    refuse = partial(self._refuse_later_steps, begun)
                    write_checkpoint(outline, part, to, self.control, row.advance, refuse)

    def _refuse_later_steps(self, begun: object) -> None:
        if self.live.step.begun is not begun:
            raise CheckpointError(
                "a step began while the save copied its values, so they would be from two steps. Save on the thread "
                "that trains, after the step; asynchronous=True writes the files while training continues."
            )

    def _write_behind(self, outline: dict[str, Any], part: Part, to: Destination) -> None:
        make_current(self._device)
        with self.control.operation(f'asynchronous save "{to.tag}"'):
            part.arrived()
            write_checkpoint(outline, part, to, self.control)

    def wait(self) -> None:
        """Wait until an asynchronous save is complete and raise its error once."""
        pending = self._pending
        if pending is None:
            return
        wait_for([pending])  # after an interrupt here, the save is still pending
        self._pending = None
        try:
            pending.result()
        except CollectiveError:
            self._disconnect()
            raise

    def wait_together(self, tag: str | None = None) -> None:
        """Wait as `wait` does and raise any rank's error on every rank. Every rank must call it, with the same tag or None.

        The ranks meet over the connections of training, which detect a rank that is still training. If some rank has closed
        its connections for saves, all ranks close theirs.
        """
        self._is_unreported = False
        collectives = self.live.collectives
        problem = None
        try:
            self.wait()
        except Exception as error:  # the other ranks are waiting for this rank's answer
            problem = problem_of(error)
        is_connected = "control" in vars(self)
        digest = b"" if tag is None else hashlib.sha256(repr(tag).encode()).digest()[:8]
        own = bytes([problem is not None, is_connected]) + digest.ljust(8, b"\0")
        everyone = collectives.exchange_if_different(own, "the tag of a checkpoint")
        if not all(one[1] for one in everyone):
            self._disconnect()
        if any(one[0] for one in everyone):
            with together(collectives, "the previous asynchronous save", "the previous asynchronous save failed: "):
                if problem is not None:
                    raise CheckpointError(problem)
        if len({one[2:] for one in everyone} - {bytes(8)}) > 1:
            tags = collectives.exchange_json(tag if tag is None else repr(tag), "the tags of a checkpoint")
            for rank, other in enumerate(tags):
                if None not in (tag, other) and other != repr(tag):
                    raise UsageError(
                        f"the tag is {tag!r} on this rank and {other} on rank {rank}: pass the same on every rank."
                    )

    def raise_if_failed(self) -> None:
        """Raise the error of an asynchronous save that has failed, once the save has ended on every rank.

        Every rank must call it. If the save is still running on some rank, the call returns without waiting for its end.
        """
        if not self._is_unreported:
            return
        has_ended = self._pending is None or self._pending.done()
        # The ranks' threads end at different times. If a rank raised when its own ended, ranks would raise in different steps.
        if self.live.collectives.agree(bytes([has_ended]), "the end of an asynchronous save").every[0]:
            self.wait_together()

    def close(self) -> None:
        """Wait for an asynchronous save and close the connections."""
        try:
            self.wait()
        finally:
            self._staging.clear()
            self._disconnect()

    @overload
    def load(
        self, folder: str | os.PathLike[str], tag: str | None = None, *, strict: bool = True, optimizer_states: bool = True,
        random: bool = True, fall_back: bool = False, node_local: bool = False,
        rename: Mapping[str, str | None] | None = None, missing_ok: Literal[False] = False,
    ) -> Loaded: ...  # fmt: skip

    @overload
    def load(
        self, folder: str | os.PathLike[str], tag: str | None = None, *, strict: bool = True, optimizer_states: bool = True,
        random: bool = True, fall_back: bool = False, node_local: bool = False,
        rename: Mapping[str, str | None] | None = None, missing_ok: bool,
    ) -> Loaded | None: ...  # fmt: skip

    def load(
        self, folder: str | os.PathLike[str], tag: str | None = None, *, strict: bool = True, optimizer_states: bool = True,
        random: bool = True, fall_back: bool = False, node_local: bool = False,
        rename: Mapping[str, str | None] | None = None, missing_ok: bool = False,
    ) -> Loaded | None:  # fmt: skip
        """Load a checkpoint that was saved at any world size and under any policy. Every rank must call it.

        Each rank reads only its own part.

        Args:
            folder: the folder of all checkpoints.
            tag: the checkpoint's name; default: the one in the file `latest`.
            strict: whether to raise an error if the checkpoint or the model lacks a parameter or buffer.
            optimizer_states: whether to load the optimizer's states and hyperparameters too.
            random: whether to restore every rank's random state, if the world size is the same.
            fall_back: whether to load the newest intact checkpoint if the chosen one cannot be loaded. The reason is logged.
            node_local: whether the folder is local to each host; see `save`. Each host first receives the files that its
                ranks need and that it lacks.
            rename: this model's names for saved parameters and buffers whose names are others, by the saved name; None for one
                that is not loaded.
            missing_ok: whether to return None, as in a job's first run, if no rank finds the tag, or without a tag the file
                `latest`. `fall_back` looks for no other checkpoint then.

        Returns:
            A `Loaded`: the checkpoint's path, tag, values and world size, and the number of bytes that this rank read. None if
            there is no checkpoint and `missing_ok` is set.

        Raises:
            CheckpointError: a file is missing or damaged, or the checkpoint is of a different model. Every rank raises
                it; the message names the file and the cause. Some parameters may have been overwritten: load another
                checkpoint, or restart.
            UsageError: a backward is waiting for its step, model states are parked, `tag` or `node_local` differs between ranks,
                `node_local` is set for a model with DTensors, a model that trains is loaded in
                `torch.inference_mode()`, or a change to the model did not reach its states.
        """
        if torch.is_inference_mode_enabled() and self.live.inner is not None:
            raise UsageError(
                "a load inside torch.inference_mode(): no step could update the states afterwards. Load outside of it."
            )
        refuse_undecided(self.live.schedule.units, "a load")
        self.live.schedule.refuse_unseen_changes()
        operation = f'load of "{folder}"' if tag is None else f'load "{tag}"'
        with self.operation(operation):
            self.wait_together(tag)
            if missing_ok:
                # A folder of one checkpoint counts too, so that the load's error names the right folder.
                found = (Path(folder) / (tag or files.LATEST)).exists() or files.is_checkpoint(Path(folder))
                if not any(
                    one[0] for one in self.live.collectives.exchange(bytes([found]), "whether there is a checkpoint")
                ):
                    return None
            if self.live.schedule.awaits_step:
                raise UsageError("a checkpoint cannot be loaded between backward and step: call zero_grad() first.")
            self.live.schedule.refuse_parked("a load")
            self.live.step.abandon_own_step()
            self.live.step.sub_groups.abandon()
            wanted = {
                "strict": strict, "optimizer_states": optimizer_states, "random": random, "rename": rename or {},
            }  # fmt: skip
            loaded = self._load_any(Path(folder), tag, fall_back, node_local, wanted)
            self.live.schedule.is_stepping = False  # all states are of one step again
            return loaded

    def _load_any(
        self, folder: Path, tag: str | None, fall_back: bool, node_local: bool, wanted: dict[str, Any]
    ) -> Loaded:
        """Load the first candidate that is intact. If there is none, raise the errors of all candidates."""
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
                    holdings.bring(candidate, partial(files_for, live=self.live))
                try:
                    return self._load_one(folder / candidate, candidate, **wanted)
                except CheckpointError as error:
                    problems[candidate] = str(error)
                    if fall_back and self.control.rank == 0:
                        logging.getLogger("zeroshard").warning("a load passes over %s: %s", folder / candidate, error)
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
        tags, problem = of_first(self.control, (tags, problem))
        if problem is not None:
            raise CheckpointError(problem)
        return tags

    def _load_one(self, path: Path, tag: str, *, rename: Mapping[str, str | None], **wanted: Any) -> Loaded:
        """Load one checkpoint. If it is replaced while it is read, read it again."""
        failed: tuple[list[str], CheckpointError] | None = None  # files that could not be read, and why
        for _ in range(_ATTEMPTS):
            data = b""
            with self.together("the manifest that is read"):
                if self.control.rank == 0:
                    data = files.manifest_bytes(path)
            manifest = files.parse_manifest(path, spread(self.control, data))
            names = [record.name for record in manifest.files]
            if failed is not None and failed[0] == names:  # nobody replaced the files: they are damaged
                raise failed[1]
            try:
                return self._read(path, tag, manifest.renamed(rename), **wanted)
            except CheckpointError as error:
                failed = (names, error)
        raise CheckpointError(f"another program kept replacing {path} while it was read. Load another tag.")

    def _read(
        self, path: Path, tag: str, manifest: Manifest, *, strict: bool, optimizer_states: bool, random: bool
    ) -> Loaded:
        reader = Reader(path, manifest)
        optimizer_states = optimizer_states and self.live.inner is not None
        with self.together("the ranges to read"):
            loader = CheckpointLoader(reader, self.live, strict=strict, optimizer_states=optimizer_states)
        state = None
        with self.together("the values that were read"):
            try:
                with self.display.task(f'loading "{tag}"', loader.nbytes) as row:
                    reader.advance = row.advance
                    loader.read()
                values = reader.values(manifest.values["shared"])
                extra_states: dict[str, Any] = {}
                is_same_size = manifest.world_size == self.live.collectives.world_size
                source = self.live.rank if is_same_size else 0
                if is_same_size and random:
                    state = reader.values(reader.own(source).get("random"), source)
                if self.live.modules_with_extra_states and len(manifest.files) > source:
                    packed = reader.own(source).get("extra_states", {})
                    extra_states = reader.values({name_of(name): state for name, state in packed.items()}, source)
            except ZeroshardError:
                raise
            except Exception as error:
                raise CheckpointError(f"{path} is damaged: {error!r}. {files.ANOTHER}") from error
        loader.apply()
        with self.together("the modules' extra states"):
            for name, module in self.live.modules_with_extra_states.items():
                if name in extra_states:
                    module.set_extra_state(extra_states[name])
        with self.together("the random state"):
            try:
                if state is not None:
                    set_random_state(state)
            except Exception as error:  # torch, numpy and Python each raise their own errors
                raise CheckpointError(
                    f"{path} is damaged: its random state cannot be set ({error}). Load it with random=False."
                ) from error
        return Loaded(path, tag, values, manifest.world_size, reader.nbytes)
