"""The gate's figures of a study: its metrics are documented, and a cell that is not proven has failed."""

from __future__ import annotations

from pathlib import Path

from harness.features.gate.metrics import EXACT, TIMED
from harness.features.gate.reduce import reduce_study
from results.record import Proof

DOCS = Path(__file__).parents[3] / "docs" / "gate.md"
WRONG = Proof(method="serial-simulation", passed=False, detail="gradient of w differs by 0.5")


def test_every_metric_is_in_the_table_of_the_docs() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in (*TIMED, *EXACT) if f"`{name}`" not in text] == []


def test_a_cell_that_is_not_proven_has_failed(planted) -> None:
    planted.points("ddp", {2: [10.5] * 3})
    planted.points("ddp", {8: [11.1] * 3}, proof=WRONG)
    planted.plan()
    subjects = reduce_study(planted.study, planted.study.results()).subjects
    [failed] = [one for one in subjects if one.failed is not None]
    assert failed.failed == f"not proven: {WRONG.detail}"
    assert ", 8 x 8" in failed.label
