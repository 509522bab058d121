"""A new axis of strings is named in three files: planning, storing and showing points follow from these."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("harness", "reports", "results", "slurm", "strategies", "workloads")
AXIS = {
    "results/cell.py": {
        "    compression: str = UNCOMPRESSED\n    collective: str = DEFAULT_COLLECTIVE\n    node_size": (
            '    flavour: str = "plain"\n'
        ),
        "    compression: str = UNCOMPRESSED\n    collective: str = DEFAULT_COLLECTIVE\n    link: str": (
            '    flavour: str = "plain"\n'
        ),
    },
    "results/plan.py": {
        "    compression: str | None = None\n": "    flavour: str | None = None\n",
        "    compressions: tuple[str, ...]": '    flavours: tuple[str, ...] = ("plain",)\n',
    },
    "harness/plan/study_file.py": {
        "    compression: Annotated[\n": '    flavour: Annotated[Names, option("a dummy [=plain]")] = None\n'
    },
}
"""Lines of a dummy axis, by the file and by the line that they come before."""
SHOWN = """
import json, msgspec
from pathlib import Path
from reports.analysis.series import merged_series, standing_skips
from reports.page.columns import SKIPS
from harness.plan.expand import expand
from harness.plan.request import make_requests
from harness.plan.study_file import StudyFile
from results.plan import Pattern, Plan
include = [Pattern(workload="mlp", strategy="ddp", gpus=3, batch_size=8, flavour="third")]
options = StudyFile(
    workload="mlp", strategy="ddp", gpus="2,4", batch_size=8, device="cpu", flavour="plain,odd",
    include=include, exclude=[Pattern(flavour="odd", gpus=4)],
)
[request] = make_requests(options, machine_has_cuda=False, source_folder=Path())
made = expand(request, study="s", created_at="")
plan = msgspec.json.decode(msgspec.json.encode(made), type=Plan)
assert plan == made
print(json.dumps({
    "cells": [[cell.flavour, cell.gpus] for cell in plan.cells],
    "series": [[one.key.flavour, list(one.cells), list(one.skips)] for one in merged_series([plan])],
    "skips": [[skip.flavour, skip.gpus, skip.reason] for skip in standing_skips([plan])],
    "columns": [column.name for column in SKIPS],
}))
"""


def test_a_new_axis_is_named_in_three_files(tmp_path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, lines in AXIS.items():
        text = (tmp_path / name).read_text(encoding="utf-8")
        for before, line in lines.items():
            assert text.count(before) == 1, before
            text = text.replace(before, line + before)
        (tmp_path / name).write_text(text, encoding="utf-8")

    def call(*words: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=environment, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = json.loads(call("-c", SHOWN))
    assert shown["cells"] == [["plain", 2], ["plain", 4], ["odd", 2], ["third", 3]]
    assert sorted(shown["series"]) == [["odd", [2], [4]], ["plain", [2, 4], []], ["third", [3], []]]
    assert shown["skips"] == [["odd", 4, "excluded by the study file: flavour odd, gpus 4"]]
    assert "flavour" in shown["columns"]
    words = "matrix --dry-run --workload mlp --strategy ddp --gpus 2 --device cpu --flavour plain,odd"
    assert "2 cells" in call("-m", "harness.cli", *words.split())
