"""Columns of CSV and keys of JSON that scripts read: none of them may go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness.cli import run
from reports.analysis.study import analyse
from reports.page.tables import TABLES, export_table

FROZEN = Path(__file__).parents[1] / "frozen/exports.json"


def _keys(value: Any, at: str = "") -> set[str]:
    """The path of each key, `[]` for any item of a list; keys that begin with a digit are ids."""
    if isinstance(value, list):
        return set().union(*(_keys(item, f"{at}[]") for item in value))
    if not isinstance(value, dict):
        return set()
    found = set()
    for key, inside in value.items():
        found |= {f"{at}.{key}", *_keys(inside, f"{at}.{key}")}
    return found


def test_no_column_and_no_key_that_scripts_read_is_gone(small, capsys) -> None:
    root = str(small.study.root)
    study = analyse("one", small.study.plans(), small.study.collect())
    found: dict[str, list[str]] = {
        f"{name}.csv": export_table([study], name, "csv").decode().partition("\n")[0].split(",")
        for name in TABLES
    }
    for call in (
        ["export", root, "--format", "json"],
        ["compare", root, root, "--json"],
        ["status", root, "--json"],
        ["list", "--json"],
        ["doctor", "--json"],
    ):
        run(call)
        found[call[0]] = sorted(_keys(json.loads(capsys.readouterr().out)))
    gone = {name: sorted({*keys} - {*found[name]}) for name, keys in json.loads(FROZEN.read_text()).items()}
    assert {name: keys for name, keys in gone.items() if keys} == {}
