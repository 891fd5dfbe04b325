"""ZeRO for PyTorch: sharded optimizer states, gradients and parameters, on stock torch.

Names are imported at their first use: `import zeroshard` takes milliseconds, and the command line starts without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeroshard.version import __version__ as __version__

_MODULE_OF = {
    "Borrowed": "access.unsharded",
    "CheckpointError": "errors",
    "CollectiveError": "errors",
    "ConfigError": "errors",
    "DistributedState": "formats.dcp",
    "DynamicLossScaler": "optim.loss_scaler",
    "Engine": "engine",
    "Lion": "optim.lion",
    "LossScaleError": "errors",
    "MuonWithAdamW": "optim.muon",
    "Offload": "policy",
    "ParameterStates": "access.parameter_states",
    "Place": "policy",
    "Plan": "planning",
    "Policy": "policy",
    "PolicyError": "errors",
    "Precision": "policy",
    "Residency": "policy",
    "Sharded": "sharded",
    "StaticLossScaler": "optim.loss_scaler",
    "StepReport": "engine",
    "StorageError": "errors",
    "TrainingProgress": "training_progress",
    "Units": "policy",
    "UsageError": "errors",
    "Wire": "policy",
    "ZeroRedundancyOptimizer": "zero_redundancy.optimizer",
    "ZeroshardError": "errors",
    "borrow": "access.unsharded",
    "checkpointing": "recompute",
    "cut": "construction.sharded_init",
    "hook_with_zero_step": "zero_redundancy.ddp_hooks",
    "hook_with_zero_step_interleaved": "zero_redundancy.ddp_hooks",
    "initialize": "engine.initialize",
    "load_pretrained": "formats.pretrained",
    "materialise": "formats.pretrained",
    "parameter_states": "access.parameter_states",
    "plan": "planning",
    "progress": "training_progress",
    "shard": "sharding",
    "sharded_init": "construction.sharded_init",
    "unsharded": "access.unsharded",
}
"""The module of each public name. No module has the name of a function here: an import of the module would hide the function."""

if TYPE_CHECKING:
    # Type checkers read neither the table nor `__getattr__`. tests/test_newcomer.py checks that these lines equal the
    # table.
    from zeroshard.access.parameter_states import ParameterStates as ParameterStates
    from zeroshard.access.parameter_states import parameter_states as parameter_states
    from zeroshard.access.unsharded import Borrowed as Borrowed
    from zeroshard.access.unsharded import borrow as borrow
    from zeroshard.access.unsharded import unsharded as unsharded
    from zeroshard.construction.sharded_init import cut as cut
    from zeroshard.construction.sharded_init import sharded_init as sharded_init
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
    from zeroshard.optim.muon import MuonWithAdamW as MuonWithAdamW
    from zeroshard.planning import Plan as Plan
    from zeroshard.planning import plan as plan
    from zeroshard.policy import Offload as Offload
    from zeroshard.policy import Place as Place
    from zeroshard.policy import Policy as Policy
    from zeroshard.policy import Precision as Precision
    from zeroshard.policy import Residency as Residency
    from zeroshard.policy import Units as Units
    from zeroshard.policy import Wire as Wire
    from zeroshard.recompute import checkpointing as checkpointing
    from zeroshard.sharded import Sharded as Sharded
    from zeroshard.sharding import shard as shard
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
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
