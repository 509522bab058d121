"""Writing the page of several studies."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from harness.reporting.report import name_files, print_headline, write_page
from harness.terminal.console import Console
from reports.analysis.side_by_side import side_by_side
from reports.analysis.study import StudyFigures
from reports.page.joint import render_studies


def write_joint_report(studies: Sequence[StudyFigures], console: Console, *, path: Path) -> None:
    """Write one page for several studies at `path`, and their tables next to it.

    Prints the headline of each study, and the findings of their comparison.
    """
    written = write_page(render_studies(studies), studies, path, f"{path.stem}.")
    for study in studies:
        console.result(f"{study.name}:")
        print_headline(study, console)
        console.result()
    shared = side_by_side(studies)
    for finding in (*shared.findings, *(f"Not compared: {text}." for text in shared.unlike)):
        for line in textwrap.wrap(finding, console.width, break_on_hyphens=False):
            console.result(line)
    name_files(written, console)
