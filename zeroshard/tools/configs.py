"""Owns `zeroshard config`, which prints how zeroshard resolves a DeepSpeed config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroshard.errors import UsageError, counted
from zeroshard.tools.options import build_module

if TYPE_CHECKING:
    from zeroshard.engine.config.load import Config
    from zeroshard.engine.config.schema import OptimizerBlock

config_app = typer.Typer(no_args_is_help=True, help="DeepSpeed configs: how zeroshard resolves them.")


@config_app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A DeepSpeed JSON config.")],
    ranks: Annotated[int | None, typer.Option(
        min=1, help="The number of ranks, for the batch sizes; default: autotp_size, or 1.")] = None,
    auto: Annotated[list[str] | None, typer.Option(help='KEY=VALUE for a key that is "auto"; may be repeated.')] = None,
    model: Annotated[str | None, typer.Option(
        help='module:function or file.py:function; supplies the hidden size and dtype for "auto" keys.')] = None,
    all_keys: Annotated[bool, typer.Option("--all", help="Print all keys, with the whole text of their effects.")] = False,
) -> None:  # fmt: skip
    """Print the resolved config: the value, origin and effect of each key that is set or computed.

    The command also finds values that the optimizer or the scheduler rejects. It does not check values that depend on
    your model or machine, such as folders and module names.
    """
    from rich.console import Console

    from zeroshard.engine.config.document import listing, summary
    from zeroshard.engine.config.load import load_config, refuse_without_batch_size, tensor_parallel_ranks
    from zeroshard.policy import refuse_uneven

    module = None
    if model is not None:
        module = build_module(model)
    values = supplied(auto or [])
    note_superfluous(file, values)
    of_model = tensor_parallel_ranks(file)
    refuse_uneven(of_model, ranks or of_model)
    config = load_config(file, (ranks or of_model) // of_model, module, values)
    refuse_without_batch_size(config)
    _make_optimizer(config)
    console = Console()
    show = listing if all_keys else summary
    console.print(show(config, console.width), soft_wrap=True, highlight=False)
    console.print(_in_force(config), highlight=False)


def supplied(items: list[str]) -> dict[str, Any]:
    """Return the values of `--auto KEY=VALUE` by key; a value that is not JSON is text. Raise `UsageError` for other items."""
    found = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator:
            raise UsageError(f"--auto takes KEY=VALUE, not {item!r}. Write, for example, --auto lr=3e-4.")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def note_superfluous(config: Path, values: Mapping[str, Any]) -> None:
    """Print a note for each value of --auto that has no effect, since the config has another value than "auto" for its key."""
    from zeroshard.engine.config.auto import without_effect
    from zeroshard.engine.config.load import read

    for name, value in without_effect(read(config), values).items():
        typer.echo(f"note: --auto {name} has no effect: the config has {json.dumps(value)}", err=True)


def _make_optimizer(config: Config) -> None:
    """Build the config's optimizer and scheduler and discard them. Raise `ConfigError` if one cannot be built.

    Importing torch takes seconds, so the common optimizers with usual values are not built: nothing refuses these.
    """
    from zeroshard.engine.schedulers import create_scheduler
    from zeroshard.optim.lr_schedules import SCHEDULES

    optimizer = config.schema.optimizer
    scheduler = config.schema.scheduler
    count = 1
    if scheduler is not None:
        # A scheduler may have a value for each param group: create as many groups as there are values.
        values = [value for value in scheduler.params.values() if isinstance(value, list | tuple)]
        count = max(map(len, values), default=1) or 1
    of_torch = scheduler is not None and scheduler.type not in SCHEDULES
    name = "SGD" if optimizer is None else optimizer.type
    has_betas = name.lower() in _WITH_BETAS
    stepped: Any = type(name, (_Groups,), {})(count, has_betas=has_betas)  # warnings name the optimizer
    if of_torch or (optimizer is not None and not is_usual(optimizer)):
        import torch

        from zeroshard.engine.from_config import create_optimizer

        groups = [{"params": [torch.nn.Parameter(torch.zeros(2, 2))]} for _ in range(count)]
        stepped = torch.optim.SGD(groups, lr=1e-3) if optimizer is None else create_optimizer(optimizer, groups)
    if scheduler is not None:
        create_scheduler(scheduler, stepped)


class _Groups:
    """What a schedule reads and writes of an optimizer."""

    def __init__(self, count: int, *, has_betas: bool) -> None:
        self.defaults: dict[str, Any] = {"lr": 1e-3} | ({"betas": (0.9, 0.999)} if has_betas else {})
        self.param_groups = [dict(self.defaults) for _ in range(count)]


_WITH_BETAS = ("adam", "adamw", "lion")


def is_usual(block: OptimizerBlock) -> bool:
    """Return whether an optimizer is common and has only arguments and values that its class certainly accepts."""
    name = block.type.lower()
    numbers = {"lr", "weight_decay"}
    if name in ("adam", "adamw"):
        numbers |= {"eps"}
    elif name == "sgd":
        numbers |= {"momentum"}
    elif name != "lion":
        return False
    for key, value in block.params.items():
        if key in ("torch_adam", "adam_w_mode") and name in ("adam", "adamw"):
            accepted = isinstance(value, bool)
        elif key == "betas" and name in _WITH_BETAS:
            accepted = isinstance(value, list) and len(value) == 2 and all(_is_beta(one) for one in value)
        else:
            accepted = key in numbers and _is_number(value)
        if not accepted:
            return False
    return True


def _is_beta(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value < 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _in_force(config: Config) -> str:
    """Describe stage, clipping, optimizer and batch, even if the file leaves them out."""
    clipping = "gradients are not clipped"
    if config.schema.gradient_clipping:
        clipping = f"gradients are clipped to a norm of {config.schema.gradient_clipping}"
    optimizer = "the one that you pass to `initialize`"
    if config.schema.optimizer is not None:
        optimizer = f"the config's {config.schema.optimizer.type}"
    batch = config.batch
    return (
        f"In force: ZeRO stage {config.stage}; {clipping}; optimizer: {optimizer};\n"
        f"batch {batch.train} = {counted(batch.micro, 'sample')} x {batch.accumulation} accumulated x "
        f"{counted(batch.world_size, 'rank')}."
    )
