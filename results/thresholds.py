"""The noise of one machine, and the margins that follow: a file beside the baselines, reviewed as they are.

::

    baselines/thresholds/<machine>.json

`bench doctor --noise` writes it, `bench compare` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

FOLDER = "thresholds"
OF_MACHINE = ("device_name", "cpu_model")
"""Facts that name a machine, the first that is known."""


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


def machine_name(facts: Mapping[str, str]) -> str | None:
    """The model that facts of a cell name; None if they name none, as for an empty baseline."""
    return next((facts[fact] for fact in OF_MACHINE if fact in facts), None)


def thresholds_path(machine: str, baselines: Path) -> Path:
    """Where the thresholds of a machine are kept: `baselines/thresholds/nvidia-h200.json`."""
    slug = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    return baselines / FOLDER / f"{slug[:80]}.json"
