"""The noise of equal runs, and the smallest margin that a number of runs can judge in this noise.

`bench doctor --noise` launches a small cell several times, and measures how much the runs differ.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from scipy.special import chdtri, stdtrit

from harness.features.gate.baselines import save_thresholds
from harness.features.gate.effect import ALPHA, FEWEST_RUNS, QUIET
from harness.features.gate.metrics import TIMED
from harness.features.gate.records.baseline import MetricNoise, Thresholds, machine_model
from harness.features.gate.reduce import reduce_study
from harness.launchers.campaign_call import INTERRUPTED
from harness.machine.device import usable_cores, visible_gpus
from harness.machine.processes import temporary_folder
from harness.matrix import Matrix
from harness.plan.options import read_duration_s
from harness.plan.study_file import StudyFile
from harness.reporting.studies import read_results
from harness.terminal.console import Console
from reports import fields
from reports.fields import Field
from reports.table import TextTable, figures, table, words
from reports.text import percent
from results.cell import BASELINE_STRATEGY, REFERENCE_STRATEGY
from results.errors import BenchError, UsageError
from results.outcome import Outcome
from results.run import RunResult
from results.statistics import t_quantile
from results.store import Study, utc_now

RUNS_A_SIDE = 10
"""The number of runs on each side that a written margin is for."""
CERTAINTY = 0.8
"""The one-sided probability that the noise of a machine does not exceed the assumed noise."""
LARGEST = 0.25
"""The largest margin that is written, because a gate that accepts 25 % is useless."""
GATED = ("step_time", "peak_memory", "startup")
"""Metrics that get a margin. The others are parts or the inverse of these."""
SHORTEST_S = 30.0
"""Approximate time of the fewest launches on a quiet machine."""


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


def measured_noise(budget_s: float) -> Thresholds | None:
    """Run the launches that `budget_s` allows, at least three; None after Ctrl-C.

    Raises UsageError for a budget that is too short, BenchError if the cell does not run here.
    """
    if budget_s < SHORTEST_S:
        raise UsageError(
            f"--budget {budget_s:g}s is too short: {FEWEST_RUNS} launches take {SHORTEST_S:g}s or more; "
            f"give --budget 2m"
        )
    begun = time.monotonic()
    with temporary_folder("bench-noise-") as (folder, _):
        root = folder / "noise"
        if _launches(root, FEWEST_RUNS) == INTERRUPTED:
            return None
        each_s = (time.monotonic() - begun) / FEWEST_RUNS
        more = int((begun + budget_s - time.monotonic()) / each_s)
        if more > 0 and _launches(root, FEWEST_RUNS + more) == INTERRUPTED:
            return None
        return _thresholds(Study(root), time.monotonic() - begun)


def _launches(root: Path, repeats: int) -> int:
    """Add launches until the study has `repeats` runs; each repeat is a separate launch."""
    gpus = len(visible_gpus())
    workers = min(2, gpus or len(usable_cores()))
    options = StudyFile(
        workload="mlp",
        strategy=REFERENCE_STRATEGY if workers == 2 else BASELINE_STRATEGY,
        gpus=str(workers),
        batch_size="128",
        repeats=repeats,
        budget="2s",
        out=str(root),
    )
    return Matrix(options, study_file=None).run(report=False)


def _thresholds(study: Study, seconds: float) -> Thresholds:
    results = read_results(study)
    measured = [result for result in results if result.outcome is Outcome.OK]
    if len(measured) < FEWEST_RUNS:
        why = next((result.reason for result in results if result.outcome is not Outcome.OK), None)
        raise BenchError(
            f"{len(measured)} of {len(results)} launches measured anything, {FEWEST_RUNS} are needed"
            f"{f': {why}' if why else ''}; see that bench matrix --workload mlp --gpus 1 runs here"
        )
    (subject,) = reduce_study(study, results).subjects
    found = noise(measured)
    return Thresholds(
        machine=machine_model(subject.facts) or "unknown",
        measured_at=utc_now(),
        seconds=round(seconds, 1),
        cell=subject.label,
        noise=found,
        fail_above=margins(found),
    )


def measure_noise(budget: str, baselines: Path) -> int:
    """Measure for `budget`, print the noise and keep the margins; returns the exit code."""
    console = Console()
    measured = measured_noise(read_duration_s(budget, "--budget"))
    if measured is None:
        console.warn("the interrupted measurement of the noise is not kept: the next one starts from zero")
        return 130
    console.result(f"{measured.machine}: {measured.cell}, {measured.seconds:.0f} s")
    shown = noise_table(measured.noise, measured.fail_above)
    console.table(shown.titles, shown.texts, numeric=shown.numeric)
    console.result(str(save_thresholds(measured, baselines)))
    for name in GATED:
        if name in measured.noise and name not in measured.fail_above:
            console.warn(
                f"{name} varies too much here for a margin of at most {percent(LARGEST)}: no margin of this "
                f"machine is written; measure more runs, on a quieter machine, or in paired mode"
            )
    return 0
