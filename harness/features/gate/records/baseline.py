"""A baseline, and the noise of one machine: files that a gate reads, reviewed and tracked with the code.

A baseline has what a gate compares of a study. A study, a run of pytest-benchmark and a saved baseline are
all read as a `Baseline`, so that any two can be compared. The facts of a subject also identify its machine.

The noise of a machine, and the margins that follow from it, are in a file in the folder of the baselines::

    baselines/thresholds/<machine>.json

`bench doctor --noise` writes it, `bench compare` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from results.schema import Schema
from results.value_types import require_times

MODEL = ("device_name", "cpu_model")
"""Facts that name the model of a machine, the first that is known."""


def machine_model(facts: Mapping[str, str]) -> str | None:
    """The model that facts of a subject name; None if they name none, as for an empty baseline."""
    return next((facts[fact] for fact in MODEL if fact in facts), None)


def file_word(model: str, longest: int) -> str:
    """Slug of a model for a file's name, at most `longest` characters: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:longest].strip("-")


Exact = int | float | str


def exact_text(values: tuple[Exact, ...]) -> str:
    """Values of one counter as text: `4,096`, several joined by commas, or `none`."""
    return ", ".join(v if isinstance(v, str) else f"{v:,.10g}" for v in values) or "none"


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is compared: a cell of a study, or a benchmark."""

    key: str
    """Equal for equal work: the cell's id without how long is measured and without the code under test."""
    label: str
    """The name for a reader."""
    facts: dict[str, str] = {}
    """Facts that must be equal on both sides of a comparison: device, versions, placement, data."""
    timed: dict[str, Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]] = {}
    """The values of each metric, one a run; runs are the independent samples."""
    exact: dict[str, tuple[Exact, ...]] = {}
    """The different values of each counter over the runs; a counter that works has one."""
    losses: dict[int, dict[int, float | None]] = {}
    """Final losses by seed and number of steps (`results.features.Kind.losses`)."""
    collectives: tuple[str, ...] = ()
    """Operations that rank 0 handed to the exchange in one step, in order: `allreduce 0-1 4096 B`."""
    runs: int = 0
    run_ids: tuple[str, ...] = ()
    """The ids of its runs; empty for files of pytest-benchmark."""
    disturbed: int = 0
    """The number of runs that had to share the machine with others."""
    failed: str | None = None
    """Why it lacks figures; None if it has them."""


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """A change that was accepted: from it on, the new figures are the right ones."""

    subject: str
    reason: str
    at: str
    commit: str | None = None
    changes: dict[str, str] = {}
    """Differences by name: `4,096 to 8,192`; facts, counters, and the means of metrics with a margin."""


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The accepted figures of a machine at a commit."""

    name: str
    measured_at: str
    """When its newest run began, as ISO 8601 text in UTC."""
    study: str | None = None
    """The folder's name of the study that it was made from; None for files of pytest-benchmark."""
    commit: str | None = None
    dirty: bool | None = None
    subjects: tuple[Subject, ...] = ()
    fail_above: dict[str, float] = {}
    """Margins of this baseline by metric, as shares: 0.05 is 5 %."""
    accepted: tuple[Acceptance, ...] = ()

    def __post_init__(self) -> None:
        require_times(self.measured_at)


FOLDER = "thresholds"


class MetricNoise(msgspec.Struct, frozen=True, kw_only=True):
    """The noise of one metric over equal runs of one cell, as shares of its mean."""

    runs: int
    between: float
    """Standard deviation of one run, where each run has its own launch."""
    within: float | None = None
    """Standard error of one run's mean, estimated from its steps: the median over runs; None if unknown.
    Where `between` is much larger, a test over steps would report changes of identical code."""


class Thresholds(msgspec.Struct, frozen=True, kw_only=True):
    """The noise and the margins of one machine."""

    machine: str
    """Model of the device, or else of the CPU."""
    measured_at: str
    """ISO 8601 text in UTC."""
    seconds: float
    cell: str
    """The label of the measured cell."""
    noise: dict[str, MetricNoise]
    fail_above: dict[str, float]
    """Margins by metric, as shares: 0.05 is 5 %."""


def thresholds_path(machine: str, baselines: Path) -> Path:
    """The path of a machine's thresholds: `baselines/thresholds/nvidia-h200.json`."""
    return baselines / FOLDER / f"{file_word(machine, 80)}.json"


BASELINE = Schema(
    "baseline", 1, Baseline, advice="restore it (git checkout), or write it again from its study or night"
)
THRESHOLDS = Schema(
    "thresholds", 1, Thresholds, advice="restore it (git checkout), or measure again by bench doctor --noise"
)
"""Version 1 of both is unreleased."""
