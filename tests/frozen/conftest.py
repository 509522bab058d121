"""Golden files of what must never change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Frozen = Callable[[str, Any], Any]


@pytest.fixture
def frozen() -> Frozen:
    """`frozen("ids.json", found)` is what the golden file holds.

    Where it does not exist it is written from `found`, and the test fails: look at it, then commit it.
    """

    def golden(name: str, found: Any) -> Any:
        path = Path(__file__).with_name(name)
        if not path.exists():
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            pytest.fail(f"{name} did not exist and was written: read it, then commit it")
        return json.loads(path.read_text(encoding="utf-8"))

    return golden
