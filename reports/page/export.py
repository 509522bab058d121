"""A report in other forms: Markdown and LaTeX to paste, JSON for programs, CSV and Parquet for pandas."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal

import pandas as pd

from reports.analysis.study import StudyFigures
from reports.page.frames import FRAMES, csv_text
from reports.page.json_document import json_document
from reports.page.latex import latex
from reports.page.markdown import markdown
from results.errors import MachineError

TextForm = Literal["markdown", "json", "latex"]
TableForm = Literal["csv", "parquet"]
NO_PYARROW = "Parquet is written by pyarrow, which is not installed: pip install 'pyarrow>=15'"


def export_text(studies: Sequence[StudyFigures], form: TextForm) -> str:
    """All studies as one text."""
    return {"markdown": markdown, "json": json_document, "latex": latex}[form](studies)


def export_table(studies: Sequence[StudyFigures], name: str, form: TableForm) -> bytes:
    """The table called `name` (of `FRAMES`), the studies below each other."""
    frame = frame_of(studies, name)
    return csv_text(frame).encode() if form == "csv" else _parquet(frame)


def frame_of(studies: Sequence[StudyFigures], name: str) -> pd.DataFrame:
    """The table of all studies; the column `study` tells them apart."""
    return pd.concat([FRAMES[name](study) for study in studies], ignore_index=True)


def _parquet(frame: pd.DataFrame) -> bytes:
    if find_spec("pyarrow") is None:
        raise MachineError(NO_PYARROW)
    file = io.BytesIO()
    frame.to_parquet(file, engine="pyarrow", index=False)
    return file.getvalue()
