"""Files of the gate of every version read to the same for ever."""

from __future__ import annotations

from pathlib import Path

from golden_laws import GoldenLaws

from harness.features.gate.records.baseline import BASELINE, THRESHOLDS
from harness.features.gate.records.paired import PAIR, PAIRED_CALL


class TestGolden(GoldenLaws):
    golden = Path(__file__).with_name("golden")
    schemas = (BASELINE, THRESHOLDS, PAIR, PAIRED_CALL)
