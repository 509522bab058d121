"""Reads the projection of a study, for the page."""

from __future__ import annotations

from harness.features.project.records import PROJECTION, Projection, projection_path
from harness.reporting.reading import Reading
from results.errors import SchemaError


def read_projection(reading: Reading) -> Projection | None:
    """The larger sizes of the study, as they were last projected.

    A redaction leaves them out: a projection has commands with folders.
    """
    path = projection_path(reading.study)
    if reading.redact or not path.exists():
        return None
    try:
        return PROJECTION.read(path)
    except SchemaError as error:
        reading.console.warn(f"the report has no projection: {error}")
        return None
