"""Owns models that are born sharded: no rank ever holds the full model.

    with zeroshard.sharded_init():
        model = MyModel()          # the same values as without sharded_init, under the same seed
    sharded = zeroshard.shard(model, torch.optim.AdamW(model.parameters()), Policy.stage(3))

The parameters of a module are divided over ranks when the module is added to another module, since its constructor is
then done. The outermost module's parameters are divided when the context ends. Every rank must run the same code.

Until `shard` takes the model, its parameters have a special class, which gathers a parameter for every torch operation. It is
divided again if the operation wrote to it, so a constructor may end by reinitialising all parameters.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as registration
from torch.utils.weak import WeakIdKeyDictionary

from zeroshard.core.classes import CONVERSIONS, METADATA, VALUES, attribute_of, whole_class
from zeroshard.core.named_parameter import named_parameters
from zeroshard.core.transport.base import Collectives
from zeroshard.core.transport.choose import create_collectives
from zeroshard.errors import StorageError, UsageError
from zeroshard.torch_private import NEW_PARAMETER, past_torch_function, storage_users, tree_map, version_of

_METADATA = METADATA | {"__format__", "__repr__"}
_MAPPED_NBYTES = 1 << 16
"""The size below which parts stay in memory, even if there is a folder."""

_numbers = itertools.count()
shard_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""The shard of each parameter, in a map, so that the user's parameters need no attribute."""


@dataclass(eq=False)
class Births:
    """The settings and records that the parameters of one `sharded_init` share.

    Attributes:
        device: the device for parameters that are on the meta device now.
        open: the shards that are whole because views of their parameters exist (see `BornShard.keep_open`).
    """

    group: dist.ProcessGroup | None
    device: torch.device
    folder: str | os.PathLike[str] | None = None
    source: int | None = None
    attributes: type | None = None
    detached_stay_cut: bool = False

    def __post_init__(self) -> None:
        self.away_class: type[BornSharded] = BornSharded
        if self.attributes is not None:
            self.away_class = type("BornSharded", (self.attributes, BornSharded), {})
        self.whole_class = whole_class(self.attributes)
        self.open: list[BornShard] = []
        self._collectives: dict[str, Collectives] = {}
        self.rank = self.collectives(self.device).rank
        self.world_size = self.collectives(self.device).world_size

    def collectives(self, device: torch.device) -> Collectives:
        """Return the collectives for tensors on `device`, since a model may be moved after it was built."""
        if device.type not in self._collectives:
            self._collectives[device.type] = create_collectives(
                self.group, device, what="sharded_init()", lasting=False
            )
        return self._collectives[device.type]

    def room(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return zeros for this rank's part of a parameter, in an unnamed file if there is a folder."""
        nbytes = numel * dtype.itemsize
        if self.folder is None or device.type != "cpu" or nbytes < _MAPPED_NBYTES:
            return torch.zeros(numel, dtype=dtype, device=device)
        try:
            # Python's mmap would keep a descriptor open for each part.
            descriptor, path = tempfile.mkstemp(dir=self.folder, prefix="zeroshard-")
            try:
                os.posix_fallocate(descriptor, 0, nbytes)
                return torch.from_file(path, shared=True, size=numel, dtype=dtype)
            finally:
                os.close(descriptor)
                Path(path).unlink()
        except OSError as error:
            raise StorageError(
                f"{self.folder} cannot hold a part of a parameter ({nbytes:,} bytes): {error.strerror}. Name an existing "
                "folder that is writable and has room."
            ) from error

    def close(self) -> None:
        """Divide each open (whole) parameter again, unless it is shown or a view of it exists."""
        self.open = [shard for shard in self.open if not shard.closed()]


class BornShard:
    """This rank's part of one parameter.

    Attributes:
        shape: the parameter's shape.
        number: the parameter's number in the order of creation, which is the same on every rank.
        shows: the number of `unsharded` blocks inside which the parameter is whole and ordinary.
    """

    def __init__(self, shape: torch.Size, births: Births) -> None:
        self.births = births
        self.shape = shape
        self.number = next(_numbers)
        self.shows = 0
        self._whole: Tensor | None = None
        self._kept_at = 0
        """The version of the shown parameter at the last `keep`."""
        self._own: Tensor

    @property
    def numel(self) -> int:
        """The number of elements of each rank's part, with padding."""
        return -(-self.shape.numel() // self.births.world_size)

    @property
    def own(self) -> Tensor:
        """This rank's elements, 1-D and padded, including writes to views of the whole parameter."""
        if self._whole is None:
            return self._own
        own = self._own
        if self.shows:  # `keep` or `hide` decides later whether writes count
            own = torch.zeros_like(own)
        self._keep_part(self._whole, own)
        return own

    @own.setter
    def own(self, own: Tensor) -> None:
        # As with `parameter.data = ...`, writes to views of old values have no effect.
        self._own = own
        self._whole = None

    @property
    def range(self) -> tuple[int, int]:
        """This rank's elements [start, stop) of the flattened parameter."""
        start = min(self.numel * self.births.rank, self.shape.numel())
        return start, min(start + self.numel, self.shape.numel())

    def take(self, whole: Tensor) -> None:
        """Store this rank's part of new values, from the source rank if there is one. Every rank must call it."""
        if self.shows and whole is self._whole:
            return  # a write through another name of the parameter: `keep` or `hide` handles it
        if self.births.source is not None:
            whole = whole.detach().contiguous()
            self.births.collectives(whole.device).broadcast(whole, self.births.source)
        self.shape = whole.shape
        self._store(whole)

    def _store(self, whole: Tensor) -> None:
        self._own = self.births.room(self.numel, whole.dtype, whole.device)
        self._keep_part(whole, self._own)

    def _keep_part(self, whole: Tensor, own: Tensor) -> None:
        start, stop = self.range
        own[: stop - start].copy_(whole.detach().reshape(-1)[start:stop])

    def whole(self) -> Tensor:
        """Return the whole parameter. Every rank must call it, even a rank on which views of the parameter exist."""
        if self.shows and self._whole is not None:
            return self._whole
        collectives = self.births.collectives(self.own.device)
        rows = self.own.new_empty(collectives.world_size, self.numel)
        rows[collectives.rank].copy_(self.own)
        if self.numel:
            collectives.all_gather(rows, 0, "all-gather of a parameter that was born sharded").wait()
        whole = rows.view(-1)[: self.shape.numel()].view(self.shape).data  # no view of `rows`; see `is_seen`
        return whole if self._whole is None else self._whole.copy_(whole)

    def keep_open(self, whole: Tensor) -> None:
        """Keep the parameter whole while views of it exist, since writes to them count."""
        if self._whole is not whole:
            self._whole = whole
            self.births.open.append(self)

    def closed(self) -> bool:
        """Divide the parameter again unless it is shown or a view of it exists. Return whether it is divided."""
        if self._whole is not None and (self.shows or is_seen(self._whole)):
            return False
        self.own = self.own
        return True

    # ------------------------------------------------------------------ temporarily whole (see `unsharded`)

    def show(self, parameter: nn.Parameter) -> None:
        """Make the parameter whole and ordinary until the matching `hide`. Every rank must call it."""
        if not self.shows:
            self.births.close()
            whole = self.whole()
            self.keep_open(whole)
            parameter.__class__ = nn.Parameter
            parameter.data = whole
            parameter.__class__ = self.births.whole_class
        self.shows += 1

    def is_written(self, parameter: nn.Parameter, version: int) -> bool:
        """Return whether this rank wrote to a shown parameter since `version`, without `keep`, or gave it other data."""
        assert self._whole is not None
        has_other_data = parameter.data_ptr() != self._whole.data_ptr() or parameter.shape != self._whole.shape
        return has_other_data or version_of(parameter) > max(version, self._kept_at)

    def keep(self, parameter: nn.Parameter) -> None:
        """Store this rank's part of a shown parameter, in its present shape and dtype."""
        self.shape = parameter.shape
        self._store(parameter.data)
        self._whole = parameter.data
        self._kept_at = version_of(parameter)

    def hide(self, parameter: nn.Parameter) -> None:
        """End one `show`. Writes to the parameter without `keep` are lost."""
        self.shows -= 1
        if not self.shows:
            self._whole = None
            _cut(parameter, self)


_UNSEEN = storage_users(torch.empty(1))


def is_seen(tensor: Tensor) -> bool:
    """Return whether another tensor, or an array, uses the same memory."""
    return storage_users(tensor) > _UNSEEN


class BornTensor(Tensor):
    """A tensor that is divided over ranks before `shard`: a parameter, or its `data`. The module's docstring describes it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        with past_torch_function():
            attribute = attribute_of(func)
            if attribute == "data" and func.__name__ == "__set__":
                return None if args[1] is args[0] else func(args[0], _taken_data(*args))
            if attribute == "data" and func.__name__ == "__get__":
                return _data_of(args[0])  # writes to it count, as for `data`
            if func.__name__ == "detach":
                # `nn.Parameter(tensor)` wants a tensor of the same class, over the same memory.
                makes_parameter = sys._getframe(1).f_code is NEW_PARAMETER
                if makes_parameter or shard_of[args[0]].births.detached_stay_cut:
                    return _detached(args[0])
            if func.__name__ in CONVERSIONS:  # as in `module.to`: each rank converts its own part
                return _convert(func, args, kwargs or {})
            if func.__name__ in _METADATA and attribute not in VALUES - {"data"}:
                return func(*args, **(kwargs or {}))
            return _on_whole(func, args, kwargs or {})

    def set_(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Give the tensor the values of another. (torch does not pass this operation to `__torch_function__`.)"""
        with past_torch_function():
            return _on_whole(Tensor.set_, (self, *args), kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        whole = copy.deepcopy(shard_of[self].whole())
        memo[id(self)] = whole = nn.Parameter(whole, self.requires_grad) if isinstance(self, nn.Parameter) else whole
        return whole

    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = shard_of[self].whole()
        if isinstance(self, nn.Parameter):
            whole = nn.Parameter(whole, self.requires_grad)
        return whole.__reduce_ex__(protocol)

    def _become_parameter(self, _: bool) -> None:
        """Let `nn.Parameter(data)` return a parameter that is divided, too."""
        self.__class__ = shard_of[self].births.away_class

    _is_param = property(lambda self: isinstance(self, BornSharded), _become_parameter)


class BornSharded(BornTensor, nn.Parameter):
    """A parameter that is divided over ranks before `shard`."""


def _data_of(tensor: BornTensor) -> BornTensor:
    """Return another tensor of the same elements, which is no parameter: a module may keep it as a plain attribute."""
    return _alias(tensor) if isinstance(tensor, nn.Parameter) else tensor


def _taken_data(tensor: BornTensor, data: Tensor) -> Tensor:
    """Return what becomes the `data` of a tensor, after its shard is that of `data`, or it has none."""
    if isinstance(data, BornTensor):  # `module.to`, after `_convert`
        shard_of[tensor] = shard_of[data]
        return _placeholder(shard_of[tensor].own, tensor.shape)
    # `shard` takes the parameter, or the user assigns another value
    shard_of.pop(tensor, None)
    tensor.__class__ = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor  # type: ignore[assignment]
    return data


def _detached(tensor: BornTensor) -> BornTensor:
    """Return a tensor of the same elements and class, outside of any graph."""
    if isinstance(tensor, nn.Parameter):
        return born(shard_of[tensor], tensor.shape, requires_grad=False)
    return _alias(tensor)


def _alias(tensor: BornTensor) -> BornTensor:
    shard = shard_of[tensor]
    data = _placeholder(shard.own, tensor.shape).as_subclass(BornTensor)
    shard_of[data] = shard
    return data


def _convert(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    tensor = args[0]
    shard = shard_of[tensor]
    kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    own = func(shard.own, *args[1:], **kwargs)
    if own is shard.own:
        return cast("Tensor", tensor)
    twin = copy.copy(shard)
    twin.own = own
    return born(twin, tensor.shape, tensor.requires_grad)


def born(shard: BornShard, shape: torch.Size, requires_grad: bool) -> BornSharded:
    """Create a sharded parameter of the given shape, of which this rank stores `shard`."""
    parameter = nn.Parameter(_placeholder(shard.own, shape), requires_grad)
    shard_of[parameter] = shard
    parameter.__class__ = shard.births.away_class
    return cast("BornSharded", parameter)


def _placeholder(own: Tensor, shape: torch.Size) -> Tensor:
    return own.new_full((), float("nan")).expand(shape)


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on whole parameters.

    The result may be a view of a parameter (`weight[0]`), to which the user then writes (`.zero_()`). Such a parameter
    stays whole while the view exists, which keeps the memory in any case.

    A result requires a gradient if it would with an ordinary parameter: torch's parametrizations look at that.
    """
    wholes: dict[int, tuple[BornTensor, Tensor]] = {}

    def swap(value: Any) -> Any:
        if not isinstance(value, BornTensor):
            return value
        if id(value) not in wholes:
            shard = shard_of[value]
            shard.births.close()
            wholes[id(value)] = (value, shard.whole())
        return wholes[id(value)][1]

    args, kwargs = tree_map(swap, (args, kwargs))
    before = {key: _appearance(whole) for key, (_, whole) in wholes.items()}
    writes_in_place = func.__name__.endswith("_")
    tracked: list[Tensor] = []
    if torch.is_grad_enabled() and not writes_in_place and func.__name__ != "numpy":
        tracked = [whole for one, whole in wholes.values() if one.requires_grad and not whole.requires_grad]
    try:
        for whole in tracked:
            whole.requires_grad_()
        result = func(*args, **kwargs)
    finally:
        for whole in tracked:
            whole.requires_grad_(False)
    for key, (tensor, whole) in wholes.items():
        if _appearance(whole) != before[key]:  # `set_` gives other memory, and leaves the version
            shard_of[tensor].take(whole)
            described = (whole.shape, whole.dtype, whole.device)
            if described != (tensor.shape, tensor.dtype, tensor.device) and isinstance(tensor, BornSharded):
                _cut(tensor, shard_of[tensor])
        if result is whole:  # an in-place operation returns its target
            result = tensor
        elif is_seen(whole):
            shard_of[tensor].keep_open(whole)
    return result


def _appearance(whole: Tensor) -> tuple[Any, ...]:
    return version_of(whole), whole.data_ptr(), whole.shape, whole.stride()


def cut_parameter(parameter: nn.Parameter, births: Births) -> None:
    """Replace a whole parameter with this rank's part, in place.

    Meta, integer and subclassed parameters stay as they are, and those inside `unsharded`, which are divided at its end.
    """
    if (
        type(parameter) is not nn.Parameter
        or parameter.is_meta
        or not parameter.is_floating_point()
        or is_shown(parameter)
    ):
        return
    shard_of[parameter] = shard = BornShard(parameter.shape, births)
    shard.take(parameter.data)
    _cut(parameter, shard)


def _cut(parameter: nn.Parameter, shard: BornShard) -> None:
    parameter.__class__ = nn.Parameter
    parameter.data = _placeholder(shard.own, shard.shape)
    parameter.__class__ = shard.births.away_class


def is_shown(parameter: Tensor) -> bool:
    """Return whether a parameter that was created sharded is now unsharded, inside `unsharded`."""
    return parameter in shard_of and shard_of[parameter].shows > 0


# ---------------------------------------------------------------------- modules


@contextmanager
def sharded_init(
    group: dist.ProcessGroup | None = None,
    folder: str | os.PathLike[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    source: int | None = 0,
    attributes: type | None = None,
    detached_stay_cut: bool = False,
    enabled: bool = True,
) -> Iterator[None]:
    """Shard modules while they are built in this context. Every rank must enter it.

    Each rank keeps only its part of the parameters. A module's parameters are sharded when the module is added to a parent.
    Those of outermost modules are sharded when the context exits. Before that, they are whole. Any other parameter is whole
    only while an operation uses it or a view of it exists. `shard` and `initialize` accept the model like any other.

    Args:
        group: the data-parallel process group; default: all ranks.
        folder: a folder in which CPU parameters are kept in unnamed temporary files until `shard` takes them over. They may then be
            larger than CPU memory.
        dtype: torch's default dtype in the context.
        source: the group's rank whose values all ranks get, including later writes. Writes to a view of a parameter
            (`weight[0].normal_()`) must be the same on all ranks. None: all ranks compute the same values and do not
            send any.
        attributes: a class whose properties these parameters get in addition to their own (see `shard`).
        detached_stay_cut: whether `parameter.detach()` and state dicts stay divided too. An operation on one of their tensors
            then gathers it, so every rank must run it. Otherwise detached tensors and state dicts are whole on every rank.
        enabled: whether to shard; False builds ordinary modules.

    Raises:
        CollectiveError: some ranks did not enter it.
        StorageError: `folder` cannot hold the parts.
    """
    if not enabled:
        yield
        return
    births = Births(group, torch.get_default_device(), folder, source, attributes, detached_stay_cut)
    holders: list[weakref.ref[nn.Module]] = []  # in the order of their parameters: the same order on all ranks

    def cut(_parent: nn.Module, _name: str, child: nn.Module | None) -> None:
        births.close()
        if child is None:
            return
        for parameter in child.parameters():
            cut_parameter(parameter, births)

    def note(module: nn.Module, _name: str, _parameter: nn.Parameter | None) -> None:
        if not holders or holders[-1]() is not module:
            holders.append(weakref.ref(module))

    handles = [
        registration.register_module_module_registration_hook(cut),
        registration.register_module_parameter_registration_hook(note),
    ]
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        yield
    finally:
        if dtype is not None:
            torch.set_default_dtype(before)
        for handle in handles:
            handle.remove()
        births.close()
    for ref in holders:
        module = ref()
        if module is None:
            continue
        for parameter in module.parameters(recurse=False):
            cut_parameter(parameter, births)


def cut(
    module: nn.Module,
    group: dist.ProcessGroup | None = None,
    folder: str | os.PathLike[str] | None = None,
    *,
    source: int | None = 0,
    attributes: type | None = None,
    detached_stay_cut: bool = False,
) -> None:
    """Keep only this rank's part of a model that is whole on every rank. Every rank must call it.

    The model is then as if it had been built inside `sharded_init`.

    Args:
        module: the model, which is changed in place. Parameters that are already divided do not change.
        group, folder, attributes, detached_stay_cut: see `sharded_init`.
        source: the rank of the group whose values all ranks get; None if the values are the same on all ranks.

    Raises:
        UsageError: a parameter is on the meta device.
        CollectiveError: some ranks did not call it.
        StorageError: `folder` cannot hold the parts.
    """
    births = Births(group, torch.get_default_device(), folder, source, attributes, detached_stay_cut)
    for fqn, parameter in named_parameters(module):
        if parameter.is_meta:
            raise UsageError(
                f"{fqn} is on the meta device and has no values: call materialise or load_pretrained instead."
            )
    for parameter in module.parameters():
        cut_parameter(parameter, births)
