"""Owns activation checkpointing of functions and of a model's units: the backward recomputes their activations.

It uses torch's non-reentrant checkpointing. `Checkpointing` adds measurements, and options for the place of saved
inputs. Gradients are bit-identical with and without checkpointing, even with dropout.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zeroshard.collectives.choose import create_collectives
from zeroshard.config.load import Config
from zeroshard.config.schema import ActivationCheckpointingBlock
from zeroshard.errors import UsageError
from zeroshard.layout.bucketing import find_units
from zeroshard.layout.modules import Forwards, modules_matching
from zeroshard.policy import Units
from zeroshard.recompute.saved_inputs import HostCopies, Keeper, Partition, Recall, Slots, keep
from zeroshard.storage.transfers import Copies
from zeroshard.torch_private import tree_flatten, tree_unflatten, version_of

_Versions = Mapping[tuple[int, torch.Size], tuple[weakref.ref[Tensor], int]]
"""The inputs and the versions that they had in the forward, by address and shape."""


@dataclass(frozen=True)
class Checkpointing:
    """The options that zeroshard adds to torch's checkpointing, named as in the config's block.

    Attributes:
        partition_activations: shard saved inputs over `model_parallel_group`, whose ranks have the same inputs.
        cpu_checkpointing: keep saved inputs in CPU memory. It has no effect if the model computes on the CPU.
        contiguous_memory_optimization: keep saved inputs in memory that is allocated once.
        number_checkpoints: the maximum number of checkpoints in a forward, for `contiguous_memory_optimization`.
        synchronize_checkpoint_boundary: wait for the accelerator at the start and the end of each checkpoint.
        profile: measure the time and bytes of each checkpoint (see `Checkpointer.table`).
        model_parallel_group: the ranks that divide each layer and have the same inputs.

    Raises:
        UsageError: `contiguous_memory_optimization` is set without `number_checkpoints`.
    """

    partition_activations: bool = False
    cpu_checkpointing: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False
    model_parallel_group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, block: ActivationCheckpointingBlock) -> Checkpointing:
        """Return the options of a config's block."""
        return cls(**block.model_dump(exclude={"checkpoint_units"}))

    def __post_init__(self) -> None:
        if self.contiguous_memory_optimization and not self.number_checkpoints:
            raise UsageError(
                "contiguous_memory_optimization allocates its memory once: set number_checkpoints, the maximum number of "
                "checkpoints in a forward."
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
        self._slots: Slots | None = None
        if self.options.contiguous_memory_optimization and self.options.number_checkpoints:
            self._slots = Slots(self.options.number_checkpoints, self.options.cpu_checkpointing)
        self._keepers: dict[torch.device, Keeper] = {}
        self.host_copies: Callable[[Slots | None], Keeper] | None = None
        """A function that creates the keeper of inputs in CPU memory, for dry runs.

        None: `HostCopies`, if the inputs are on an accelerator.
        """
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
        if not (wanted.profile or wanted.partition_activations or wanted.cpu_checkpointing or self._slots):
            # torch keeps the inputs. The function gets the caller's own lists and dicts, to which it may add values.
            return torch_checkpoint(lambda *args: function(*args, **kwargs), *args, **options)
        # torch gives its hooks only tensors that are arguments themselves, so each leaf becomes an argument.
        leaves, spec = tree_flatten((args, kwargs))
        # Weights, masks and positions are not activations: they stay in memory in any case.
        activations = {
            (leaf.data_ptr(), leaf.shape): (weakref.ref(leaf), version_of(leaf))
            for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None
        }

        def call(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(list(leaves), spec)
            return function(*args, **kwargs)

        if self._slots is not None:
            self._slots.begin()
        with saved_tensors_hooks(partial(self._pack, name, activations), lambda recall: recall()):
            return torch_checkpoint(call, *leaves, **options)

    # ------------------------------------------------------------------ saved inputs

    def _pack(self, name: str, activations: _Versions, tensor: Tensor) -> Recall:
        """Keep an input. Its recall raises RuntimeError if the input was changed in place, as torch does without hooks."""
        key = (tensor.data_ptr(), tensor.shape)  # autograd may pass an alias of the input to its hooks
        if key not in activations or tensor.numel() == 0:
            return keep(tensor)
        if self.options.profile:
            self.costs.setdefault(name, Cost()).nbytes += tensor.nbytes
        if tensor.device not in self._keepers:
            self._keepers[tensor.device] = self._make_keeper(tensor.device)
        recall = self._keepers[tensor.device](tensor)
        reference, version = activations[key]

        def unless_changed() -> Tensor:
            alive = reference()
            if alive is not None and version_of(alive) != version:
                raise RuntimeError(
                    "an input of a checkpointed function was modified by an inplace operation, so its activations cannot be "
                    "recomputed. Change a copy instead."
                )
            return recall()

        return unless_changed

    def _make_keeper(self, device: torch.device) -> Keeper:
        keeper: Keeper = self._slots or keep
        if self.options.cpu_checkpointing and self.host_copies is not None:
            keeper = self.host_copies(self._slots)
        elif self.options.cpu_checkpointing and device.type != "cpu":
            keeper = HostCopies(self._slots, Copies(device))
        if not self.options.partition_activations:
            return keeper
        group = self.options.model_parallel_group
        if group is None or dist.get_world_size(group) == 1:
            warnings.warn(
                "partition_activations has no effect without a model-parallel group: pass one to checkpointing.configure().",
                stacklevel=2,
            )
            return keeper
        return Partition(create_collectives(group, device, what="partitioned activations"), keeper)

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
