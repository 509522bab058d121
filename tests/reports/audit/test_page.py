"""docs/audit.md names everything that is read."""

from __future__ import annotations

import re
from pathlib import Path

from reports.audit.columns import HEADERS, UNITS
from reports.audit.findings import CHECKS

PAGE = (Path(__file__).parents[3] / "docs" / "audit.md").read_text()
QUOTED = set(re.findall(r"`([^`\n]+)`", PAGE))


def test_every_name_and_unit_stands_on_the_page() -> None:
    assert HEADERS.keys() - QUOTED == set()
    assert UNITS.keys() - QUOTED == set()


def test_every_check_stands_on_the_page() -> None:
    assert [check for check in CHECKS if f"\n| {check} |" not in PAGE] == []
