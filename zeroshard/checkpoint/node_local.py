"""Owns checkpoints in folders that hosts do not share: copies on the next host, and the transfer of missing files before a load.

The folder is on a local disk, or in memory (/dev/shm). Each rank's file is on the rank's host and on the next one. The
manifest is on all hosts, so no file is lost if one host fails.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zeroshard.checkpoint import manifest as files
from zeroshard.checkpoint.agreement import of_first, together
from zeroshard.checkpoint.manifest import Manifest
from zeroshard.checkpoint.safetensors_file import CHUNK_NBYTES, damage_of
from zeroshard.core.storage.buffers import memory_of
from zeroshard.core.transport.base import Collectives
from zeroshard.core.transport.grouped import Grouped
from zeroshard.core.transport.members import hosts_of
from zeroshard.core.transport.tree import collect, spread
from zeroshard.errors import CheckpointError


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

    @cached_property
    def _host_of(self) -> dict[int, int]:
        return {rank: number for number, ranks in enumerate(self.ranks) for rank in ranks}

    def host(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return self._host_of[rank]

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

    def kept(self, rank: int) -> list[int]:
        """Return the ranks of the host before, of whose files this rank keeps a copy."""
        return [other for other in self.ranks[self.host(rank) - 1] if self.keeper(other) == rank]


class FileMove(NamedTuple):
    """A file to copy from the host of rank `source` to the host of rank `target`."""

    source: int
    target: int
    name: str
    nbytes: int


def own_moves(control: Collectives, hosts: Hosts, name_of: Callable[[int], str], nbytes: int) -> list[FileMove]:
    """Return the copies to the next host in which this rank takes part, in the order of their sources.

    `nbytes` is the size of this rank's file, and `name_of` returns the name of each rank's. Every rank must call it.
    """
    own = torch.tensor([nbytes])
    sizes = {rank: torch.zeros_like(own) for rank in hosts.kept(control.rank)}
    label = "the sizes of files"
    works = [control.transfer(size, rank, control.rank, label) for rank, size in sizes.items()]
    keeper = hosts.keeper(control.rank)
    works.append(control.transfer(own, control.rank, keeper, label))
    for work in works:
        work.wait()
    moves = [FileMove(rank, control.rank, name_of(rank), int(size)) for rank, size in sizes.items()]
    return sorted([*moves, FileMove(control.rank, keeper, name_of(control.rank), nbytes)])


def refuse_shared(control: Collectives, folder: Path, moves: Sequence[FileMove]) -> None:
    """Raise if a file exists at its target before it is sent, since the hosts then share the folder."""
    for move in moves:
        if move.target == control.rank and (folder / move.name).exists():
            raise CheckpointError(
                f"several hosts share the folder {folder.parent}. Save without node_local (use_node_local_storage)."
            )


def carry(control: Collectives, folder: Path, moves: Sequence[FileMove]) -> None:
    """Copy files between hosts. Every rank must call it, with the moves in which it takes part, in one order on all ranks.

    The function finishes all copies before it raises the first `OSError` of this rank.
    """
    problems: list[OSError] = []
    with ExitStack() as stack:
        opened: dict[FileMove, FileIO] = {}  # unbuffered, so that closing them writes nothing
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


# ---------------------------------------------------------------------- before a load


@dataclass(frozen=True)
class _Version:
    """A checkpoint, with the sizes of its files and the hosts that have them."""

    tag: str
    created: float  # in seconds since 1970
    sizes: dict[str, int]  # in bytes, by file name
    hosts: list[int]  # those with its manifest
    holders: dict[str, list[int]]  # those with each file in its full size

    @property
    def lost(self) -> list[str]:
        """The files that no host has."""
        return [name for name in self.sizes if not self.holders[name]]


class Holdings:
    """The checkpoints of all hosts. Rank 0 knows which hosts have each file.

    Every rank must construct it, and call its methods.
    """

    def __init__(self, control: Collectives, hosts: Hosts, folder: Path) -> None:
        self._control = control
        self._hosts = hosts
        self._folder = folder
        self._own = hosts.host(control.rank)
        own = _Listed()
        if hosts.leads(control.rank):
            own = _Listed.of(_list(folder), self._own)
        found = collect(control, own.message, _merged_lists, "the checkpoints of each host")
        self._latest: list[str | None] = []
        """The tag in the `latest` of each host; on rank 0 only, like the versions."""
        self._versions: list[_Version] = []
        if found is not None:
            listed = _Listed(**json.loads(found))
            self._latest = [listed.latest.get(str(host)) for host in range(len(hosts.ranks))]
            self._versions = sorted(listed.versions_with_holders(), key=lambda version: -version.created)

    def tags(self, tag: str | None, *, fall_back: bool) -> list[str]:
        """List the tags to try: `tag`, or the newest tag that is in the `latest` of some host.

        With `fall_back`, the other checkpoints without lost files follow, the newest first.
        """
        with together(self._control, "the tags of checkpoints"):
            found = self._tags(tag, fall_back=fall_back) if self._control.rank == 0 else []
        tags: list[str] = of_first(self._control, found)
        return tags

    def _tags(self, tag: str | None, *, fall_back: bool) -> list[str]:
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

    def _refuse_lost(self, tag: str | None) -> None:
        for version in self._versions:
            if version.tag == tag:
                raise CheckpointError(
                    f"checkpoint {tag} is lost: none of {len(self._hosts.ranks)} hosts has {version.lost[0]} intact. Both "
                    "copies, on two neighbouring hosts, are gone. Load an earlier checkpoint."
                )

    def bring(self, tag: str, needed: Callable[[Manifest], Iterable[int]]) -> None:
        """Send each host the files of a checkpoint that it lacks and its ranks need, and the manifest.

        A file that only one host has is also sent to the next host, so that there are two copies again. If any rank fails, all
        raise its error.

        Args:
            tag: the checkpoint's tag.
            needed: returns the numbers of the files that this rank needs.
        """
        folder = self._folder / tag
        control = self._control
        version = None
        with together(control, "the checkpoints of each host"):
            if control.rank == 0:
                version = self._newest(tag)
                if version is None:
                    self._refuse_lost(tag)
                    raise CheckpointError(
                        f"no host has a checkpoint in {folder}: there is no {files.MANIFEST}. Load another tag."
                    )
        with_manifest = of_first(control, None if version is None else version.hosts)
        source = self._hosts.ranks[with_manifest[0]][0]
        data = b""
        with together(control, "a manifest from another host"):
            if control.rank == source:
                data = (folder / files.MANIFEST).read_bytes()
        data = spread(control, data, source)
        manifest = files.parse_manifest(folder, data)
        moves = self._moves(version, manifest, needed(manifest))
        with together(control, "files from other hosts"):
            with suppress(OSError):  # the others are waiting for this rank's data: opening the file raises the error
                folder.mkdir(parents=True, exist_ok=True)
            carry(control, folder, moves)
        with together(control, "the manifest on each host"):
            if self._hosts.leads(control.rank) and self._own not in with_manifest:
                files.replace_file(folder / files.MANIFEST, data, f"host{self._own}")

    def _moves(self, version: _Version | None, manifest: Manifest, needed: Iterable[int]) -> list[FileMove]:
        """Return the copies in which this rank takes part. Rank 0 knows the version, and chooses them for all ranks."""
        own = json.dumps({self._own: sorted(set(needed))}).encode()
        found = collect(self._control, own, _merged_numbers, "the files that each host needs")
        chosen: list[tuple[int, int, int]] = []
        if found is not None and version is not None:
            hosts_of_file: dict[int, set[int]] = {}
            for host, numbers in json.loads(found).items():
                for number in numbers:
                    hosts_of_file.setdefault(number, set()).add(int(host))
            for number, record in enumerate(manifest.files):
                holders = version.holders[record.name]
                targets = hosts_of_file.get(number, set()).difference(holders)
                if len({*holders, *targets}) == 1 and self._hosts.are_several:
                    targets.add((holders[0] + 1) % len(self._hosts.ranks))
                source = self._hosts.member(holders[0], number)
                chosen += [(source, self._hosts.member(host, number), number) for host in sorted(targets)]
        moves = []
        for source, target, number in of_first(self._control, chosen):
            if self._control.rank in (source, target):
                record = manifest.files[number]
                moves.append(FileMove(source, target, record.name, record.nbytes))
        return moves

    def leave_out_damaged(self, tag: str) -> bool:
        """Verify a checkpoint's files on every host and count the damaged ones as missing.

        Returns:
            Whether some files were damaged and other hosts have intact copies, which `bring` can send.
        """
        control = self._control
        folder = self._folder / tag
        damaged = []
        with suppress(CheckpointError):  # a damaged manifest was reported before
            for number, record in enumerate(files.read_manifest(folder).files):
                is_ours = self._hosts.member(self._own, number) == control.rank
                if is_ours and record.has_its_size(folder) and damage_of(folder, record) is not None:
                    damaged.append(record.name)
        own = json.dumps({self._own: damaged} if damaged else {}).encode()
        found = collect(control, own, _merged_numbers, "the damaged files of each host")
        version = self._newest(tag)
        can_be_sent = False
        if found is not None and version is not None:
            everywhere = json.loads(found)
            for host, names in everywhere.items():
                for name in names:
                    version.holders[name].remove(int(host))
            can_be_sent = bool(everywhere) and not version.lost
        if not of_first(control, can_be_sent):
            return False
        for name in damaged:
            logging.getLogger("zeroshard").warning("%s is damaged: another host's copy replaces it.", folder / name)
        return True


@dataclass
class _Listed:
    """The checkpoints of some hosts, as JSON values, whose keys are strings."""

    latest: dict[str, str | None] = field(default_factory=dict)
    """The tag in the file `latest`, by host."""
    versions: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The checkpoints with their hosts, by tag and names of files: {tag, created, sizes, hosts}."""
    files: dict[str, dict[str, dict[str, list[int]]]] = field(default_factory=dict)
    """The hosts with a file, by tag, the file's name, and its size."""

    @classmethod
    def of(cls, listed: dict[str, Any], host: int) -> _Listed:
        """Create it from the list of one host."""
        found = cls({str(host): listed["latest"]})
        for tag, (created, sizes) in listed["tags"].items():
            key = hashlib.sha256("/".join([tag, *sorted(sizes)]).encode()).hexdigest()
            found.versions[key] = {"tag": tag, "created": created, "sizes": sizes, "hosts": [host]}
        for tag, sizes in listed["files"].items():
            found.files[tag] = {name: {str(nbytes): [host]} for name, nbytes in sizes.items()}
        return found

    @property
    def message(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    def merged(self, other: _Listed) -> _Listed:
        """Add the checkpoints of other hosts."""
        self.latest |= other.latest
        for key, version in other.versions.items():
            if key in self.versions:
                self.versions[key]["hosts"] += version["hosts"]
            else:
                self.versions[key] = version
        for tag, names in other.files.items():
            for name, by_size in names.items():
                for nbytes, hosts in by_size.items():
                    self.files.setdefault(tag, {}).setdefault(name, {}).setdefault(nbytes, []).extend(hosts)
        return self

    def versions_with_holders(self) -> Iterator[_Version]:
        """Yield each version with the hosts that have its files.

        A file's name belongs to one save, so files count even on a host that was killed before it got the manifest.
        """
        for version in self.versions.values():
            present = self.files.get(version["tag"], {})
            holders = {}
            for name, nbytes in version["sizes"].items():
                holders[name] = sorted(present.get(name, {}).get(str(nbytes), []))
            yield _Version(version["tag"], version["created"], version["sizes"], sorted(version["hosts"]), holders)


def _merged_lists(own: bytes, other: bytes) -> bytes:
    return _Listed(**json.loads(own)).merged(_Listed(**json.loads(other))).message


def _merged_numbers(own: bytes, other: bytes) -> bytes:
    """Join two mappings from hosts to files."""
    merged = json.loads(own)
    for host, found in json.loads(other).items():
        merged[host] = sorted({*merged.get(host, []), *found})
    return json.dumps(merged).encode()


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
            own = [file for file in path.glob("rank_*.safetensors") if file.is_file()]
            listed["files"][path.name] = {file.name: file.stat().st_size for file in own}
            with suppress(CheckpointError):
                manifest = files.read_manifest(path)
                sizes = {record.name: record.nbytes for record in manifest.files}
                listed["tags"][path.name] = (manifest.created, sizes)
    return listed
