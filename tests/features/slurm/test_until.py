"""`bench matrix --until` on a real Slurm: rounds of jobs, waited for or submitted by jobs."""

from __future__ import annotations

import pytest

pytest.importorskip("harness.features.until.rounds")
pytestmark = pytest.mark.slow
CALL = (
    *("matrix", "--workload", "mlp", "--gpus", "1,2", "--device", "cpu"),
    *("--strategy", "single,ddp", "--batch-size", "32", "--budget", "0", "--quads", "0", "--until", "0.5"),
    *("--launcher", "slurm", "--out", "study"),
)


def _rounds(bench) -> list[int]:
    return [plan.round.number for plan in bench.study().plans()]


@pytest.mark.long
def test_a_call_that_waits_runs_round_after_round_and_reports(lab, bench) -> None:
    done = bench(*CALL, "--feed", "wait")
    assert done.code == 0, done.stderr
    assert len(_rounds(bench)) >= 3
    assert "Growth" in (bench.study().root / "report.html").read_text()


def test_jobs_submit_the_rounds_after_the_first_one(lab, bench) -> None:
    done = bench(*CALL, "--feed", "depend")
    assert done.code == 0, done.stderr
    bench.settle()
    assert len(_rounds(bench)) >= 3
    assert (bench.study().root / "report.html").exists()
