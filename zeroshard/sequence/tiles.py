"""Owns modules that run tile by tile over the positions of a sequence, to keep only one tile's activations.

An MLP's intermediate activation is about four times as wide as its input and output. Its result at one position needs
no other position, so its forward can run on one tile of positions at a time. The backward runs the forward of each tile
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from zeroshard.core.modules import Forwards, modules_matching
from zeroshard.core.named_parameter import named_modules
from zeroshard.errors import UsageError
from zeroshard.sequence.batches import has_values
from zeroshard.torch_private import has_tensor_hooks, version_of

_MIXES = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.SyncBatchNorm,
)  # fmt: skip
"""Modules whose result at one position depends on other positions."""


def tile(model: nn.Module, patterns: str | Sequence[str], tokens: int = 2048) -> Tiles:
    """Run modules of a model on at most `tokens` positions at a time.

    The returned object's `remove` ends the tiling. Each parameter gets its gradient once, summed over tiles (16-bit
    gradients in fp32). A sharded unit is unsharded once, not for each tile. Inputs of at most `tokens` positions run as
    before. Call this function before or after `shard`.

    Args:
        model: the model. The `forward` methods of its modules are wrapped in place.
        patterns: full names of modules, in which `*` matches anything. Of nested modules, only the outermost is tiled.
        tokens: the maximum number of positions in a tile. Positions are the second dimension of a module's argument.

    Raises:
        UsageError: `tokens` is below 1, a pattern does not match any module, or a module cannot run in tiles: it
            combines positions, takes arguments other than one tensor [rows, positions, ...], returns another shape,
            changes its input in place, uses parameters of other modules, or has hooks on parameters. Some of these
            errors are raised only in the first forward or backward.
    """
    if tokens < 1:
        raise UsageError(
            f"tokens={tokens}, but a tile has 1 position or more. Pass a positive number, such as tokens=2048."
        )
    modules = modules_matching(model, patterns, "tile")
    for outer, module in modules.items():
        for name, inner in named_modules(module, outer):
            if isinstance(inner, _MIXES):
                raise UsageError(
                    f"tile: {name} is a {type(inner).__name__}, whose result at one position depends on others: name modules "
                    "that treat each position separately, such as MLPs."
                )
    return Tiles(modules, tokens)


class Tiles:
    """The modules of a model that run in tiles."""

    def __init__(self, modules: dict[str, nn.Module], tokens: int) -> None:
        self._forwards = Forwards()
        for name, module in modules.items():
            self._forwards.replace(module, _Tiled(name, module, module.forward, tokens))

    def remove(self) -> None:
        """Undo `tile`: the modules no longer run in tiles."""
        self._forwards.restore()


class _Tiled:
    """The forward of one module that runs in tiles.

    This is an object, not a closure: a deep copy of the model must copy it together with the module that it runs.
    """

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any], tokens: int) -> None:
        self._name = name
        self._module = module
        self._forward = forward
        self._tokens = tokens
        self._is_checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(args) != 1 or len(tensors) != 1 or tensors[0] is not args[0] or args[0].dim() < 3:
            raise UsageError(
                f"{self._name} runs in tiles, so it must get one positional argument, a tensor [rows, positions, ...], "
                "and no other tensor: name other modules to tile()."
            )
        (x,) = args
        if x.shape[1] <= self._tokens:
            return self._forward(x, **kwargs)
        run = partial(self._forward, **kwargs)
        if not self._is_checked and has_values(x):
            self._check(run, x)
        parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        if any(map(has_tensor_hooks, parameters)):
            raise UsageError(
                f"a parameter of {self._name} has a hook (register_hook), which would get the gradient of each tile: "
                "change gradients between the backward and the step, or leave this module out of tile()."
            )

        first: dict[int, _Random] = {}

        def positions(part: Tensor, where: slice) -> Tensor:
            # The backward repeats the dropout of the forward.
            before = _Random(part)
            first.setdefault(where.start, before).restore()
            writes = _writes(part)
            y = _of_positions(self._name, run(part), part)
            if _writes(part) != writes:
                raise UsageError(
                    f"{self._name} changes its input in place, and a tile is a copy of a part of the input: leave inplace=True "
                    "out of its modules, or leave this module out of tile()."
                )
            if first[where.start] is not before:
                before.restore()
            return y

        return TileByTile.apply("tile()", positions, self._tokens, x, True, *parameters)  # type: ignore[no-untyped-call]

    def _check(self, run: Callable[[Tensor], Any], x: Tensor) -> None:
        """Raise unless two positions have the same results together and separately."""
        if not x.shape[0]:
            return
        modes = [(module, module.training) for module in self._module.modules()]
        self._module.eval()
        try:
            with torch.no_grad():
                together = _of_positions(self._name, run(x[:1, :2].contiguous()), x[:1, :2])
                apart = torch.cat([run(x[:1, :1].contiguous()), run(x[:1, 1:2].contiguous())], dim=1)
        finally:
            for module, mode in modes:
                module.training = mode
        if not bool(together.isfinite().all() & apart.isfinite().all()):
            return  # an overflow proves nothing: the next call checks again
        tolerance = 1e-3 if together.dtype in (torch.float32, torch.float64) else 5e-2
        if not bool((together - apart).abs().max() <= tolerance * apart.abs().max()):
            raise UsageError(
                f"{self._name} gives different results if positions run together, so it cannot run in tiles: name "
                "modules that treat each position separately, such as MLPs."
            )
        # Outputs of zeros (a projection that starts at zero) prove nothing: the next call checks again.
        self._is_checked = bool(apart.any())


def _writes(x: Tensor) -> int:
    """Return the number of writes to a tensor; 0 for tensors made in torch.inference_mode, which do not count writes."""
    return 0 if x.is_inference() else version_of(x)


def _of_positions(name: str, y: Any, x: Tensor) -> Tensor:
    if isinstance(y, Tensor) and y.shape[:2] == x.shape[:2]:
        return y
    found = type(y).__name__
    if isinstance(y, Tensor):
        found = f"tensor {list(y.shape)}"
    raise UsageError(
        f"{name} cannot run in tiles: it must return one tensor [rows, positions, ...], but returned a {found}. Name other modules."
    )


# ---------------------------------------------------------------------- tile by tile


class TileByTile(torch.autograd.Function):
    """An autograd function that runs a function tile by tile, and each tile again in the backward.

    Args:
        what: the name of the user's call, for errors.
        run: `run(part, where, *tensors)` returns the results of one tile.
        most: the maximum number of positions in a tile.
        x: [rows, positions, ...].
        of_module: whether the tensors are parameters of a module, which `run` does not get as arguments.
        tensors: the tensors that get their whole gradients at once.
    """

    @staticmethod
    def forward(
        ctx: Any, what: str, run: Callable[..., Tensor], most: int, x: Tensor, of_module: bool, *tensors: Tensor | None
    ) -> Tensor:
        ctx.what, ctx.run, ctx.most = what, run, most
        # Parameters stay objects, not saved tensors: the backward differentiates with respect to the objects that `run` reads.
        ctx.parameters = tensors if of_module else ()
        given = tensors[len(ctx.parameters) :]
        ctx.save_for_backward(x, *given)
        device = x.device.type
        dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.autocast = partial(torch.autocast, device, dtype=dtype, enabled=enabled)
        out = None
        for where in _parts(x.shape[1], most):
            y = run(x[:, where].contiguous(), where, *given)
            if out is None:
                out = y.new_empty(*x.shape[:2], *y.shape[2:])
            out[:, where] = y
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                f"{ctx.what} recomputes tiles in the backward, which has no second derivative: leave create_graph=True "
                "out, or run this part of the model without tiles."
            )
        x, *given = ctx.saved_tensors
        needs_x, _, *needs = ctx.needs_input_grad[3:]
        # Use leaves, so that no hook on a parameter gets the gradient of one tile.
        given = [
            tensor if tensor is None else tensor.detach().requires_grad_(need)
            for tensor, need in zip(given, needs, strict=False)
        ]
        wanted = [tensor for tensor, need in zip((*ctx.parameters, *given), needs, strict=True) if need]
        by_x = torch.empty_like(x) if needs_x else None
        totals: list[Tensor | None] = [None] * len(wanted)
        summed: set[int] = set()  # the indices of the totals that are sums
        for where in _parts(x.shape[1], ctx.most):
            own = x[:, where].detach().contiguous().requires_grad_(needs_x)
            with torch.enable_grad(), ctx.autocast():
                y = ctx.run(own, where, *given)
            inputs = [own, *wanted] if needs_x else wanted
            if where.start == 0:
                _refuse_others(ctx.what, y, (own, *ctx.parameters, *given))
            made = list(torch.autograd.grad(y, inputs, gradients[0][:, where], allow_unused=True))
            if by_x is not None:
                of_x = made.pop(0)
                by_x[:, where] = 0 if of_x is None else of_x
            # This is a separate function, so that no local variable keeps a replaced total while the next tile runs.
            _add_tile(totals, summed, made)
        # A gradient has the dtype of its tensor. A sum in fp32 is rounded once.
        rounded = iter(
            total if total is None else total.to(tensor.dtype) for total, tensor in zip(totals, wanted, strict=True)
        )
        return None, None, None, by_x, None, *[next(rounded) if need else None for need in needs]


def _refuse_others(what: str, y: Tensor, known: Sequence[Tensor | None]) -> None:
    """Raise if a tile's result depends on a leaf that is not `known`, whose gradient would be lost."""
    nodes: list[Any] = [y.grad_fn]
    seen: set[Any] = {None}  # keeps the nodes' Python objects alive, since Python reuses the ids of freed objects
    known_ids = {id(one) for one in known}
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known_ids:
            raise UsageError(
                f"{what}: a tile uses a parameter {list(leaf.shape)} that its module does not own (by a hook or a closure), and "
                "that parameter would get no gradient. Make it a parameter of the module, or leave the module out of tile()."
            )
        nodes += [inner for inner, _ in node.next_functions]


class _Random:
    """The random state of the CPU and of the device, with which the backward repeats the dropout."""

    def __init__(self, x: Tensor) -> None:
        self._cpu = torch.get_rng_state()
        self._device = x.device.type
        self._others = get_device_states(x)

    def restore(self) -> None:
        """Restore the random state."""
        torch.set_rng_state(self._cpu)
        if self._others[0]:
            set_device_states(*self._others, device_type=self._device)


def _add_tile(totals: list[Tensor | None], summed: set[int], gradients: Sequence[Tensor | None]) -> None:
    """Add one tile's gradients to the totals. None counts as zero. 16-bit gradients are summed in fp32."""
    for index, gradient in enumerate(gradients):
        total = totals[index]
        if gradient is None:
            continue
        if total is None:
            totals[index] = gradient
        elif index in summed:
            total.add_(gradient)
        else:  # make a new tensor, since autograd may return one tensor twice
            totals[index] = total.to(torch.promote_types(total.dtype, torch.float32)) + gradient
            summed.add(index)


def _parts(count: int, most: int) -> Iterable[slice]:
    """Return the parts of `count` positions that run, with at most `most` positions in each."""
    return (slice(start, min(start + most, count)) for start in range(0, max(count, 1), most))
