"""Reads the nights of a history, for the page of a study and for a page of all nights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.features.gate.nights import nights_in
from harness.features.gate.records.baseline import Baseline
from harness.features.gate.section import nights_section
from harness.reporting.reading import Reading
from harness.terminal.console import Console
from reports.page.section import Section


def read_history(reading: Reading) -> Mapping[str, Sequence[Baseline]]:
    """The nights of `--history`, by machine, in the order of time.

    Nights name commits and settings that a redaction of the study does not know, so it leaves them out.
    """
    folder = reading.given.get("history")
    if folder is None or reading.redact:
        return {}
    return nights_in(Path(folder), reading.console)


def nights_here() -> str | None:
    """The folder `history` here, if it has nights."""
    return "history" if any(Path("history").glob("*/*.json")) else None


def nights_of(folder: Path, console: Console) -> Section | None:
    """The section of all nights in a folder; None if no series has two."""
    return nights_section(nights_in(folder, console))
