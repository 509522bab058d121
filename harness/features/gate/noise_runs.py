"""`bench doctor --noise`: launch a small cell several times, and measure how much the runs differ."""

from __future__ import annotations

import time
from pathlib import Path

from harness.features.gate.baselines import save_thresholds
from harness.features.gate.effect import FEWEST_RUNS
from harness.features.gate.noise import GATED, LARGEST, margins, noise, noise_table
from harness.features.gate.records.baseline import Thresholds, machine_model
from harness.features.gate.reduce import reduce_study
from harness.launchers.campaign_call import INTERRUPTED
from harness.machine.device import usable_cores, visible_gpus
from harness.machine.processes import temporary_folder
from harness.matrix import Matrix
from harness.plan.options import read_duration_s
from harness.plan.study_file import StudyFile
from harness.reporting.studies import read_results
from harness.terminal.console import Console
from reports.text import percent
from results.cell import BASELINE_STRATEGY, REFERENCE_STRATEGY
from results.errors import BenchError, UsageError
from results.outcome import Outcome
from results.store import Study, utc_now

SHORTEST_S = 30.0
"""Approximate time of the fewest launches on a quiet machine."""


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
    table = noise_table(measured.noise, measured.fail_above)
    console.table(table.titles, table.texts, numeric=table.numeric)
    console.result(str(save_thresholds(measured, baselines)))
    for name in GATED:
        if name in measured.noise and name not in measured.fail_above:
            console.warn(
                f"{name} varies too much here for a margin of at most {percent(LARGEST)}: no margin of this "
                f"machine is written; measure more runs, on a quieter machine, or in paired mode"
            )
    return 0
