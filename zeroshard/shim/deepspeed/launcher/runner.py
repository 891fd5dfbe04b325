"""What `accelerate launch` reads."""

from __future__ import annotations

from deepspeed._missing import missing

DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
__all__ = ["DEEPSPEED_ENVIRONMENT_NAME"]
__getattr__ = missing(__name__, main="Start scripts with `zeroshard run`, torchrun, srun or mpirun.")
