"""Finds modules of a model by name patterns and replaces the forwards of some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from zeroshard.core.named_parameter import name_of, named_modules
from zeroshard.errors import UsageError


def modules_matching(model: nn.Module, patterns: str | Sequence[str], what: str) -> dict[str, nn.Module]:
    """Return the modules whose full names match a pattern, by name, in the order of the patterns.

    Of nested modules, only the outermost is returned: a change to it applies to those inside. In a pattern, `*` stands for
    anything.

    Raises:
        UsageError: a pattern matches no module. The message names the call `what`.
    """
    if isinstance(patterns, str):
        patterns = [patterns]
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching: dict[str, nn.Module] = {}
        for name, module in named_modules(model):
            if name and fnmatchcase(name, name_of(pattern)):
                matching.setdefault(name, module)  # a wrapper comes before its module
        if not matching:
            raise UsageError(
                f"{what}: no module of the model is called {pattern!r}. Use names of model.named_modules()."
            )
        found |= matching
    outermost = {}
    for name, module in found.items():
        around = [name[:index] for index, letter in enumerate(name) if letter == "."]
        if not any(outer in found for outer in around):
            outermost[name] = module
    return outermost


class Forwards:
    """Replacements for modules' forwards, until `restore`."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, Any]] = []

    @property
    def modules(self) -> list[nn.Module]:
        """The modules whose forward is replaced."""
        return [module for module, _ in self._before]

    def replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Make a module run this function as its forward."""
        self._before.append((module, module.__dict__.get("forward")))
        module.forward = forward  # type: ignore[method-assign]

    def restore(self) -> None:
        """Restore the forward that each module had: an attribute of the module, or the method of its class."""
        for module, before in reversed(self._before):
            del module.forward
            if before is not None:
                module.forward = before  # type: ignore[method-assign]
        self._before.clear()
