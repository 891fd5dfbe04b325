"""Owns the collectives of backends that are right as they are: NCCL and its kin."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.collectives.base import Pending, PendingReduction
from zeroshard.collectives.grouped import TRANSFER_TAG, Grouped, Transfer, Work
from zeroshard.collectives.members import Members
from zeroshard.collectives.watch import Watch


class Native(Grouped):
    """The backend's own collectives, reduce and gather on groups of their own so that neither waits for the other."""

    def __init__(self, members: Members, device: torch.device, predivide_factor: float, watch: Watch) -> None:
        super().__init__(members, device, predivide_factor, watch)
        self._group = self._made(members.registered)
        self._gather_group = self._made(members.registered)
        # torch 2.13 renamed them; 2.11 has the old names only.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def close(self) -> None:
        super().close()
        # torch names a subgroup by how many groups there are: one that is gone gives its name, and its stale addresses in
        # the store, to the next. So subgroups stay until the process ends.
        if dist.is_initialized() and not self.members.is_subgroup:
            dist.destroy_process_group(self._gather_group)
            dist.destroy_process_group(self._group)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if tensor.numel() == 0:
            return
        self.sent["broadcast"] += tensor.nbytes if self.rank == source else 0
        with self.guarded(f"a broadcast of rank {self.members.ranks[source]}"):
            dist.broadcast(tensor, src=self.members.ranks[source], group=self._group)

    def transfer(self, tensor: Tensor, source: int, target: int, label: str) -> Pending:
        works: list[Work] = []
        with self.guarded(label):
            if self.rank == source:
                self.sent["transfer"] += tensor.nbytes
                works = [(self._group.send([tensor], target, TRANSFER_TAG), target)]
            elif self.rank == target:
                works = [(self._group.recv([tensor], source, TRANSFER_TAG), source)]
        return Transfer(self, works, "transfer", label)

    def all_gather(self, rows: Tensor, bucket: int, label: str, resting: Tensor | None = None) -> Pending:
        self.sent["all_gather"] += rows[self.rank].nbytes * (self.world_size - 1)
        work = self._all_gather(rows.view(-1), rows[self.rank], group=self._gather_group, async_op=True)
        return Transfer(self, [(work, None)], "gather", label)

    def workspace_numel(self, rows: Tensor) -> int:
        return rows.shape[1]

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str) -> PendingReduction:
        self.sent["reduce_scatter"] += rows[self.rank].nbytes * (self.world_size - 1)
        work = self._reduce_scatter(workspace, rows.view(-1), group=self._group, async_op=True)
        return _NativeMean(Transfer(self, [(work, None)], "reduce", label), workspace, self._divisor)

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        everyone = own.new_empty(self.world_size * own.numel())
        self.sent["exchange"] += own.nbytes * (self.world_size - 1)
        work = self._all_gather(everyone, own, group=self._group, async_op=True)
        Transfer(self, [(work, None)], "exchange", label).wait()
        with self.guarded(label):  # an accelerator's wait ends here
            return [row.numpy().tobytes() for row in everyone.view(self.world_size, -1).cpu()]


class _NativeMean(PendingReduction):
    def __init__(self, transfer: Transfer, total: Tensor, divisor: float) -> None:
        self._transfer, self._total, self._divisor = transfer, total, divisor

    def finish(self, out: Tensor, *, accumulate: bool) -> None:
        self._transfer.wait()
        if accumulate:
            out.add_(self._total.to(out.dtype).div_(self._divisor))
        else:
            out.copy_(self._total).div_(self._divisor)
