"""The tables of studies as CSV, Parquet and pandas frames.

A table has one row for each cell, run, rank, loss or skip. Units are in the names of columns; a gap is
unknown.

A spreadsheet executes a string that begins like a formula, even if it is quoted. So a string in a CSV file
that begins with = + - @, an apostrophe, a tab or a line break gets an apostrophe before it; remove one
leading apostrophe to restore it. Every line break of a string is a line feed. Numbers and Parquet files are
not changed. (OWASP, CSV Injection.)
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Literal

import pandas as pd

from reports.analysis.study import StudyFigures
from reports.page.columns import (
    CELLS,
    LOSSES,
    RANKS,
    RUNS,
    SKIPS,
    cell_rows,
    loss_rows,
    rank_rows,
    run_rows,
    skip_rows,
    telemetry,
)
from reports.table import Column
from results.errors import MachineError
from results.foreign_text import visible

TableForm = Literal["csv", "parquet"]
NO_PYARROW = "Parquet is written by pyarrow, which is not installed: pip install 'pyarrow>=15'"
_FORMULA = ("=", "+", "-", "@", "'", "\t", "\n")
TABLES: Mapping[str, tuple[Callable[[StudyFigures], Sequence[Any]], tuple[Column[Any], ...]]] = (
    MappingProxyType(
        {
            "cells": (cell_rows, CELLS),
            "runs": (run_rows, RUNS),
            "ranks": (rank_rows, RANKS),
            "losses": (loss_rows, LOSSES),
            "skips": (skip_rows, SKIPS),
        }
    )
)
"""The tables of a study, by name: the rows of each, and its columns."""


def export_table(studies: Sequence[StudyFigures], name: str, form: TableForm) -> bytes:
    """The table called `name`, with all studies below each other."""
    frame = frame_of(studies, name)
    if form == "csv":
        return csv_text(frame).encode()
    if find_spec("pyarrow") is None:
        raise MachineError(NO_PYARROW)
    file = io.BytesIO()
    frame.to_parquet(file, engine="pyarrow", index=False)
    return file.getvalue()


def frame_of(studies: Sequence[StudyFigures], name: str) -> pd.DataFrame:
    """The table called `name` of all studies; the column `study` has the name of the study."""
    frames = []
    for study in studies:
        rows_of, columns = TABLES[name]
        rows = rows_of(study)
        more = telemetry(row.run for row in rows) if name == "runs" else ()
        series = {}
        for column in (*columns, *more):
            values = [column.value(row) for row in rows]
            if column.dtype == "string":
                # Enumerations are strings too.
                values = [None if value is None else str(value) for value in values]
            series[column.name] = pd.Series(values, dtype=column.dtype)
        frames.append(pd.DataFrame(series))
    return pd.concat(frames, ignore_index=True)


def csv_text(frame: pd.DataFrame) -> str:
    """The frame as CSV, safe to open in a spreadsheet."""
    texts = {str(name): column for name, column in frame.items() if column.dtype == "string"}
    safe = {name: column.map(_safe, na_action="ignore") for name, column in texts.items()}
    return frame.assign(**safe).to_csv(index=False, lineterminator="\n")


def _safe(text: str) -> str:
    # The csv module does not quote a carriage return, which readers take as the end of a row.
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    # Quoting does not stop characters that act on the terminal that shows the file.
    return visible(f"'{lines}" if lines.startswith(_FORMULA) else lines)
