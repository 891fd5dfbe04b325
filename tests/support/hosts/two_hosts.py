"""Owns two simulated hosts on this machine, for tests and benchmarks: namespaces and a link with a given delay and bandwidth.

with TwoHosts(delay_us=1000, mbit=1000) as hosts:
    outcomes = hosts.torchrun(2, "job.py", "argument")
    hosts.crossed()       # bytes from a to b, and from b to a

A host's programs end with the host, and both hosts end with this process, even if it is killed: see wire.c.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_SOURCE = Path(__file__).with_name("wire.c")
_ROOT = Path(__file__).parents[3]
_PORT = 29400
_START_SECONDS = 10.0


class NotPermitted(Exception):
    """An error with the reason why this machine cannot make hosts."""


class Outcome(NamedTuple):
    """The outcome of a program on one host."""

    status: int
    log: str
    seconds: float


class Program:
    """A program that runs on a host."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process, self._log, self._start = process, log, time.monotonic()

    @property
    def log(self) -> str:
        """The output so far."""
        return self._log.read_text(errors="replace")

    def wait(self, timeout: float) -> Outcome:
        """Wait for the program's end. Raise `subprocess.TimeoutExpired`, with the program's output, after `timeout` seconds."""
        try:
            status = self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise subprocess.TimeoutExpired(error.cmd, error.timeout, self.log) from None
        return Outcome(status, self.log, time.monotonic() - self._start)

    def until(self, text: str, timeout: float) -> None:
        """Wait until the program has printed a text."""
        deadline = time.monotonic() + timeout
        while text not in self.log:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{text!r} was never printed:\n{self.log}")
            time.sleep(0.05)


class TwoHosts:
    """Two hosts and the link between them, see the module's docstring.

    Args:
        delay_us: the delay in microseconds, in each direction.
        mbit: the bandwidth in Mbit/s, in each direction.

    Raises:
        NotPermitted: the machine does not allow it.
    """

    def __init__(self, delay_us: int = 200, mbit: int = 1000) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hosts"))
        self._programs = 0
        try:
            self._wire = self._started(delay_us, mbit)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _started(self, delay_us: int, mbit: int) -> subprocess.Popen[str]:
        compiler, enters = shutil.which("cc") or shutil.which("gcc"), shutil.which("nsenter")
        if compiler is None or enters is None:
            raise NotPermitted("there is no C compiler" if compiler is None else "there is no nsenter")
        program = self._folder / "wire"
        made = subprocess.run([compiler, "-O2", "-o", program, _SOURCE], capture_output=True, text=True, check=False)
        if made.returncode:
            raise NotPermitted(f"wire.c does not compile here: {made.stderr.strip().splitlines()[-1]}")
        wire = subprocess.Popen(
            [program, str(delay_us), str(mbit), *ADDRESSES], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert wire.stdout is not None
        assert wire.stderr is not None
        said = wire.stdout.readline().split()
        if len(said) != 2:
            wire.wait(_START_SECONDS)
            raise NotPermitted(f"no hosts can be made here ({wire.stderr.read().strip()})")
        self._hosts = [int(one) for one in said]
        return wire

    def __enter__(self) -> TwoHosts:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._wire.stdin is not None
        with suppress(BrokenPipeError):
            self._wire.stdin.close()
        self._wire.wait(_START_SECONDS)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------ the wire

    def _say(self, command: str) -> list[int]:
        assert self._wire.stdin is not None
        assert self._wire.stdout is not None
        self._wire.stdin.write(command + "\n")
        self._wire.stdin.flush()
        return [int(one) for one in self._wire.stdout.readline().split()]

    def crossed(self) -> list[int]:
        """Return the bytes sent so far, including headers: from the first host to the second, and back."""
        return self._say("bytes")

    def drop(self) -> None:
        """Lose all packets silently, until `join`."""
        self._say("drop")

    def join(self) -> None:
        """End `drop`."""
        self._say("join")

    def kill(self, host: int) -> None:
        """End all processes of a host at once."""
        self._say(f"kill {host}")

    def boot(self, host: int) -> None:
        """Start a killed host again, with its name and address, and without its earlier processes."""
        (self._hosts[host],) = self._say(f"boot {host}")

    # ------------------------------------------------------------------ programs

    def start(self, host: int, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Program:
        """Start a program on host 0 or 1."""
        self._programs += 1
        log = self._folder / f"{self._programs}.log"
        own = {
            "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "wire0", "TORCH_CPP_LOG_LEVEL": "ERROR",
        }  # fmt: skip
        entered = ["nsenter", "--target", str(self._hosts[host]), "--net", "--uts", "--pid", "--", *command]
        with log.open("wb") as out:
            process = subprocess.Popen(
                entered, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, **own, **(environment or {})}, cwd=_ROOT,
            )  # fmt: skip
        return Program(process, log)

    def start_torchrun(
        self, ranks: int, script: Path | str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> list[Program]:
        """Start a script under torchrun on both hosts, with `ranks` ranks each."""
        static = ["--nnodes", "2", "--master-addr", ADDRESSES[0], "--master-port", str(_PORT)]
        return [
            self._start_agent(host, ranks, [*static, "--node-rank", str(host)], [str(script), *arguments], environment)
            for host in (0, 1)
        ]

    def start_elastic(self, host: int, ranks: int, script: Path | str, *arguments: str) -> Program:
        """Start a script under torchrun on one host with `ranks` ranks, while the other host may come and go."""
        quick = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"
        elastic = [
            "--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "elastic",
            "--rdzv-endpoint", f"{ADDRESSES[0]}:{_PORT}", "--rdzv-conf", f"{quick},is_host={int(host == 0)}",
        ]  # fmt: skip
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return self._start_agent(host, ranks, elastic, [str(script), *arguments], own)

    def _start_agent(
        self,
        host: int,
        ranks: int,
        options: Sequence[str],
        script: Sequence[str],
        environment: Mapping[str, str] | None,
    ) -> Program:
        local = ["--nproc-per-node", str(ranks), "--local-addr", ADDRESSES[host]]
        return self.start(host, [sys.executable, "-m", "torch.distributed.run", *options, *local, *script], environment)

    def torchrun(
        self,
        ranks: int,
        script: Path,
        *arguments: str,
        timeout: float = 120.0,
        environment: Mapping[str, str] | None = None,
    ) -> list[Outcome]:
        """Run a script under torchrun on both hosts, until both have ended."""
        return [one.wait(timeout) for one in self.start_torchrun(ranks, script, *arguments, environment=environment)]
