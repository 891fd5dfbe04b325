"""Pipeline parallelism, which is not offered: names for isinstance."""

from __future__ import annotations

from deepspeed._missing import missing
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import ProcessTopology

__all__ = ["LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec"]
__getattr__ = missing(__name__)
