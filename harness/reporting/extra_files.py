"""Writing files in addition to the page of one study: the page of several studies, and their drawings."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.reporting.report import name_files, print_headline, write_page
from harness.terminal.console import Console
from reports.analysis.side_by_side import side_by_side
from reports.analysis.study import StudyFigures
from reports.page.paper import figure_files, shared_figure_files
from reports.page.render import render_studies
from reports.text import count
from results import files
from results.errors import UsageError

FIGURE_FORMS = ("svg", "pdf", "png")


def figure_forms(text: str) -> tuple[str, ...]:
    """The forms of files that `--figures` names. Raises UsageError for others, and for none."""
    forms = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    unknown = [form for form in forms if form not in FIGURE_FORMS]
    if unknown or not forms:
        raise UsageError(f"--figures is some of {', '.join(FIGURE_FORMS)}, joined by commas, not {text!r}")
    return forms


def write_figures(
    studies: Sequence[StudyFigures], console: Console, *, page: Path, forms: Sequence[Any], style: Any
) -> Path:
    """Write the drawings as files: into the folder `figures` next to a study's own page, or for another page
    into `PAGE.figures`. Each of several studies has its own folder in it."""
    folder = page.with_name("figures" if page.name == "report.html" else f"{page.stem}.figures")
    number = 0
    for study in studies:
        target = folder / study.name.replace("/", "-") if len(studies) > 1 else folder
        for name, data in figure_files(study, forms, style):
            files.replace(target / name, data, in_study=True)
            number += 1
    if len(studies) > 1:
        for name, data in shared_figure_files(studies, forms, style):
            files.replace(folder / name, data, in_study=True)
            number += 1
    console.result(f"figures: {count(number, 'file')} in {folder}")
    return folder


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
