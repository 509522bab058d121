"""The modules of bench, parsed once for all laws about their text."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("harness", "reports", "results", "slurm", "strategies", "workloads")


@cache
def sources() -> dict[str, ast.Module]:
    """The modules by their files. A test file that asks for them is in the group `sources`."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return {file.relative_to(ROOT).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}
