"""A study as tables of pandas: a row a cell, run, rank, loss or skip. Units are in names; a gap is unknown.

A spreadsheet takes a text that begins like a formula for one, whatever it is quoted by. So a text in a CSV
that begins with = + - @, an apostrophe, a tab or a line break has an apostrophe before it; to have the text
back, take one leading apostrophe off. Every line break of a text is a line feed. Numbers are left alone, and
so is Parquet. (OWASP, CSV Injection.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from reports.analysis.study import StudyFigures
from reports.page.columns import CELLS, LOSSES, RANKS, RUNS, SKIPS, Column, telemetry
from reports.page.rows import cell_rows, loss_rows, rank_rows, run_rows, skip_rows
from results.foreign_text import visible

_FORMULA = ("=", "+", "-", "@", "'", "\t", "\n")


def cells_frame(study: StudyFigures) -> pd.DataFrame:
    """Every planned cell, with or without figures."""
    return _frame(cell_rows(study), CELLS)


def runs_frame(study: StudyFigures) -> pd.DataFrame:
    """Every run of every planned cell, oldest first, and whether the cell's figure counts it."""
    rows = run_rows(study)
    return _frame(rows, (*RUNS, *telemetry(row.run for row in rows)))


def ranks_frame(study: StudyFigures) -> pd.DataFrame:
    """Every rank of every counted run that recorded its ranks."""
    return _frame(rank_rows(study), RANKS)


def losses_frame(study: StudyFigures) -> pd.DataFrame:
    """Every loss of every counted run: the mean over ranks and the steps since the row before."""
    return _frame(loss_rows(study), LOSSES)


def skips_frame(study: StudyFigures) -> pd.DataFrame:
    """Every point of the matrix that is not run, and why."""
    return _frame(skip_rows(study), SKIPS)


FRAMES: Mapping[str, Callable[[StudyFigures], pd.DataFrame]] = {
    "cells": cells_frame,
    "runs": runs_frame,
    "ranks": ranks_frame,
    "losses": losses_frame,
    "skips": skips_frame,
}
"""The tables of a study, by name."""


def cells_csv(study: StudyFigures) -> str:
    return csv_text(cells_frame(study))


def runs_csv(study: StudyFigures) -> str:
    return csv_text(runs_frame(study))


def csv_text(frame: pd.DataFrame) -> str:
    """The frame as CSV, safe to open in a spreadsheet."""
    texts = {str(name): column for name, column in frame.items() if column.dtype == "string"}
    safe = {name: column.map(_safe, na_action="ignore") for name, column in texts.items()}
    return frame.assign(**safe).to_csv(index=False, lineterminator="\n")


def _safe(text: str) -> str:
    # The csv module does not quote a carriage return, and readers take it for the end of the row.
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    # What is not quoted by anything could still act on the terminal that shows the file.
    return visible(f"'{lines}" if lines.startswith(_FORMULA) else lines)


def _frame(rows: Sequence[object], columns: Sequence[Column]) -> pd.DataFrame:
    return pd.DataFrame({column.name: _values(rows, column) for column in columns})


def _values(rows: Sequence[object], column: Column) -> pd.Series:
    values = [column.value(row) for row in rows]
    if column.dtype == "string":
        # Enumerations are texts too.
        values = [None if value is None else str(value) for value in values]
    return pd.Series(values, dtype=column.dtype)
