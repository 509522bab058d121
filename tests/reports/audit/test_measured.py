"""The measurement of docs/audit.md on the excerpts of published tables, and its files."""

from __future__ import annotations

import csv
import importlib
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from reports.audit.curves import ABOVE, BETWEEN, FELL

HERE = Path(__file__).parent
EXCERPTS = {
    "scaling": ("llm_foundry", "torchtitan", "dlperf", "pytorch_ddp"),
    "single_node": ("vtrain",),
    "collectives": ("nccl_tests",),
}


@pytest.fixture(scope="module")
def measure() -> Iterator[ModuleType]:
    """The script, which imports the kinds of errors from beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield importlib.import_module("measure")


@pytest.fixture(scope="module")
def excerpts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The excerpts under the names of the tables that they are from."""
    folder = tmp_path_factory.mktemp("excerpts")
    for name, files in EXCERPTS.items():
        rows = []
        for file in files:
            with (HERE / "tables" / f"{file}.csv").open(newline="", encoding="utf-8") as text:
                rows += list(csv.DictReader(text))
        with (folder / f"published_{name}.csv").open("w", newline="", encoding="utf-8") as text:
            writer = csv.DictWriter(text, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return folder


def test_nine_of_ten_planted_errors_are_found(measure: ModuleType, excerpts: Path) -> None:
    score = measure.plant(measure.sources(excerpts, "all"), errors=120)
    assert score.planted.total() == 120
    assert len(score.planted) >= 15
    assert score.share >= 0.9, score.missed


def test_each_label_has_a_reason_and_no_row_is_judged_twice() -> None:
    labels = tomllib.loads((HERE / "labels.toml").read_text())["finding"]
    assert len({(label["table"], label["line"], label["formula"]) for label in labels}) == len(labels) > 0
    assert all(len(label["reason"]) > 40 and isinstance(label["right"], bool) for label in labels)
    assert {label["table"] for label in labels} <= EXCERPTS.keys()
    # The share that docs/audit.md states.
    assert (sum(label["right"] for label in labels), len(labels)) == (20, 21)


def test_the_labels_are_of_formulas_that_exist() -> None:
    labels = tomllib.loads((HERE / "labels.toml").read_text())["finding"]
    known = {ABOVE.formula, BETWEEN.formula, FELL.formula, "more bytes take no less time"}
    assert {label["formula"] for label in labels} == known


def test_the_half_kept_aside_is_that_of_the_seed() -> None:
    split = tomllib.loads((HERE / "sources.toml").read_text())
    names = sorted([*split["aside"], *split["developed_on"]])
    random.Random(16).shuffle(names)
    assert sorted(names[: len(names) // 2]) == split["aside"]
