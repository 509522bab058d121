"""Reads the nights of a history, for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.reporting.reading import Reading
from results.baseline import Baseline
from results.history import read_nights


def read_history(reading: Reading) -> Mapping[str, Sequence[Baseline]]:
    """The nights of `--history`, by machine, in the order of time.

    Nights name commits and settings that a redaction of the study does not know, so it leaves them out.
    """
    folder = reading.given.get("history")
    if folder is None or reading.redact:
        return {}
    nights, damaged = read_nights(Path(folder))
    for sentence in damaged:
        reading.console.warn(sentence)
    return nights
