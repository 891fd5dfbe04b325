"""Owns the marks on our hooks for torch.compile, and the refusals of options that compiled models may not have.

[Note: compiled models]
torch.compile reads Python once, and runs what it made of it wherever its guards hold: on classes, dtypes and shapes of tensors, on
how many hooks a module has. The effect of our hooks changes from step to step, so it never becomes part of a graph:

- Hooks of a unit's own module run at its border. torch.compile does not look into them: a graph that reaches there ends.
- Hooks of the parts inside (a Linear of a block) do nothing while the unit is whole: the graph skips them, and a block is
  one graph. torch guards this: a parameter without values is of another class, so torch traces the code again.
- Parameters are of one class whenever a module that uses them runs, see `Appearance.begin_use`. So alike blocks share one graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import Any

from torch import nn

from zeroshard.errors import UsageError
from zeroshard.schedule.unit import Unit
from zeroshard.torch_private import compiled_call_of, runs_compiled

BORDER = (
    "zeroshard gathers a unit's parameters here, which no graph may contain. For fullgraph=True compile the "
    "units one by one (model.blocks[i] = torch.compile(model.blocks[i], fullgraph=True)); else leave fullgraph out"
)
"""The reason that torch logs where a graph ends at a border, and raises where none may end (fullgraph)."""

_CUDA_GRAPHS = (
    "{} is compiled with CUDA graphs (mode='reduce-overhead' or 'max-autotune'). A replay overwrites what the one "
    "before it gave out, gradients that are still being reduced among them, and reads parameters where they once were. "
    "Compile with mode='max-autotune-no-cudagraphs', or the default."
)
_WRAPPER = "get_compiler_config"
"""The attribute of each function that torch.compile returns; it gives the options, by a public name."""
_NEAREST = 12
"""Frames between a hook of a unit and the call of torch.compile that runs the unit, where there is one: fewer than that."""


def refuse_cuda_graphs(model: nn.Module) -> None:
    """Raise if a module was compiled with CUDA graphs."""
    for fqn, module in model.named_modules():
        for compiled in (module, compiled_call_of(module)):
            get = getattr(compiled, _WRAPPER, None)
            if get is not None:
                _refuse(get(), fqn or "the model")


def refuse_distributed_units(module: nn.Module, units: Iterable[Unit]) -> None:
    """Raise if units have DTensors: torch.compile describes those by their local tensors, whose memory is a unit's.

    Args:
        module: the module that runs in compiled code.
    """
    for unit in units:
        if unit.named[0].is_distributed:
            raise UsageError(
                f"{unit.named[0].fqn} is a DTensor, and {type(module).__name__} runs inside torch.compile, which "
                "cannot describe sharded DTensors: leave torch.compile out, or the tensor parallelism."
            )


def is_compiled(module: nn.Module, *, all_callers: bool) -> bool:
    """Return whether the code that now runs a module was compiled: before or after `shard`, or around a whole step.

    Args:
        module: the running module.
        all_callers: look through the whole stack, and not only at the direct caller. This costs a microsecond or two.

    Raises:
        UsageError: with CUDA graphs.
    """
    found = _WRAPPER in module.__dict__
    for config in _configs_of_callers(None if all_callers else _NEAREST):
        _refuse(config, f"what runs this {type(module).__name__}")
        found = True
    return found


def _configs_of_callers(depth: int | None) -> Iterator[Any]:
    """Yield the options of the compiled functions on the stack."""
    for frame in islice(_frames(), depth):
        if runs_compiled(frame.f_code):
            yield getattr(frame.f_locals.get("self"), "compiler_config", None)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _refuse(config: Any, label: str) -> None:
    if isinstance(config, Mapping) and config.get("triton.cudagraphs"):
        raise UsageError(_CUDA_GRAPHS.format(label))


def begin_use(units: Iterable[Unit]) -> None:
    """Show ordinary parameters in these units, whose modules are about to run."""
    for unit in units:
        unit.appearance.begin_use()


def end_use(units: Iterable[Unit]) -> None:
    """End `begin_use`."""
    for unit in units:
        unit.appearance.end_use()
