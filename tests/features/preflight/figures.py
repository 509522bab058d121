"""A study with runs on a node that a preflight has found slow."""

from __future__ import annotations

from dataclasses import replace

from harness.features.preflight.section import Preflighted
from harness.features.preflight.verdict import NodeVerdict, Verdict
from reports.analysis.study import StudyFigures


def a_verdict(slow: str = "n2", host: str = "host-2") -> Verdict:
    """The verdict on two nodes, of which the second is slow."""
    found = {"products": 4e14, "all-reduce with another over nccl": 9e10}
    return Verdict(
        measured_at="2026-01-02T03:04:05.000Z",
        slow_below=0.85,
        nodes=(
            NodeVerdict(name="n1", host="host-1", figures=found),
            NodeVerdict(
                name=slow, host=host, figures=found | {"products": 1e14}, faults=(f"{slow} is slow",)
            ),
        ),
        notes=("An all-reduce over all nodes has 90 GB/s over nccl.",),
    )


def shown(study: StudyFigures, words: str) -> StudyFigures:
    ids = frozenset(run.run_id for pool in study.pools.values() for run in pool.every)
    found = Preflighted(a_verdict(words, words), {words: ids})
    return replace(study, added={**study.added, "preflight": found})
