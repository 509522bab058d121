"""`bench site`: an index of studies, their pages, and the nights, as a static folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from harness.cli import run
from harness.features.review import site
from harness.features.review.index import answer_of
from reports.analysis.study import StudyFigures

STEP_ROW = (
    b'\n{"event":"steps","at":"2026-01-01T00:00:00Z","step":1,"epoch":1.0,"samples":8,"loss":1.0,'
    b'"seconds":1.0,"learning_rate":0.1}\n'
)
STEPS = {"before": 10.0, "team/after": 12.0}


@pytest.fixture
def runs(new_study, tmp_path) -> Path:
    """Two studies, the second 20 % slower and with a cell that was not run, and a damaged one."""
    for number, (name, step) in enumerate(STEPS.items()):
        planted = new_study(tmp_path / "runs" / name, runs_before=10 * number)
        cells = planted.series("weak", "ddp", [2, 4], batch=8)
        planted.plan()
        planted.runs(cells[0], [step * (1 + 0.001 * at) for at in range(6)])
        if number == 0:
            planted.runs(cells[1], [step] * 6)
    (tmp_path / "runs" / "torn").mkdir()
    (tmp_path / "runs" / "torn" / "plan-0001.json").write_text("{")
    return tmp_path / "runs"


def rows(index: str) -> list[list[str]]:
    body = index.partition("<tbody>")[2].partition("</tbody>")[0]
    return [
        [re.sub("<[^>]+>", "", cell).strip() for cell in re.findall(r"<td.*?</td>", row, re.DOTALL)]
        for row in body.split("</tr>")[:-1]
    ]


def test_the_index_has_a_row_a_study_with_what_changed(runs, tmp_path) -> None:
    public = tmp_path / "public"
    assert run(["site", str(runs), "--output", str(public)]) == 0
    index = (public / "index.html").read_text(encoding="utf-8")
    after, before = [row for row in rows(index) if row[0] != "torn"]
    assert (after[0], before[0], before[4]) == ("team/after", "before", "-")
    assert after[4] == "ddp on 2: 20.0 % slower; 1 of 1 cell changed since before"
    assert after[6] == "1 not run"
    for page in re.findall(r'<td><a href="([^"]+)"', index):
        assert "In short" in (public / page).read_text(encoding="utf-8")


def test_studies_with_damaged_files_are_rows_and_darken_no_other(runs, tmp_path, monkeypatch, capsys) -> None:
    [cell, *_] = sorted((runs / "before" / "cells").iterdir())
    (cell / "training").mkdir()
    (cell / "training" / "log.jsonl").write_bytes(
        b'{"event":"started","at":"20\n' + b'{"a":' * 100_000 + STEP_ROW
    )

    def unforeseen(study: StudyFigures) -> str:
        return str([][1]) if study.name == "team/after" else real(study)

    real = site.render_figures
    monkeypatch.setattr(site, "render_figures", unforeseen)
    public = tmp_path / "public"
    assert run(["site", str(runs), "--output", str(public)]) == 0
    found = {row[0]: row[3] for row in rows((public / "index.html").read_text(encoding="utf-8"))}
    assert set(found) == {"torn", "team/after", "before"}
    assert found["torn"].startswith("it has no page: ")
    assert "plan-0001.json is not a readable plan" in found["torn"]
    assert found["team/after"].startswith("it has no page: IndexError: list index out of range")
    assert [path.name for path in (public / "studies").rglob("*.html")] == ["before.html"]
    assert "1 of its 1 rows have no start of a training before them" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_study_is_compared_with_the_last_one_of_its_plan_and_not_with_one_that_shares_a_cell(
    runs, tmp_path, new_study
) -> None:
    """The newest study is 8 % slower than the study of its plan, and 18 % slower than the other one in
    the cell that both have."""
    plans = {"between": {"ddp": [2], "fsdp": [2]}, "newest": {"ddp": [2, 4]}}
    for number, (name, step) in enumerate({"between": 12.96 / 1.18, "newest": 12.96}.items(), 1):
        study = new_study(runs / name, runs_before=100 * number)
        series = [study.series("weak", *curve, batch=8) for curve in plans[name].items()]
        study.plan()
        for cell in [cell for cells in series for cell in cells]:
            study.runs(cell, [step * (1 + 0.001 * at) for at in range(6)])
    public = tmp_path / "public"
    run(["site", str(runs), "--output", str(public)])
    changes = {row[0]: row[4] for row in rows((public / "index.html").read_text(encoding="utf-8"))}
    assert changes["between"] == "-"
    assert changes["newest"] == "ddp on 2: 8.0 % slower; 1 of 1 cell changed since team/after"


def test_the_answers_of_all_workloads_are_shown(planted) -> None:
    for workload in ("gpt-nano", "mlp"):
        for cell in planted.series("weak", "ddp", [2, 4], batch=8, workload=workload):
            planted.runs(cell, [10.0] * 3)
    planted.plan()
    answer = answer_of(planted.analysed())
    assert "gpt-nano: " in answer
    assert ". mlp: " in answer


def test_a_page_as_new_as_its_study_is_kept_and_an_older_one_or_a_foreign_one_is_not(runs, tmp_path) -> None:
    page, public = tmp_path / "public" / "studies" / "before.html", tmp_path / "public"
    run(["site", str(runs), "--output", str(public)])
    page.write_text("mine", encoding="utf-8")
    run(["site", str(runs), "--output", str(public)])
    assert page.read_text(encoding="utf-8") == "mine"
    os.utime(page, (0, 0))
    run(["site", str(runs), "--output", str(public)])
    assert "In short" in page.read_text(encoding="utf-8")
    shutil.rmtree(runs / "before")
    run(["site", str(runs), "--output", str(public)])
    assert not page.exists()


def test_a_redacted_site_has_no_host_and_no_name_of_a_folder(runs, tmp_path) -> None:
    public = tmp_path / "public"
    run(["site", str(runs), "--output", str(public)])
    run(["site", str(runs), "--output", str(public), "--redact"])
    for secret in ("node-a", "team", str(tmp_path)):
        assert not [path for path in public.rglob("*.html") if secret in path.read_text(encoding="utf-8")]
        assert not [path for path in public.rglob("*") if secret in path.relative_to(public).as_posix()]
    assert "20.0 % slower" in (public / "index.html").read_text(encoding="utf-8")


def test_a_folder_without_studies_is_refused(tmp_path, capsys) -> None:
    assert run(["site", str(tmp_path)]) == 2
    assert "has no study" in capsys.readouterr().err


@pytest.mark.slow
def test_the_served_index_is_searched_in_the_browser(runs, tmp_path) -> None:
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("no Chromium on the path")
    served = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "harness.cli",
            "site",
            str(runs),
            "--output",
            str(tmp_path / "public"),
            "--serve",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert served.stdout is not None
        address = next(line for line in served.stdout if line.startswith("http://127.0.0.1:")).split()[0]
        with urllib.request.urlopen(address) as page:
            assert len(rows(page.read().decode())) == 3
        found = subprocess.run(
            [
                *(program, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
                *(f"--user-data-dir={tmp_path}/chromium", f"{address}#~filter=after"),
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    finally:
        served.terminate()
        served.communicate()
    assert "1 of 3 rows shown" in found
