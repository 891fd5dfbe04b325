"""ZeRO for PyTorch: sharded optimizer states, gradients and parameters, on stock torch."""

from zeroshard import checkpointing
from zeroshard.checkpoint.dcp import DistributedState
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
from zeroshard.initialize import initialize
from zeroshard.optim.ddp_hooks import hook_with_zero_step, hook_with_zero_step_interleaved
from zeroshard.optim.lion import Lion
from zeroshard.optim.loss_scaler import DynamicLossScaler, StaticLossScaler
from zeroshard.optim.muon import MuonWithAdamW
from zeroshard.optim.zero_redundancy_optimizer import ZeroRedundancyOptimizer
from zeroshard.policy import Offload, Place, Policy, Precision, Residency, Units
from zeroshard.pretrained import load_pretrained, materialise
from zeroshard.shard import Sharded, shard, unsharded
from zeroshard.sharded_init import sharded_init

__version__ = "0.1.0"

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
