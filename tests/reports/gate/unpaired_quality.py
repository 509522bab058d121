"""How often the unpaired comparison errs on real launches, of the same code and of planted slow-downs.

The launches are those of a study, which more repeats continue (in this folder, so that the model is found)::

    bench matrix --workload py:waiting_model:plain,py:waiting_model:slow2,py:waiting_model:slow3,\
py:waiting_model:slow5,py:waiting_model:slow10 --gpus 2 --strategy ddp --device cpu --budget 2s --quads 0 \
--out runs/quality --repeats 20

`python unpaired_quality.py runs/quality [REPEATS]` makes calls of its launches, in the order in which they
ran: BASE is REPEATS launches in a row (5), NEW the next ones. Of the same code every such call is counted
once, and resampled ones beside it: REPEATS of twice as many launches in a row, against as many of those that
follow.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from scipy.stats import beta

from reports.gate.comparison import Rules, Verdict, compare
from reports.gate.reduce import reduce_study
from results.baseline import Baseline
from results.run import RunResult
from results.store import Study

RESAMPLED = 2000
Runs = Sequence[RunResult]


def side(study: Study, runs: Runs) -> Baseline:
    """The runs of one cell as a side of a comparison; whatever the cell, it is called the same."""
    whole = reduce_study(study, runs)
    (measured,) = (subject for subject in whole.subjects if subject.runs)
    # A planted wait is a model of its own, and its source is under test.
    alike = msgspec.structs.replace(measured, key="cell", label="cell")
    return msgspec.structs.replace(whole, subjects=(alike,))


def verdict(study: Study, base: Runs, new: Runs) -> Verdict:
    """Of the step time, as `bench compare` gives it with its default margins."""
    found = compare(side(study, base), side(study, new), Rules(margins={}))
    return next(one.verdict for one in found.findings if one.metric == "step_time")


def upper_bound(errors: int, calls: int) -> float:
    """Of a rate, with 95 % confidence (Clopper-Pearson)."""
    return 1.0 if errors == calls else float(beta.ppf(0.95, errors + 1, calls - errors))


def told(kind: str, verdicts: Sequence[Verdict]) -> str:
    count, calls = Counter(verdicts), len(verdicts)
    alarms = count[Verdict.REGRESSED]
    rates = " | ".join(f"{count[one]}" for one in (Verdict.UNCHANGED, Verdict.INCONCLUSIVE, Verdict.IMPROVED))
    return f"| {kind} | {calls} | {alarms} | {upper_bound(alarms, calls):.1%} | {rates} |"


def calls_in_a_row(study: Study, base: Runs, new: Runs, repeats: int) -> list[Verdict]:
    """BASE from one stretch of launches, NEW from the next: each launch is in one call."""
    starts = range(0, min(len(base), len(new)) - 2 * repeats + 1, 2 * repeats)
    return [verdict(study, base[at : at + repeats], new[at + repeats : at + 2 * repeats]) for at in starts]


def resampled(study: Study, runs: Runs, repeats: int) -> list[Verdict]:
    rng = np.random.default_rng(1)
    found = []
    for _ in range(RESAMPLED if len(runs) >= 4 * repeats else 0):
        at = int(rng.integers(len(runs) - 4 * repeats + 1))
        halves = runs[at : at + 2 * repeats], runs[at + 2 * repeats : at + 4 * repeats]
        base, new = ([half[i] for i in rng.choice(2 * repeats, repeats, replace=False)] for half in halves)
        found.append(verdict(study, base, new))
    return found


def spread(runs: Runs) -> str:
    logs = np.log([run.step_ns.value for run in runs if run.step_ns is not None])
    return f"{np.exp(logs.mean()) / 1e6:.3g} ms, standard deviation {logs.std(ddof=1):.1%}"


def main(folder: Path, repeats: int) -> None:
    study = Study.existing(folder)
    by_kind: dict[str, list[RunResult]] = {}
    measured = [run for run in study.results() if run.step_ns is not None]
    for run in sorted(measured, key=lambda run: run.started_at or ""):
        by_kind.setdefault(study.cell(run.cell_id).workload.rpartition(":")[2], []).append(run)
    by_kind = dict(sorted(by_kind.items(), key=lambda item: (len(item[0]), item[0])))
    for kind, runs in by_kind.items():
        print(f"{kind}: {len(runs)} launches, step {spread(runs)}")
    print("\n| calls | number | regressed | upper 95 % bound | unchanged | inconclusive | improved |")
    print("|---|---|---|---|---|---|---|")
    plain = by_kind.pop("plain")
    print(told("same code", calls_in_a_row(study, plain, plain, repeats)))
    if again := resampled(study, plain, repeats):
        print(told("same code, resampled (not independent)", again))
    for kind, runs in by_kind.items():
        print(told(f"+{kind.removeprefix('slow')} %", calls_in_a_row(study, plain, runs, repeats)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5)
