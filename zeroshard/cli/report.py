"""Owns `zeroshard report`, which draws a run's log as one page of plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zeroshard.cli.options import output_file
from zeroshard.errors import UsageError
from zeroshard.observe.plots import require_matplotlib


def report(
    run: Annotated[Path, typer.Argument(metavar="FILE", help="A folder with steps.jsonl, or the file.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; default: report.html beside the log.")] = None,
) -> None:  # fmt: skip
    """Draw the log of a run as one HTML file: loss, learning rate, norm, loss scale, speed, memory, time, bytes sent.

    The page contains its pictures, and needs neither a network nor JavaScript. You can draw it while the run continues.
    """
    from zeroshard.observe.report_page import page
    from zeroshard.observe.run_log import read_run

    read = read_run(run)
    require_matplotlib("zeroshard report")
    path = output_file(out or read.path.with_name("report.html"), "--out")
    if path.suffix == ".jsonl":
        raise UsageError(f"--out: {path} has a log's suffix, but the page is HTML. Name a file such as report.html.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(read), encoding="utf-8")
    for note in read.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"{path}  {path.stat().st_size / 1024:,.0f} KiB")
