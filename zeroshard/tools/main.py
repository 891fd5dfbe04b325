"""Owns the command-line program: its commands, and the output of errors.

Commands import their modules when they run, so that `zeroshard --help` and completion do not wait for torch.
"""

from __future__ import annotations

import atexit
import gc
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from zeroshard.errors import UsageError, ZeroshardError
from zeroshard.tools.checkpoints import consolidate, import_from_deepspeed, inspect
from zeroshard.tools.configs import config_app
from zeroshard.tools.doctor import doctor
from zeroshard.tools.plan import estimate, plan
from zeroshard.tools.report import report
from zeroshard.tools.run import PASSED_ON, print_shim_path, run
from zeroshard.version import __version__

app = typer.Typer(name="zeroshard", no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(config_app, name="config")
app.command()(estimate)
app.command()(plan)
app.command()(report)
app.command()(inspect)
app.command()(consolidate)
app.command("import-deepspeed")(import_from_deepspeed)
app.command()(doctor)
app.command(context_settings=PASSED_ON)(run)
app.command("shim-path")(print_shim_path)

_GONE = {
    "compare": "zeroshard compare is now an example of the repository: run python examples/compare.py, with the same options.",
    "explain": "zeroshard explain is gone: each message ends with its remedy. Look at docs/troubleshooting.md for the causes.",
}
"""Commands of earlier releases, and what replaces them."""


def _refuse(context: typer.Context) -> None:
    raise UsageError(_GONE[str(context.info_name)])


for _name in _GONE:
    app.command(_name, hidden=True, context_settings=PASSED_ON)(_refuse)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"zeroshard {__version__}, torch {version('torch')}, Python {sys.version.split()[0]}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """ZeRO for PyTorch: sharded optimizer states, gradients and parameters, on stock torch."""


def main() -> None:
    """Run the program. For an error of zeroshard or the file system, print a sentence and exit with code 2."""
    atexit.register(_skip_last_collection)
    try:
        app(prog_name="zeroshard")
    except ZeroshardError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))


def _skip_last_collection() -> None:
    """Exclude all objects from Python's last garbage collection, which goes through all of torch's modules for a second.

    Not with libraries that nanobind binds, such as triton: they print what was never freed.
    """
    if not any(metaclass.__module__ == "nanobind" for metaclass in type.__subclasses__(type)):
        gc.freeze()


def _fail(sentence: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "red"), sentence))
    raise SystemExit(2)
