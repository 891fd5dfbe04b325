"""ZeRO for PyTorch: sharded optimizer states, gradients and parameters, on stock torch."""

from zeroshard.errors import CollectiveError, ConfigError, PolicyError, UsageError, ZeroshardError
from zeroshard.policy import Place, Policy, Precision, Residency
from zeroshard.shard import Sharded, shard, unsharded

__version__ = "0.1.0"

__all__ = [
    "CollectiveError",
    "ConfigError",
    "Place",
    "Policy",
    "PolicyError",
    "Precision",
    "Residency",
    "Sharded",
    "UsageError",
    "ZeroshardError",
    "shard",
    "unsharded",
]
