"""Names of pipeline parallelism, for isinstance."""

from __future__ import annotations

from deepspeed._missing import missing, refused

_INSTEAD = "There is no pipeline parallelism: all ranks are data-parallel."
ProcessTopology = refused("ProcessTopology", _INSTEAD)
PipeDataParallelTopology = refused("PipeDataParallelTopology", _INSTEAD)
PipeModelDataParallelTopology = refused("PipeModelDataParallelTopology", _INSTEAD)
__getattr__ = missing(__name__)
