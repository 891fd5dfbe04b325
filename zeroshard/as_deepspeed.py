"""Owns `import zeroshard.as_deepspeed`, after which `import deepspeed` imports zeroshard's shim.

Import this module before all other libraries. The import puts zeroshard's package named `deepspeed` first on the path,
for this process and its child processes, and prints a line on rank 0.

Raises:
    UsageError: the real DeepSpeed is loaded already, or transformers or accelerate has looked for DeepSpeed and found none.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from zeroshard.errors import UsageError
from zeroshard.integrations.shim_path import is_ours, put_on_path, real_deepspeed


def _refuse_late() -> None:
    real = sys.modules.get("deepspeed")
    if real is not None and not is_ours(real.__file__):
        raise UsageError(
            f"import zeroshard.as_deepspeed comes too late: DeepSpeed is loaded ({real.__file__}). Make it the "
            "script's first import."
        )
    if real is not None:
        return
    for name in ("accelerate", "transformers"):
        if _has_decided(name):
            raise UsageError(
                f"import zeroshard.as_deepspeed comes too late: {name} is loaded already, and found no deepspeed. Make it "
                "the script's first import, or start the script with `zeroshard run`."
            )


def _has_decided(name: str) -> bool:
    """Return whether a library was imported without deepspeed and defined its classes accordingly."""
    if name == "accelerate":
        utils = sys.modules.get("accelerate.utils")
        return utils is not None and not hasattr(utils, "DeepSpeedEngineWrapper")
    integration: ModuleType | None = sys.modules.get("transformers.integrations.deepspeed")
    return integration is not None and integration.HfDeepSpeedConfig.__bases__ == (object,)


def _announce() -> None:
    if os.environ.get("RANK", "0") == "0":
        beside = real_deepspeed()
        instead = f", instead of the one at {beside}" if beside is not None else ""
        print(f"zeroshard: this process imports zeroshard as deepspeed{instead}.", file=sys.stderr)


_refuse_late()
put_on_path()
_announce()
