"""`bench report`: the page of a study, from what is on disk."""

from __future__ import annotations

import os
from pathlib import Path

import click


@click.command(name="report")
@click.argument("study")
@click.option("-o", "--output", metavar="FILE.html", help="where to write it, instead of STUDY/report.html")
def command(study: str, output: str | None) -> int:
    """Write the report of STUDY (a folder) as one HTML file, and its tables as CSV beside it.

    Works where torch is not installed. A study that may not be written is read all the same; then the
    report needs --output.
    """
    from harness.console import Console
    from harness.report import write_report
    from reports.analysis.study import analyse
    from results.store import Study

    folder = Study.existing(Path(study))
    results = folder.collect() if os.access(folder.root, os.W_OK) else folder.results()
    figures = analyse(folder.name, folder.plans(), results)
    write_report(folder, figures, Console(), path=Path(output) if output else None)
    return 0
