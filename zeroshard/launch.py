"""Owns the calls by which this process joins the other ranks of its launcher and leaves them at exit.

The calls look for launchers in this order:

- torchrun and similar (RANK, WORLD_SIZE, MASTER_ADDR);
- the mpirun of Open MPI, MPICH and Intel MPI (before srun, since inside a Slurm job Slurm's variables describe the
  batch script);
- Slurm's srun, with or without PMI;
- other launchers with PMI.

A process without a launcher is one rank.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import multiprocessing
import os
import re
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from zeroshard.errors import UsageError

NOTICE_SECONDS = 30.0
NOTICE_VARIABLE = "ZEROSHARD_NOTICE_SECONDS"
_LEAVE_SECONDS = 30.0
_DEFAULT_PORT = 29500
"""torch's own default."""
_LAST_PORT = 65535
_DIGITS = re.compile(r"[0-9]{1,18}")  # int() and isdigit() accept more than that and differ from each other
_ADDRESS = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?\]")
_MARK = "ZEROSHARD_RUN_MARK"
"""The environment variable with a file's path. `zeroshard run` warns if no process creates that file."""


@dataclass(frozen=True)
class Launch:
    """The settings in a launcher's environment.

    `address` and `port` belong to rank 0. `local_rank` and `address` are None if the environment lacks them.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    address: str | None
    port: int


def read_launch(environment: Mapping[str, str] | None = None) -> Launch | None:
    """Read the launcher's environment (default: this process's own). Return None if it names at most one rank.

    Raises:
        UsageError: the variables are incomplete, invalid or contradictory, or this process is a Slurm batch script.
    """
    env = environment
    if env is None:
        env = os.environ
    if "WORLD_SIZE" in env:
        return _launch(env, _TORCHRUN)
    if {_OPEN_MPI.size, _OPEN_MPI.rank} & env.keys():
        return _launch(env, _OPEN_MPI)
    if {_PMI.size, _PMI.rank} & env.keys() and (_PMI.local_rank in env or "SLURM_PROCID" not in env):
        return _launch(env, _PMI)
    if "SLURM_PROCID" in env:
        return _read_slurm(env)
    if "RANK" in env:  # raises if the rank is above 0, since WORLD_SIZE is missing
        return _launch(env, _TORCHRUN)
    return None


class _Variables(NamedTuple):
    """The names of the environment variables that a launcher sets."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str | None = None
    """The variable with the number of ranks on this machine, if the launcher sets one."""


_TORCHRUN = _Variables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_OPEN_MPI = _Variables(
    "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
)  # fmt: skip
_PMI = _Variables("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = _Variables("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


def _read_slurm(env: Mapping[str, str]) -> Launch | None:
    variables = _SLURM
    if "SLURM_STEP_NUM_TASKS" in env:
        variables = _SLURM._replace(size="SLURM_STEP_NUM_TASKS")
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    launch = _launch(env, variables)
    is_batch_script = "SLURM_JOB_ID" in env and "SLURM_STEP_ID" not in env and "MASTER_ADDR" not in env
    if launch is not None and is_batch_script:
        raise UsageError(
            f"the Slurm job has {launch.world_size} tasks, and this process is its batch script, not one of them: "
            "start it with srun (`srun python train.py`), or with torchrun."
        )
    if launch is not None and launch.address is None and nodes:
        launch = replace(launch, address=first_host(nodes))
    return launch


def _launch(env: Mapping[str, str], variables: _Variables) -> Launch | None:
    launcher, rank, size, local, local_size = variables
    world_size = _number(env, size, 1)
    own = _number(env, rank, 0)
    if own and size not in env:
        raise UsageError(
            f"{rank}={own} implies several ranks, but {size} is not set. Start with torchrun, or unset {rank}."
        )
    if own >= world_size:
        raise UsageError(
            f"{rank}={own} is not below {size}={world_size}: the launcher's environment is wrong. Start "
            "with torchrun, or correct these variables."
        )
    if world_size == 1:
        return None
    if rank not in env:
        raise UsageError(f"{size}={world_size} is set, but {rank} is not set. Start with torchrun.")
    local_rank = None
    if local in env:
        local_rank = _number(env, local, 0)
    address = env.get("MASTER_ADDR") or None
    if address is None and local_size is not None and env.get(local_size) == env[size]:  # one machine
        address = "127.0.0.1"
    return Launch(launcher, own, world_size, local_rank, address, _port(env))


def _number(env: Mapping[str, str], name: str, least: int) -> int:
    value = env.get(name, str(least))
    if not _DIGITS.fullmatch(value) or int(value) < least:
        raise UsageError(
            f"the environment's {name}={value!r} is not an integer of at least {least}. Start with torchrun, or unset it."
        )
    return int(value)


def _port(env: Mapping[str, str]) -> int:
    if "MASTER_PORT" in env:
        port = _number(env, "MASTER_PORT", 1)
        if port > _LAST_PORT:
            raise UsageError(f"the environment's MASTER_PORT={port} is invalid. Set one from 1 to {_LAST_PORT}.")
        return port
    job = env.get("SLURM_JOB_ID", "")
    if not _DIGITS.fullmatch(job):
        return _DEFAULT_PORT
    return 15000 + int(job) % 10000  # jobs that share a machine must listen on different ports


def first_host(nodes: str) -> str:
    """Return the first machine of a Slurm node list: `gpu003-ib` for `gpu[003-005,9]-ib,login`. Raise UsageError if it has none."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes)
    host = ""
    if first is not None and nodes[first.end() :][:1] in ("", ","):
        host = re.sub(r"\[([0-9]+)[^\]]*\]", r"\1", first.group())
    if not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise UsageError(f"Slurm's list of machines {nodes!r} names none: set MASTER_ADDR to the machine of rank 0.")
    return host


def local_rank() -> int:
    """Return this process's number on its machine, or its rank if the launcher sets only the rank.

    Raises:
        UsageError: see `read_launch`.
    """
    launch = read_launch()
    if launch is None:
        return _number(os.environ, "LOCAL_RANK", 0)
    if launch.local_rank is None:
        return launch.rank
    return launch.local_rank


def local_device() -> torch.device:
    """Make this rank's accelerator the current one and return it, or return the CPU if there is none.

    Raises:
        UsageError: see `read_launch`.
    """
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    # If each process sees only one device, it is device 0 at every local rank.
    torch.accelerator.set_device_index(local_rank() % torch.accelerator.device_count())
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def notice_seconds() -> float:
    """Return the seconds until a wait is logged: from the environment, or 30. Infinity means never."""
    text = os.environ.get(NOTICE_VARIABLE, NOTICE_SECONDS)
    with contextlib.suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise UsageError(f"{NOTICE_VARIABLE} is {text!r}: give seconds as a positive number, or inf for never.")


def init_distributed(
    backend: str | None = None, *, timeout: timedelta | None = None, init_method: str | None = None, rank: int = -1,
    world_size: int = -1, required: bool | None = None,
) -> None:  # fmt: skip
    """Join the ranks of a launcher, unless they are joined already.

    A process without a launcher becomes a group of one rank, unless `required` is False.

    Args:
        backend, timeout: for torch.distributed; default: the accelerator's own backend (gloo on a CPU), and torch's
            timeout.
        init_method, rank, world_size: the address, this rank's number and the number of ranks, instead of those in the
            launcher's environment.
        required: False means that the caller has already joined the ranks.

    Raises:
        UsageError: this process cannot join the other ranks.
    """
    device = local_device()
    if init_method is None and rank < 0:
        join_ranks(device, required is not False, backend, timeout)
    elif not dist.is_initialized():
        backend = backend or dist.get_default_backend_for_device(device)
        dist.init_process_group(backend, init_method=init_method, timeout=timeout, rank=rank, world_size=world_size)
        atexit.register(_leave_ranks, os.getpid())


def join_ranks(
    device: torch.device, required: bool | None = None, backend: str | None = None, timeout: timedelta | None = None
) -> None:
    """Join the launcher's ranks in torch.distributed, unless they are joined already. The process leaves them at exit.

    It does nothing if torch.distributed is initialised or unavailable, or if there is at most one rank (see `required`).

    Args:
        device: the device of the model, now or later. Its type decides the default backend.
        required: True: join even if the environment names at most one rank. False: the caller has already joined the ranks.

    Raises:
        UsageError: the environment names several ranks, and this process cannot join them.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    launch = read_launch()
    if launch is None and not required:
        if multiprocessing.parent_process() is not None:
            warnings.warn(
                "this process was started by multiprocessing, and torch.distributed is not initialised, so it trains by itself, as "
                "rank 0 of 1. If several processes train one model, call torch.distributed.init_process_group in each one first.",
                stacklevel=2,
            )
        return
    if launch is not None and required is False:
        raise UsageError(
            f"{launch.launcher} started {launch.world_size} ranks, torch.distributed is not initialised, and dist_init_required is "
            "False: each rank would train by itself. Leave dist_init_required out, or call "
            "torch.distributed.init_process_group first."
        )
    if device.type == "meta":
        device = torch.device("cpu")
    backend = backend or dist.get_default_backend_for_device(device)
    rank = 0
    world_size = 1
    place = "127.0.0.1"
    where = "tcp://127.0.0.1:0"
    if launch is not None:
        rank = launch.rank
        world_size = launch.world_size
        place = f"{launch.address}:{launch.port}"
        where = _meeting_point(launch)
    elif {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        where = "env://"  # otherwise torch would look for the store of torchrun's agent at the address above
    trap = trap_of_restarts(os.environ)
    if trap is not None and rank == 0:
        logging.getLogger("zeroshard").warning(trap)
    unknown = None if launch is None else unknown_address(launch)
    if unknown is not None:
        logging.getLogger("zeroshard").warning("%s This rank tries again until the timeout.", unknown)
    advice = "Check that rank 0 runs there, and that this machine reaches that port."
    if rank == 0:
        advice = f"Check that all {world_size} ranks were started, and with this address and port."
    seconds = notice_seconds()
    text = f"rank {rank} of {world_size} has waited {seconds:.0f} s at {place} for the other ranks to join. {advice}"
    try:
        with _log_after(seconds, text):
            dist.init_process_group(backend, init_method=where, timeout=timeout, rank=rank, world_size=world_size)
    except (RuntimeError, ValueError) as error:
        raise UsageError(
            f"the ranks could not be joined over {backend} at {place}: {str(error).splitlines()[0].rstrip('.')}. "
            f"{unknown or trap or advice}"
        ) from error
    atexit.register(_leave_ranks, os.getpid())


@contextlib.contextmanager
def _log_after(seconds: float, text: str) -> Iterator[None]:
    """Log a text if the block takes longer than this."""
    notice = threading.Timer(min(seconds, threading.TIMEOUT_MAX), logging.getLogger("zeroshard").warning, [text])
    notice.daemon = True
    notice.start()
    try:
        yield
    finally:
        notice.cancel()


def trap_of_restarts(env: Mapping[str, str]) -> str | None:
    """Return a warning if torchrun may restart the ranks, and the ranks share torchrun's store.

    In that store, restarted ranks would find the addresses of the ranks that ended, and would wait for these ranks
    (torch 2.13, over gloo).
    """
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or env.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        return None
    return (
        "torchrun may restart the ranks (--max-restarts). They would then wait for the ended ranks, whose addresses are "
        "still in its store. Export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before you start, and pass --standalone or, on "
        "several hosts, --rdzv-backend c10d."
    )


def mark_use() -> None:
    """Record, for `zeroshard run`, that this process passed a model to zeroshard."""
    if _MARK in os.environ:
        with contextlib.suppress(OSError):  # the launcher is gone
            Path(os.environ[_MARK]).touch()


def _meeting_point(launch: Launch) -> str:
    if launch.address is None:
        raise UsageError(
            f"{launch.launcher} started {launch.world_size} ranks, and the address at which they meet is missing: "
            "set MASTER_ADDR to the machine of rank 0 (and MASTER_PORT to a free port there), or start with torchrun."
        )
    if launch.launcher == "torchrun":
        return "env://"  # torchrun itself listens on the port and sets the variables that torch reads
    address = launch.address
    if ":" in address and not address.startswith("["):  # IPv6
        address = f"[{address}]"
    if not _ADDRESS.fullmatch(address):
        raise UsageError(f"MASTER_ADDR={launch.address!r} is invalid: set it to the machine of rank 0.")
    return f"tcp://{address}:{launch.port}"


def unknown_address(launch: Launch) -> str | None:
    """Return a warning if the name of rank 0's machine has no address. A cluster may add one a few seconds later."""
    if launch.address is None:
        return None
    try:
        socket.getaddrinfo(launch.address.strip("[]"), launch.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return (
            f"{launch.address!r}, the machine of rank 0, has no address on {socket.gethostname()} ({reason}): set MASTER_ADDR to a "
            "name or an address that every machine can reach."
        )
    return None


def _leave_ranks(process: int) -> None:
    """Destroy torch.distributed's groups when this process ends, within a time limit: another rank may be dead.

    Without this call, the process may abort at its end, since a backend thread calls Python after the interpreter has ended.
    While the backend waits for collectives that have begun, it holds the GIL: only faulthandler can enforce the limit.
    """
    if os.getpid() != process or not dist.is_initialized():  # a forked child inherits this call
        return
    with contextlib.suppress(ValueError, OSError, AttributeError):  # stderr may not be a file: then there is no limit
        faulthandler.dump_traceback_later(_LEAVE_SECONDS, exit=True)
    # Another error has already reported the loss of a rank.
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
