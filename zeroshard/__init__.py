"""ZeRO for PyTorch: sharded optimizer states, gradients and parameters, on stock torch."""

from zeroshard.engine import Engine, initialize
from zeroshard.errors import CollectiveError, ConfigError, PolicyError, UsageError, ZeroshardError
from zeroshard.policy import Place, Policy, Precision, Residency
from zeroshard.shard import Sharded, shard, unsharded

__version__ = "0.1.0"

__all__ = [
    "CollectiveError",
    "ConfigError",
    "Engine",
    "Place",
    "Policy",
    "PolicyError",
    "Precision",
    "Residency",
    "Sharded",
    "UsageError",
    "ZeroshardError",
    "initialize",
    "shard",
    "unsharded",
]
