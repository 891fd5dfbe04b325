"""ZeRO for PyTorch: sharded optimizer states, gradients and parameters, on stock torch.

Names are imported at their first use: `import zeroshard` takes milliseconds, and its command line answers without torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zeroshard.version import __version__ as __version__

if TYPE_CHECKING:
    from zeroshard.engine import Engine, StepReport
    from zeroshard.errors import (
        CheckpointError,
        CollectiveError,
        ConfigError,
        LossScaleError,
        PolicyError,
        StorageError,
        UsageError,
        ZeroshardError,
    )
    from zeroshard.formats.dcp import DistributedState
    from zeroshard.formats.pretrained import load_pretrained, materialise
    from zeroshard.initialize import initialize
    from zeroshard.optim.lion import Lion
    from zeroshard.optim.loss_scaler import DynamicLossScaler, StaticLossScaler
    from zeroshard.optim.muon import MuonWithAdamW
    from zeroshard.parameter_states import ParameterStates, parameter_states
    from zeroshard.plan import Plan, plan
    from zeroshard.policy import Offload, Place, Policy, Precision, Residency, Units, Wire
    from zeroshard.progress import TrainingProgress, progress
    from zeroshard.recompute import checkpointing
    from zeroshard.shard import shard
    from zeroshard.sharded import Sharded
    from zeroshard.sharded_init import cut, sharded_init
    from zeroshard.unsharded import Borrowed, borrow, unsharded
    from zeroshard.zero_redundancy.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
    from zeroshard.zero_redundancy.optimizer import ZeroRedundancyOptimizer

__all__ = [
    "Borrowed",
    "CheckpointError",
    "CollectiveError",
    "ConfigError",
    "DistributedState",
    "DynamicLossScaler",
    "Engine",
    "Lion",
    "LossScaleError",
    "MuonWithAdamW",
    "Offload",
    "ParameterStates",
    "Place",
    "Plan",
    "Policy",
    "PolicyError",
    "Precision",
    "Residency",
    "Sharded",
    "StaticLossScaler",
    "StepReport",
    "StorageError",
    "TrainingProgress",
    "Units",
    "UsageError",
    "Wire",
    "ZeroRedundancyOptimizer",
    "ZeroshardError",
    "borrow",
    "checkpointing",
    "cut",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "initialize",
    "load_pretrained",
    "materialise",
    "parameter_states",
    "plan",
    "progress",
    "shard",
    "sharded_init",
    "unsharded",
]

_HOMES = {
    "engine": ("Engine", "StepReport"),
    "errors": ("CheckpointError", "CollectiveError", "ConfigError", "LossScaleError", "PolicyError", "StorageError", "UsageError",
               "ZeroshardError"),
    "formats.dcp": ("DistributedState",),
    "formats.pretrained": ("load_pretrained", "materialise"),
    "initialize": ("initialize",),
    "optim.lion": ("Lion",),
    "optim.loss_scaler": ("DynamicLossScaler", "StaticLossScaler"),
    "optim.muon": ("MuonWithAdamW",),
    "parameter_states": ("ParameterStates", "parameter_states"),
    "plan": ("Plan", "plan"),
    "policy": ("Offload", "Place", "Policy", "Precision", "Residency", "Units", "Wire"),
    "progress": ("TrainingProgress", "progress"),
    "recompute": ("checkpointing",),
    "shard": ("shard",),
    "sharded": ("Sharded",),
    "sharded_init": ("cut", "sharded_init"),
    "unsharded": ("Borrowed", "borrow", "unsharded"),
    "zero_redundancy.ddp_hooks": ("hook_with_zero_step", "hook_with_zero_step_interleaved"),
    "zero_redundancy.optimizer": ("ZeroRedundancyOptimizer",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name where it lives, at its first use (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = f"{__name__}.{_HOME_OF[name]}"
    # `recompute.checkpointing` is a module, which only an import of its own makes an attribute.
    value = import_module(f"{home}.{name}") if name == "checkpointing" else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """`shard`, `initialize`, `progress`, `unsharded` and others are functions in modules of the same name.

    Importing a submodule makes it an attribute of its package: without this, whoever imports `zeroshard.shard` first would turn
    `zeroshard.shard(...)` into the call of a module.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """By name, as any module: whoever sends functions of a script to other processes sends its globals along."""
        return import_module, (self.__name__,)

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and _HOME_OF.get(name) == name):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
