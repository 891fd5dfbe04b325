"""Owns dry runs in processes of their own: several at once, of which nothing stays. Called by search."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from zeroshard.errors import UsageError, ZeroshardError

T = TypeVar("T")


def in_processes(
    jobs: Iterable[Callable[[], T]], count: int | None = None, *, first_here: bool = False
) -> Iterator[tuple[int, T | ZeroshardError]]:
    """(number, result) of each job as it ends; an error of ours is a result. Forked: a job may be any callable.

    Args:
        first_here: the first runs in this process: what it imports, the others find imported.

    Raises:
        UsageError: a process died.
    """
    waiting = list(enumerate(jobs))
    if first_here and waiting:
        number, job = waiting.pop(0)
        yield number, _result_of(job)
    with ThreadPoolExecutor(count or min(len(waiting), os.cpu_count() or 1) or 1) as pool:
        running: dict[Future[Any], int] = {pool.submit(_in_fork, job): number for number, job in waiting}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()


def _in_fork(job: Callable[[], T]) -> T | ZeroshardError:
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(receive)
        _child(job, send)
    os.close(send)
    with os.fdopen(receive, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if status or not data:
        raise UsageError(
            f"a dry run in a process of its own died (exit {os.waitstatus_to_exitcode(status)}): is there memory left?"
        )
    result: T | ZeroshardError = pickle.loads(data)
    return result


def _result_of(job: Callable[[], T]) -> T | ZeroshardError:
    try:
        return job()
    except ZeroshardError as error:
        return error


def _child(job: Callable[[], Any], send: int) -> None:
    """Runs in the fork and never returns."""
    code = 1
    try:
        result = _result_of(job)
        with os.fdopen(send, "wb") as pipe:
            pickle.dump(result, pipe)
        code = 0
    finally:
        os._exit(code)
