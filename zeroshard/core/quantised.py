"""Owns what zeroshard knows of bitsandbytes' quantised parameters, which are frozen. The package itself is not imported.

A `Params4bit` holds packed bytes (of any dtype: `quant_storage`), and beside them, in `quant_state`, the scales of its blocks. Its
bytes are sharded and moved like those of other parameters. The scales stay whole on each rank: an eighth of the bytes, or a 32nd
with double quantisation. An `Int8Params` stays whole at every stage: its module keeps an alias of its memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from zeroshard.core.named_parameter import named_modules
from zeroshard.errors import UsageError
from zeroshard.torch_private import own_parameters

FOUR_BIT, EIGHT_BIT = "Params4bit", "Int8Params"


def quantised_kind(parameter: Tensor) -> str:
    """Return the name of bitsandbytes' class of a parameter, or "" if it is of another class."""
    for base in type(parameter).__mro__:
        if base.__module__.startswith("bitsandbytes.") and base.__name__ in (FOUR_BIT, EIGHT_BIT):
            return base.__name__
    return ""


def refuse_unquantised(fqn: str, parameter: nn.Parameter) -> None:
    """Raise if a parameter of bitsandbytes does not have its bytes yet, or has them in another format."""
    kind = quantised_kind(parameter)
    is_ready = (
        parameter.dtype.itemsize == 1 if kind == EIGHT_BIT else getattr(parameter, "quant_state", None) is not None
    )
    if not is_ready:
        raise UsageError(
            f"parameter {fqn} is a {kind} and not quantised yet: move the model to its device before, with model.to(device)."
        )
    if getattr(getattr(parameter, "quant_state", None), "packing_format_for_cpu", False):
        raise UsageError(
            f"parameter {fqn} was packed for inference by a forward in eval mode, and does not train adapters: shard the model "
            "before its first evaluation."
        )


def scales_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the scales of quantised parameters, under the names that bitsandbytes gives them in state dicts."""
    for fqn, module in named_modules(model):
        weight = own_parameters(module).get("weight")  # an attribute may be computed, as by PEFT
        kind = "" if weight is None else quantised_kind(weight)
        prefix = f"{fqn}." if fqn else ""
        if kind == FOUR_BIT:
            state = weight.quant_state  # type: ignore[union-attr]
            yield f"{prefix}weight.absmax", state.absmax
            if state.nested:
                yield f"{prefix}weight.nested_absmax", state.state2.absmax
                yield f"{prefix}weight.nested_offset", state.offset
        elif kind == EIGHT_BIT:
            found = [getattr(holder, "SCB", None) for holder in (weight, getattr(module, "state", None))]
            yield from ((f"{prefix}SCB", scale) for scale in found if scale is not None)


def prepare_modules(model: nn.Module) -> None:
    """Make bitsandbytes' modules leave the memory of sharded parameters as it is.

    On some CPUs, a forward in eval mode would replace the bytes by others in another format. An 8-bit module that has run, or its
    parameter, keeps an alias of the memory that the parameter had before.
    """
    for module in model.modules():
        weight = own_parameters(module).get("weight")  # an attribute may be computed, as by PEFT
        kind = "" if weight is None else quantised_kind(weight)
        if kind == FOUR_BIT and hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        elif kind == EIGHT_BIT:
            for holder in (weight, getattr(module, "state", None)):
                if getattr(holder, "CB", None) is not None:
                    holder.CB = weight.data  # type: ignore[union-attr]
