"""Pipeline parallelism, which is not offered: names for isinstance."""

from __future__ import annotations

from deepspeed._missing import missing
from deepspeed.runtime.pipe import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
__getattr__ = missing(__name__)
