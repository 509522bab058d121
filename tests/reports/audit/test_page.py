"""docs/audit.md names everything that is read."""

from __future__ import annotations

import re
from pathlib import Path

from reports.audit.columns import HEADERS, UNITS

PAGE = (Path(__file__).parents[3] / "docs" / "audit.md").read_text()
QUOTED = set(re.findall(r"`([^`\n]+)`", PAGE))


def test_every_name_and_unit_stands_on_the_page() -> None:
    assert HEADERS.keys() - QUOTED == set()
    assert UNITS.keys() - QUOTED == set()
