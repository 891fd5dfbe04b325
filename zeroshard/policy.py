"""Owns the memory decision: which model state is sharded and where it rests. Called by everyone, imports none of ours but errors.

A ZeRO stage is nothing but a preset of `Policy` (Rajbhandari et al., "ZeRO", arXiv:1910.02054, section 5):

    =========  ============  ==================================  =========
    preset     parameters    gradients                           optimizer
    =========  ============  ==================================  =========
    stage 0    unsharded     unsharded                           unsharded
    stage 1    unsharded     unsharded until the last microbatch  sharded
    stage 2    unsharded     sharded                             sharded
    stage 3    sharded       sharded                             sharded
    =========  ============  ==================================  =========

The policy never changes a result: see docs/design.md, "Numbers".
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

from zeroshard.errors import PolicyError


class Place(enum.StrEnum):
    """Where a model state rests."""

    ACCELERATOR = "accelerator"
    CPU = "cpu"
    DISK = "disk"


@dataclass(frozen=True)
class Residency:
    """How one kind of model state rests between its uses."""

    sharded: bool
    place: Place = Place.ACCELERATOR


@dataclass(frozen=True)
class Policy:
    """The residencies of the three model states.

    Attributes:
        parameters, gradients, optimizer: their residencies. Sharding a state requires sharding those after it:
            parameters sharded => gradients sharded => optimizer sharded.
        reshard_after_forward: where parameters are sharded, whether a unit is given back after its forward (less
            memory, one more all-gather) or kept for the backward.
        prefetch_numel: where parameters are sharded, units are brought together ahead of their use until this many
            elements are on their way; 0 is none ahead, None is one unit ahead.
        max_live_numel: where parameters are sharded, nothing is prefetched or kept that would bring the unsharded
            elements above it. The units in use (the root, and the block that runs) may.
        max_reuse_numel: where parameters are sharded, a unit is kept after its forward if at most this many elements
            are used before its backward. 0: only the last of the forward is.
    """

    parameters: Residency
    gradients: Residency
    optimizer: Residency
    reshard_after_forward: bool = True
    prefetch_numel: int | None = None
    max_live_numel: int | None = None
    max_reuse_numel: int = 0

    def __post_init__(self) -> None:
        if self.parameters.sharded and not self.gradients.sharded:
            raise PolicyError(
                "parameters are sharded but gradients are not: the gradient of a sharded parameter has no whole "
                "buffer to rest in. Shard the gradients too, or use Policy.stage(3)."
            )
        if self.gradients.sharded and not self.optimizer.sharded:
            raise PolicyError(
                "gradients are sharded but the optimizer is not: this rank would update elements whose gradient it "
                "does not hold. Shard the optimizer too, or use Policy.stage(2)."
            )
        for state in ("parameters", "gradients", "optimizer"):
            place = getattr(self, state).place
            if place is Place.DISK:
                raise PolicyError(f"{state} at rest on disk are not available yet: use Place.ACCELERATOR or Place.CPU.")

    def refuse_unless_it_rests_on(self, device: torch.device) -> None:
        """Raise `PolicyError` where a state would have to be copied between the CPU and `device`, which is not there yet."""
        for state in ("parameters", "gradients", "optimizer"):
            if getattr(self, state).place is Place.CPU and device.type != "cpu":
                raise PolicyError(
                    f"{state} at rest in CPU memory while the model computes on {device} are not available yet: use "
                    "Place.ACCELERATOR (in a config, leave out offload_param and offload_optimizer)."
                )

    @classmethod
    def stage(cls, stage: int, *, reshard_after_forward: bool = True) -> Policy:
        """The preset of a ZeRO stage, 0 to 3."""
        if stage not in (0, 1, 2, 3):
            raise PolicyError(f"a ZeRO stage is 0, 1, 2 or 3, not {stage!r}.")
        return cls(
            parameters=Residency(sharded=stage >= 3),
            gradients=Residency(sharded=stage >= 2),
            optimizer=Residency(sharded=stage >= 1),
            reshard_after_forward=reshard_after_forward,
        )


@dataclass(frozen=True)
class Units:
    """Which parameters are brought together at once, where the rule (each block of a list of blocks) is not what you want.

    Attributes:
        leaf_classes, leaf_names, leaf_suffixes: modules that are one unit with all that they contain: by class (its name, or
            with its module's), by fqn (with `*` for anything), by the end of the fqn. Declare so a module that runs
            some of its children on some ranks only, a mixture of experts: then all ranks bring all of it together.
        min_numel: a block of fewer elements is no unit of its own; it belongs to what contains it.
        persistent_numel: parameters of fewer elements are not sharded (their gradients and optimizer states are)...
        max_persistent_numel: ... as long as they are not more than this many elements in all.
    """

    leaf_classes: tuple[str, ...] = ()
    leaf_names: tuple[str, ...] = ()
    leaf_suffixes: tuple[str, ...] = ()
    min_numel: int = 0
    persistent_numel: int = 0
    max_persistent_numel: int | None = None


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training run. `None` means: as the dtype above it in this list.

    Attributes:
        param_dtype: dtype of the unsharded parameters that forward and backward use; None keeps each parameter's own.
        reduce_dtype: dtype in which gradients travel between ranks; None is the parameter's.
        accumulate_dtype: dtype in which reduced gradients are kept and summed over microbatches; None is
            `master_dtype`, since sums over microbatches in 16 bits lose digits.
        master_dtype: dtype of the weights that the optimizer updates.
        buffer_dtype: dtype of the model's floating-point buffers; None is the parameters'.
        predivide_factor: gradients are divided by it before they travel, and the sum over ranks by world_size / it: a
            backend that sums in 16 bits then overflows later. (Sums over gloo are in fp32 in any case.)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None
    master_dtype: torch.dtype = torch.float32
    buffer_dtype: torch.dtype | None = None
    predivide_factor: float = 1.0

    def resolve(self, own_dtype: torch.dtype) -> DTypes:
        """The concrete dtypes for a parameter whose own dtype is `own_dtype`."""
        if not own_dtype.is_floating_point:
            return DTypes(own_dtype, own_dtype, own_dtype, own_dtype)
        param = self.param_dtype or own_dtype
        # A double-precision parameter keeps its digits: the master is never narrower than what the user built.
        master = torch.promote_types(self.master_dtype, param)
        return DTypes(param, self.reduce_dtype or param, self.accumulate_dtype or master, master)


@dataclass(frozen=True)
class DTypes:
    """What `Precision` comes to for one dtype of parameter."""

    param: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype
    master: torch.dtype
