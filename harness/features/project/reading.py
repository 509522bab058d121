"""Reads the projection of a study, for the page."""

from __future__ import annotations

from harness.reporting.reading import Reading
from results.errors import SchemaError
from results.projection import Projection


def read_projection(reading: Reading) -> Projection | None:
    """The larger sizes of the study, as they were last projected.

    A redaction leaves them out: a projection has commands with folders.
    """
    if reading.redact:
        return None
    try:
        return reading.study.projection()
    except SchemaError as error:
        reading.console.warn(f"the report has no projection: {error}")
        return None
