"""Owns the collectives of backends that are right as they are: NCCL and its kin."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.collectives.base import Pending, PendingReduction
from zeroshard.collectives.grouped import Grouped, Transfer


class Native(Grouped):
    """The backend's own collectives, reduce and gather on groups of their own so that neither waits for the other."""

    def __init__(self, parent: dist.ProcessGroup, device: torch.device, predivide_factor: float) -> None:
        super().__init__(parent, device, predivide_factor)
        self._gather_group = self._new_group()
        # torch 2.13 renamed them; 2.11 has the old names only.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def close(self) -> None:
        self._destroy(self._gather_group)
        super().close()

    def all_gather(self, rows: Tensor, bucket: int, label: str) -> Pending:
        self.sent["all_gather"] += rows[self.rank].nbytes * (self.world_size - 1)
        work = self._all_gather(rows.view(-1), rows[self.rank], group=self._gather_group, async_op=True)
        return Transfer(self, [work], "gather", label)

    def workspace_numel(self, rows: Tensor) -> int:
        return rows.shape[1]

    def reduce_scatter(self, rows: Tensor, workspace: Tensor, bucket: int, label: str) -> PendingReduction:
        self.sent["reduce_scatter"] += rows[self.rank].nbytes * (self.world_size - 1)
        work = self._reduce_scatter(workspace, rows.view(-1), group=self._group, async_op=True)
        return _NativeMean(Transfer(self, [work], "reduce", label), workspace, self._divisor)

    def exchange(self, data: bytes, label: str) -> list[bytes]:
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        everyone = own.new_empty(self.world_size * own.numel())
        self.sent["exchange"] += own.nbytes * (self.world_size - 1)
        work = self._all_gather(everyone, own, group=self._group, async_op=True)
        Transfer(self, [work], "exchange", label).wait()
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
