"""The script that scores laws on published tables and learns their residuals (docs/evidence.md)."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from types import ModuleType

import pytest
from packages import module_at

from harness.features.project.laws import CONSTANT

HEADS = ("source", "url_or_repo_path", "model", "hardware", "gpus", "strategy", "batch_per_gpu", "seq_len")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return module_at(Path(__file__).parents[3] / "docs" / "studies" / "projection_tables.py")


@pytest.fixture
def table(tmp_path) -> Path:
    """Write a table: family `a` has a series with 64 GPUs 4 % slower and an ambiguous one, `b` two sizes."""
    rows = [("a", "m", 16, "1600"), ("a", "m", 32, "3200"), ("a", "m", 64, str(6400 / 1.04))]
    rows += [("a", "twice", 16, "1"), ("a", "twice", 16, "2"), ("a", "twice", 32, "3")]
    rows += [("b", "m", 8, "800"), ("b", "m", 16, "1600"), ("b", "m", 32, "not measured")]
    path = tmp_path / "table.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*HEADS, "throughput", "unit", "notes"])
        for source, model, gpus, throughput in rows:
            line = (source, f"of {source}", model, "h100", gpus, "DDP", 8, 2048)
            writer.writerow([*line, throughput, "samples/s total", ""])
    return path


def test_series_are_read_and_their_residuals_are_by_hand(tables, table) -> None:
    families, addresses = tables.read(table)
    assert {source: [[*one] for one in series] for source, series in families.items()} == {
        "a": [[16, 32, 64]],
        "b": [[8, 16]],
    }
    found = tables.learnt(families, addresses)
    [a, b] = found.families
    assert (a.address, b.residuals) == ("of a", ())
    # 64 from 16 and 32; 32 and 64 from 16 alone are refused, and so is 16 from 8, another node.
    [one] = a.residuals
    assert (one.gpus, one.law) == ((32, 64), CONSTANT)
    assert one.errors[CONSTANT] == pytest.approx(math.log(1.04), abs=1e-5)


def test_a_table_of_another_family_is_scored_by_the_shipped_bands(tables, table) -> None:
    families, _ = tables.read(table)
    residuals = tables.shipped()
    lines = [*tables.report([*tables.predictions(families, residuals)], residuals)]
    assert lines[0].startswith("1 of 4 predictions are answered")
    # 4 % slower is within the band, which reaches further towards slower.
    assert any(line.startswith("| a | 2x | 1 | 3.8 % | 3.8 % | 1 of 1 |") for line in lines)
