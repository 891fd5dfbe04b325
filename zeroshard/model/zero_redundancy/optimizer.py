"""Owns the replacement for torch.distributed.optim.ZeroRedundancyOptimizer, which shards any optimizer's state.

The parameters are divided into buckets, and each bucket into one shard per rank. A rank's optimizer steps on views of
its own shards, in the parameters' own storage. Then the ranks gather each bucket, so all have the new values.
"""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from zeroshard.core.named_parameter import refuse_distributed
from zeroshard.core.storage.buffers import BufferPool
from zeroshard.core.transport.base import Collectives, Work
from zeroshard.core.transport.choose import create_collectives
from zeroshard.core.transport.members import group_of, refuse_no_rank
from zeroshard.model.zero_redundancy.gathered_bucket import (
    CACHE_NUMEL,
    FollowedParameter,
    GatheredBucket,
    OwnView,
    finish_all,
    in_storage_order,
    lay_out_parameters,
)
from zeroshard.model.zero_redundancy.optimizer_state import consolidate, load
from zeroshard.optim.states import (
    looks_at_whole_parameters,
    refuse_what_cannot_be_sharded,
    refuse_whole_states,
    wants_whole_states,
)
from zeroshard.torch_private import load_with_hooks

_IN_FLIGHT = 4
"""The maximum number of all-gathers in flight: each may hold scratch, here or in the transport."""

_GRADIENT = attrgetter("grad")


class ZeroRedundancyOptimizer(torch.optim.Optimizer, Joinable):
    """An optimizer for DistributedDataParallel that shards the state of a torch optimizer over a process group.

    Elementwise optimizers get even shards. Others (Muon, Adafactor, unknown classes) get whole parameters, balanced by
    size. `repr` shows the choice.

    Args:
        params: parameters, or param groups.
        optimizer_class: the class of the local optimizer.
        process_group: the ranks that share the optimizer's states; default: all ranks.
        parameters_as_bucket_view: whether to make the parameters views of flat buffers, into which the all-gather
            writes directly. Otherwise they keep their own storages, and small ones pass through scratch.
        overlap_with_ddp: whether the step runs inside DDP's backward, through `hook_with_zero_step` or
            `hook_with_zero_step_interleaved`. `step()` then only warns.
        elementwise: whether the optimizer updates each element only from that element's own history; default: the
            right value for optimizers of torch and zeroshard, and False for other classes.
        defaults: arguments of the local optimizer.

    Raises:
        TypeError, ValueError: as in torch's class.
        UsageError: the class needs all parameters at once (LBFGS, Prodigy) or sparse gradients, or a parameter is a DTensor.
        CollectiveError: some ranks did not create the optimizer.
    """

    def __init__(
        self, params: Any, optimizer_class: type[torch.optim.Optimizer],
        process_group: dist.ProcessGroup | None = None, parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False, *, elementwise: bool | None = None, **defaults: Any,
    ) -> None:  # fmt: skip
        refuse_what_cannot_be_sharded(optimizer_class)
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self.overlap_with_ddp = overlap_with_ddp
        self._optim: torch.optim.Optimizer | None = None
        super().__init__(params, defaults)
        numbered = ((f"number {number}", one) for number, one in enumerate(self._all_parameters))
        refuse_distributed(numbered, "ZeroRedundancyOptimizer")
        Joinable.__init__(self)  # type: ignore[no-untyped-call]
        self._device = self._all_parameters[0].device
        self.process_group = group_of(process_group) or dist.group.WORLD
        self._collectives: Collectives = create_collectives(
            self.process_group, self._device, what="ZeroRedundancyOptimizer()"
        )
        self.rank = self._collectives.rank
        self.world_size = self._collectives.world_size
        self._pool = BufferPool(self._device)
        if elementwise is None:
            elementwise = looks_at_whole_parameters(optimizer_class) is False
        self._whole = not elementwise
        self._piece_numel: int | None = None
        # torch's loop passes over the elements several times. In pieces that fit into a cache, it reads memory once.
        if elementwise and self._device.type == "cpu" and not (defaults.get("fused") or defaults.get("foreach")):
            self._piece_numel = CACHE_NUMEL
        self.buckets: list[GatheredBucket] = []  # in the order of their all-gathers
        self._followed: list[FollowedParameter] = []
        self._consolidated: dict[int, dict[str, Any]] | None = None
        self._untraced_step = _untraced_step()
        self._optim = optimizer_class(self._local_groups(self.param_groups), **defaults)
        self.defaults = dict(self._optim.defaults)
        _copy_options(self._optim.param_groups, self.param_groups)

    # ------------------------------------------------------------------ layout

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The local optimizer, over this rank's shards."""
        assert self._optim is not None
        return self._optim

    @property
    def _all_parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def _views(self) -> list[OwnView]:
        return [view for bucket in self.buckets for view in bucket.views]

    def _local_groups(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Lay out the parameters of new groups. Return groups of this rank's views of them."""
        buckets, followed = lay_out_parameters(
            [parameter for group in groups for parameter in group["params"]], len(self.buckets), self.rank, self.world_size,
            whole=self._whole, flat=self.parameters_as_bucket_view, piece_numel=self._piece_numel,
        )  # fmt: skip
        self.buckets += buckets
        self._followed += followed
        own: dict[int, list[Tensor]] = {}
        for view in chain.from_iterable(bucket.views for bucket in buckets):
            own.setdefault(id(view.parameter), []).append(view.value)
        return [{**group, "params": [view for p in group["params"] for view in own.get(id(p), [])]} for group in groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group. The shards of earlier parameters do not change.

        Raises:
            RuntimeError: `overlap_with_ddp` is set.
            ValueError: the group has no parameters.
        """
        if isinstance(param_group, dict) and "params" not in param_group:
            raise ValueError("each param group needs a 'params' key with its parameters.")
        if self._optim is not None and self.overlap_with_ddp:
            raise RuntimeError(
                "a param group cannot be added with overlap_with_ddp=True, since DDP's buckets are laid out. Pass all "
                "groups to the constructor."
            )
        super().add_param_group(param_group)
        if self._optim is not None:
            group = self.param_groups[-1]
            self._optim.add_param_group(self._local_groups([group])[0])
            # The other groups' options may have changed since the last step.
            _copy_options(self._optim.param_groups[-1:], [group])
            self._consolidated = None

    def __repr__(self) -> str:
        kind = "whole parameters" if self._whole else "elementwise, even shards"
        own = sum(view.value.numel() for view in self._views)
        numel = sum(parameter.numel() for parameter in self._all_parameters)
        held = f"{own:,} of {numel:,} elements on rank {self.rank} of {self.world_size}"
        return f"ZeroRedundancyOptimizer({kind}: {held})\n{self.optim!r}"

    # ------------------------------------------------------------------ step

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Update this rank's shards and gather the parameters. Every rank must call it, with reduced gradients.

        Args:
            closure: a function that recomputes the loss and the gradients. Its loss is returned.
            kwargs: arguments of the local optimizer's step.

        Raises:
            UsageError: a gradient is sparse, or a parameter was moved or cast after the optimizer was created.
        """
        if wants_whole_states():
            return None  # `state_dict` is called next and raises
        if self.overlap_with_ddp:
            warnings.warn("step() has no effect: with overlap_with_ddp=True, the backward steps.", stacklevel=2)
            return None
        Join.notify_join_context(self)
        if self._join_config.enable and closure is None:
            self._share_gradients(joined=False)
        return self._untraced_step(self, closure, **kwargs)

    def _step_and_gather(self, closure: Callable[[], Any] | None, **kwargs: Any) -> Any:
        def reduced() -> Any:
            assert closure is not None
            value = closure()
            if self._join_config.enable:
                self._share_gradients(joined=False)
            self._lend(self.buckets, _GRADIENT)
            return value

        if closure is not None:  # an optimizer that does not call it uses the current gradients
            kwargs["closure"] = reduced
        loss = self._local_step(self.buckets, _GRADIENT, **kwargs)
        self.start_gather(self.buckets)()
        return loss

    def step_buckets(
        self, buckets: Sequence[GatheredBucket], gradient_of: Callable[[Tensor], Tensor | None]
    ) -> Callable[[], None]:
        """Update this rank's shards of some buckets and start to gather them. Return a function that waits for the gathers."""
        self._local_step(buckets, gradient_of)
        return self.start_gather(buckets)

    def _local_step(
        self, buckets: Sequence[GatheredBucket], gradient_of: Callable[[Tensor], Tensor | None], **kwargs: Any
    ) -> Any:
        _copy_options(self.param_groups, self.optim.param_groups)
        has_order = bool(self.optim.state) and not self._whole
        for followed in self._followed:
            followed.follow(has_order=has_order)
        for view in self._views:
            view.follow()
        self._lend(buckets, gradient_of)
        loss = self.optim.step(**kwargs)
        self._lend(self.buckets, lambda _: None)
        _copy_options(self.optim.param_groups, self.param_groups)
        self._consolidated = None
        return loss

    @staticmethod
    def _lend(buckets: Sequence[GatheredBucket], gradient_of: Callable[[Tensor], Tensor | None]) -> None:
        for bucket in buckets:
            for view in bucket.views:
                view.lend(gradient_of(view.parameter))

    def start_gather(self, buckets: Sequence[GatheredBucket]) -> Callable[[], None]:
        """Start to gather the trained parameters of buckets and return a function that waits for them."""
        in_flight: deque[Callable[[], None]] = deque()
        for bucket in buckets if self.world_size > 1 else ():
            if any(member.requires_grad or member.grad is not None for member in bucket.members):
                if len(in_flight) == _IN_FLIGHT:
                    in_flight.popleft()()
                in_flight.append(bucket.start_gather(self._collectives, self._pool))

        def wait() -> None:
            for finish in in_flight:
                finish()

        return wait

    # ------------------------------------------------------------------ uneven inputs

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return a join hook. A rank that has run out of inputs shadows the remaining ranks' steps.

        It receives the gradients from a rank that still has inputs. (In torch's class, it uses its own last
        gradients.)
        """
        return _StepAlong(self)

    def step_along(self) -> None:
        """Take one step of a rank that has run out of inputs."""
        self._share_gradients(joined=True)
        self._step_and_gather(None)

    def _share_gradients(self, *, joined: bool) -> None:
        """Send the reduced gradients to ranks that have run out of inputs. Every rank must call it.

        In DDP, a rank without inputs takes part in all-reduces and drops the results, which every other rank has. If
        this rank has `joined` (it has run out of inputs), its gradients are overwritten.
        """
        collectives = self._collectives
        parameters = self._all_parameters
        own = bytes([joined, *(parameter.grad is not None for parameter in parameters)])
        everyone = collectives.exchange_if_different(own, "which ranks have joined")
        source = next(rank for rank, message in enumerate(everyone) if not message[0])
        targets = [rank for rank, message in enumerate(everyone) if message[0]]
        label = "gradients for a rank that has joined"
        works: list[Work] = []
        with collectives.together():
            for parameter, has_gradient in zip(parameters, everyone[source][1:], strict=True):
                if joined:
                    parameter.grad = torch.zeros_like(parameter) if has_gradient else None
                if not (has_gradient and parameter.numel()):
                    continue
                gradient = parameter if parameter.grad is None else parameter.grad
                if gradient.stride() != parameter.stride():
                    gradient = torch.empty_like(parameter).copy_(gradient)
                flat = in_storage_order(gradient)
                works += [collectives.transfer(flat, source, target, label) for target in targets]
        finish_all(works)

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> Any:
        return self.process_group

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's shards.

        After `consolidate_state_dict(to)`, rank `to` returns the complete state dict of an unsharded optimizer instead,
        until the next step, load or new param group. This method does not run a collective. Unlike in torch's class, it
        does not require a prior consolidation.

        `state_dict["zeroshard"]["pieces"]` lists `[parameter index, start, stop]` for each shard; the keys of "state" are
        indices into this list. Elements are counted in the order of the parameter's storage.
        """
        refuse_whole_states(_SAVE_WHOLE, is_part=self.world_size > 1)
        state_dict: dict[str, Any] = super().state_dict()
        if self._consolidated is not None:
            state_dict["state"] = self._consolidated
        else:
            state = self.optim.state
            values = enumerate(view.value for view in self._views)
            state_dict["state"] = {number: state[value] for number, value in values if state.get(value)}
            state_dict["zeroshard"] = {"rank": self.rank, "world_size": self.world_size, **self._shards}
        return state_dict

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Gather the complete state on rank `to`, in CPU memory. Every rank must call it.

        Raises:
            UsageError: there is no rank `to`, or a state is neither a tensor, a number nor a string.
        """
        refuse_no_rank(f"consolidate_state_dict(to={to})", to, self.world_size)
        self._consolidated = consolidate(
            self.optim, self._views, self._shards["pieces"], self._all_parameters, self._collectives, to
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of an unsharded optimizer, of torch's ZeroRedundancyOptimizer, or of this class.

        A consolidated state dict loads on any number of ranks; this rank's shards load into the same shards only.

        Args:
            state_dict: the state dict, which is not changed.

        Raises:
            ValueError: the sizes of the loaded param groups differ from those of this optimizer's groups.
            UsageError: the state dict holds other shards, or whole parameters' states that cannot be divided.
        """
        load_with_hooks(self, state_dict, self._load)

    def _load(self, state_dict: dict[str, Any]) -> None:
        load(self.optim, self._views, self._shards, self.param_groups, state_dict)
        _copy_options(self.optim.param_groups, self.param_groups)
        self._consolidated = None

    @property
    def _shards(self) -> dict[str, Any]:
        """The description of this rank's shards, by which they load again only into the same shards."""
        indices = {id(parameter): index for index, parameter in enumerate(self._all_parameters)}
        return {"whole": self._whole, "pieces": [[indices[id(v.parameter)], v.start, v.stop] for v in self._views]}


@functools.cache
def _untraced_step() -> Callable[..., Any]:
    """Return `_step_and_gather`, which torch.compile must not trace, since it communicates. This call imports the compiler."""
    step: Callable[..., Any] = torch.compiler.disable(
        ZeroRedundancyOptimizer._step_and_gather, reason="zeroshard communicates"
    )
    return step


_SAVE_WHOLE = "Call consolidate_state_dict(), and save optimizer.state_dict() on the rank that has it."


class _StepAlong(JoinHook):
    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero

    def main_hook(self) -> None:
        self._zero.step_along()


def _copy_options(source: Iterable[dict[str, Any]], target: Iterable[dict[str, Any]]) -> None:
    """Copy the options of the param groups, without the parameters."""
    for one, other in zip(source, target, strict=True):
        other.update((key, value) for key, value in one.items() if key != "params")
