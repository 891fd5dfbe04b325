"""Owns a process group with NCCL's semantics, over gloo: an operation runs on a stream, and `wait()` makes a stream wait."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from simgpu.device import collectives, device, launched, native

NAME = "simccl"


def register() -> None:
    """Register the backend with torch, once in a process."""
    # From 2.15 on, torch records what the backends of a group send. A group in Python has no backends, and torch would raise.
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, SimCCL, devices=["simgpu"])


class _Work(dist.Work):
    """An operation that keeps its tensors until it is waited for, as in NCCL's group, which avoids record_stream."""

    def __init__(self, event: torch.Event, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._event, self._tensors = event, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        torch.accelerator.current_stream().wait_event(self._event)
        self._tensors = ()
        return True

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[device()])
        self.wait()
        future.set_result(list(self._tensors))
        return future


class _Done(dist.Work):
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class SimCCL(dist.ProcessGroup):
    """A process group with the same streams as NCCL: one for collectives, and one for each pair of ranks."""

    supports_coalescing = True

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore(NAME, store), rank, size, timeout)
        self._streams: dict[object, torch.Stream] = {}
        self._coalesced: list[tuple[Callable[..., None], list[Tensor]]] | None = None
        self.options = SimpleNamespace(_timeout=timeout)

    # ------------------------------------------------------------------ what torch asks of a group

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("simgpu")]

    def _get_backend(self, _device: torch.device) -> SimCCL:
        return self

    def get_group_store(self) -> dist.Store:
        return self._store

    def getGroupName(self) -> str:
        return str(dist.distributed_c10d._world.pg_names.get(self, NAME))

    def setGroupName(self, _name: str) -> None: ...

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...

    # ------------------------------------------------------------------ on streams

    def _start(
        self, name: str, run: Callable[..., None], tensors: list[Tensor], key: object = "collectives"
    ) -> dist.Work:
        """Launch `run` on one of the group's streams, after the current stream. It gets the tensors' memory as CPU tensors."""
        for tensor in tensors:
            if tensor.device != device() or not tensor.is_contiguous():
                raise RuntimeError(f"{NAME}: {name} takes contiguous tensors of simgpu, not of {tensor.device}")
        if self._coalesced is not None:
            self._coalesced.append((run, tensors))
            return _Done()
        collectives[name] += 1
        launched.append((name, tensors[0].dtype))
        if key not in self._streams:
            self._streams[key] = torch.Stream(device())
        stream = self._streams[key]
        stream.wait_stream(torch.accelerator.current_stream())
        memory = [native().on_cpu(tensor.detach()) for tensor in tensors]
        native().launch(stream.stream_id, lambda: run(*memory))
        return _Work(stream.record_event(), tensors)

    def _start_coalescing(self, _device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: Any = None) -> dist.Work:
        assert self._coalesced is not None
        operations, self._coalesced = self._coalesced, None
        return self._start_all("coalesced", operations)

    def _start_all(self, name: str, operations: list[tuple[Callable[..., None], list[Tensor]]]) -> dist.Work:
        counts = [(one, len(tensors)) for one, tensors in operations]  # the kernel keeps no tensor

        def run(*memory: Tensor) -> None:
            rest = list(memory)
            for one, count in counts:
                one(*rest[:count])
                del rest[:count]

        return self._start(name, run, [tensor for _, tensors in operations for tensor in tensors])

    # ------------------------------------------------------------------ operations

    def _gather(self, output: Tensor, own: Tensor) -> None:
        self._gloo.allgather([list(output.view(self.size(), -1).unbind())], [own.clone().view(-1)]).wait()

    def _scatter(self, op: Any) -> Callable[[Tensor, Tensor], None]:
        def run(output: Tensor, rows: Tensor) -> None:
            wide = rows.to(torch.promote_types(rows.dtype, torch.float32)) if rows.is_floating_point() else rows.clone()
            everyone = [torch.empty_like(wide) for _ in range(self.size())]
            self._gloo.allgather([everyone], [wide]).wait()
            mine = [one.view(self.size(), -1)[self.rank()] for one in everyone]
            total = mine[0].clone()
            for one in mine[1:]:
                total += one
            output.view(-1).copy_(total / self.size() if op == dist.ReduceOp.AVG else total)

        return run

    def _reduce(self, op: Any) -> Callable[[Tensor], None]:
        def run(tensor: Tensor) -> None:
            wide = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.clone()
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
            self._gloo.allreduce([wide], options).wait()
            tensor.copy_(wide / self.size() if op == dist.ReduceOp.AVG else wide)

        return run

    @staticmethod
    def _op(opts: Any) -> Any:
        return dist.ReduceOp.SUM if opts is None else opts.reduceOp

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        return self._start("all_gather", self._gather, [output, own])

    def _reduce_scatter_base(self, output: Tensor, rows: Tensor, opts: Any = None) -> dist.Work:
        return self._start("reduce_scatter", self._scatter(self._op(opts)), [output, rows])

    def all_gather_single_coalesced(self, outputs: Any, owns: Any, opts: Any = None) -> dist.Work:
        pairs = zip(outputs, owns, strict=True)
        return self._start_all("all_gather", [(self._gather, [output, own]) for output, own in pairs])

    def reduce_scatter_single_coalesced(self, outputs: Any, rows: Any, opts: Any = None) -> dist.Work:
        run = self._scatter(self._op(opts))
        return self._start_all("reduce_scatter", [(run, list(pair)) for pair in zip(outputs, rows, strict=True)])

    # torch 2.13 renamed these methods, and 2.11 has only the old names.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def allgather(self, outputs: Any, owns: Any, opts: Any = None) -> dist.Work:
        def run(*memory: Tensor) -> None:
            self._gloo.allgather([list(memory[:-1])], [memory[-1]]).wait()

        return self._start("all_gather", run, [*outputs[0], owns[0]])

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._start("all_reduce", self._reduce(self._op(opts)), list(tensors))

    def broadcast(self, tensors: Any, opts: Any = None) -> dist.Work:
        source = opts.rootRank if opts is not None else 0

        def run(tensor: Tensor) -> None:
            plain = dist.BroadcastOptions()
            plain.rootRank, plain.rootTensor = source, 0
            self._gloo.broadcast([tensor], plain).wait()

        return self._start("broadcast", run, list(tensors))

    def send(self, tensors: Any, peer: int, _tag: int = 0) -> dist.Work:
        return self._start("send", lambda one: self._gloo.send([one], peer, 0).wait(), list(tensors), self._pair(peer))

    def recv(self, tensors: Any, peer: int, _tag: int = 0) -> dist.Work:
        return self._start("recv", lambda one: self._gloo.recv([one], peer, 0).wait(), list(tensors), self._pair(peer))

    def _pair(self, peer: int) -> object:
        return tuple(sorted((self.rank(), peer)))

    def barrier(self, opts: Any = None) -> dist.Work:
        self._gloo.barrier().wait()
        return _Done()
