"""Owns `zeroshard report`: a run's log as one page of plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from zeroshard.cli.options import output_file
from zeroshard.errors import UsageError
from zeroshard.observe.plots import require_matplotlib


def report(
    run: Annotated[Path, typer.Argument(help="A folder with steps.jsonl, or such a file.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: report.html beside the log.")] = None,
) -> None:  # fmt: skip
    """Draw a run's log into one HTML file: loss, learning rate, norm, loss scale, speed, memory, time by part, bytes sent.

    The page contains its pictures, and needs neither network nor JavaScript. It can be drawn while the run goes on.
    """
    from zeroshard.observe.report_page import page
    from zeroshard.observe.run_log import read_run

    read = read_run(run)
    require_matplotlib("zeroshard report")
    path = output_file(out or read.path.with_name("report.html"), "--out")
    if path.suffix == ".jsonl":
        raise UsageError(f"--out: {path} is a log's name, and the page is HTML: name a file such as report.html.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(read), encoding="utf-8")
    for note in read.notes:
        typer.echo(f"note: {note}", err=True)
    typer.echo(f"{path}  {path.stat().st_size / 1024:,.0f} KiB")
