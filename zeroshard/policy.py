"""Owns the memory decision: which model state is sharded and where it rests.

A ZeRO stage is nothing but a preset of `Policy` (Rajbhandari et al., "ZeRO", arXiv:1910.02054, section 5): see `Policy.stage`.
The policy never changes a result, except where its `wire` names lossy sums: see docs/design.md, "Numbers".
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from zeroshard.errors import PolicyError, UsageError

PAGE_NBYTES = 4096
"""The divisor of addresses, offsets and lengths in direct I/O."""


class Place(enum.StrEnum):
    """A place where a model state rests."""

    ACCELERATOR = "accelerator"
    CPU = "cpu"
    DISK = "disk"


@dataclass(frozen=True)
class Residency:
    """The place of one kind of model state between its uses, and whether it is sharded.

    Attributes:
        sharded: over all ranks, or each rank has the whole.
        per_host: parameters: sharded only over the ranks of a host (`Policy.within`), so that each host has the whole.
    """

    sharded: bool
    place: Place = Place.ACCELERATOR
    per_host: bool = False


@dataclass(frozen=True)
class Offload:
    """The settings for transfers of a model state between its place and its use. Applies where its place is cpu or disk.

    Attributes:
        path: disk: the folder for its file, which must be there. Nothing in it has a name, so nothing is left behind.
        pin_memory: CPU memory that an accelerator reads and writes is pinned.
        buffer_count, buffer_numel: disk: the CPU memory for what is on its way or in use is at most `buffer_count` buffers of
            `buffer_numel` elements; for the optimizer, elements of the master weights, gradients and states together.
        max_in_cpu_numel: disk, parameters: so many elements of this rank's shards stay in CPU memory, the first ones.
        ratio: optimizer: the share of the parameters whose optimizer states leave the accelerator; the rest is updated there.
        sub_group_numel: optimizer: the most elements that are updated by one call of the torch optimizer.
        read_ahead, write_behind: disk, optimizer: sub-groups are read before their turn, and written behind the next one's.
        block_nbytes, requests: disk: bytes of one request, and how many are under way at once.
    """

    path: str | None = None
    pin_memory: bool = True
    buffer_count: int = 4
    buffer_numel: int = 100_000_000
    max_in_cpu_numel: int = 0
    ratio: float = 1.0
    sub_group_numel: int = 1_000_000_000
    read_ahead: bool = True
    write_behind: bool = True
    block_nbytes: int = 4 << 20
    requests: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.ratio <= 1:
            raise PolicyError(f"ratio is a share between 0 and 1, not {self.ratio!r}. Pass such a number.")
        if self.block_nbytes % PAGE_NBYTES:
            raise PolicyError(
                f"block_nbytes (in a config, aio.block_size) is a multiple of {PAGE_NBYTES}, as direct I/O needs it; "
                f"{self.block_nbytes} is not. Pass such a number."
            )
        for name in ("buffer_count", "buffer_numel", "sub_group_numel", "block_nbytes", "requests"):
            if getattr(self, name) < 1:
                raise PolicyError(f"{name} is at least 1, not {getattr(self, name)!r}. Pass such a number.")


def largest_shard_numel(offload: Offload) -> int:
    """Elements of an optimizer's shard on disk of which several fit into the buffers: one is read, one updated, one written.

    Master weights, gradient and two states in fp32, four sub-groups of which one is to spare, and a half is left for other shapes.
    """
    return max(offload.buffer_count * offload.buffer_numel // (4 * 4 * 2), 1)


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Communication that loses digits between ranks. By default none does, and every stage gives the same bits.

    Parameters, files, `unsharded` and the optimizer's arithmetic are exact. Values travel in blocks of 256 with one scale each, off
    by half a scale at most: the block's largest magnitude over 127 (int8) or 7 (int4).

    Attributes:
        gradients: "int8" or "int4", for the sums of gradients that cross hosts (`Policy.within`). Sums are made in fp32.
    """

    gradients: Literal["int8", "int4"] | None = None

    def __post_init__(self) -> None:
        if self.gradients not in (None, "int8", "int4"):
            raise PolicyError(
                f'Wire(gradients=...) is "int8", "int4" or None, not {self.gradients!r}. Pass one of them.'
            )

    @property
    def is_lossy(self) -> bool:
        """Whether anything loses digits."""
        return self != EXACT

    def __str__(self) -> str:
        return f"gradients across hosts {self.gradients}" if self.is_lossy else "nothing"


EXACT = Wire()


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
        offload_parameters, offload_optimizer: how these states travel, where they rest on cpu or disk; gradients as the
            optimizer.
        within: how many ranks are one host, in the order of ranks, or "host" for those that share a machine. Sums over ranks are
            then those over hosts of each host's: other bits than without, and the same for every policy of the same `within`.
        wire: the values that are rounded on their way between ranks. By default none are; with a wire the bits differ.
        rests_as_masters: where sharded parameters have master weights of another dtype, and both rest on the accelerator, the
            master weights are all that rests: they are rounded on their way to each all-gather. 14 bytes a parameter instead of
            16 in 16 bits, and the same bits. Not where each host has the whole (`per_host`).
    """

    parameters: Residency
    gradients: Residency
    optimizer: Residency
    reshard_after_forward: bool = True
    prefetch_numel: int | None = None
    max_live_numel: int | None = None
    max_reuse_numel: int = 0
    offload_parameters: Offload = Offload()
    offload_optimizer: Offload = Offload()
    within: int | Literal["host"] | None = None
    wire: Wire = EXACT
    rests_as_masters: bool = False

    def __post_init__(self) -> None:
        self._refuse_hosts()
        self._refuse_wire()
        if self.parameters.sharded and not self.gradients.sharded:
            raise PolicyError(
                "parameters are sharded but gradients are not: the gradient of a sharded parameter has no whole buffer "
                "to rest in. Shard the gradients too, or use Policy.stage(3)."
            )
        if self.gradients.sharded and not self.optimizer.sharded:
            raise PolicyError(
                "gradients are sharded but the optimizer is not: this rank would update elements whose gradient it "
                "does not hold. Shard the optimizer too, or use Policy.stage(2)."
            )
        if self.optimizer.place is not Place.ACCELERATOR and not self.optimizer.sharded:
            raise PolicyError(
                f"the optimizer is to rest on {self.optimizer.place}, and it is not sharded: every rank would move the "
                "whole of it. Shard it: Policy.stage(1) or above, on one rank too."
            )
        if self.gradients.place is not Place.ACCELERATOR and not self.gradients.sharded:
            raise PolicyError(
                f"gradients are to rest on {self.gradients.place}, and they are not sharded: they are summed where "
                "they are made. Shard them (Policy.stage(2) or above), or leave them on the accelerator."
            )
        if self.parameters.place is not Place.ACCELERATOR and not self.optimizer.sharded:
            raise PolicyError(
                f"parameters are to rest on {self.parameters.place}, and the optimizer is not sharded: every rank "
                "would move all of them in both directions for its step. Shard it: Policy.stage(1) or above, on "
                "one rank too."
            )
        if self.parameters.place is Place.DISK and not self.parameters.sharded:
            raise PolicyError(
                "parameters are to rest on disk, and they are not sharded: every rank would write the whole of them. "
                "Shard them (Policy.stage(3)), or let them rest in CPU memory between steps."
            )
        for state, offload, key in (
            ("parameters", "offload_parameters", "offload_param"), ("optimizer", "offload_optimizer", "offload_optimizer"),
            ("gradients", "offload_optimizer", "offload_optimizer"),
        ):  # fmt: skip
            if getattr(self, state).place is Place.DISK and getattr(self, offload).path is None:
                raise PolicyError(
                    f"{state} are to rest on disk, and no folder is named: pass {offload}=Offload(path=...) (in a "
                    "config, "
                    f"{key}.nvme_path)."
                )

    def _refuse_hosts(self) -> None:
        if not (self.within in (None, "host") or (type(self.within) is int and self.within >= 1)):
            raise PolicyError(f'within is a number of ranks, "host" or None, not {self.within!r}. Pass one of them.')
        if self.gradients.per_host or self.optimizer.per_host:
            raise PolicyError(
                "gradients and optimizer states are sharded over all ranks: per_host is for parameters. Leave it out "
                "for the others."
            )
        if self.parameters.per_host and not (self.parameters.sharded and self.within is not None):
            raise PolicyError("per_host is a way to shard parameters: pass sharded=True, and Policy(within=...), too.")
        if self.parameters.per_host and self.parameters.place is Place.DISK:
            raise PolicyError(
                "parameters are to rest on disk and on each host as a whole (within): every host would write what all have. Let "
                "them rest in CPU memory, or leave within out (in a config, zero_hpz_partition_size or mics_shard_size)."
            )

    def _refuse_wire(self) -> None:
        if self.wire.gradients is not None and self.within is None:
            raise PolicyError(
                "gradients are to be sent quantised (in a config, zero_optimization.zero_quantized_gradients), "
                "which is for traffic between hosts, and none are named: give within, the ranks of a host "
                "(zero_hpz_partition_size or mics_shard_size), or leave it out."
            )

    @property
    def keeps_masters_only(self) -> bool:
        """Whether nothing but master weights rests of trained parameters that have some, see `rests_as_masters`."""
        places = (self.parameters.place, self.optimizer.place)
        is_possible = self.parameters.sharded and not self.parameters.per_host
        return self.rests_as_masters and is_possible and places == (Place.ACCELERATOR, Place.ACCELERATOR)

    @property
    def uses_disk(self) -> bool:
        """Whether anything rests on disk, so that CPU memory is bounded by the buffers."""
        return Place.DISK in (self.parameters.place, self.gradients.place, self.optimizer.place)

    @classmethod
    def stage(
        cls, stage: int, *, reshard_after_forward: bool = True, within: int | Literal["host"] | None = None,
        wire: Wire = EXACT,
    ) -> Policy:  # fmt: skip
        """The preset of a ZeRO stage: 0 shards nothing, 1 optimizer states, 2 gradients too, 3 parameters too.

        Gradients of stage 1 are unsharded until the last microbatch. `within`: stage 3 shards parameters over the ranks of a host,
        gradients and optimizer states over all.
        """
        if stage not in (0, 1, 2, 3):
            raise PolicyError(f"a ZeRO stage is 0, 1, 2 or 3, not {stage!r}. Pass one of them.")
        return cls(
            parameters=Residency(sharded=stage >= 3, per_host=stage >= 3 and within is not None),
            gradients=Residency(sharded=stage >= 2),
            optimizer=Residency(sharded=stage >= 1),
            reshard_after_forward=reshard_after_forward,
            within=within,
            wire=wire,
        )

    def offloaded(
        self, *, optimizer: Place | None = None, parameters: Place | None = None, offload: Offload | None = None,
        path: str | None = None,
    ) -> Policy:  # fmt: skip
        """Return this policy with states at rest elsewhere, as in ZeRO-Offload and ZeRO-Infinity.

        Args:
            optimizer: the place of optimizer states and master weights, and of gradients where they are sharded.
            parameters: the place of parameters: their shards (stage 3), or the whole between steps (below).
            offload: how they travel; default: see `Offload`.
            path: the folder for what rests on disk; instead of `offload.path`.
        """
        how = offload or Offload()
        if path is not None:
            how = replace(how, path=path)
        changed = self
        if optimizer is not None:
            gradients = self.gradients
            if gradients.sharded:
                gradients = replace(gradients, place=optimizer)
            moved = replace(self.optimizer, place=optimizer)
            changed = replace(changed, optimizer=moved, gradients=gradients, offload_optimizer=how)
        if parameters is not None:
            moved = replace(self.parameters, place=parameters)
            changed = replace(changed, parameters=moved, offload_parameters=how)
        return changed


@dataclass(frozen=True)
class Units:
    """The parameters that are unsharded together, where the rule (each block of a list of blocks) does not fit.

    Attributes:
        leaf_classes, leaf_names, leaf_suffixes: modules that are one unit with all that they contain: by class (its name, or
            with its module's), by fqn (with `*` for anything), by the end of the fqn. Declare so a module that runs
            some of its children on some ranks only, a mixture of experts: then all ranks bring all of it together.
        min_numel: a block of fewer elements is no unit of its own; it belongs to what contains it. None is 0 for models of up
            to 128 blocks, and 10,000 for others.
        persistent_numel: parameters of fewer elements are not sharded (their gradients and optimizer states are)...
        max_persistent_numel: ... as long as they are not more than this many elements in all.
    """

    leaf_classes: tuple[str, ...] = ()
    leaf_names: tuple[str, ...] = ()
    leaf_suffixes: tuple[str, ...] = ()
    min_numel: int | None = None
    persistent_numel: int = 0
    max_persistent_numel: int | None = None

    def __post_init__(self) -> None:
        for name in ("leaf_classes", "leaf_names", "leaf_suffixes"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise UsageError(f"{name} is the string {value!r}, and takes several: write {name}=({value!r},).")


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training run. `None` means: as the dtype above it in this list, unless its entry has another default.

    Attributes:
        param_dtype: dtype of the unsharded parameters that forward and backward use; None keeps each parameter's own.
        reduce_dtype: dtype in which gradients travel between ranks; None is the parameter's, but fp32 where that has 16 bits
            and the backend rounds after each addition (NCCL does).
        accumulate_dtype: dtype in which reduced gradients are kept and summed over microbatches; None is
            `master_dtype`, since sums over microbatches in 16 bits lose digits.
        master_dtype: dtype of the weights that the optimizer updates.
        buffer_dtype: dtype of the model's floating-point buffers; None keeps each buffer's own.
        predivide_factor: gradients are divided by it before they travel, and the sum over ranks by world_size / it: a
            backend that sums in 16 bits then overflows later. (Sums over gloo are in fp32 in any case; NCCL divides as it adds.)
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None
    master_dtype: torch.dtype = torch.float32
    buffer_dtype: torch.dtype | None = None
    predivide_factor: float = 1.0

    def over_microbatches(self, count: int) -> Precision:
        """Return the dtypes for steps of `count` microbatches. With one, gradients keep their communication dtype."""
        if count > 1 or self.param_dtype is None or self.accumulate_dtype is not None:
            return self
        return replace(self, accumulate_dtype=self.reduce_dtype or self.param_dtype)

    def resolve(
        self, own_dtype: torch.dtype, sum_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype
    ) -> DTypes:
        """The concrete dtypes for a parameter whose own dtype is `own_dtype`.

        Args:
            sum_dtype: the dtype in which a transport sends gradients of a dtype, see `reduce_dtype`.
        """
        # Nothing is computed in 8 bits: such parameters stay as they are.
        if not own_dtype.is_floating_point or own_dtype.itemsize == 1:
            return DTypes(own_dtype, own_dtype, own_dtype, own_dtype)
        param = self.param_dtype or own_dtype
        # A double-precision parameter keeps its digits: the master is never narrower than what the user built.
        master = torch.promote_types(self.master_dtype, param)
        return DTypes(param, self.reduce_dtype or sum_dtype(param), self.accumulate_dtype or master, master)


@dataclass(frozen=True)
class DTypes:
    """The dtypes that `Precision` comes to for one dtype of parameter."""

    param: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype
    master: torch.dtype
