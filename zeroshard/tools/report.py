"""Owns `zeroshard report`, which draws the log of a run as one picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zeroshard.tools.options import picture_file
from zeroshard.tools.plots import require_matplotlib


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders with steps.jsonl, or the files.")],
    out: Annotated[Path | None, typer.Option(help="The picture to write; default: report.png beside the first log.")] = None,
) -> None:  # fmt: skip
    """Draw the logs of runs as one picture: loss, learning rate, gradient norm, tokens per second and memory.

    You can draw it while a run continues.
    """
    from zeroshard.tools.curves import draw, read_run

    read = [read_run(run) for run in runs]
    require_matplotlib("zeroshard report")
    path = picture_file(out or read[0].path.with_name("report.png"), "--out")
    draw(read, path)
    for run in read:
        for note in run.notes:
            typer.echo(f"note: {note}", err=True)
    typer.echo(path)
