"""ZeRO for PyTorch: sharded optimizer states, gradients and parameters, on stock torch.

Names are imported at their first use: `import zeroshard` takes milliseconds, and the command line starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeroshard.version import __version__ as __version__

_NAMES = {
    "model.parameter_states": "ParameterStates parameter_states",
    "model.unsharded": "Borrowed borrow unsharded",
    "model.born": "cut sharded_init",
    "engine.engine": "Engine",
    "engine.progress": "StepReport",
    "engine.initialize": "initialize",
    "errors": "CheckpointError CollectiveError ConfigError LossScaleError PolicyError StorageError UsageError ZeroshardError",
    "checkpoint.dcp": "DistributedState",
    "model.pretrained": "load_pretrained materialise",
    "optim.lion": "Lion",
    "optim.loss_scaler": "DynamicLossScaler StaticLossScaler",
    "tools.planning": "Plan plan",
    "policy": "Offload Place Policy Precision Residency Units",
    "engine.recompute": "checkpointing",
    "model.shard": "shard",
    "model.sharded": "Sharded",
    "engine.training_progress": "TrainingProgress progress",
    "model.zero_redundancy.ddp_hooks": "hook_with_zero_step hook_with_zero_step_interleaved",
    "model.zero_redundancy.optimizer": "ZeroRedundancyOptimizer",
}
"""The public names of each module. No function has a top-level module's name: an import of the module would hide the function."""
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    # Type checkers read neither the table nor `__getattr__`. tests/tools/test_newcomer.py checks that these lines equal the
    # table.
    from zeroshard.checkpoint.dcp import DistributedState as DistributedState
    from zeroshard.engine.engine import Engine as Engine
    from zeroshard.engine.initialize import initialize as initialize
    from zeroshard.engine.progress import StepReport as StepReport
    from zeroshard.engine.recompute import checkpointing as checkpointing
    from zeroshard.engine.training_progress import TrainingProgress as TrainingProgress
    from zeroshard.engine.training_progress import progress as progress
    from zeroshard.errors import CheckpointError as CheckpointError
    from zeroshard.errors import CollectiveError as CollectiveError
    from zeroshard.errors import ConfigError as ConfigError
    from zeroshard.errors import LossScaleError as LossScaleError
    from zeroshard.errors import PolicyError as PolicyError
    from zeroshard.errors import StorageError as StorageError
    from zeroshard.errors import UsageError as UsageError
    from zeroshard.errors import ZeroshardError as ZeroshardError
    from zeroshard.model.born import cut as cut
    from zeroshard.model.born import sharded_init as sharded_init
    from zeroshard.model.parameter_states import ParameterStates as ParameterStates
    from zeroshard.model.parameter_states import parameter_states as parameter_states
    from zeroshard.model.pretrained import load_pretrained as load_pretrained
    from zeroshard.model.pretrained import materialise as materialise
    from zeroshard.model.shard import shard as shard
    from zeroshard.model.sharded import Sharded as Sharded
    from zeroshard.model.unsharded import Borrowed as Borrowed
    from zeroshard.model.unsharded import borrow as borrow
    from zeroshard.model.unsharded import unsharded as unsharded
    from zeroshard.model.zero_redundancy.ddp_hooks import hook_with_zero_step as hook_with_zero_step
    from zeroshard.model.zero_redundancy.ddp_hooks import (
        hook_with_zero_step_interleaved as hook_with_zero_step_interleaved,
    )
    from zeroshard.model.zero_redundancy.optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from zeroshard.optim.lion import Lion as Lion
    from zeroshard.optim.loss_scaler import DynamicLossScaler as DynamicLossScaler
    from zeroshard.optim.loss_scaler import StaticLossScaler as StaticLossScaler
    from zeroshard.policy import Offload as Offload
    from zeroshard.policy import Place as Place
    from zeroshard.policy import Policy as Policy
    from zeroshard.policy import Precision as Precision
    from zeroshard.policy import Residency as Residency
    from zeroshard.policy import Units as Units
    from zeroshard.tools.planning import Plan as Plan
    from zeroshard.tools.planning import plan as plan
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
