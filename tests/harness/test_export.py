"""`bench export`, and `bench report` of several studies and without names."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import re
import shutil
from pathlib import Path

import pytest

from harness.cli import run
from results.store import study_names

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def two(small_study, tmp_path) -> list[str]:
    """A study and a copy of it under the same name in another folder."""
    roots = [tmp_path / parent / "study" for parent in ("before", "after")]
    for root in roots:
        shutil.copytree(small_study[0].root, root)
    return list(map(str, roots))


def export(capsys: Capture, *arguments: str) -> str:
    assert run(["export", *arguments]) == 0
    return capsys.readouterr().out


def names_host(text: str) -> bool:
    """Whether a page has this host as a word: hosts may be called `vm`, and pages have hashes and base64."""
    return re.search(rf"(?<![\w+/=-]){re.escape(platform.node())}(?![\w+/=-])", text) is not None


def test_markdown_and_json_go_to_stdout(small_study, capsys) -> None:
    root = str(small_study[0].root)
    assert export(capsys, root, "--format", "markdown").startswith(
        "# study\n\nScaling of distributed training; "
    )
    document = json.loads(export(capsys, root, "--format", "json"))
    assert document["schema"] == "bench/export"
    assert [study["name"] for study in document["studies"]] == ["study"]


def test_one_table_of_csv_goes_to_stdout(small_study, capsys) -> None:
    root = str(small_study[0].root)
    rows = list(csv.DictReader(io.StringIO(export(capsys, root, "--format", "csv", "--table", "runs"))))
    assert {row["run_id"] for row in rows} == {result.run_id for result in small_study[0].results()}


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_all_tables_go_into_a_folder(form, small_study, tmp_path, capsys) -> None:
    out = export(capsys, str(small_study[0].root), "--format", form, "-o", str(tmp_path / "new/tables"))
    written = sorted((tmp_path / "new/tables").iterdir())
    names = ("cells", "losses", "ranks", "runs", "skips")
    assert [path.name for path in written] == [f"{name}.{form}" for name in names]
    assert sorted(out.splitlines()) == list(map(str, written))


def test_a_text_or_one_table_goes_into_a_file(small_study, tmp_path, capsys) -> None:
    root = str(small_study[0].root)
    export(capsys, root, "--format", "markdown", "-o", str(tmp_path / "page.md"))
    assert (tmp_path / "page.md").read_text().startswith("# study")
    export(capsys, root, "--format", "parquet", "--table", "cells", "-o", str(tmp_path / "cells.parquet"))
    assert (tmp_path / "cells.parquet").read_bytes()[:4] == b"PAR1"


WRONG = [
    (["--format", "csv"], "csv is 5 tables: give --output FOLDER, or --table cells|runs|ranks|losses|skips"),
    (["--format", "parquet"], "parquet is binary: give --output FOLDER"),
    (["--format", "json", "--table", "runs"], "--table runs is for csv and parquet"),
    (["--format", "xls"], "'xls' is not one of 'markdown', 'csv', 'json', 'parquet', 'latex'"),
    ([], "--format"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_a_call_that_has_nowhere_to_write_is_refused(arguments, words, capsys) -> None:
    assert run(["export", "absent", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err


def test_several_studies_in_one_report(two, tmp_path, capsys) -> None:
    page = tmp_path / "both.html"
    assert run(["report", *two, "-o", str(page)]) == 0
    out = capsys.readouterr().out
    assert "after/study against before/study, 3 shared cells: " in out
    assert "Studies side by side" in page.read_text()
    rows = list(csv.DictReader(io.StringIO((tmp_path / "both.cells.csv").read_text())))
    assert {row["study"] for row in rows} == {"before/study", "after/study"}


def test_several_studies_need_an_output(two, capsys) -> None:
    assert run(["report", *two]) == 2
    assert "give --output FILE.html" in capsys.readouterr().err


def test_a_study_given_twice_is_refused(two, capsys, tmp_path) -> None:
    assert run(["report", two[0], f"{two[0]}/", "-o", str(tmp_path / "page.html")]) == 2
    assert "is given twice" in capsys.readouterr().err


NAMES = [
    (["a/x", "b/y"], ["x", "y"]),
    (["a/x", "b/x", "c/z"], ["a/x", "b/x", "z"]),
    (["a/1/x", "b/1/x"], ["a/1/x", "b/1/x"]),
    (["x", "a/x"], ["top/x", "a/x"]),
]


@pytest.mark.parametrize(("paths", "names"), NAMES)
def test_studies_are_called_by_as_much_of_their_path_as_tells_them_apart(paths, names) -> None:
    top = Path("/somewhere/top")
    assert study_names([top / path for path in paths]) == names


def test_a_redacted_report_names_no_host_folder_or_user(two, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("LOGNAME", "planteduser")
    page = tmp_path / "page.html"
    assert run(["report", *two, "--redact", "-o", str(page)]) == 0
    texts = [
        page.read_text(),
        (tmp_path / "page.cells.csv").read_text(),
        (tmp_path / "page.runs.csv").read_text(),
    ]
    for text in texts:
        assert not names_host(text)
        assert str(tmp_path) not in text
        assert "planteduser" not in text
        assert "before/" not in text
    assert "study (2)" in texts[1]
    assert "node-1" in texts[2]


@pytest.mark.parametrize("form", ["markdown", "json"])
def test_a_redacted_export_names_no_host(form, small_study, capsys, tmp_path) -> None:
    plain = export(capsys, str(small_study[0].root), "--format", form)
    hidden = export(capsys, str(small_study[0].root), "--format", form, "--redact")
    assert not names_host(hidden)
    assert names_host(plain) == (form == "json")


def test_a_study_that_may_not_be_written_is_exported(two, capsys, monkeypatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in Path(two[0]).rglob("*")}
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    export(capsys, two[0], "--format", "json")
    assert {path: path.stat().st_mtime_ns for path in Path(two[0]).rglob("*")} == before
