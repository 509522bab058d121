"""The notebook of the docs runs, on a study as `bench matrix` leaves one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs/notebooks/load_a_study.ipynb"


@pytest.fixture
def notebook() -> dict[str, Any]:
    return json.loads(NOTEBOOK.read_text(encoding="ascii"))


def code(notebook: dict[str, Any]) -> dict[str, str]:
    return {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"}


def test_it_is_a_notebook_of_version_4_without_outputs(notebook) -> None:
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(ids) == len(set(ids))
    for cell in notebook["cells"]:
        # The fields that version 4.5 asks for, and no other.
        fields = {"cell_type", "id", "metadata", "source"}
        if cell["cell_type"] == "code":
            fields |= {"execution_count", "outputs"}
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
        assert cell.keys() == fields


def test_a_study_is_loaded_in_four_lines(notebook) -> None:
    lines = [line for line in code(notebook)["load"].splitlines() if line]
    assert len(lines) <= 4


def test_its_code_runs(notebook, small, tmp_path, monkeypatch) -> None:
    (tmp_path / "runs").mkdir()
    small.study.root.rename(tmp_path / "runs/my-study")
    monkeypatch.chdir(tmp_path)
    with mpl.rc_context({"backend": "agg"}):
        names: dict[str, Any] = {}
        for name, source in code(notebook).items():
            exec(compile(source, name, "exec"), names)
        (axes,) = names["figure"].axes
        names["plt"].close("all")
    assert len(names["cells"]) == 6
    drawn = {
        label: bars[0].get_ydata().tolist()
        for bars, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    # One device in 10 ms; two in 12.5 and four in 16 ms.
    assert drawn == {
        "gpt-nano, ddp + none": pytest.approx([0.8, 0.625]),
        "gpt-nano, single + none": [1.0],
    }
    spread = names["counted"].groupby("cell_id")["step_ns"].mean()
    assert sorted(spread) == [10e6, 12.5e6, 16e6, 25e6, 40e6]
    assert list(names["budget"]) == [f"{part} (ms)" for part in names["parts"]]
