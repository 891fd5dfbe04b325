"""Run the experiment from torch's tutorial: DDP and Adam on 20 layers, with and without ZeroRedundancyOptimizer.

    python examples/zero_redundancy_optimizer.py [--ranks 2]

Each layer is a Linear(2000, 2000). Peak memory is that of the accelerator or, on a CPU, of the process. The sum and the bits
of the parameters show that the results are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zeroshard import ZeroRedundancyOptimizer

MOMENTS = ("after the model", "after DDP", "before the step", "after the step")


def peak(device: torch.device) -> float:
    """Return the peak memory of the accelerator or, on a CPU, of the process, in MB."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device) / 1e6
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024 / 1e6


def train(rank: int, ranks: int, port: int, use_zero: bool, folder: str) -> None:
    """Run one step on one rank. Rank 0 writes its measurements to the folder."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = torch.device(accelerator.type, rank) if accelerator is not None else torch.device("cpu")
    if accelerator is not None:
        torch.accelerator.set_device_index(rank)
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        dist.get_default_backend_for_device(device), init_method=address, rank=rank, world_size=ranks
    )
    torch.manual_seed(0)
    start = peak(device)
    model = nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(20)]).to(device)
    peaks = [peak(device)]
    ddp = DistributedDataParallel(model)
    peaks.append(peak(device))
    optimizer: torch.optim.Optimizer
    if use_zero:
        optimizer = zero = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
        held = zero.optim
    else:
        optimizer = held = torch.optim.Adam(ddp.parameters(), lr=0.01)
    inputs = torch.randn(20, 2000, generator=torch.Generator().manual_seed(rank)).to(device)
    ddp(inputs).square().mean().backward()
    peaks.append(peak(device))
    optimizer.step()
    peaks.append(peak(device))

    state = sum(value.nbytes for entry in held.state.values() for value in entry.values())
    digest, total = hashlib.sha256(), 0.0
    for parameter in model.parameters():
        values = parameter.detach().cpu()
        digest.update(values.numpy().tobytes())
        total += float(values.double().sum())
    if rank == 0:
        figures = [*(value - start for value in peaks), state / 1e6, total]
        torch.save({"figures": figures, "digest": digest.hexdigest()}, Path(folder) / f"{use_zero}.pt")
    dist.destroy_process_group()


def main() -> None:
    """Run both optimizers and print their measurements side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 2
    parser.add_argument(
        "--ranks",
        type=int,
        default=devices,
        help="the number of processes; default: one per accelerator, or 2 on a CPU",
    )
    ranks = parser.parse_args().ranks
    with tempfile.TemporaryDirectory() as folder:
        for use_zero in (False, True):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = int(probe.getsockname()[1])
            mp.spawn(train, (ranks, port, use_zero, folder), nprocs=ranks)  # type: ignore[attr-defined, no-untyped-call]
        plain, zero = (torch.load(Path(folder) / f"{use_zero}.pt") for use_zero in (False, True))

    table = Table(title=f"20 x Linear(2000, 2000), DDP and Adam on {ranks} ranks; rank 0, MB", title_justify="left")
    for column in ("", "without", "with ZeroRedundancyOptimizer"):
        table.add_column(column, justify="right")
    names = [*(f"peak {moment}" for moment in MOMENTS), "optimizer states", "sum of parameters"]
    for name, one, other in zip(names, plain["figures"], zero["figures"], strict=True):
        digits = 6 if name == "sum of parameters" else 0
        table.add_row(name, f"{one:.{digits}f}", f"{other:.{digits}f}")
    same = plain["digest"] == zero["digest"]
    table.add_row(
        "parameters", plain["digest"][:12], zero["digest"][:12] + (", the same bits" if same else ", DIFFERENT")
    )
    Console().print(table)
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
