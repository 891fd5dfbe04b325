"""Lightning on zeroshard: `ZeroStrategy` for the Trainer, and `FabricZeroStrategy` for Fabric.

Importing this package registers their names:

    import zeroshard.integrations.lightning

    lightning.Trainer(strategy="zeroshard_stage_3", devices=2)
"""

from zeroshard.integrations.lightning.fabric import FabricZeroStrategy
from zeroshard.integrations.lightning.folders import write_single_file
from zeroshard.integrations.lightning.sharding import fabric_class, trainer_class
from zeroshard.integrations.lightning.trainer import ZeroStrategy

__all__ = ["FabricZeroStrategy", "ZeroStrategy", "write_single_file"]

ZeroStrategy.register_strategies(trainer_class("strategies", "StrategyRegistry"))
FabricZeroStrategy.register_strategies(fabric_class("strategies", "STRATEGY_REGISTRY"))
