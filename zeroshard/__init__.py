"""ZeRO for PyTorch: sharded optimizer states, gradients and parameters, on stock torch.

Names are imported at their first use: `import zeroshard` takes milliseconds, and the command line starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeroshard.version import __version__ as __version__

_NAMES = {
    "access.parameter_states": "ParameterStates parameter_states",
    "access.unsharded": "Borrowed borrow unsharded",
    "construction.born": "cut sharded_init",
    "engine": "Engine StepReport",
    "engine.initialize": "initialize",
    "errors": "CheckpointError CollectiveError ConfigError LossScaleError PolicyError StorageError UsageError ZeroshardError",
    "formats.dcp": "DistributedState",
    "formats.pretrained": "load_pretrained materialise",
    "optim.lion": "Lion",
    "optim.loss_scaler": "DynamicLossScaler StaticLossScaler",
    "planning": "Plan plan",
    "policy": "Offload Place Policy Precision Residency Units",
    "recompute": "checkpointing",
    "sharding.shard": "shard",
    "sharding.sharded": "Sharded",
    "training_progress": "TrainingProgress progress",
    "zero_redundancy.ddp_hooks": "hook_with_zero_step hook_with_zero_step_interleaved",
    "zero_redundancy.optimizer": "ZeroRedundancyOptimizer",
}
"""The public names of each module. No function has a top-level module's name: an import of the module would hide the function."""
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    # Type checkers read neither the table nor `__getattr__`. tests/test_newcomer.py checks that these lines equal the
    # table.
    from zeroshard.access.parameter_states import ParameterStates as ParameterStates
    from zeroshard.access.parameter_states import parameter_states as parameter_states
    from zeroshard.access.unsharded import Borrowed as Borrowed
    from zeroshard.access.unsharded import borrow as borrow
    from zeroshard.access.unsharded import unsharded as unsharded
    from zeroshard.construction.born import cut as cut
    from zeroshard.construction.born import sharded_init as sharded_init
    from zeroshard.engine import Engine as Engine
    from zeroshard.engine import StepReport as StepReport
    from zeroshard.engine.initialize import initialize as initialize
    from zeroshard.errors import CheckpointError as CheckpointError
    from zeroshard.errors import CollectiveError as CollectiveError
    from zeroshard.errors import ConfigError as ConfigError
    from zeroshard.errors import LossScaleError as LossScaleError
    from zeroshard.errors import PolicyError as PolicyError
    from zeroshard.errors import StorageError as StorageError
    from zeroshard.errors import UsageError as UsageError
    from zeroshard.errors import ZeroshardError as ZeroshardError
    from zeroshard.formats.dcp import DistributedState as DistributedState
    from zeroshard.formats.pretrained import load_pretrained as load_pretrained
    from zeroshard.formats.pretrained import materialise as materialise
    from zeroshard.optim.lion import Lion as Lion
    from zeroshard.optim.loss_scaler import DynamicLossScaler as DynamicLossScaler
    from zeroshard.optim.loss_scaler import StaticLossScaler as StaticLossScaler
    from zeroshard.planning import Plan as Plan
    from zeroshard.planning import plan as plan
    from zeroshard.policy import Offload as Offload
    from zeroshard.policy import Place as Place
    from zeroshard.policy import Policy as Policy
    from zeroshard.policy import Precision as Precision
    from zeroshard.policy import Residency as Residency
    from zeroshard.policy import Units as Units
    from zeroshard.recompute import checkpointing as checkpointing
    from zeroshard.sharding.shard import shard as shard
    from zeroshard.sharding.sharded import Sharded as Sharded
    from zeroshard.training_progress import TrainingProgress as TrainingProgress
    from zeroshard.training_progress import progress as progress
    from zeroshard.zero_redundancy.ddp_hooks import hook_with_zero_step as hook_with_zero_step
    from zeroshard.zero_redundancy.ddp_hooks import hook_with_zero_step_interleaved as hook_with_zero_step_interleaved
    from zeroshard.zero_redundancy.optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
else:
    __all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a public name from its module, at its first use (PEP 562)."""
    if name not in _MODULE_OF:
        import_module(f"{__name__}.removed").refuse_removed(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
