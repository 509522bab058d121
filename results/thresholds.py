"""The noise of one machine, and the margins that follow: a file beside the baselines, reviewed as they are.

::

    baselines/thresholds/<machine>.json

`bench doctor --noise` writes it, `bench compare` reads it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from results.machine import file_word

FOLDER = "thresholds"


class MetricNoise(msgspec.Struct, frozen=True, kw_only=True):
    """How far equal runs of one cell differ in one metric, as shares of its mean."""

    runs: int
    between: float
    """Standard deviation of one run: each run is a launch of its own."""
    within: float | None = None
    """Standard error that the steps of one run alone give its mean, the median over runs; None if unknown.
    Where `between` is much larger, a test over steps would report changes of identical code."""


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """What is tolerated on one machine."""

    machine: str
    """Model of the device, or else of the CPU."""
    measured_at: str
    """ISO 8601 text in UTC."""
    seconds: float
    """How long the measurement took."""
    cell: str
    """What was measured."""
    noise: dict[str, MetricNoise]
    """By metric."""
    fail_above: dict[str, float]
    """Margins by metric, as shares: 0.05 is 5 %."""


def thresholds_path(machine: str, baselines: Path) -> Path:
    """Where the thresholds of a machine are kept: `baselines/thresholds/nvidia-h200.json`."""
    return baselines / FOLDER / f"{file_word(machine, 80)}.json"
