"""Owns modules that run tile by tile over the positions of a sequence, so that they keep one tile's activations inside.

An MLP's intermediate is four times as wide as its input and output. Its work at one position needs no other position.
So its forward can run on some positions at a time, and again on each tile in the backward, without kept activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from zeroshard.errors import UsageError
from zeroshard.layout.modules import Forwards, modules_matching
from zeroshard.sequence.batches import has_values
from zeroshard.sequence.loss import Sums, as_now, parts, refuse_second_backward
from zeroshard.torch_private import has_tensor_hooks

_MIXES = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.SyncBatchNorm,
)  # fmt: skip
"""Modules whose work at one position needs other positions."""


def tile(model: nn.Module, patterns: str | Sequence[str], tokens: int = 2048) -> Tiles:
    """Run modules of a model on at most `tokens` positions at a time, until the returned object's `remove`.

    Gradients of parameters are summed over tiles (16-bit ones in fp32), and arrive once. Inputs of at most `tokens`
    positions run as before. The module's own unit is gathered once.

    Args:
        model: the model, whose modules' `forward` is wrapped, on the module itself. Call it before or after `shard`.
        patterns: full names of modules, with `*` for anything. Of nested modules, the outermost is used.
        tokens: the most positions of a tile, in the second dimension of the module's first argument: [rows, positions, ...].

    Raises:
        UsageError: no module has such a name, or its work is not position by position.
    """
    if tokens < 1:
        raise UsageError(f"tokens={tokens}: a tile has 1 position or more. Pass 1 or more, such as tokens=2048.")
    modules = modules_matching(model, patterns, "tile")
    for name, module in modules.items():
        _refuse_mixing(name, module)
    return Tiles(modules, tokens)


class Tiles:
    """The modules of a model that run in tiles."""

    def __init__(self, modules: dict[str, nn.Module], tokens: int) -> None:
        self._forwards = Forwards()
        for name, module in modules.items():
            self._forwards.replace(module, _Tiled(name, module, module.forward, tokens))

    def remove(self) -> None:
        """Undo `tile`: the modules run whole again."""
        self._forwards.restore()


class _Tiled:
    """The forward of one module."""

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any], tokens: int) -> None:
        self._name = name
        self._module = module
        self._forward = forward
        self._tokens = tokens
        self._is_checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else None
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if len(args) != 1 or not isinstance(x, Tensor) or x.dim() < 3 or len(tensors) > 1:
            raise UsageError(
                f"{self._name} runs in tiles, so its one positional argument must be a tensor [rows, positions, ...], "
                "and its only tensor: name other modules to tile()."
            )
        if x.shape[1] <= self._tokens:
            return self._forward(x, **kwargs)
        run = partial(self._forward, **kwargs)
        if not self._is_checked and has_values(x):
            self._check(run, x)
        parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        if any(map(has_tensor_hooks, parameters)):
            raise UsageError(
                f"a parameter of {self._name} has a hook (register_hook), which would see the gradient of each tile: "
                "change gradients between the backward and the step, or leave this module out of tile()."
            )
        return _Run.apply(self._name, run, self._tokens, x, *parameters)  # type: ignore[no-untyped-call]

    def _check(self, run: Callable[[Tensor], Any], x: Tensor) -> None:
        """Raise if a position's result depends on others: two positions together must give the results of each one
        separately.
        """
        modes = [(module, module.training) for module in self._module.modules()]
        self._module.eval()
        try:
            with torch.no_grad():
                together = _of_positions(self._name, run(x[:1, :2].contiguous()), x[:1, :2])
                apart = torch.cat([run(x[:1, :1].contiguous()), run(x[:1, 1:2].contiguous())], dim=1)
        finally:
            for module, mode in modes:
                module.training = mode
        tolerance = 1e-3 if together.dtype in (torch.float32, torch.float64) else 5e-2
        if not bool((together - apart).abs().max() <= tolerance * apart.abs().max()):
            raise UsageError(
                f"{self._name} gives other results beside other positions, so it cannot run in tiles: name "
                "modules that work position by position, such as MLPs."
            )
        # Outputs of zeros (a projection that starts at zero) prove nothing: the next call checks again.
        self._is_checked = bool(apart.any())


def _of_positions(name: str, y: Any, x: Tensor) -> Tensor:
    if isinstance(y, Tensor) and y.shape[:2] == x.shape[:2]:
        return y
    raise UsageError(
        f"{name} cannot run in tiles: it must return one tensor [rows, positions, ...], and returned "
        f"{'a tensor ' + str(list(y.shape)) if isinstance(y, Tensor) else 'a ' + type(y).__name__}. Name other modules."
    )


class _Run(torch.autograd.Function):
    """An autograd function that runs a function tile by tile. Parameters are inputs, so that each gets its whole
    gradient at once.
    """

    @staticmethod
    def forward(
        ctx: Any, name: str, run: Callable[[Tensor], Any], tokens: int, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.run, ctx.tokens, ctx.parameters = run, tokens, parameters
        ctx.autocast = as_now(x.device.type)
        ctx.save_for_backward(x)
        ctx.random = []
        out = None
        for where in parts(x.shape[1], tokens):
            if any(ctx.needs_input_grad):
                ctx.random.append(_Random(x))
            part = x[:, where]
            y = _of_positions(name, run(part.contiguous()), part)
            if out is None:
                out = y.new_empty(*x.shape[:2], *y.shape[2:])
            out[:, where] = y
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_backward("tile()")
        (x,) = ctx.saved_tensors
        needs_x = ctx.needs_input_grad[3]
        by_x = torch.empty_like(x) if needs_x else None
        sums = Sums()
        before = _Random(x)
        for random, where in zip(ctx.random, parts(x.shape[1], ctx.tokens), strict=True):
            random.restore()
            own = x[:, where].detach().contiguous().requires_grad_(needs_x)
            with torch.enable_grad(), ctx.autocast():
                y = ctx.run(own)
            wanted = [own, *ctx.parameters] if needs_x else list(ctx.parameters)
            made = list(torch.autograd.grad(y, wanted, gradients[0][:, where], allow_unused=True))
            if by_x is not None:
                of_x = made.pop(0)
                by_x[:, where] = 0 if of_x is None else of_x
            sums.add(made)
        before.restore()
        return None, None, None, by_x, *sums.totals()


class _Random:
    """The random state of the CPU and of the device, so that the backward repeats the dropout."""

    def __init__(self, x: Tensor) -> None:
        self._cpu = torch.get_rng_state()
        self._device = x.device.type
        self._others = get_device_states(x)

    def restore(self) -> None:
        """Restore the random state."""
        torch.set_rng_state(self._cpu)
        if self._others[0]:
            set_device_states(*self._others, device_type=self._device)


def _refuse_mixing(name: str, module: nn.Module) -> None:
    for inner, one in module.named_modules():
        if isinstance(one, _MIXES):
            raise UsageError(
                f"tile: {'.'.join(filter(None, (name, inner)))} is a {type(one).__name__}, whose work at one "
                "position needs others: name modules that work position by position, such as MLPs."
            )
