"""Owns activation checkpointing of functions and of a model's units: the backward recomputes their activations.

torch does the work: its non-reentrant checkpointing, and `save_on_cpu` for inputs in CPU memory. Gradients are
bit-identical with and without checkpointing, even with dropout.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zeroshard.core.bucketing import find_units
from zeroshard.core.modules import Forwards, modules_matching
from zeroshard.engine.config.load import Config
from zeroshard.engine.config.schema import ActivationCheckpointingBlock
from zeroshard.errors import UsageError
from zeroshard.policy import Units
from zeroshard.torch_private import tree_flatten, tree_unflatten

WITHOUT_EFFECT = ("partition_activations", "contiguous_memory_optimization", "number_checkpoints")
"""Keys of the config's block for which torch has no equal."""


@dataclass(frozen=True)
class Checkpointing:
    """The options that zeroshard adds to torch's checkpointing, named as in the config's block.

    Attributes:
        cpu_checkpointing: keep saved inputs in pinned CPU memory. It has no effect if the model computes on the CPU.
        synchronize_checkpoint_boundary: wait for the accelerator at the start and the end of each checkpoint.
        profile: measure the time and bytes of each checkpoint (see `Checkpointer.table`).
    """

    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False

    @classmethod
    def of(cls, block: ActivationCheckpointingBlock) -> Checkpointing:
        """Return the options of a config's block. Warn if it sets keys without effect."""
        warn_without_effect({name: getattr(block, name) for name in WITHOUT_EFFECT})
        return cls(**{field.name: getattr(block, field.name) for field in fields(cls)})


def warn_without_effect(given: dict[str, Any]) -> None:
    """Warn about options that are set and have no effect."""
    names = [name for name, value in given.items() if value]
    if names:
        warnings.warn(
            f"activation checkpointing ignores {', '.join(names)}: torch keeps each input whole, in memory of its allocator. "
            "Remove what is ignored; cpu_checkpointing saves memory.",
            stacklevel=3,
        )


@dataclass
class Cost:
    """The total cost of all checkpoints with one name: seconds of forward and recomputation, bytes of saved inputs."""

    calls: int = 0
    forward: float = 0.0
    recompute: float = 0.0
    nbytes: int = 0


class Checkpointer:
    """An object that runs functions and recomputes their activations in the backward.

    One checkpointer per model is enough; one per process works, too.

    Args:
        options: see `Checkpointing`; default: torch's own checkpointing.
    """

    def __init__(self, options: Checkpointing | None = None) -> None:
        self.options = options or Checkpointing()
        self.costs: dict[str, Cost] = {}
        self.host_copies: Callable[[], AbstractContextManager[Any]] | None = None
        """Replaces `save_on_cpu` in dry runs."""
        self._forwards = Forwards()

    @classmethod
    def of(cls, config: Config, model: nn.Module) -> Checkpointer | None:
        """Checkpoint the units that a config names and return the checkpointer; None if the config does not name any."""
        block = config.schema.activation_checkpointing
        if block.checkpoint_units is None:
            return None
        checkpointer = cls(Checkpointing.of(block))
        checkpointer.checkpoint_units(model, block.checkpoint_units, config.units)
        return checkpointer

    def __deepcopy__(self, memo: dict[int, Any]) -> Checkpointer:
        return self  # a copy of a checkpointed model shares the checkpointer

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `function(*args, **kwargs)` and recompute its activations in the backward."""
        return self.run(getattr(function, "__qualname__", type(function).__qualname__), function, *args, **kwargs)

    def run(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Checkpoint a function as `checkpoint` does, with a name for the table."""
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        wanted = self.options
        options: dict[str, Any] = {"use_reentrant": False}
        if wanted.profile or wanted.synchronize_checkpoint_boundary:
            options["context_fn"] = partial(self._measured, name)
        leaves, spec = tree_flatten((args, kwargs))
        # Weights, masks and positions are not activations: they stay in memory in any case.
        activations = {
            n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.grad_fn is not None
        }
        if wanted.profile:
            self.costs.setdefault(name, Cost()).nbytes += sum(one.nbytes for one in activations.values())
        hooks = self._hooks({one.device.type for one in activations.values()})
        if hooks is None:
            # torch keeps the inputs. The function gets the caller's own lists and dicts, to which it may add values.
            return torch_checkpoint(lambda *args: function(*args, **kwargs), *args, **options)
        # torch shows its hooks only tensors that are arguments themselves; a closure would keep them in memory.
        others = [None if n in activations else leaf for n, leaf in enumerate(leaves)]
        places = list(activations)

        def call(*activations: Tensor) -> Any:
            given = list(others)
            for n, one in zip(places, activations, strict=True):
                given[n] = one
            args, kwargs = tree_unflatten(given, spec)
            return function(*args, **kwargs)

        with hooks:
            return torch_checkpoint(call, *activations.values(), **options)

    def _hooks(self, devices: set[str]) -> AbstractContextManager[Any] | None:
        """Return the hooks that keep inputs of these devices in CPU memory; None if inputs stay where they are."""
        if not self.options.cpu_checkpointing:
            return None
        if self.host_copies is not None:
            return self.host_copies()
        accelerators = devices - {"cpu"}
        if not accelerators:
            return None
        return save_on_cpu(pin_memory=True, device_type=accelerators.pop())

    # ------------------------------------------------------------------ costs

    def _measured(self, name: str) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        cost = Cost()
        if self.options.profile:
            cost = self.costs.setdefault(name, cost)
        cost.calls += 1
        return _Clock(cost, "forward"), _Clock(cost, "recompute")

    def table(self) -> Table:
        """Return a `rich` table: mean ms and MiB per call of each checkpoint. Without `profile`, it is empty."""
        table = Table("checkpoint", "calls", "forward ms", "recompute ms", "saved inputs MiB")
        for name, cost in self.costs.items():
            calls = max(cost.calls, 1)
            numbers = (1e3 * cost.forward / calls, 1e3 * cost.recompute / calls, cost.nbytes / calls / 2**20)
            table.add_row(name, str(cost.calls), *[f"{number:.2f}" for number in numbers])
        return table

    # ------------------------------------------------------------------ units

    def checkpoint_units(
        self, model: nn.Module, patterns: str | Sequence[str] = "auto", units: Units | None = None
    ) -> None:
        """Checkpoint modules of a model, without a change to its code, until `remove`.

        Args:
            model: the model. The `forward` methods of its modules are wrapped in place.
            patterns: "auto" for the units of the model (each block of a list of blocks), or full names, in which `*`
                matches anything.
            units: for "auto": the definition of units, as passed to `shard`.

        Raises:
            UsageError: the model has no list of blocks, or a pattern does not match any module.
        """
        if patterns == "auto":
            chosen = dict(find_units(model, units))
        else:
            chosen = modules_matching(model, patterns, "checkpoint_units")
        if not chosen:
            raise UsageError(
                f"there is nothing to checkpoint: {type(model).__name__} has no list of blocks. Name the modules."
            )
        for name, module in chosen.items():
            self._forwards.replace(module, partial(self.run, name, module.forward))

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that `checkpoint_units` wrapped."""
        return self._forwards.modules

    def remove(self) -> None:
        """Undo `checkpoint_units`."""
        self._forwards.restore()


class _Clock(AbstractContextManager[None]):
    """A timer of one part of a cost, which waits for the accelerator at both ends."""

    def __init__(self, cost: Cost, part: str) -> None:
        self._cost = cost
        self._part = part
        self._start = 0.0

    def __enter__(self) -> None:
        _synchronize()
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        _synchronize()
        vars(self._cost)[self._part] += time.perf_counter() - self._start


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
