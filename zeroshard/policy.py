"""Owns `Policy`: for each model state, whether it is sharded, and its place.

A ZeRO stage is a preset of `Policy` (Rajbhandari et al., "ZeRO", arXiv:1910.02054, section 5); see `Policy.stage`.
docs/design.md lists the policies whose results are bit-identical ("What is promised").
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from zeroshard.errors import PolicyError, UsageError
from zeroshard.removed import refuse_removed

if TYPE_CHECKING:  # the command line reads configs without torch, whose import takes seconds
    import torch

PAGE_NBYTES = 4096
"""In direct I/O, addresses, offsets and lengths are multiples of this number of bytes."""


class Place(enum.StrEnum):
    """A place in which a model state is stored between its uses."""

    ACCELERATOR = "accelerator"
    CPU = "cpu"
    DISK = "disk"


def place_of(name: Place | str) -> Place:
    """Return the place with this name. Raise PolicyError if there is none."""
    if name not in list(Place):
        names = ", ".join(f'"{place}"' for place in Place)
        raise PolicyError(f"a model state cannot have the place {name!r}. Pass a Place, or one of {names}.")
    return Place(name)


@dataclass(frozen=True)
class Residency:
    """The place of one kind of model state between its uses, and whether it is sharded.

    Attributes:
        sharded: whether each rank stores only its shard of the state. Otherwise, each rank stores all of it.
        place: where the state is stored between its uses.
        per_host: for parameters: whether they are sharded over the ranks of each host (`Policy.within`), so that each
            host has all of them.

    Raises:
        PolicyError: `place` is unknown.
    """

    sharded: bool
    place: Place = Place.ACCELERATOR
    per_host: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", place_of(self.place))  # code compares places by identity


@dataclass(frozen=True)
class Offload:
    """The settings for transfers of a model state whose place is cpu or disk.

    Attributes:
        path: for the disk: an existing folder for the file. zeroshard unlinks the file at once, so nothing is left
            behind.
        pin_memory: whether CPU memory that an accelerator reads and writes is pinned.
        buffer_count, buffer_numel: for the disk: states in transfer or in use take at most `buffer_count` buffers of
            `buffer_numel` elements of CPU memory. For the optimizer, elements of master weights, gradients and states
            are counted together.
        max_in_cpu_numel: for parameters on disk: up to this many elements of each rank's shards stay in CPU memory.
        ratio: for the optimizer: the share of the parameters, 0 to 1, whose optimizer states leave the accelerator. The states of
            a unit that would exceed the share stay, and the accelerator updates its parameters.
        sub_group_numel: for an offloaded optimizer: the most elements that one call of the torch optimizer updates
            (never more than 4,194,304), unless a single shard has more.
        read_ahead, write_behind: for the optimizer on disk: whether a sub-group is read while the one before it is
            updated, and written while the next one is updated.
        block_nbytes, requests: for the disk: the size of a request in bytes, and the number of concurrent requests.

    Raises:
        PolicyError: a value is out of its range.
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
            raise PolicyError(f"ratio must be a share between 0 and 1, not {self.ratio!r}. Pass one, such as 0.5.")
        if self.block_nbytes % PAGE_NBYTES:
            raise PolicyError(
                f"block_nbytes (in a config, aio.block_size) must be a multiple of {PAGE_NBYTES} for direct I/O, not "
                f"{self.block_nbytes}. Pass one, such as {256 * PAGE_NBYTES}."
            )
        for name in ("buffer_count", "buffer_numel", "sub_group_numel", "block_nbytes", "requests"):
            if getattr(self, name) < 1:
                raise PolicyError(f"{name} must be at least 1, not {getattr(self, name)!r}. Pass 1 or more.")


def largest_shard_numel(offload: Offload) -> int:
    """Return the most elements that a shard of an optimizer on disk may have, so that the buffers hold enough shards.

    At any time, one shard is being read, one updated and one written. The buffers must therefore hold four shards (one
    to spare), each with master weights, gradients and two states, as with Adam. Half of the buffers stay free for other
    shapes.
    """
    return max(offload.buffer_count * offload.buffer_numel // (4 * 4 * 2), 1)


@dataclass(frozen=True)
class Policy:
    """The residencies of the three model states.

    Attributes:
        parameters, gradients, optimizer: the residency of each. Sharded parameters require sharded gradients, which require
            a sharded optimizer.
        reshard_after_forward: for sharded parameters: whether a unit is resharded after its forward (less memory, one
            more all-gather) or kept for the backward.
        prefetch_numel: for sharded parameters: units are gathered ahead of their use until the prefetched ones have
            this many elements. 0 disables prefetching; None prefetches one unit.
        max_live_numel: for sharded parameters: the number of unsharded elements beyond which no unit is prefetched or
            kept. The units in use (the root unit, and the block that is running) may exceed it.
        max_reuse_numel: for sharded parameters: a unit is kept after its forward if at most this many elements are used
            before its backward. With 0, only the last unit of the forward is kept.
        offload_parameters, offload_optimizer: the settings for transfers of parameters and of optimizer states that are
            on cpu or disk. `offload_optimizer` also applies to gradients.
        within: the number of consecutive ranks that form a host, or "host" for the ranks that share a machine.
            Gradients are then summed inside each host first, and then over hosts. Rounding differs from runs without
            `within`. With one microbatch per step, results are bit-identical for all policies with the same `within`.

    Raises:
        PolicyError: a value is invalid, a disk does not have a folder, or values exclude each other.
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
    rests_as_masters: InitVar[object] = None
    wire: InitVar[object] = None

    def __post_init__(self, rests_as_masters: object, wire: object) -> None:
        for name, value in (("rests_as_masters", rests_as_masters), ("Wire", wire)):
            if value is not None:
                refuse_removed(name)
        self._refuse_hosts()
        if self.parameters.sharded and not self.gradients.sharded:
            raise PolicyError(
                "parameters are sharded but gradients are not: the gradient of a sharded parameter has no whole buffer. "
                "Shard the gradients too, or use Policy.stage(3)."
            )
        if self.gradients.sharded and not self.optimizer.sharded:
            raise PolicyError(
                "gradients are sharded but the optimizer is not: this rank would update elements whose gradient it "
                "does not hold. Shard the optimizer too, or use Policy.stage(2)."
            )
        if self.optimizer.place is not Place.ACCELERATOR and not self.optimizer.sharded:
            raise PolicyError(
                f"the optimizer is to be stored on {self.optimizer.place}, and it is not sharded: every rank would move "
                "all of its states. Shard it with Policy.stage(1) or above, even on one rank."
            )
        if self.gradients.place is not Place.ACCELERATOR and not self.gradients.sharded:
            raise PolicyError(
                f"gradients are to be stored on {self.gradients.place}, and they are not sharded: they are summed on the "
                "accelerator. Shard them (Policy.stage(2) or above), or leave them on the accelerator."
            )
        if self.parameters.place is not Place.ACCELERATOR and not self.optimizer.sharded:
            raise PolicyError(
                f"parameters are to be stored on {self.parameters.place}, and the optimizer is not sharded: every rank "
                "would move all parameters in both directions for its step. Shard the optimizer with Policy.stage(1) "
                "or above, even on one rank."
            )
        if self.parameters.place is Place.DISK and not self.parameters.sharded:
            raise PolicyError(
                "parameters are to be stored on disk, and they are not sharded: every rank would write all of them. "
                "Shard them (Policy.stage(3)), or store them in CPU memory."
            )
        for state, offload, key in (
            ("parameters", "offload_parameters", "offload_param"), ("optimizer", "offload_optimizer", "offload_optimizer"),
            ("gradients", "offload_optimizer", "offload_optimizer"),
        ):  # fmt: skip
            if getattr(self, state).place is Place.DISK and getattr(self, offload).path is None:
                states = "optimizer states" if state == "optimizer" else state
                raise PolicyError(
                    f"{states} are to be stored on disk, and no folder is named. Pass {offload}=Offload(path=...) (in a "
                    f"config, {key}.nvme_path)."
                )

    def _refuse_hosts(self) -> None:
        if not (self.within in (None, "host") or (type(self.within) is int and self.within >= 1)):
            raise PolicyError(f'within takes a number of ranks, "host" or None, not {self.within!r}. Pass one of them.')
        if self.gradients.per_host or self.optimizer.per_host:
            raise PolicyError(
                "per_host is for parameters only: gradients and optimizer states are sharded over all ranks. Leave it "
                "out for these."
            )
        if self.parameters.per_host and not (self.parameters.sharded and self.within is not None):
            raise PolicyError(
                "per_host needs sharded parameters and the ranks of a host. Pass sharded=True and Policy(within=...) too."
            )
        if self.parameters.per_host and self.parameters.place is Place.DISK:
            raise PolicyError(
                "parameters are to be stored on disk, whole on each host (within): every host would write the same. Store "
                "them in CPU memory, or leave within out (in a config, zero_hpz_partition_size or mics_shard_size)."
            )

    @property
    def keeps_masters_only(self) -> bool:
        """Whether 16-bit parameters rest as their fp32 master weights only, which each all-gather rounds.

        They do so at stage 3 if both are on the accelerator. From CPU memory or disk, a gather would move twice the bytes; and
        hosts that each hold all parameters (`per_host`) do not hold all master weights.
        """
        is_possible = self.parameters.sharded and not self.parameters.per_host
        return is_possible and self.parameters.place is self.optimizer.place is Place.ACCELERATOR

    @property
    def uses_disk(self) -> bool:
        """Whether any model state is on disk."""
        return Place.DISK in (self.parameters.place, self.gradients.place, self.optimizer.place)

    @classmethod
    def stage(
        cls, stage: int, *, reshard_after_forward: bool = True, within: int | Literal["host"] | None = None,
        wire: object = None,
    ) -> Policy:  # fmt: skip
        """Return the preset of a ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters.

        At stage 1, gradients are unsharded until the last microbatch. With `within`, stage 3 shards parameters over the
        ranks of each host, and gradients and optimizer states over all ranks.

        Raises:
            PolicyError: the stage is unknown, or `within` is invalid.
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
        """Return this policy with some states offloaded, as in ZeRO-Offload and ZeRO-Infinity.

        Args:
            optimizer: the place of optimizer states and master weights, and of gradients if they are sharded: a `Place`
                or its name.
            parameters: the place of parameters' shards (stage 3), or of whole parameters (stages 1 and 2).
            offload: the settings for the transfers of these states; default: `Offload()`.
            path: the folder for states on disk. It replaces `offload.path`.

        Raises:
            PolicyError: a place is unknown, this policy cannot store states there, or a disk does not have a path.
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
    """The rule that decides which parameters are unsharded together. By default, each block in a list of blocks is one unit.

    Attributes:
        leaf_classes, leaf_names, leaf_suffixes: modules that each form one unit with all their submodules. They are
            given by class or class name (with or without its module), by fqn (`*` matches anything), or by the end of the fqn.
            Declare a module that runs some children on some ranks only, such as a mixture of experts: all ranks then
            gather the whole module.
        min_numel: a block with fewer elements than this belongs to the unit that contains it. None means 0 for models
            of up to 128 blocks, and 10,000 for models with more.
        persistent_numel: parameters with fewer elements than this are not sharded. Their gradients and optimizer states
            are.
        max_persistent_numel: the maximum number of elements, in all, that `persistent_numel` leaves unsharded.

    Raises:
        UsageError: a string was passed instead of a tuple. (If no module matches, `shard` raises it.)
    """

    leaf_classes: tuple[type | str, ...] = ()
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
    """The dtypes of a training run.

    Attributes:
        param_dtype: the dtype of the unsharded parameters that forward and backward use; None keeps each parameter's own.
        reduce_dtype: the dtype in which gradients are sent between ranks. None means the parameter's dtype, or fp32 if
            that dtype has 16 bits and the backend rounds after each addition, as NCCL does.
        accumulate_dtype: the dtype in which reduced gradients are kept and summed over microbatches. None means
            the dtype of the master weights, since 16-bit sums over microbatches lose precision.
        master_dtype: the dtype of the weights that the optimizer updates. It is widened if it cannot represent all
            values of the parameters' dtype.
        buffer_dtype: the dtype of the model's floating-point buffers; None keeps each buffer's own.
        predivide_factor: the number by which gradients are divided before they are sent. The sum over ranks is then
            divided by world_size / predivide_factor, so that a backend that sums in 16 bits is less likely to overflow.
            Neither backend usually needs it: over gloo, sums use at least fp32, and NCCL divides during the sum.
        keep_in_fp32: parts of names, such as "router.*weight", of parameters that stay in fp32 if `param_dtype` has 16
            bits. Those that a transformers model declares itself (`_keep_in_fp32_modules_strict`) always do.
        state_dtype: the dtype in which the optimizer's states of a parameter's size, such as Adam's moments, rest between steps:
            torch.bfloat16, or torch.uint8 for codes of 8 bits and a scale for each 256 elements of a parameter of at least 4096.
            A step computes with them in the master weights' dtype. None keeps the optimizer's own dtype.
        state_rounding: how a step rounds these states: "stochastic", with random bits that are the same over any number of
            ranks, at every stage, or "nearest".

    Raises:
        UsageError: `state_dtype` is another dtype, `state_rounding` another word, or 8 bits are to hold states of 16-bit master
            weights.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None
    master_dtype: torch.dtype = field(default_factory=lambda: _torch().float32)
    buffer_dtype: torch.dtype | None = None
    predivide_factor: float = 1.0
    keep_in_fp32: tuple[str, ...] = ()
    state_dtype: torch.dtype | None = None
    state_rounding: Literal["stochastic", "nearest"] = "stochastic"

    def __post_init__(self) -> None:
        if self.state_dtype is not None and self.state_dtype not in (_torch().bfloat16, _torch().uint8):
            raise UsageError(
                f"state_dtype is {self.state_dtype}: optimizer states rest in bfloat16, whose range is that of fp32, in codes of 8 "
                "bits, or in the optimizer's own dtype. Pass torch.bfloat16, torch.uint8 or None."
            )
        if self.state_rounding not in ("stochastic", "nearest"):
            raise UsageError(f'state_rounding is {self.state_rounding!r}. Pass "stochastic" or "nearest".')
        if self.state_dtype is _torch().uint8 and self.master_dtype.itemsize < 4:
            raise UsageError(
                f"state_dtype is {self.state_dtype}, and master_dtype is {self.master_dtype}, which cannot represent what these "
                "codes stand for. Leave master_dtype in fp32."
            )

    def over_microbatches(self, count: int) -> Precision:
        """Return the dtypes for steps of `count` microbatches.

        The gradients of a single microbatch are not summed, so 16 bits suffice. If `param_dtype` is set and
        `accumulate_dtype` is not, `accumulate_dtype` becomes `reduce_dtype` or, without one, `param_dtype`.
        """
        if count > 1 or self.param_dtype is None or self.accumulate_dtype is not None:
            return self
        return replace(self, accumulate_dtype=self.reduce_dtype or self.param_dtype)

    def resolve(
        self, own_dtype: torch.dtype, sum_dtype: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype, *,
        in_fp32: bool = False,
    ) -> DTypes:  # fmt: skip
        """Return the concrete dtypes for a parameter whose own dtype is `own_dtype`.

        Args:
            sum_dtype: a function that returns the dtype in which a transport sends gradients; see `reduce_dtype`.
            in_fp32: whether the parameter stays in fp32 in 16-bit training; see `keep_in_fp32`.
        """
        # Integers and 8-bit floats keep their dtype: zeroshard never computes in 8 bits.
        if not own_dtype.is_floating_point or own_dtype.itemsize == 1:
            return DTypes(own_dtype, own_dtype, own_dtype, own_dtype, own_dtype)
        param = self.param_dtype or own_dtype
        accumulate = self.accumulate_dtype
        if in_fp32 and self.param_dtype is not None and self.param_dtype.itemsize == 2:
            param = _torch().promote_types(own_dtype, _torch().float32)
            accumulate = None if accumulate is None else _torch().promote_types(accumulate, param)
        # A master weight is never narrower than the parameter that the forward uses: double precision stays.
        master = _torch().promote_types(self.master_dtype, param)
        return DTypes(
            param, self.reduce_dtype or sum_dtype(param), accumulate or master, master, self.state_dtype or master
        )


def _torch() -> Any:
    import torch

    return torch


@dataclass(frozen=True)
class DTypes:
    """The dtypes that `Precision` resolves for one parameter dtype."""

    param: torch.dtype
    reduce: torch.dtype
    accumulate: torch.dtype
    master: torch.dtype
    state: torch.dtype


def refuse_uneven(size: int, world: int) -> None:
    """Raise `UsageError` if the number of tensor-parallel ranks does not divide the number of ranks of the job."""
    if world % size:
        raise UsageError(
            f"{size} tensor-parallel ranks do not divide the {world} ranks of the job: each model needs {size} of them. "
            "Choose a divisor."
        )
