"""The files that a `py:` workload opens while it is built are known, and opening is as before afterwards."""

from __future__ import annotations

import builtins
import io
import os
from pathlib import Path

import pytest

from workloads.build import build_workload, import_builder
from workloads.source import opened_files

MODEL = """
import json
import os
from pathlib import Path

from torch import nn
from workloads import Workload

HERE = Path(__file__).parent


def build():
    with open(HERE / "a.json") as file:
        json.load(file)
    (HERE / "b.json").read_text()
    os.close(os.open(HERE / "c.json", os.O_RDONLY))
    (HERE / "written.json").write_text("{}")
    return Workload(module=nn.Linear(1, 1), step=print, synthetic=print)
"""


CONFIG = """
from pathlib import Path

WIDTH = int((Path(__file__).parent / "width.txt").read_text())
"""
MODELS = """
import config_{0}
from torch import nn
from workloads import Workload


def first():
    return Workload(module=nn.Linear(config_{0}.WIDTH, 1), step=print, synthetic=print)


second = first
"""


@pytest.mark.parametrize("before", ["imported", "first", "second"])
def test_what_a_module_opens_when_it_is_imported_is_of_every_model_that_imports_it(
    tmp_path: Path, before: str
) -> None:
    """In whichever order a process builds them, and where it has imported the module before."""
    (tmp_path / f"config_{before}.py").write_text(CONFIG)
    (tmp_path / f"models_{before}.py").write_text(MODELS.format(before))
    (tmp_path / "width.txt").write_text("3")
    functions = ["first", "second"] if before == "first" else ["second", "first"]
    if before == "imported":
        import_builder(f"py:models_{before}:first", source_folder=tmp_path)
    for function in functions:
        build_workload(f"py:models_{before}:{function}", source_folder=tmp_path)
        assert list(opened_files(f"models_{before}:{function}", tmp_path)) == ["width.txt"]


def test_files_that_are_read_are_known_and_those_that_are_written_are_not(tmp_path: Path) -> None:
    before = builtins.open, io.open, os.open
    (tmp_path / "opening.py").write_text(MODEL)
    for name in "abc":
        (tmp_path / f"{name}.json").write_text("{}")
    build_workload("py:opening:build", source_folder=tmp_path)
    assert (builtins.open, io.open, os.open) == before
    assert list(opened_files("opening:build", tmp_path)) == ["a.json", "b.json", "c.json"]
