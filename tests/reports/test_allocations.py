"""The same cell in several allocations, with planted times."""

from __future__ import annotations

import pytest
from builders import an_environment
from launching import a_result

from reports.analysis.study import drift
from reports.page.sections.environment import allocations_finding
from results.outcome import Outcome
from results.run import RunResult
from results.statistics import Metric


def ran(cell: str, allocation: str | None, step_ms: float, **changes: object) -> RunResult:
    facts = {
        "run_id": f"{cell}-{allocation}-{step_ms}",
        "environment": an_environment(host="n1", allocation=allocation),
        "fingerprint": "f",
        "step_ns": Metric(value=step_ms * 1e6, unit="ns", low=None, high=None, samples=1, interval=None),
    }
    return a_result(cell_id=cell, **facts | changes)


def test_allocations_are_compared_by_the_cell_that_most_of_them_ran() -> None:
    found = drift(
        [
            ran("base", "slurm 1", 9.0),
            # The mean of 10 and 14 is 12.
            ran("base", "slurm 2", 10.0),
            ran("base", "slurm 2", 14.0),
            ran("base", "slurm 3", 10.0),
            ran("other", "slurm 2", 99.0),
            ran("other", "slurm 3", 1.0),
        ]
    )
    assert found.cell_id == "base"
    # The median of 9, 12 and 10 is 10.
    assert found.ratios == pytest.approx({"slurm 1": 0.9, "slurm 2": 1.2, "slurm 3": 1.0})
    assert "from 0.900 to 1.200 of their median" in allocations_finding(found)


def test_incomparable_values_are_not_compared() -> None:
    one = [ran("base", "slurm 1", 9.0), ran("base", "slurm 1", 9.0), ran("base", None, 9.0)]
    assert drift(one) is None
    failed = ran("base", "slurm 2", 1.0, outcome=Outcome.CRASHED)
    assert drift([*one, failed]) is None
    elsewhere = [ran("base", "slurm 2", 9.0), ran("base", "slurm 3", 1.0, fingerprint="other")]
    found = drift([*one, *elsewhere])
    assert [*found.ratios] == ["slurm 1", "slurm 2"]
    assert found.others == 1
    assert allocations_finding(found).endswith(
        "1 allocation with other machines, software or code: not compared."
    )
