"""Approved text: what a page, a script or a list of messages says as a whole, reviewed as a diff.

`APPROVE=1 pytest FILE` writes the text of the tests in a file anew.
"""

from __future__ import annotations

import os
from pathlib import Path


def approved(path: Path, text: str) -> None:
    """Fail if the text is not what the file holds; with APPROVE set, write it there."""
    if os.environ.get("APPROVE"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{path} differs: review it with APPROVE=1 and git diff"
