"""The record of `bench tune` in a study's folder: what was searched, tried and found.

It is derived from the declared space, from the runs of the nested study `trials` and from the runs of the
final study, and is written again whenever one of them has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from results.outcome import Outcome
from results.schema import Schema
from results.statistics import Metric

TUNING_FILE = "tuning.json"
TRIALS = "trials"
"""The folder of the nested study whose runs are the trials."""


def told(choices: Mapping[str, str]) -> str:
    """Choices in words; the strategy has no name in front: `ddp, bucket_mb 25.0, micro_batch 8`."""
    return ", ".join(value if key == "strategy" else f"{key} {value}" for key, value in choices.items())


class TunedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of the space that may fit, and what the search says of it."""

    id: str
    """The id of its cell under the default step policy."""
    choices: dict[str, str]
    """Its values where settings of the space differ, such as `bucket_mb`: `25.0`."""
    state: str = "waiting"
    """`waiting`, `racing`, `out`, `failed` or `dropped`."""
    why: str = ""
    """Why it is in this state, the end of a sentence."""
    rate: float | None = None
    """Samples a second of all replicas, over its trials; None if no trial has a rate."""
    predicted_rate: float | None = None
    predicted_bytes: int | None = None
    """Memory of the fullest rank in closed form."""


class TunedTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One short run of a setting. The trials of one rung and block ran interleaved."""

    setting: str
    rung: int
    block: int
    outcome: Outcome
    reason: str | None = None
    rate: float | None = None
    memory_bytes: int | None = None
    """Peak of the fullest rank: of the allocator on a GPU, over idle on a CPU."""
    device_s: float = 0.0
    """Seconds of all devices, with a share of the start of its launch."""


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    """The winner's rate over the rate of a setting that differs in one choice, by interleaved trials."""

    choice: str
    value: str
    instead: str
    ratio: Metric


class TuningAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of the final study."""

    setting: str
    """The id of the setting to use."""
    sentence: str
    gain: Metric | None = None
    """Its throughput over the default's; None if the default has no figure or is the answer."""
    contributions: tuple[Contribution, ...] = ()
    remarks: tuple[str, ...] = ()
    """Sentences on changes in training, and on the limits of the answer."""
    commands: tuple[str, ...] = ()
    """The `bench matrix` call that uses the setting, and the `bench train` call if the launcher trains."""
    taken: int = 0
    """The number of settings that could not be measured, because the cluster took launches away."""


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """One tune."""

    command: str
    default: str
    """The id of the setting that the others are compared with."""
    refused: dict[str, int] = {}
    """Points of the space without a setting that may fit: their number by reason."""
    settings: tuple[TunedSetting, ...] = ()
    trials: tuple[TunedTrial, ...] = ()
    """In the order in which they began."""
    ended: str = ""
    """Why the search ended, a clause; empty before its end."""
    final: tuple[str, ...] = ()
    """The ids of the settings that the final study measures."""
    answer: TuningAnswer | None = None


# Version 1 is unreleased.
TUNING = Schema("tuning", 1, Tuning, advice="delete it: the same bench tune command derives it from its runs")


def read_record(root: Path) -> Tuning | None:
    """The tune whose final is the study in a folder; None without one. Raises SchemaError if damaged."""
    path = root / TUNING_FILE
    return TUNING.read(path) if path.exists() else None
