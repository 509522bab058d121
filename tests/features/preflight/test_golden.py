"""Files of preflights of every version read to the same for ever."""

from __future__ import annotations

from pathlib import Path

from golden_laws import GoldenLaws

from harness.features.preflight.verdict import PREFLIGHT


class TestGolden(GoldenLaws):
    golden = Path(__file__).with_name("golden")
    schemas = (PREFLIGHT,)
