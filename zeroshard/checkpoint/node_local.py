"""Owns checkpoints in folders that hosts do not share: copies on the next host, and the transfer of missing files before a load.

The folder is on a local disk, or in memory (/dev/shm). Each rank's file is on the rank's host and on the next one. The
manifest is on all hosts, so no file is lost if one host fails.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.agreement import together
from zeroshard.checkpoint.safetensors_file import CHUNK_NBYTES, damage_of
from zeroshard.collectives.base import Collectives
from zeroshard.collectives.grouped import Grouped
from zeroshard.collectives.meeting import hosts_of
from zeroshard.errors import CheckpointError
from zeroshard.storage.buffers import memory_of


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job. The ranks of a host share a folder; if all ranks see one folder, there is one host."""

    ranks: list[list[int]]

    @property
    def are_several(self) -> bool:
        return len(self.ranks) > 1

    @classmethod
    def of(cls, control: Collectives) -> Hosts:
        """Gather the host of each rank. Every rank must call it."""
        return cls(hosts_of(control.members) if isinstance(control, Grouped) else [[0]])

    def host(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def leads(self, rank: int) -> bool:
        """Return whether a rank does the work that only one rank of its host needs to do."""
        return self.ranks[self.host(rank)][0] == rank

    def member(self, host: int, number: int) -> int:
        """Return the rank that does the task with this number on a host. The ranks of a host take turns."""
        ranks = self.ranks[host % len(self.ranks)]
        return ranks[number % len(ranks)]

    def keeper(self, rank: int) -> int:
        """Return the rank on the next host that keeps a copy of this rank's file."""
        home = self.host(rank)
        return self.member(home + 1, self.ranks[home].index(rank))


class Move(NamedTuple):
    """A file to copy from the host of rank `source` to the host of rank `target`."""

    source: int
    target: int
    name: str
    nbytes: int


def refuse_shared(control: Collectives, folder: Path, moves: Sequence[Move]) -> None:
    """Raise if a file exists at its target before it is sent, since the hosts then share the folder."""
    for move in moves:
        if move.target == control.rank and (folder / move.name).exists():
            raise CheckpointError(
                f"several hosts share the folder {folder.parent}. Save without node_local (use_node_local_storage)."
            )


def carry(control: Collectives, folder: Path, moves: Sequence[Move]) -> None:
    """Copy files between hosts. Every rank must call it, with the same moves.

    The function finishes all copies before it raises the first `OSError` of this rank.
    """
    problems: list[OSError] = []
    with ExitStack() as stack:
        opened: dict[Move, FileIO] = {}  # unbuffered, so that closing them writes nothing
        for move in moves:
            if control.rank in (move.source, move.target):
                with _noting(problems):
                    file = (folder / move.name).open("rb" if move.source == control.rank else "wb", buffering=0)
                    opened[move] = stack.enter_context(file)
        for start in range(0, max((move.nbytes for move in moves), default=0), CHUNK_NBYTES):
            in_flight = []
            for move in moves:
                count = min(CHUNK_NBYTES, move.nbytes - start)
                if count <= 0:
                    continue
                chunk = torch.empty(count if control.rank in (move.source, move.target) else 0, dtype=torch.uint8)
                if move.source == control.rank and move in opened:
                    with _noting(problems):  # the other rank is waiting for the chunk, even after an error
                        if opened[move].readinto(memory_of(chunk)) != count:
                            raise OSError(f"{move.name} ends too soon")
                label = f"{move.name} of a checkpoint"
                in_flight.append((move, chunk, control.transfer(chunk, move.source, move.target, label)))
            for move, chunk, pending in in_flight:
                pending.wait()
                if move.target == control.rank and move in opened:
                    with _noting(problems):  # the others continue to send, even if this disk is full
                        file = opened.pop(move)  # after an error, this file gets no more chunks
                        left = memory_of(chunk)
                        while left:
                            left = left[file.write(left) :]
                        if start + chunk.numel() == move.nbytes:
                            os.fsync(file.fileno())  # before a manifest names the file
                        opened[move] = file
    if problems:
        raise problems[0]


@contextmanager
def _noting(problems: list[OSError]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problems.append(error)


def broadcast(control: Collectives, data: bytes, source: int) -> bytes:
    """Return rank `source`'s data on every rank. Every rank must call it."""
    lengths = control.exchange(len(data).to_bytes(8, "little"), "the length of a manifest")
    buffer = torch.empty(int.from_bytes(lengths[source], "little"), dtype=torch.uint8)
    if control.rank == source and data:
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    control.broadcast(buffer, source)
    return buffer.numpy().tobytes()


# ---------------------------------------------------------------------- before a load


@dataclass(frozen=True)
class _Version:
    """A checkpoint, with the sizes of its files and the hosts that have them."""

    tag: str
    created: float  # in seconds since 1970
    sizes: dict[str, int]  # in bytes, by file name
    hosts: list[int] = field(default_factory=list)  # those with its manifest
    holders: dict[str, list[int]] = field(default_factory=dict)  # those with each file in its full size

    @property
    def lost(self) -> list[str]:
        """The files that no host has."""
        return [name for name in self.sizes if not self.holders[name]]


class Holdings:
    """The checkpoints of all hosts, with the files that each host has. Every rank must construct it."""

    def __init__(self, control: Collectives, hosts: Hosts, folder: Path) -> None:
        self._control = control
        self._hosts = hosts
        self._folder = folder
        own = _list(folder) if hosts.leads(control.rank) else None
        everyone = control.exchange_json(own, "the checkpoints of each host")
        by_host = [everyone[ranks[0]] for ranks in hosts.ranks]
        self._latest = [listed["latest"] for listed in by_host]
        found: dict[tuple[str, ...], _Version] = {}
        for host, listed in enumerate(by_host):
            for tag, (created, sizes) in listed["tags"].items():
                found.setdefault((tag, *sorted(sizes)), _Version(tag, created, sizes)).hosts.append(host)
        self._versions = sorted(found.values(), key=lambda version: -version.created)
        # A file's name belongs to one save, so files count even on a host that was killed before it got the manifest.
        present = [listed["files"] for listed in by_host]
        for version in self._versions:
            for name, nbytes in version.sizes.items():
                holders = [host for host, tags in enumerate(present) if tags.get(version.tag, {}).get(name) == nbytes]
                version.holders[name] = holders

    def tags(self, tag: str | None, *, fall_back: bool) -> list[str]:
        """List the tags to try: `tag`, or the newest tag that is in the `latest` of some host.

        With `fall_back`, the other checkpoints without lost files follow, the newest first.
        """
        newest = list(dict.fromkeys(version.tag for version in self._versions if not version.lost))
        first = [name for name in newest if name in self._latest][:1]
        if tag is not None:
            first = [tag]
        if fall_back:
            first += [name for name in newest if name not in first]
        if not first:
            for name in self._latest:
                self._refuse_lost(name)
            raise CheckpointError(
                f"no host has a checkpoint in {self._folder}. Name the folder to which the training run saved."
            )
        return first

    def _newest(self, tag: str) -> _Version | None:
        return next((version for version in self._versions if version.tag == tag and not version.lost), None)

    def _refuse_lost(self, tag: str) -> None:
        for version in self._versions:
            if version.tag == tag:
                raise CheckpointError(
                    f"checkpoint {tag} is lost: none of {len(self._hosts.ranks)} hosts has {version.lost[0]} intact. Both "
                    "copies, on two neighbouring hosts, are gone. Load an earlier checkpoint."
                )

    def bring(self, tag: str) -> None:
        """Send each host its missing files of a checkpoint. Every rank must call it. If any rank fails, all raise its error."""
        version = self._newest(tag)
        if version is None:
            self._refuse_lost(tag)
            raise CheckpointError(
                f"no host has a checkpoint in {self._folder / tag}: there is no {files.MANIFEST}. Load another tag."
            )
        folder = self._folder / tag
        control = self._control
        hosts = self._hosts
        moves = []
        for number, (name, nbytes) in enumerate(version.sizes.items()):
            source = hosts.member(version.holders[name][0], number)
            for host in range(len(hosts.ranks)):
                if host not in version.holders[name]:
                    moves.append(Move(source, hosts.member(host, number), name, nbytes))
        with together(control, "files from other hosts"):
            with suppress(OSError):  # the others are waiting for this rank's data: opening the file raises the error
                folder.mkdir(parents=True, exist_ok=True)
            carry(control, folder, moves)
        source = hosts.ranks[version.hosts[0]][0]
        data = b""
        with together(control, "a manifest from another host"):
            if control.rank == source:
                data = (folder / files.MANIFEST).read_bytes()
        data = broadcast(control, data, source)
        with together(control, "the manifest on each host"):
            own = hosts.host(control.rank)
            if hosts.leads(control.rank) and own not in version.hosts:
                files.replace_file(folder / files.MANIFEST, data, f"host{own}")

    def leave_out_damaged(self, tag: str) -> bool:
        """Verify a checkpoint's files on every host and count the damaged ones as missing. Every rank must call it.

        Returns:
            Whether some files were damaged and other hosts have intact copies, which `bring` can send.
        """
        version = self._newest(tag)
        if version is None:
            return False
        control = self._control
        folder = self._folder / tag
        own = self._hosts.host(control.rank)
        damaged = []
        with suppress(CheckpointError):  # a damaged manifest was reported before
            records = {record.name: record for record in files.read_manifest(folder).files}
            for number, name in enumerate(version.sizes):
                is_ours = own in version.holders[name] and self._hosts.member(own, number) == control.rank
                if is_ours and name in records and damage_of(folder, records[name]) is not None:
                    damaged.append(name)
        everyone = control.exchange_json(damaged, "the damaged files of each host")
        for rank, names in enumerate(everyone):
            for name in names:
                version.holders[name].remove(self._hosts.host(rank))
        if not any(everyone) or version.lost:
            return False
        for name in damaged:
            logging.getLogger("zeroshard").warning("%s is damaged: another host's copy replaces it.", folder / name)
        return True


def _list(folder: Path) -> dict[str, Any]:
    """Return a dict of JSON values: the tag in `latest` and, by folder, the manifest's time and sizes, and the files' sizes."""
    listed: dict[str, Any] = {"latest": None, "tags": {}, "files": {}}
    with suppress(CheckpointError):
        listed["latest"] = files.latest_tag(folder)
    paths: list[Path] = []
    with suppress(OSError):  # a folder that cannot be read counts as empty: the others are waiting for this answer
        paths = [path for path in folder.iterdir() if path.is_dir()]
    for path in paths:
        with suppress(OSError):
            listed["files"][path.name] = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
            with suppress(CheckpointError):
                manifest = files.read_manifest(path)
                sizes = {record.name: record.nbytes for record in manifest.files}
                listed["tags"][path.name] = (manifest.created, sizes)
    return listed
