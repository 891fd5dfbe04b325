"""Names of pipeline parallelism, for isinstance."""

from __future__ import annotations

from deepspeed._missing import missing, refused

_INSTEAD = "There is no pipeline parallelism: give initialize() the whole model, with stage 3 where it is large."
PipelineModule = refused("PipelineModule", _INSTEAD)
LayerSpec = refused("LayerSpec", _INSTEAD)
TiedLayerSpec = refused("TiedLayerSpec", _INSTEAD)
__getattr__ = missing(__name__)
