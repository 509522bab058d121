"""Reads the projection of a study, for the page."""

from __future__ import annotations

from harness.features.project.records import PROJECTION, Projection, projection_path
from harness.reporting.reading import Reading
from results.errors import SchemaError
from results.store import Study


def read(study: Study) -> Projection | None:
    """The study's projection to larger sizes; None without one. Raises SchemaError if it is damaged."""
    path = projection_path(study)
    return PROJECTION.read(path) if path.exists() else None


def read_projection(reading: Reading) -> Projection | None:
    """The larger sizes of the study, as they were last projected.

    A redaction leaves them out: a projection has commands with folders.
    """
    if reading.redact:
        return None
    try:
        return read(reading.study)
    except SchemaError as error:
        reading.console.warn(f"the report has no projection: {error}")
        return None
