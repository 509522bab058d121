"""The code hash of a run covers the modules that its ranks import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from harness.machine.code import _MEASURED, PACKAGES

ROOT = Path(__file__).parents[2]
NOT_IN_STEPS = {"harness/machine/code.py"}
"""Modules that name the code of a rank, and run before its first cell."""


def _imports(path: Path) -> Iterator[Path]:
    """Files of bench that a file imports, also within functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            place = ROOT.joinpath(*name.split("."))
            if name.split(".")[0] in PACKAGES:
                yield from (
                    file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()
                )


def test_every_file_that_a_rank_imports_is_in_the_code_hash() -> None:
    reached, todo = set[Path](), [ROOT / "harness/worker/__main__.py"]
    while todo:
        path = todo.pop()
        if path not in reached:
            reached.add(path)
            todo += _imports(path)
    covered = [ROOT / part for part in _MEASURED]
    missing = {
        str(path.relative_to(ROOT))
        for path in reached
        if not any(path.is_relative_to(part) for part in covered) and path.read_text().strip()
    }
    assert missing - {"harness/__init__.py"} == NOT_IN_STEPS
    assert all(part.exists() for part in covered)
