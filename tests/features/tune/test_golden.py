"""Files of tunes of every version read to the same objects for ever."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from golden_laws import GoldenLaws

from harness.features.tune.records import (
    TUNING,
    Contribution,
    TunedSetting,
    TunedTrial,
    Tuning,
    TuningAnswer,
)
from results.outcome import Outcome
from results.statistics import Metric

TUNED = Tuning(
    command="bench tune --workload gpt-nano --gpus 2",
    default="a",
    refused={"gpt-nano does not take --memory-format channels_last": 4},
    settings=(
        TunedSetting(
            id="b",
            choices={"strategy": "ddp", "micro_batch": "8"},
            state="racing",
            why="is among the fastest so far",
            rate=90.5,
            predicted_rate=80.0,
            predicted_bytes=2048,
        ),
    ),
    trials=(
        TunedTrial(
            setting="b",
            rung=1,
            block=2,
            outcome=Outcome.OUT_OF_MEMORY,
            reason="no memory",
            rate=0.5,
            memory_bytes=1024,
            device_s=3.5,
        ),
    ),
    ended="the race is over",
    final=("b", "a"),
    answer=TuningAnswer(
        setting="b",
        sentence="Fastest that fits: ddp.",
        gain=Metric(value=1.2, unit="x", low=1.1, high=1.3, samples=3, interval="range"),
        contributions=(
            Contribution(
                choice="micro_batch",
                value="8",
                instead="4",
                ratio=Metric(value=1.5, unit="x", low=None, high=None, samples=1, interval=None),
            ),
        ),
        remarks=("--compile rounds differently.",),
        commands=("bench matrix --workload gpt-nano",),
        taken=2,
    ),
)


class TestGolden(GoldenLaws):
    golden = Path(__file__).with_name("golden")
    expected: ClassVar = {"tuning-1": (TUNING, TUNED)}
