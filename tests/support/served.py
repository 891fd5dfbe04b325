"""Owns processes that fork ranks on request. Ranks start with all that such a process imported or registered.

The process of the tests must not import or register the same, since its own forks would have it too.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any


class Server:
    """A handle of the process, for the tests.

    Args:
        code: the Python that the process runs, with `{}` for the descriptor that it passes to `answer`.
        environment: the environment variables that differ from those of this process.
    """

    def __init__(self, code: str, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-c", code.format(theirs.fileno())],
            env={**os.environ, **environment},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        atexit.register(self.close)

    def run(self, request: Any) -> list[Any]:
        """Send a request, and return each rank's result.

        Raises:
            RankError: with every failed rank's traceback.
        """
        from zeroshard.testing import RankError

        self._connection.send_bytes(pickle.dumps(request))  # `send` would share tensors instead of copying them
        results, error = pickle.loads(self._connection.recv_bytes())
        if error is not None:
            raise RankError(error)
        return list(results)

    def close(self) -> None:
        """End the process. Later forks hold copies of the socket, so closing it would not be enough."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._connection.close()
        self._process.wait()


def answer(descriptor: int, run: Callable[[Any], list[Any]]) -> None:
    """Run requests in the process, until the other side closes the connection."""
    from zeroshard.testing import RankError

    connection = Connection(descriptor)
    while True:
        try:
            request = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answered: tuple[list[Any], str | None] = run(request), None
        except RankError as error:
            answered = [], str(error)
        connection.send_bytes(pickle.dumps(answered))
