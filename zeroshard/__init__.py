"""ZeRO for PyTorch: sharded optimizer states, gradients and parameters, on stock torch."""

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
from zeroshard.policy import Offload, Place, Policy, Precision, Residency, Units
from zeroshard.recompute import checkpointing
from zeroshard.shard import shard
from zeroshard.sharded import Sharded
from zeroshard.sharded_init import sharded_init
from zeroshard.unsharded import unsharded
from zeroshard.version import __version__ as __version__
from zeroshard.zero_redundancy.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from zeroshard.zero_redundancy.optimizer import ZeroRedundancyOptimizer

__all__ = [
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
    "Place",
    "Policy",
    "PolicyError",
    "Precision",
    "Residency",
    "Sharded",
    "StaticLossScaler",
    "StepReport",
    "StorageError",
    "Units",
    "UsageError",
    "ZeroRedundancyOptimizer",
    "ZeroshardError",
    "checkpointing",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "initialize",
    "load_pretrained",
    "materialise",
    "shard",
    "sharded_init",
    "unsharded",
]
