"""The noise of equal runs, and the smallest margin that a number of runs can judge in this noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import numpy as np
from scipy.special import chdtri, stdtrit

from harness.features.gate.effect import ALPHA, FEWEST_RUNS, QUIET
from harness.features.gate.metrics import TIMED
from harness.features.gate.records.baseline import MetricNoise
from reports import fields
from reports.fields import Field
from reports.table import TextTable, figures, table, words
from results.run import RunResult
from results.statistics import t_quantile

RUNS_A_SIDE = 10
"""The number of runs on each side that a written margin is for."""
CERTAINTY = 0.8
"""The one-sided probability that the noise of a machine does not exceed the assumed noise."""
LARGEST = 0.25
"""The largest margin that is written, because a gate that accepts 25 % is useless."""
GATED = ("step_time", "peak_memory", "startup")
"""Metrics that get a margin. The others are parts or the inverse of these."""


def noise(runs: Sequence[RunResult]) -> dict[str, MetricNoise]:
    """The noise of each metric of which at least `FEWEST_RUNS` runs have a positive figure."""
    # The relative standard errors of runs' mean step times by their batch means (`within_run`).
    errors = [
        (step.high - step.low) / 2 / t_quantile(step.samples - 1) / step.value
        for run in runs
        if (step := run.step_ns) is not None and step.low is not None and step.high is not None
    ]
    found = {}
    for name, metric in TIMED.items():
        values = [value for run in runs if (value := metric.read(run)) is not None and value > 0]
        if len(values) >= FEWEST_RUNS:
            found[name] = MetricNoise(
                runs=len(values),
                between=float(np.log(values).std(ddof=1)),
                within=median(errors) if errors and name == "step_time" else None,
            )
    return found


def margin(known: MetricNoise, runs: int, rows: int) -> float:
    """The smallest margin that `runs` runs on each side can always judge, among `rows` judged rows.

    An interval that is at most as wide as from QUIET x margin to the margin never contains both
    (`runs_that_tell`). The standard deviation is taken at its upper bound (chi-square, `CERTAINTY`).
    """
    freedom = known.runs - 1
    deviation = known.between * math.sqrt(freedom / float(chdtri(freedom, CERTAINTY)))
    half = float(stdtrit(2 * runs - 2, 1 - ALPHA / rows)) * deviation * math.sqrt(2 / runs)
    return 2 * half / (1 - QUIET)


def margins(found: dict[str, MetricNoise]) -> dict[str, float]:
    """Choose margins by metric, in whole percents, between the default margin of the metric and `LARGEST`."""
    wanted = {
        name: max(
            TIMED[name].margin or 0.0,
            math.ceil(100 * margin(found[name], RUNS_A_SIDE, len(GATED))) / 100,
        )
        for name in GATED
        if name in found
    }
    return {name: share for name, share in wanted.items() if share <= LARGEST}


def noise_table(found: dict[str, MetricNoise], written: dict[str, float]) -> TextTable:
    """One row for each metric: its noise, the margin that it allows, and the margin that is written."""
    return table(
        found.items(),
        [
            words("metric", lambda row: TIMED[row[0]].title),
            figures("runs", lambda row: Field(str(row[1].runs))),
            figures("between launches", lambda row: fields.percent(row[1].between)),
            figures("within a launch", lambda row: fields.percent(row[1].within)),
            figures(
                f"{RUNS_A_SIDE} runs a side can judge",
                lambda row: fields.percent(margin(row[1], RUNS_A_SIDE, len(GATED))),
            ),
            figures("margin", lambda row: fields.percent(written.get(row[0]))),
        ],
    )
