"""A study that is the final of a search."""

from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as with_fields

from harness.features.tune.records import Contribution, TunedSetting, TunedTrial, Tuning, TuningAnswer
from reports.analysis.study import StudyFigures
from results.outcome import Outcome
from results.statistics import Metric

TUNING = Tuning(
    command="bench tune",
    default="a",
    settings=tuple(TunedSetting(id=one, choices={"strategy": one}) for one in "ab"),
    trials=tuple(
        TunedTrial(setting=one, rung=0, block=1, outcome=Outcome.OK, rate=rate, memory_bytes=2**20)
        for one, rate in (("a", 10.0), ("b", 20.0))
    ),
    answer=TuningAnswer(
        setting="b",
        sentence="Fastest that fits: b.",
        contributions=(
            Contribution(
                choice="strategy",
                value="b",
                instead="a",
                ratio=Metric(value=2.0, unit="x", low=None, high=None, samples=1, interval=None),
            ),
        ),
        remarks=("A remark.",),
        commands=("bench matrix", "bench train"),
    ),
)


def shown(study: StudyFigures, words: str) -> StudyFigures:
    return replace(study, added={**study.added, "tuning": with_fields(TUNING, command=words)})
