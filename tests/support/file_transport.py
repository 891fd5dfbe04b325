"""Owns a transport of a hundred lines, which sends messages as files in one folder. It shows the duties of a transport."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from zeroshard.core.transport.base import Reduction, Work, sum_into
from zeroshard.core.transport.grouped import Grouped
from zeroshard.core.transport.members import Members
from zeroshard.core.transport.watch import Watch

FOLDER = "ZEROSHARD_TEST_FOLDER"
"""The environment variable that names the folder."""


class Files(Grouped):
    """Collectives over files. A message's file is named by its sender, its operation, and its number among that kind."""

    def __init__(self, members: Members, device: torch.device, watch: Watch) -> None:
        super().__init__(members, device, watch)
        number = len(list(Path(os.environ[FOLDER]).glob(f"*.{members.own}")))
        (Path(os.environ[FOLDER]) / f"{number}.{members.own}").touch()
        self._folder = Path(os.environ[FOLDER]) / f"{number}.{'-'.join(map(str, members.ranks))}"
        self._folder.mkdir(exist_ok=True)
        self._count: Counter[str] = Counter()

    def next(self, operation: str) -> str:
        """Return the name of the next operation of a kind, the same on every rank."""
        self._count[operation] += 1
        return f"{operation}.{self._count[operation]}"

    def send(self, name: str, tensor: Tensor, receivers: int) -> None:
        """Write a tensor's file for this many receivers. The caller may overwrite the tensor at once."""
        self.sent[name.split(" ", maxsplit=1)[0]] += tensor.nbytes * receivers
        part = self._folder / f"part.{self.rank}"
        part.write_bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        part.rename(self._folder / f"{name}.from.{self.rank}")

    def receive(self, name: str, sender: int, out: Tensor, label: str) -> None:
        """Wait for a rank's tensor."""
        path, deadline = self._folder / f"{name}.from.{sender}", time.monotonic() + self.members.timeout.total_seconds()
        with self.guarded(label, sender), self.measure(name.rsplit("_", maxsplit=1)[-1].split(" ", maxsplit=1)[0]):
            while not path.exists():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"timed out waiting for {path.name}")
                time.sleep(0.0005)
            data = bytearray(path.read_bytes())
            if len(data) != out.nbytes:
                raise RuntimeError(f"rank {sender} sent {len(data)} bytes, and this rank expects {out.nbytes}")
        if data:
            out.detach().copy_(torch.frombuffer(data, dtype=out.dtype).view(out.shape))

    # ------------------------------------------------------------------ the five operations

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Work:
        name = self.next(f"all_gather {bucket}")
        self.send(name, rows[self.rank], self.world_size - 1)
        return Arriving(self, name, {other: rows[other] for other in range(self.world_size)}, label)

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str, divisor: float) -> Reduction:
        name = self.next(f"reduce_scatter {bucket}")
        self.send(name, rows, 1)
        return Mean(self, name, rows, label, divisor)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self.transfer(tensor, source, self.rank, "a broadcast", "broadcast").wait()

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        rows = torch.zeros(self.world_size, len(data), dtype=torch.uint8)
        rows[self.rank] = torch.tensor(list(data), dtype=torch.uint8)
        name = self.next("exchange")
        self.send(name, rows[self.rank], self.world_size - 1)
        Arriving(self, name, {other: rows[other] for other in range(self.world_size)}, label).wait()
        return [row.numpy().tobytes() for row in rows]

    def transfer(self, tensor: Tensor, source: int, target: int, label: str, kind: str = "transfer") -> Work:
        name = self.next(f"{kind} {source}")
        if self.rank == source:
            self.send(name, tensor, 1)
        return Arriving(self, name, {source: tensor} if self.rank == target != source else {}, label)


class Arriving(Work):
    """Tensors in transit from other ranks, by rank."""

    def __init__(self, files: Files, name: str, expected: dict[int, Tensor], label: str) -> None:
        self._files, self._name, self._label = files, name, label
        self._expected = {sender: out for sender, out in expected.items() if sender != files.rank}

    def wait(self) -> None:
        while self._expected:
            sender = next(iter(self._expected))
            self._files.receive(self._name, sender, self._expected[sender], self._label)
            del self._expected[sender]


class Mean(Reduction):
    """A sum over ranks in rank order, divided by the divisor."""

    def __init__(self, files: Files, name: str, rows: Tensor, label: str, divisor: float) -> None:
        self._files, self._name, self._rows, self._label, self._divisor = files, name, rows, label, divisor

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        files, contributions = self._files, []
        for sender in range(files.world_size):
            rows = self._rows
            if sender != files.rank:
                rows = torch.empty_like(self._rows)
                files.receive(self._name, sender, rows, self._label)
            contributions.append(rows[files.rank])
        sum_into(contributions, self._divisor, out, accumulate)
