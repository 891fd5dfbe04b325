"""Owns the decision about memory: for each model state, whether it is sharded, and its place.

A ZeRO stage is a preset of `Policy` (Rajbhandari et al., "ZeRO", arXiv:1910.02054, section 5): see `Policy.stage`.
The policy never changes a result, except if its `wire` makes sums lossy: see docs/design.md, "Numbers".
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
    """A place in which a model state is stored between its uses."""

    ACCELERATOR = "accelerator"
    CPU = "cpu"
    DISK = "disk"


@dataclass(frozen=True)
class Residency:
    """The place of one kind of model state between its uses, and whether it is sharded.

    Attributes:
        sharded: True: each rank stores its shard. False: each rank stores the whole.
        per_host: for parameters: shard them only over the ranks of a host (`Policy.within`), so that each host has the
            whole.
    """

    sharded: bool
    place: Place = Place.ACCELERATOR
    per_host: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.place, Place):
            return
        if self.place not in list(Place):
            names = ", ".join(f'"{place}"' for place in Place)
            raise PolicyError(f"the place of a model state is {self.place!r}. Pass a Place, or one of {names}.")
        object.__setattr__(self, "place", Place(self.place))  # code compares places by identity


@dataclass(frozen=True)
class Offload:
    """The settings for transfers of a model state between its place and its use. They apply if its place is cpu or
    disk.

    Attributes:
        path: for the disk: an existing folder for its file. The file has no name, so nothing is left behind.
        pin_memory: whether CPU memory that an accelerator reads and writes is pinned.
        buffer_count, buffer_numel: for the disk: the CPU memory for states under way or in use is at most
            `buffer_count` buffers of `buffer_numel` elements; for the optimizer, elements of the master weights,
            gradients and states together.
        max_in_cpu_numel: for parameters on disk: the number of elements of this rank's shards that stay in CPU memory.
        ratio: for the optimizer: the share of the parameters, 0 to 1, whose optimizer states leave the accelerator. It
            updates the others itself.
        sub_group_numel: for the optimizer: the most elements that one call of the torch optimizer updates.
        read_ahead, write_behind: for the optimizer on disk: whether sub-groups are read before their turn, and written
            during the next one's.
        block_nbytes, requests: for the disk: the bytes of one request, and the number of requests under way at once.
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
            raise PolicyError(f"ratio is a share between 0 and 1, not {self.ratio!r}. Pass one, such as 0.5.")
        if self.block_nbytes % PAGE_NBYTES:
            raise PolicyError(
                f"block_nbytes (in a config, aio.block_size) is a multiple of {PAGE_NBYTES}, as direct I/O needs it; "
                f"{self.block_nbytes} is not. Pass one, such as {256 * PAGE_NBYTES}."
            )
        for name in ("buffer_count", "buffer_numel", "sub_group_numel", "block_nbytes", "requests"):
            if getattr(self, name) < 1:
                raise PolicyError(f"{name} is at least 1, not {getattr(self, name)!r}. Pass 1 or more.")


def largest_shard_numel(offload: Offload) -> int:
    """The largest shard of an optimizer on disk, in elements, of which several fit into the buffers: one is read, one
    updated, one written.

    It counts master weights, gradient and two states in fp32 for four sub-groups (one to spare), and leaves half for
    other shapes.
    """
    return max(offload.buffer_count * offload.buffer_numel // (4 * 4 * 2), 1)


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The lossy communication between ranks. By default there is none, and every stage gives the same bits.

    Parameters, files, `unsharded` and the optimizer's arithmetic are exact. Values are sent in blocks of 256 with one
    scale each: the block's largest magnitude over 127 (int8) or 7 (int4). A value is off by at most half a scale.

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
        """Whether any communication is lossy."""
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
        reshard_after_forward: for sharded parameters: whether a unit is resharded after its forward (less memory, one
            more all-gather) or kept for the backward.
        prefetch_numel: for sharded parameters: the number of elements that are gathered ahead of their use. 0 disables
            prefetching; None prefetches one unit.
        max_live_numel: for sharded parameters: the most unsharded elements, beyond which nothing is prefetched or kept.
            The units in use (the root, and the block that runs) may exceed it.
        max_reuse_numel: for sharded parameters: a unit is kept after its forward if at most this many elements are used
            before its backward. 0: only the last unit of the forward is kept.
        offload_parameters, offload_optimizer: the settings for transfers of these states, if they are on cpu or disk;
            gradients follow the optimizer.
        within: the number of ranks of one host, in the order of ranks, or "host" for the ranks that share a machine.
            Gradients are then summed inside each host first, and then over hosts. The bits differ from those without
            it, and are the same for every policy of the same `within`.
        wire: the values that are rounded before they are sent to other ranks. By default none are; with a wire the bits
            differ.
        rests_as_masters: for sharded parameters with master weights of another dtype, both on the accelerator: only the
            master weights are stored, and each all-gather rounds them. In 16 bits that takes 14 bytes a parameter
            instead of 16, with the same bits. It has no effect if each host holds all the parameters (`per_host`).
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
                "parameters are to rest on disk, and they are not sharded: every rank would write all of them. "
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
            raise PolicyError(
                "per_host is a way to shard parameters: pass sharded=True and Policy(within=...) as well."
            )
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
        """Whether trained parameters with master weights are stored only as these, see `rests_as_masters`."""
        places = (self.parameters.place, self.optimizer.place)
        is_possible = self.parameters.sharded and not self.parameters.per_host
        return self.rests_as_masters and is_possible and places == (Place.ACCELERATOR, Place.ACCELERATOR)

    @property
    def uses_disk(self) -> bool:
        """Whether any state is on disk, so that the buffers bound CPU memory."""
        return Place.DISK in (self.parameters.place, self.gradients.place, self.optimizer.place)

    @classmethod
    def stage(
        cls, stage: int, *, reshard_after_forward: bool = True, within: int | Literal["host"] | None = None,
        wire: Wire = EXACT,
    ) -> Policy:  # fmt: skip
        """Return the preset of a ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters.

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
        """Return this policy with states in other places, as in ZeRO-Offload and ZeRO-Infinity.

        Args:
            optimizer: the place of optimizer states and master weights, and of gradients if they are sharded: a `Place`
                or its name.
            parameters: the place of parameters: their shards (stage 3), or the whole between steps (below).
            offload: the settings for their transfers; default: see `Offload`.
            path: the folder for states on disk; instead of `offload.path`.
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
    """The parameters that are unsharded together, if the default rule (each block of a list of blocks) does not fit.

    Attributes:
        leaf_classes, leaf_names, leaf_suffixes: modules that are one unit with everything inside: by class (its name,
            or with its module's), by fqn (with `*` for anything), by the end of the fqn. Declare a module that runs
            some of its children on some ranks only, such as a mixture of experts: then all ranks gather all of it.
        min_numel: a block of fewer elements belongs to the unit that contains it. None is 0 for models of up to 128
            blocks, and 10,000 for others.
        persistent_numel: parameters of fewer elements are not sharded; their gradients and optimizer states are.
        max_persistent_numel: the most elements, in all, of parameters that `persistent_numel` leaves unsharded.
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
                raise UsageError(f"{name} takes a tuple, not the string {value!r}. Write {name}=({value!r},).")


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training run. `None` means the dtype above it in this list, unless its entry has another default.

    Attributes:
        param_dtype: dtype of the unsharded parameters that forward and backward use; None keeps each parameter's own.
        reduce_dtype: dtype in which gradients are sent between ranks; None is the parameter's, but fp32 if that has 16
            bits and the backend rounds after each addition (NCCL does).
        accumulate_dtype: dtype in which reduced gradients are kept and summed over microbatches; None is
            `master_dtype`, since sums over microbatches in 16 bits lose digits.
        master_dtype: dtype of the weights that the optimizer updates.
        buffer_dtype: dtype of the model's floating-point buffers; None keeps each buffer's own.
        predivide_factor: gradients are divided by it before they are sent, and the sum over ranks by world_size / it. A
            backend that sums in 16 bits then overflows later. (Sums over gloo are always in fp32; NCCL divides as it
            adds.)
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
        """Return the concrete dtypes for a parameter whose own dtype is `own_dtype`.

        Args:
            sum_dtype: the dtype in which a transport sends gradients of a dtype, see `reduce_dtype`.
        """
        # Nothing is computed in 8 bits: such parameters stay as they are.
        if not own_dtype.is_floating_point or own_dtype.itemsize == 1:
            return DTypes(own_dtype, own_dtype, own_dtype, own_dtype)
        param = self.param_dtype or own_dtype
        # A double-precision parameter keeps its digits: the master is never narrower than the user's parameter.
        master = torch.promote_types(self.master_dtype, param)
        return DTypes(param, self.reduce_dtype or sum_dtype(param), self.accumulate_dtype or master, master)


@dataclass(frozen=True)
class DTypes:
    """The dtypes that `Precision` gives for one dtype of parameter."""

    param: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype
    master: torch.dtype
