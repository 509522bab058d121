"""Files of every version read to the same for ever: `golden/NAME-VERSION.json`."""

from __future__ import annotations

from pathlib import Path

from golden_laws import GoldenLaws

import results.schemas
from results.schema import Schema


class TestGolden(GoldenLaws):
    golden = Path(__file__).with_name("golden")
    schemas = tuple(value for value in vars(results.schemas).values() if isinstance(value, Schema))
