"""Reads the search that a study is the final of, for the page."""

from __future__ import annotations

from harness.reporting.reading import Reading
from results.errors import StoreError
from results.tuning import Tuning


def read_tuning(reading: Reading) -> Tuning | None:
    """The search; None for an ordinary study, and under a redaction."""
    if reading.redact:
        return None
    try:
        return reading.study.tuning()
    except StoreError as error:
        reading.console.warn(f"the report has no tuning: {error}")
        return None
