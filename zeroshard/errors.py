"""Owns the exceptions that zeroshard raises; every message names the cause, and ends with the remedy."""

from zeroshard.uncaught import report_uncaught

PAGES = ("troubleshooting.md", "refused_calls.md")
"""Pages with a heading for each class, and its messages below: in the docs, and in the package for `zeroshard explain`.
"""


class ZeroshardError(Exception):
    """The base class of all errors of this package. Uncaught under torchrun, it is one sentence, printed once.

    Tracebacks end in a note that names the command which explains the error; `str` of an error is only its sentence.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"`zeroshard explain {self.public_name()}` explains it")
        report_uncaught(ZeroshardError)

    @classmethod
    def public_name(cls) -> str:
        """Return the name of this class, or of the public class that it extends."""
        return next(one for one in cls.__mro__ if one.__module__ == __name__).__name__


class ConfigError(ZeroshardError, ValueError):
    """A configuration that cannot be honoured. The message names the key path."""


class PolicyError(ZeroshardError, ValueError):
    """A combination of residencies that has no meaning."""


class UsageError(ZeroshardError, RuntimeError):
    """A call that is out of order, or a model or optimizer that cannot be sharded."""


class CollectiveError(ZeroshardError, RuntimeError):
    """Ranks diverged, timed out or died inside a collective. The message names the ranks and the operation of each."""


class CheckpointError(ZeroshardError, RuntimeError):
    """A file that cannot be written, or is missing, damaged, or of another model. The message names the file and the cause."""


class LossScaleError(ZeroshardError, FloatingPointError):
    """Gradients overflow at the smallest loss scale: fp16 training cannot go on."""


class StorageError(ZeroshardError, RuntimeError):
    """Model states cannot be moved to CPU memory or disk, or back. The message names the place and the cause."""
