"""Owns the checkpoints of one sharded model: save, load, and the save that is still being written. Called by shard and engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.live_model import LiveModel
from zeroshard.checkpoint.loading import Loader, Reader
from zeroshard.checkpoint.manifest import Manifest
from zeroshard.checkpoint.node_local import Holdings, Hosts
from zeroshard.checkpoint.random_state import random_state, set_random_state
from zeroshard.checkpoint.saving import PendingSave, Where, write_checkpoint
from zeroshard.checkpoint.snapshot import Snapshot, take_snapshot
from zeroshard.collectives.base import Collectives
from zeroshard.collectives.choose import create_control
from zeroshard.errors import CheckpointError, UsageError, ZeroshardError
from zeroshard.observe.display import Display

_ATTEMPTS = 3


@dataclass(frozen=True)
class Loaded:
    """What a load found.

    Attributes:
        path: the checkpoint's folder.
        tag: its tag.
        values: what was saved beside the model states, by key.
        world_size: how many ranks saved it.
        nbytes: what this rank read.
    """

    path: Path
    tag: str
    values: dict[str, Any]
    world_size: int
    nbytes: int


@dataclass(frozen=True)
class Wanted:
    """What of a checkpoint is loaded, see `Checkpoints.load`."""

    strict: bool
    optimizer_states: bool
    random: bool


class Checkpoints:
    """See the module's docstring.

    Attributes:
        live: what is saved, and what a load goes to.
        display: where it shows how far a long one has come.
    """

    def __init__(self, live: LiveModel, display: Display) -> None:
        self.live, self.display = live, display
        self._control: Collectives | None = None
        self._hosts: Hosts | None = None
        self._pending: PendingSave | None = None
        self._staging: dict[str, Tensor] = {}  # of asynchronous saves: this rank's part of all states, once more

    def _hosts_of(self, node_local: bool) -> Hosts | None:
        """Which ranks share a folder, where each host has it for itself; None where all see one. Every rank must call it."""
        said = self.control.exchange_json(node_local, "whether each host has the folder for itself")
        other = next((rank for rank, one in enumerate(said) if one != said[0]), None)
        if other is not None:
            raise UsageError(
                f"node_local is {said[0]} on rank 0 and {said[other]} on rank {other}: say the same on every rank."
            )
        if node_local and self._hosts is None:
            self._hosts = Hosts.of(self.control)
        return self._hosts if node_local else None

    @property
    def control(self) -> Collectives:
        """Its own connections, made at first use: a save behind the training must not meet the training's messages."""
        if self._control is None:
            self._control = create_control(self.live.collectives)
        return self._control

    # ------------------------------------------------------------------ save

    def save(
        self, where: Where, values: Mapping[str, Any], *, exclude_frozen: bool = False, asynchronous: bool = False,
        node_local: bool = False,
    ) -> None:  # fmt: skip
        """Save everything that training needs, with `values` (JSON and tensors; rank 0's count). Every rank must call it.

        Raises:
            CheckpointError: on every rank, if it was not saved; what was there before is as it was. Also where the last
                asynchronous save failed.
        """
        files.check_tag(where.tag)
        if asynchronous and self.live.policy.uses_disk:
            raise UsageError(
                "an asynchronous save copies this rank's model states to CPU memory first, and under this policy they rest on "
                "disk, where there is room for them: save without asynchronous=True."
            )
        self.wait_together()
        where = replace(where, hosts=self._hosts_of(node_local))
        snapshot = self._agree_on_snapshot(values, exclude_frozen, asynchronous)
        if not asynchronous:
            with self.display.task(f'saving "{where.tag}"', snapshot.part.nbytes) as row:
                write_checkpoint(snapshot, where, self.control, row.advance)
            return
        self._pending = PendingSave(partial(self._write_behind, snapshot, where))

    def _write_behind(self, snapshot: Snapshot, where: Where) -> None:
        with self.control.operation(f'asynchronous save "{where.tag}"'):
            write_checkpoint(snapshot, where, self.control)

    def _agree_on_snapshot(self, values: Mapping[str, Any], exclude_frozen: bool, staged: bool) -> Snapshot:
        """What one rank cannot save, none does. `staged` makes it a copy."""
        snapshot, problem = None, None
        try:
            snapshot = take_snapshot(self.live, values, {"random": random_state()}, exclude_frozen=exclude_frozen)
            if staged:
                snapshot = replace(snapshot, part=snapshot.part.staged(self._staging))
        except Exception as error:  # the others wait for this rank's word
            problem = f"rank {self.live.rank}: {error}"
        problems = [one for one in self.control.exchange_json(problem, "what is saved") if one is not None]
        if problems or snapshot is None:
            raise CheckpointError("\n  ".join(problems))
        return snapshot

    def together(self, work: Callable[[], object]) -> None:
        """Do a part of something; what goes wrong on any rank is an error on all."""
        problem = None
        try:
            work()
        except OSError as error:
            problem = f"{error.filename or 'a file'} cannot be written: {error.strerror or error}."
        except Exception as error:  # the others wait for this rank's word
            problem = str(error)
        problem = self._first(problem)
        if problem is not None:
            raise CheckpointError(problem)

    def wait(self) -> None:
        """Block until an asynchronous save is whole; raises what went wrong with it, once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def wait_together(self) -> None:
        """As `wait`; what went wrong is raised on every rank now, also where one was told before."""
        problem = None
        try:
            self.wait()
        except CheckpointError as error:
            problem = str(error)
        problem = self._first(problem)
        if problem is not None:
            raise CheckpointError(f"the asynchronous save before failed: {problem}")

    def raise_if_failed(self) -> None:
        """Raise what went wrong with an asynchronous save that has ended."""
        if self._pending is not None and self._pending.is_done:
            self.wait()

    def close(self) -> None:
        """Wait, and give the connections back."""
        try:
            self.wait()
        finally:
            self._staging.clear()
            if self._control is not None:
                self._control.close()
                self._control = None

    # ------------------------------------------------------------------ load

    def load(
        self, folder: str | os.PathLike[str], tag: str | None = None, *, strict: bool = True, optimizer_states: bool = True,
        random: bool = True, fall_back: bool = False, node_local: bool = False,
    ) -> Loaded:  # fmt: skip
        """Load a checkpoint, saved at whatever world size and policy. Every rank must call it.

        Args:
            folder: that of all checkpoints.
            tag: default: what `latest` names.
            strict: parameters that the checkpoint or the model lacks are errors.
            optimizer_states: load the optimizer's states and hyperparameters.
            random: restore random state, where the world size is the same.
            fall_back: where a checkpoint is damaged, go on with the newest whole one.
            node_local: the folder is each host's own; what a host lacks comes from the others first.

        Raises:
            CheckpointError: on every rank. Parameters may have been overwritten in part: load another, or start anew.
        """
        self.wait_together()
        if self.live.schedule.awaits_step:
            raise UsageError("a checkpoint cannot be loaded between backward and step: zero_grad() first.")
        self.live.optimizer.refuse_parked("a load")
        self.live.optimizer.abandon()
        wanted = Wanted(strict, optimizer_states, random)
        problems: list[str] = []
        hosts = self._hosts_of(node_local)
        holdings = None if hosts is None else Holdings(self.control, hosts, Path(folder))
        candidates = (
            self._candidates(Path(folder), tag, fall_back)
            if holdings is None
            else holdings.tags(tag, fall_back=fall_back)
        )
        for candidate in candidates:
            if holdings is not None:
                self.together(partial(holdings.bring, candidate))
            found = self._try(Path(folder) / candidate, candidate, wanted)
            if isinstance(found, str) and holdings is not None and holdings.leave_out_damaged(candidate):
                self.together(partial(holdings.bring, candidate))
                found = self._try(Path(folder) / candidate, candidate, wanted)
            if isinstance(found, Loaded):
                return found
            problems.append(found)
        raise CheckpointError("\n".join(problems) or f"{folder} holds no whole checkpoint.")

    def _candidates(self, folder: Path, tag: str | None, fall_back: bool) -> list[str]:
        """The tags to try, as rank 0 sees them."""
        told: dict[str, Any] | None = None
        if self.control.rank == 0:
            try:
                wanted = [files.check_tag(tag if tag is not None else files.latest_tag(folder))]
                told = {"tags": wanted}
            except CheckpointError as error:
                wanted = []
                told = {"tags": [], "error": str(error)}
            if fall_back:
                with suppress(OSError):
                    told = {"tags": wanted + [one for one in files.tags(folder) if one not in wanted]}
        told = self.control.exchange_json(told, "the tags of checkpoints")[0]
        if "error" in told:
            raise CheckpointError(told["error"])
        return list(told["tags"])

    def _try(self, path: Path, tag: str, wanted: Wanted) -> Loaded | str:
        """Load one, or say why not. A checkpoint that is replaced while it is read is read again."""
        problem = ""
        for _ in range(_ATTEMPTS):
            manifest, problem = self._agree_on_manifest(path)
            if manifest is None:
                return problem
            outcome = self._read(path, tag, manifest, wanted)
            if isinstance(outcome, Loaded):
                return outcome
            problem = outcome
            again, _ = self._agree_on_manifest(path)
            if again is None or again.files == manifest.files:
                break
        return problem

    def _agree_on_manifest(self, path: Path) -> tuple[Manifest | None, str]:
        for _ in range(_ATTEMPTS):
            manifest, problem = None, None
            try:
                manifest = files.read_manifest(path)
            except CheckpointError as error:
                problem = str(error)
            said = {"error": problem, "files": [record.name for record in manifest.files] if manifest else []}
            everyone = self.control.exchange_json(said, "the manifest that is read")
            errors = [one["error"] for one in everyone if one["error"]]
            if errors:
                return None, errors[0]
            if all(one == everyone[0] for one in everyone):
                return manifest, ""
        return None, f"{path} is replaced again and again while it is read."

    def _read(self, path: Path, tag: str, manifest: Manifest, wanted: Wanted) -> Loaded | str:
        reader = Reader(path, manifest)
        loader = Loader(reader, self.live)
        optimizer_states = wanted.optimizer_states and self.live.inner is not None
        problem, values = None, dict[str, Any]()
        try:
            loader.prepare(strict=wanted.strict, optimizer_states=optimizer_states)
        except Exception as error:  # the others wait for this rank's word
            problem = str(error)
        problem = self._first(problem)
        if problem is not None:
            return problem
        try:
            with self.display.task(f'loading "{tag}"', loader.nbytes) as row:
                reader.advance = row.advance
                loader.read()
            values = reader.values(manifest.values["shared"])
            same_world = manifest.world_size == self.live.collectives.world_size
            own = manifest.values["ranks"][self.live.rank] if same_world else {}
            state = reader.values(own.get("random")) if wanted.random else None
        except Exception as error:
            problem = str(error) if isinstance(error, ZeroshardError) else f"{path} is damaged: {error!r}"
        problem = self._first(problem)
        if problem is not None:
            return problem
        loader.apply(optimizer_states=optimizer_states)
        if state is not None:
            set_random_state(state)
        return Loaded(path, tag, values, manifest.world_size, reader.nbytes)

    def _first(self, problem: str | None) -> str | None:
        """What is wrong on any rank is wrong on all."""
        everyone = self.control.exchange_json(
            None if problem is None else f"rank {self.live.rank}: {problem}", "how it went"
        )
        return next((one for one in everyone if one is not None), None)
