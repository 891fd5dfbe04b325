"""Owns a unit: the parameters that are unsharded together, their flat buffer and its buckets. Called by schedule.

A user's parameter is always the ordinary named `nn.Parameter` that the user made, with its true shape. What it looks at
depends on the unit's state:

    UNSHARDED   a view of the flat buffer
    ARRIVING    sharded at rest: still the placeholder. Unsharded at rest: the view, but of a class that makes readers wait
                until the all-gather of the updated values has landed, see `arriving_class`
    SHARDED     a placeholder: one NaN expanded to the true shape. Shape, numel and dtype are right, it takes one
                element, reading it gives NaN and never a stale number, most in-place writes raise
    OFFLOADED   unsharded, at rest in CPU memory between steps: the placeholder, but of the class whose readers bring the
                values back first. No other rank is needed for that
    PARKED      the placeholder: what rests is elsewhere until `reload_states`
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.layout.layout import UnitLayout, lay_out, lay_out_whole
from zeroshard.parameters.bucket import Bucket, Context
from zeroshard.parameters.flat_buffer import FlatBuffer
from zeroshard.parameters.metadata import METADATA, VALUES
from zeroshard.policy import DTypes, Place
from zeroshard.storage.base import Slot
from zeroshard.storage.transfers import LANDED, Transfer


@dataclass(frozen=True)
class NamedParameter:
    """A user's parameter with its true shape; `fqns` are all names under which the model knows it, first name first."""

    fqns: tuple[str, ...]
    parameter: nn.Parameter
    shape: torch.Size

    @property
    def fqn(self) -> str:
        return self.fqns[0]


class State(enum.Enum):
    """See the module's docstring."""

    SHARDED = "sharded"
    ARRIVING = "arriving"
    UNSHARDED = "unsharded"
    OFFLOADED = "offloaded"
    PARKED = "parked"


def arriving_class(arrive: Callable[[], None]) -> type[nn.Parameter]:
    """What a unit's parameters are for the moment between the optimizer's step and the end of the all-gather after it.

    The values arrive while Python goes on. Every torch operation that touches such a parameter, through whatever
    reference, comes here first: unless it asks for no value, it waits, `arrive` makes the parameters ordinary again, and it runs.
    """

    class ArrivingParameter(nn.Parameter):
        @classmethod
        def __torch_function__(
            cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if func.__name__ in METADATA and attribute not in VALUES:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            arrive()
            return func(*args, **(kwargs or {}))

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            arrive()  # before torch looks at the class that the copy is to have
            return copy.deepcopy(self, memo)

    return ArrivingParameter


class Unit:
    """See the module's docstring.

    Args:
        label: for errors and tables.
        modules: those whose forward uses the parameters.
        named: the parameters; all of one dtype, on one device, and all trainable or all frozen.
    """

    def __init__(
        self, label: str, modules: Sequence[nn.Module], named: Sequence[NamedParameter], trainable: bool,
        dtypes: DTypes, first_bucket: int, context: Context,
    ) -> None:  # fmt: skip
        self.label, self.modules, self.named, self.trainable = label, tuple(modules), tuple(named), trainable
        self.policy = context.policy
        self.sharded_at_rest = context.policy.parameters.sharded
        self.master_dtype = dtypes.master if trainable else dtypes.param
        world_size = context.collectives.world_size
        numels = [entry.shape.numel() for entry in named]
        self.layout: UnitLayout = (
            lay_out_whole(numels, world_size)
            if context.whole_parameters
            else lay_out(numels, world_size, context.bucket_numel)
        )
        whole = self._collect(dtypes.master, context)
        self.flat = FlatBuffer(self.layout.numel, dtypes.param, whole.device)
        self._whole_at_rest = self._place_in_cpu_memory(dtypes.param, context)
        self.buckets = [
            Bucket(
                first_bucket + i, f"{label} [bucket {first_bucket + i}]", layout,
                self.flat.rows(layout.start, layout.numel, world_size), whole[layout.start : layout.stop],
                self._whole_at_rest, dtypes, trainable, context,
            )
            for i, layout in enumerate(self.layout.buckets)
        ]  # fmt: skip
        self._views = [
            self.flat.view(start, entry.shape) for start, entry in zip(self.layout.starts, named, strict=True)
        ]
        self._homes = [
            [(bucket, piece) for bucket in self.buckets for piece in bucket.layout.pieces if piece.index == index]
            for index in range(len(named))
        ]
        placeholders = whole.new_full((max(len(named), 1),), float("nan")) if dtypes.param.is_floating_point else None
        self._placeholder = None if placeholders is None else placeholders.to(dtypes.param)
        self._arriving_class = arriving_class(self.unshard)
        self._versions: list[int] = []
        self._is_at_rest = False
        self._reloading: Transfer = LANDED
        self._received: set[int] = set()
        self.used: set[int] = set()
        """Parameters that received a gradient on this rank since the last `forget_gradients`."""
        self._pins = 0
        self.is_parked = False
        """Some of its model states are away until `reload_states`."""
        self._state_before = State.UNSHARDED
        self.state = State.UNSHARDED
        self._look_at_views()
        self.reshard()
        self.offload()

    def _place_in_cpu_memory(self, dtype: torch.dtype, context: Context) -> Slot | None:
        """Where unsharded parameters rest between steps, if not on the accelerator."""
        residency, storages = context.policy.parameters, context.storages
        if residency.sharded or residency.place is Place.ACCELERATOR or storages.host is storages.accelerator:
            return None
        return storages.host.slot(self.label, self.layout.numel, dtype)

    def _collect(self, dtype: torch.dtype, context: Context) -> Tensor:
        """The unit's parameters, as rank 0 has them, one after another. One unit whole is what start-up costs."""
        device = self.named[0].parameter.device
        whole = torch.zeros(self.layout.numel, dtype=dtype, device=device)
        for start, entry in zip(self.layout.starts, self.named, strict=True):
            whole[start : start + entry.shape.numel()].copy_(entry.parameter.detach().reshape(-1))
        context.collectives.broadcast(whole)
        return whole

    # ------------------------------------------------------------------ parameters

    def start_unshard(self) -> None:
        """Start to bring the parameters together, if they are not."""
        if self.state is State.PARKED:
            raise UsageError(f"{self.label} is parked by offload_states(): call reload_states() before it is used.")
        if self.state is State.SHARDED:
            self.flat.allocate()
            try:
                for bucket in self.buckets:
                    bucket.start_reload()
                for bucket in self.buckets:
                    bucket.unshard()
            except BaseException:
                for bucket in self.buckets:
                    bucket.abandon_unshard()
                raise
            self.state = State.ARRIVING
        elif self.state is State.OFFLOADED:
            assert self._whole_at_rest is not None
            self.flat.allocate()
            self._reloading = self._whole_at_rest.read(self.flat.tensor)
            self.state = State.ARRIVING

    def prefetch(self) -> None:
        """The parameters are needed soon: what rests on disk may start to come."""
        if self.state is State.SHARDED:
            for bucket in self.buckets:
                bucket.prefetch()

    def unshard(self) -> None:
        """The parameters are about to be used: when this returns they are whole and current."""
        if self.state is State.UNSHARDED:
            return
        self.start_unshard()
        self._reloading.wait(self.flat.tensor.device)
        for bucket in self.buckets:
            bucket.wait_unsharded()
        self.state = State.UNSHARDED
        if self.sharded_at_rest:
            self._refuse_written_placeholders()
            self._look_at_views()
            return
        self._set_arriving(False)
        if self._whole_at_rest is not None:
            self._look_at_views()
            self._versions = self.versions()

    def reshard(self) -> None:
        """Used: where parameters are sharded at rest, give the unsharded ones back. Else nothing."""
        if not self.sharded_at_rest or self.state in (State.SHARDED, State.PARKED) or self._pins:
            return
        for bucket in self.buckets:
            bucket.wait_unsharded()  # a transfer in flight still writes to the storage
        self._look_at_placeholders()
        self.flat.free()
        self.state = State.SHARDED

    def offload(self) -> None:
        """Where unsharded parameters rest in CPU memory: bring them there, and give the accelerator's memory back."""
        if self.state not in (State.ARRIVING, State.UNSHARDED) or not self._may_leave:
            return
        assert self._whole_at_rest is not None
        self.unshard()
        self._take_new_data()
        # What was written through `.data` has left no trace; frozen parameters are written so (a teacher's average, say).
        if not self._is_at_rest or not self.trainable or self._versions != self.versions():
            self._whole_at_rest.write(self.flat.tensor)
            self._is_at_rest = True
        self._leave()

    @property
    def _may_leave(self) -> bool:
        """Readers of a class of the user's own could not be made to bring the values back."""
        return (
            self._whole_at_rest is not None
            and not self._pins
            and all(type(entry.parameter) in (nn.Parameter, self._arriving_class) for entry in self.named)
        )

    def _take_new_data(self) -> None:
        """Somebody gave a parameter another tensor as its `.data`: its values are the parameter's."""
        for entry, view in zip(self.named, self._views, strict=True):
            if entry.parameter.data_ptr() != view.data_ptr() and view.numel():
                if entry.parameter.shape != view.shape:
                    raise UsageError(
                        f"{entry.fqn} was given data of shape {tuple(entry.parameter.shape)}, and had {tuple(view.shape)}."
                    )
                view.copy_(entry.parameter.data)
                entry.parameter.data = view

    def write_back(self) -> None:
        """What rests is to be what the user sees, where parameters are unsharded, and written to as the user likes."""
        if self.sharded_at_rest or self.state is not State.UNSHARDED:
            return
        self._take_new_data()
        if self._whole_at_rest is None:
            return
        for bucket in self.buckets:
            bucket.take_own_row()
        if not self.trainable:
            self._whole_at_rest.write(self.flat.tensor)

    def _leave(self) -> None:
        self._look_at_placeholders()
        self.flat.free()
        self.state = State.OFFLOADED
        self._set_arriving(True)

    def prepare_step(self) -> None:
        """The optimizer is about to step: none of these values is arriving, and those that rest in CPU memory are not here."""
        if self.state is State.ARRIVING and not self.sharded_at_rest:
            self.unshard()
        if self.trainable:
            self.write_back()
        if self.trainable and self.state is State.UNSHARDED and self._may_leave:
            self._leave()  # all of it is brought together anew after the step
        self.offload()

    def park(self, *, parameters: bool) -> None:
        """Model states will be elsewhere for a while; where it is the parameters, they show nothing meanwhile."""
        if self._pins:
            raise UsageError(
                f"offload_states() inside zeroshard.unsharded(), which holds {self.label}. Call it outside."
            )
        self.is_parked = True
        if not parameters:
            return
        if self.state is State.UNSHARDED:
            self._look_at_placeholders()
        self._state_before, self.state = self.state, State.PARKED

    def unpark(self) -> None:
        """What rests is where it was."""
        self.is_parked = False
        if self.state is State.PARKED:
            self.state = self._state_before
            if self.state is State.UNSHARDED:
                self._look_at_views()

    def pin(self) -> None:
        """Stay unsharded, whoever gives the unit back, until `unpin`."""
        self._pins += 1

    def refuse_step(self) -> None:
        """Raise where the unit is pinned: it would go on showing what it was before the step."""
        if self._pins and self.sharded_at_rest:
            raise UsageError(
                f"optimizer.step() inside zeroshard.unsharded(), which holds {self.label} as it is. Step outside."
            )

    def unpin(self) -> None:
        """The end of one `pin`."""
        self._pins -= 1

    def take_parameters(self, source: int) -> None:
        """Somebody changed the unsharded parameters: rank `source`'s values become everybody's. Every rank must call it."""
        if self.is_parked:
            raise UsageError(f"{self.label} was changed while model states are parked: call reload_states() first.")
        self._is_at_rest = False
        for bucket in self.buckets:
            bucket.take_parameters(source)

    def take_masters(self) -> None:
        """Master weights (or, of a frozen unit, what rests) were set: the parameters follow. Every rank must call it."""
        if self.state in (State.ARRIVING, State.OFFLOADED):
            self.unshard()
        self._is_at_rest = False
        for bucket in self.buckets:
            bucket.take_masters(regather=self.state is State.UNSHARDED)

    def owners(self, index: int) -> Iterator[tuple[int, int, int]]:
        """(rank, start, stop): who holds which elements of the flattened parameter `index`."""
        for bucket, _ in self._homes[index]:
            for rank in range(bucket.layout.world_size):
                for piece in bucket.layout.shard_pieces(rank):
                    if piece.index == index:
                        yield rank, piece.parameter_start, piece.parameter_start + piece.numel

    def versions(self) -> list[int]:
        """Counts of in-place writes, by parameter."""
        return [entry.parameter._version for entry in self.named]

    def written_since(self, versions: Sequence[int]) -> list[str]:
        """The fqns of parameters that were written in place since; all, where a write through `.data` was found."""
        if any(bucket.differs_from_rest() for bucket in self.buckets):  # every rank hears the same
            return [entry.fqn for entry in self.named]
        now = zip(self.named, versions, self.versions(), strict=True)
        return [entry.fqn for entry, before, after in now if before != after]

    def sync_parameters(self) -> None:
        """The optimizer has stepped: what this unit shows from now on is the updated values."""
        self.reshard()
        self._is_at_rest = False
        if self.state is State.OFFLOADED:
            self._set_arriving(False)
            self.flat.allocate()
            self._look_at_views()
        for bucket in self.buckets:
            bucket.sync_parameters()
        if not self.sharded_at_rest and any(bucket.is_gathering for bucket in self.buckets):
            self.state, self._reloading = State.ARRIVING, LANDED
            self._set_arriving(True)
            if any(type(entry.parameter) is not self._arriving_class for entry in self.named):
                self.unshard()  # a class of the user's own: its readers cannot be made to wait, so we do

    def release(self) -> None:
        """Give every parameter back to the user, whole and in a storage of its own."""
        self.unshard()
        for entry in self.named:
            entry.parameter.data = entry.parameter.data.clone()

    def _set_arriving(self, arriving: bool) -> None:
        before, after = (nn.Parameter, self._arriving_class) if arriving else (self._arriving_class, nn.Parameter)
        for entry in self.named:
            if type(entry.parameter) is before:
                entry.parameter.__class__ = after

    def _look_at_views(self) -> None:
        for entry, view in zip(self.named, self._views, strict=True):
            entry.parameter.data = view

    def _look_at_placeholders(self) -> None:
        if self._placeholder is None:
            raise UsageError(
                f"{self.label} holds integer parameters, which cannot be sharded; register them as buffers."
            )
        for index, entry in enumerate(self.named):
            entry.parameter.data = self._placeholder[index].expand(entry.shape)
        self._versions = [entry.parameter._version for entry in self.named]

    def _refuse_written_placeholders(self) -> None:
        """A write to a sharded parameter went nowhere: say so before its effect is missed.

        The version counter sees in-place operations on the parameter at no cost; what goes around it, through `.data`,
        is seen where reading a number does not make the host wait for the device.
        """
        assert self._placeholder is not None
        written = [
            entry.fqn
            for entry, version in zip(self.named, self._versions, strict=True)
            if entry.parameter._version != version
        ]
        if not written and self._placeholder.device.type == "cpu" and not self._placeholder.isnan().all():
            written = [e.fqn for e, value in zip(self.named, self._placeholder.tolist(), strict=True) if value == value]
        if written:
            self._placeholder.fill_(float("nan"))
            raise UsageError(
                f"sharded parameters were written in place, and the write has no effect: {', '.join(written)}. "
                "Set values before zeroshard takes the model."
            )

    # ------------------------------------------------------------------ gradients

    def add_gradient(self, index: int, gradient: Tensor) -> None:
        """Hand this rank's gradient of parameter `index` to the buckets it lies in."""
        flat = gradient.reshape(-1)
        for bucket, piece in self._homes[index]:
            bucket.add_gradient(piece, flat)
        self._received.add(index)
        self.used.add(index)

    @property
    def has_all_gradients(self) -> bool:
        """Every parameter has its gradient of this microbatch: nothing in the backward reads the unit any more."""
        return self.trainable and len(self._received) == len(self.named)

    @property
    def is_frozen(self) -> bool:
        """No parameter takes a gradient. (One that the optimizer does not update may still take one.)"""
        return not any(entry.parameter.requires_grad for entry in self.named)

    def expect_gradients(self) -> None:
        """The backward of a call of the unit's module begins (one of several, where it was called so), or the whole is over."""
        self._received.clear()

    def abandon_backward(self) -> None:
        """A backward broke off: forget what arrived of it, and the step it belongs to."""
        for bucket in self.buckets if self.trainable else ():
            bucket.abandon_microbatch()
        self.forget_gradients()
        self.reshard()

    def forget_gradients(self) -> None:
        """A new step begins."""
        self.used.clear()
        self._received.clear()
        for bucket in self.buckets if self.trainable else ():
            bucket.forget_gradients()
