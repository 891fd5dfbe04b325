"""Which torch there is."""

from __future__ import annotations

from packaging.version import Version

from deepspeed._missing import missing

__all__ = ["required_torch_version"]
__getattr__ = missing(__name__)


def required_torch_version(min_version: float | str | None = None, max_version: float | str | None = None) -> bool:
    """Whether torch's version lies between two."""
    import torch

    own = Version(Version(torch.__version__).base_version)
    return (min_version is None or own >= Version(str(min_version))) and (
        max_version is None or own <= Version(str(max_version))
    )
