"""Builders of compiled kernels, of which none is needed: each is compatible, and has nothing to load."""

from __future__ import annotations

from typing import NoReturn

from deepspeed._missing import missing

__getattr__ = missing(__name__)


class _Builder:
    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """There is nothing to compile."""
        return True

    def load(self, verbose: bool = True) -> NoReturn:
        """There is no kernel."""
        raise NotImplementedError(
            f"zeroshard has nothing compiled to load: what {type(self).__name__} is for is written in Python, on torch."
        )


class FusedAdamBuilder(_Builder):
    """FusedAdam."""

    NAME = "fused_adam"


class CPUAdamBuilder(_Builder):
    """DeepSpeedCPUAdam."""

    NAME = "cpu_adam"


class CPUAdagradBuilder(_Builder):
    """DeepSpeedCPUAdagrad."""

    NAME = "cpu_adagrad"


class CPULionBuilder(_Builder):
    """DeepSpeedCPULion."""

    NAME = "cpu_lion"


class FusedLionBuilder(_Builder):
    """FusedLion."""

    NAME = "fused_lion"


class AsyncIOBuilder(_Builder):
    """Files of offload."""

    NAME = "async_io"
