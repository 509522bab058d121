"""Reads the search that a study is the final of, for the page."""

from __future__ import annotations

from harness.features.tune.records import Tuning, read_record
from harness.reporting.reading import Reading
from results.errors import StoreError


def read_tuning(reading: Reading) -> Tuning | None:
    """The search; None for an ordinary study, and under a redaction.

    Raises StoreError if it is damaged and the study has nothing else.
    """
    if reading.redact:
        return None
    try:
        return read_record(reading.study.root)
    except StoreError as error:
        if not reading.figures.plans:
            raise
        reading.console.warn(f"the report has no tuning: {error}")
        return None
