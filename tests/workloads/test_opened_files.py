"""The files that a `py:` workload opens while it is built are known, and opening is as before afterwards."""

from __future__ import annotations

import builtins
import io
import os
from pathlib import Path

from workloads.build import build_workload
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


def test_files_that_are_read_are_known_and_those_that_are_written_are_not(tmp_path: Path) -> None:
    before = builtins.open, io.open, os.open
    (tmp_path / "opening.py").write_text(MODEL)
    for name in "abc":
        (tmp_path / f"{name}.json").write_text("{}")
    build_workload("py:opening:build", source_folder=tmp_path)
    assert (builtins.open, io.open, os.open) == before
    assert list(opened_files("opening:build", tmp_path)) == ["a.json", "b.json", "c.json"]
