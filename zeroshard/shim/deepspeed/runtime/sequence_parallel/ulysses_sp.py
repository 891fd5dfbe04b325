"""Sequence parallelism, which is not offered: what accelerate asks for with sp_size > 1 says so."""

from __future__ import annotations

from deepspeed._missing import missing

_INSTEAD = "There is no sequence parallelism: leave parallelism_config out, or set sp_size=1."
__getattr__ = missing(
    __name__,
    UlyssesSPAttentionHF=_INSTEAD,
    UlyssesSPDataLoaderAdapter=_INSTEAD,
    SequenceTiledCompute=_INSTEAD,
    TiledMLP=_INSTEAD,
)
