"""Owns the tensors that this rank lets the others of its host read, until all have: a tensor itself, or a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.collectives.shared_file import SharedFile


class Lent(NamedTuple):
    """The lent memory that some peers have not read yet.

    Attributes:
        readers: the ranks that have not read it.
        tensor: stays until then.
        room: in which the tensor is a copy, to be used again.
        label: its description.
    """

    readers: set[int]
    tensor: Tensor
    room: Tensor | None
    label: str


class Lending:
    """The memory that this rank lends to others, see the module's docstring.

    Args:
        file: this rank's memory.
    """

    def __init__(self, file: SharedFile) -> None:
        self._file = file
        self._lent: dict[int, Lent] = {}
        """The offers, by tag."""
        self._rooms: list[Tensor] = []
        """Free buffers for copies, as bytes."""

    def lend(self, tensor: Tensor, tag: int, readers: Sequence[int], label: str) -> tuple[int, bool]:
        """Keep a contiguous tensor for these ranks.

        Returns:
            The place of its first element in the file, and whether it is read in place: then it must not change until
            all have read it.
        """
        offset = self._file.offset_of(tensor) if tensor.numel() else 0
        room = None
        if offset is None:
            room = self._room(tensor.nbytes)
            tensor = room[: tensor.nbytes].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
            offset = self._file.offset_of(tensor)
            assert offset is not None
        self._lent[tag] = Lent(set(readers), tensor, room, label)
        return offset, room is None

    def _room(self, nbytes: int) -> Tensor:
        fitting = [room for room in self._rooms if room.numel() >= nbytes]
        if fitting:
            room = min(fitting, key=Tensor.numel)
            self._drop(room)
            return room
        if self._rooms:  # one that is too small makes room
            self._drop(max(self._rooms, key=Tensor.numel))
        return self._file.empty(nbytes, torch.uint8)

    def _drop(self, room: Tensor) -> None:
        self._rooms = [one for one in self._rooms if one is not room]

    @property
    def copies_nbytes(self) -> int:
        """The bytes of memory for copies, in use and free."""
        used = [lent.room for lent in self._lent.values() if lent.room is not None]
        return sum(room.numel() for room in [*used, *self._rooms])

    def was_read(self, tag: int, reader: int) -> None:
        """Record that a rank has read the offer."""
        lent = self._lent.get(tag)
        if lent is None:
            return
        lent.readers.discard(reader)
        if not lent.readers:
            del self._lent[tag]
            if lent.room is not None:
                self._rooms.append(lent.room)

    def was_read_by(self, tag: int, reader: int) -> bool:
        """Return whether a rank has read the memory lent under a tag."""
        return tag not in self._lent or reader not in self._lent[tag].readers

    def readers(self, tag: int) -> list[int]:
        """Return the peers that have not read it."""
        return sorted(self._lent[tag].readers) if tag in self._lent else []

    def tensor(self, tag: int) -> Tensor:
        """The memory that is lent under a tag."""
        return self._lent[tag].tensor

    def label(self, tag: int) -> str:
        """The label of the lent memory."""
        return self._lent[tag].label

    def in_place(self) -> list[int]:
        """The tags of tensors that are lent in place."""
        return [tag for tag, lent in self._lent.items() if lent.room is None]

    def is_in_place(self, tag: int) -> bool:
        """Return whether a tensor is lent in place under a tag."""
        return tag in self._lent and self._lent[tag].room is None
