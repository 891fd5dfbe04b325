"""Owns checkpoints in folders that each host has for itself: copies on the next host, and what a host lacks before it loads.

Called by saving and checkpoints. The folder is a local disk, or memory (/dev/shm). The file of each rank lies on its own host and
on the one after it, the manifest on all: what one host held is not lost with it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.chunks import CHUNK_NBYTES, is_whole
from zeroshard.collectives.base import Collectives
from zeroshard.collectives.grouped import Grouped
from zeroshard.collectives.meeting import hosts_of
from zeroshard.errors import CheckpointError
from zeroshard.storage.raw_memory import memory_of


@dataclass(frozen=True)
class Hosts:
    """Which ranks share a host, and therefore a folder.

    Attributes:
        ranks: of each host.
    """

    ranks: list[list[int]]

    @classmethod
    def of(cls, control: Collectives) -> Hosts:
        """Every rank must call it."""
        return cls(hosts_of(control.members) if isinstance(control, Grouped) else [[0]])

    def host(self, rank: int) -> int:
        """The number of a rank's host."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)

    def leads(self, rank: int) -> bool:
        """Whether it does for its host what is done once."""
        return self.ranks[self.host(rank)][0] == rank

    def member(self, host: int, number: int) -> int:
        """One of a host's ranks; their work is shared out by number."""
        ranks = self.ranks[host % len(self.ranks)]
        return ranks[number % len(ranks)]

    def keeper(self, rank: int) -> int:
        """The rank of the next host that keeps a copy of this rank's file."""
        home = self.host(rank)
        return self.member(home + 1, self.ranks[home].index(rank))


class Move(NamedTuple):
    """A file of a checkpoint's folder that goes from one rank's host to another's."""

    source: int
    target: int
    name: str
    nbytes: int


def copies(hosts: Hosts, names: Sequence[str], sizes: Sequence[int]) -> list[Move]:
    """What goes to the next host after a save; `names` and `sizes` by rank."""
    if len(hosts.ranks) == 1:
        return []
    return [Move(rank, hosts.keeper(rank), name, sizes[rank]) for rank, name in enumerate(names)]


def refuse_shared(control: Collectives, folder: Path, moves: Sequence[Move]) -> None:
    """Raise where a file is there before it was sent: hosts see one another's folders."""
    for move in moves:
        if move.target == control.rank and (folder / move.name).exists():
            raise CheckpointError(
                f"{folder.parent} is a folder that several hosts share: save without node_local (use_node_local_storage)."
            )


def carry(control: Collectives, folder: Path, moves: Sequence[Move]) -> OSError | None:
    """Carry out moves, the same on all ranks. Every rank must call it, and goes on to the end whatever happens on it.

    Returns:
        Why a file could not be read or written on this rank.
    """
    problem: OSError | None = None
    own = {number: move for number, move in enumerate(moves) if control.rank in (move.source, move.target)}
    with ExitStack() as stack:
        opened: dict[int, FileIO] = {}  # not buffered: nothing is left to be written when they are closed
        for number, move in own.items():
            try:
                file = (folder / move.name).open("rb" if move.source == control.rank else "wb", buffering=0)
                opened[number] = stack.enter_context(file)
            except OSError as error:
                problem = problem or error
        for start in range(0, max((move.nbytes for move in moves), default=0), CHUNK_NBYTES):
            under_way = []
            for number, move in enumerate(moves):
                count = min(CHUNK_NBYTES, move.nbytes - start)
                if count <= 0:
                    continue
                chunk = torch.empty(count if number in own else 0, dtype=torch.uint8)
                if move.source == control.rank and number in opened:
                    problem = _read(opened[number], chunk, move.name) or problem
                label = f"{move.name} of a checkpoint"
                under_way.append((number, chunk, control.transfer(chunk, move.source, move.target, label)))
            for number, chunk, pending in under_way:
                pending.wait()
                if moves[number].target == control.rank and number in opened:
                    is_last = start + chunk.numel() == moves[number].nbytes
                    failed = _write(opened[number], chunk, flush=is_last)
                    if failed is not None:  # a full disk: the others still send
                        problem = problem or failed
                        opened.pop(number)
    return problem


def _read(file: FileIO, chunk: Tensor, name: str) -> OSError | None:
    """Fill a chunk; or say why not: the other rank waits for it all the same."""
    try:
        count = file.readinto(memory_of(chunk))
    except OSError as error:
        return error
    return None if count == chunk.numel() else OSError(f"{name} ends too soon")


def _write(file: FileIO, chunk: Tensor, *, flush: bool) -> OSError | None:
    """All of a chunk, and at the end to the disk, before a manifest names the file; or say why not."""
    left = memory_of(chunk)
    try:
        while left:
            left = left[file.write(left) :]
        if flush:
            os.fsync(file.fileno())
    except OSError as error:
        return error
    return None


# ---------------------------------------------------------------------- before a load


@dataclass(frozen=True)
class _Version:
    """One checkpoint of a tag, as the hosts hold it together.

    Attributes:
        created: seconds since 1970.
        names: of its files.
        sizes: of these, in bytes.
        holders: by name, the hosts that have it whole.
        hosts: those that have its manifest.
    """

    tag: str
    created: float
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    holders: dict[str, list[int]]
    hosts: list[int]

    @property
    def lost(self) -> list[str]:
        """Files that no host has."""
        return [name for name in self.names if not self.holders.get(name)]


class Holdings:
    """What all hosts have together. Every rank must make it."""

    def __init__(self, control: Collectives, hosts: Hosts, folder: Path) -> None:
        self._control, self._hosts, self._folder = control, hosts, folder
        told = _held(folder) if hosts.leads(control.rank) else None
        everyone = control.exchange_json(told, "the checkpoints of each host")
        self._latest: list[str] = []
        self._versions: dict[str, list[_Version]] = {}
        by_host = [everyone[ranks[0]] for ranks in hosts.ranks]
        for host, told in enumerate(by_host):
            self._take(host, told)
        for host, told in enumerate(by_host):
            self._take_files(host, told["files"])

    def _take(self, host: int, told: dict[str, Any]) -> None:
        self._latest += [told["latest"]] if told["latest"] else []
        for tag, (created, names, sizes) in told["tags"].items():
            versions = self._versions.setdefault(tag, [])
            one = next((version for version in versions if version.names == tuple(names)), None)
            if one is None:
                one = _Version(tag, created, tuple(names), tuple(sizes), {}, [])
                versions.append(one)
            one.hosts.append(host)

    def _take_files(self, host: int, told: dict[str, dict[str, int]]) -> None:
        """Files count by their names, which are one save's alone: a host that was killed before its manifest has its part, too."""
        for tag, sizes in told.items():
            for version in self._versions.get(tag, ()):
                for name, nbytes in zip(version.names, version.sizes, strict=True):
                    if sizes.get(name) == nbytes:
                        version.holders.setdefault(name, []).append(host)

    def tags(self, tag: str | None, *, fall_back: bool) -> list[str]:
        """The tags to try: that, or the newest that a host calls the latest, and, to fall back to, all others. Newest first.

        Raises:
            CheckpointError: there is none.
        """
        whole = {name: version.created for name in self._versions if (version := self._newest(name)) is not None}
        newest = sorted(whole, key=lambda name: -whole[name])
        if tag is not None:
            first = [tag]
        else:
            first = [name for name in newest if name in self._latest][:1]
        if not first and not (fall_back and newest):
            lost = [version for name in self._latest for version in self._versions.get(name, ())]
            raise CheckpointError(
                _lost_words(lost[0], len(self._hosts.ranks))
                if lost
                else f"no host's {self._folder} holds a checkpoint."
            )
        return first + [name for name in newest if fall_back and name not in first]

    def _newest(self, tag: str) -> _Version | None:
        whole = [version for version in self._versions.get(tag, ()) if not version.lost]
        return max(whole, key=lambda version: version.created, default=None)

    def bring(self, tag: str) -> None:
        """Give every host what it lacks of a checkpoint. Every rank must call it.

        Raises:
            CheckpointError: on every rank where the checkpoint is lost, or unknown.
            OSError: a file could not be read or written on this rank.
        """
        version = self._newest(tag)
        if version is None:
            versions = self._versions.get(tag)
            raise CheckpointError(
                _lost_words(versions[0], len(self._hosts.ranks)) if versions
                else f"no host's {self._folder / tag} is a checkpoint: it has no {files.MANIFEST}."
            )  # fmt: skip
        folder, control, hosts = self._folder / tag, self._control, self._hosts
        moves = [
            Move(
                hosts.member(version.holders[name][0], number), hosts.member(host, number), name, version.sizes[number]
            )
            for number, name in enumerate(version.names)
            for host in range(len(hosts.ranks))
            if host not in version.holders[name]
        ]
        problems: list[Exception | None] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # the others wait for what this rank sends
            problems.append(error)
        problems += [carry(control, folder, moves), self._bring_manifest(folder, version)]
        for problem in filter(None, problems):
            raise problem

    def leave_out_damaged(self, tag: str) -> bool:
        """Read the files of a checkpoint that every host had, and forget those that are damaged. Every rank must call it.

        Returns:
            Whether some are, and other hosts have all of them: `bring` brings these.
        """
        version = self._newest(tag)
        if version is None:
            return False
        control, hosts, folder = self._control, self._hosts, self._folder / tag
        own, damaged = hosts.host(control.rank), list[str]()
        with suppress(CheckpointError):  # what is wrong with the manifest was told
            records = {record.name: record for record in files.read_manifest(folder).files}
            for number, name in enumerate(version.names):
                if own not in version.holders[name] or hosts.member(own, number) != control.rank:
                    continue
                if name in records and not is_whole(folder / name, records[name].nbytes, records[name].checksums):
                    damaged.append(name)
        everyone = control.exchange_json(damaged, "the damaged files of each host")
        for rank, names in enumerate(everyone):
            for name in names:
                version.holders[name].remove(hosts.host(rank))
        if not any(everyone) or version.lost:
            return False
        for name in damaged:
            logging.getLogger("zeroshard").warning("%s is damaged: another host's copy takes its place.", folder / name)
        return True

    def _bring_manifest(self, folder: Path, version: _Version) -> Exception | None:
        control, hosts = self._control, self._hosts
        source, own = hosts.ranks[version.hosts[0]][0], hosts.host(control.rank)
        data, problem = b"", None
        try:
            data = (folder / files.MANIFEST).read_bytes() if control.rank == source else b""
        except OSError as error:  # the others wait for it: they get nothing, and write nothing
            problem = error
        data = broadcast(control, data, source)
        try:
            if data and hosts.leads(control.rank) and own not in version.hosts:
                files.replace_file(folder / files.MANIFEST, data, f"host{own}")
        except CheckpointError as error:
            return error
        return problem


def broadcast(control: Collectives, data: bytes, source: int) -> bytes:
    """Rank `source`'s data."""
    lengths = control.exchange(len(data).to_bytes(8, "little"), "the length of a manifest")
    length = int.from_bytes(lengths[source], "little")
    told = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(length, dtype=torch.uint8)
    control.broadcast(told, source)
    return told.numpy().tobytes()


def _held(folder: Path) -> dict[str, Any]:
    """Of this host, as JSON: what `latest` names; by tag, what a manifest says, and the files that are here with their sizes."""
    latest: str | None = None
    with suppress(CheckpointError):
        latest = files.latest_tag(folder)
    tags: dict[str, Any] = {}
    here: dict[str, dict[str, int]] = {}
    with suppress(OSError):  # a folder that cannot be read holds nothing; the others wait for this rank's word
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.is_dir():
                here[path.name] = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
                with suppress(CheckpointError):
                    manifest = files.read_manifest(path)
                    sizes = {record.name: record.nbytes for record in manifest.files}
                    tags[path.name] = (manifest.created, list(sizes), list(sizes.values()))
    return {"latest": latest, "tags": tags, "files": here}


def _lost_words(version: _Version, hosts: int) -> str:
    return (
        f"checkpoint {version.tag} is lost: none of {hosts} hosts has {version.lost[0]} whole. Two copies are kept, on "
        "hosts next to each other: both went."
    )
