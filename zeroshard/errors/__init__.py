"""Owns the exceptions that zeroshard raises, and the plurals in messages.

Every error's message names the cause and ends with the remedy.
"""

from zeroshard.errors.uncaught import report_uncaught


def counted(number: int, what: str, ending: str = "s") -> str:
    """Format a number of things: 1 rank, 8 ranks."""
    return f"{number} {what}{ending * (number != 1)}"


class ZeroshardError(Exception):
    """The base class of zeroshard's errors.

    Under torchrun, each machine prints identical uncaught errors once, without a traceback unless `ZEROSHARD_TRACEBACK=1` is set.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        report_uncaught(ZeroshardError)


class ConfigError(ZeroshardError, ValueError):
    """An invalid or unsupported config. The message names the path of the key."""


class PolicyError(ZeroshardError, ValueError):
    """An invalid policy, such as an impossible combination of residencies."""


class UsageError(ZeroshardError, RuntimeError):
    """A call that is invalid or out of order, or a model or optimizer that cannot be sharded."""


class CollectiveError(ZeroshardError, RuntimeError):
    """A failed collective: ranks diverged, timed out or died. The message names the ranks and their operations, if known."""


class CheckpointError(ZeroshardError, RuntimeError):
    """A checkpoint that cannot be written or loaded. The message names the cause, and the file if one is at fault."""


class LossScaleError(ZeroshardError, FloatingPointError):
    """An overflow of gradients at the smallest loss scale: fp16 training cannot continue."""


class StorageError(ZeroshardError, RuntimeError):
    """A failure to store, read or move model states. The message names the cause, and, for a disk, the folder."""
