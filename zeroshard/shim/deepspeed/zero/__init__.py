"""`deepspeed.runtime.zero` under its short name."""

from __future__ import annotations

from deepspeed.runtime.zero import *  # noqa: F403
from deepspeed.runtime.zero import __all__ as __all__
from deepspeed.runtime.zero import __getattr__ as __getattr__
