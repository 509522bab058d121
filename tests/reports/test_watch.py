"""`bench report --watch`: the page of a running study says what runs, and its last page is the usual one."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import a_launch

from harness.cli import run, study
from results.files import study_lock
from results.launch import Slot


@pytest.fixture
def cells(planted, monkeypatch):
    """Two cells in a study of one repeat: the second has not run."""
    made = planted.series("weak", "ddp", [2, 4], batch=8)
    planted.plan(repeats=1)
    planted.runs(made[0], [10.0])
    monkeypatch.chdir(planted.study.root.parent)
    return made


def rows(page: str) -> list[list[str]]:
    body = page.partition('id="running"')[2].partition("</section>")[0]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in body.split("</tr>")[1:-1]]


def test_the_page_follows_a_study_that_a_bench_works_on(planted, cells, monkeypatch, capsys) -> None:
    slot = Slot(run_id="20260102T030405Z-00000f", cell_id=cells[1].id, repeat=0)
    launch = a_launch(slots=(slot,), job_id=None)
    pages: list[str] = []
    page = planted.study.root / "report.html"

    def looked(seconds: float) -> None:
        pages.append(page.read_text(encoding="utf-8"))
        if len(pages) == 1:
            planted.study.add_launch(launch)
        if len(pages) == 3:
            held.__exit__(None, None, None)

    monkeypatch.setattr(study, "time", SimpleNamespace(sleep=looked))
    held = study_lock(planted.study.root)
    held.__enter__()
    assert run(["report", "planted", "--watch"]) == 0
    states = [{row[0]: row[1] for row in rows(one)} for one in pages]
    assert [found[cells[1].id] for found in states] == ["to do", "running", "running"]
    assert all("EVERY_MS" in one for one in pages)
    assert pages[1] == pages[2]
    last = page.read_text(encoding="utf-8")
    assert "EVERY_MS" not in last
    assert 'id="running"' not in last
    assert capsys.readouterr().out.count("report: ") == 1
    assert run(["report", "planted"]) == 0
    assert page.read_text(encoding="utf-8") == last


def test_of_a_study_that_nobody_works_on_the_usual_page_is_written_at_once(cells) -> None:
    assert run(["report", "planted", "--watch"]) == 0
    assert "EVERY_MS" not in Path("planted/report.html").read_text(encoding="utf-8")


def test_a_redacted_page_does_not_follow_since_reasons_name_hosts(cells, capsys) -> None:
    assert run(["report", "planted", "--watch", "--redact"]) == 2
    assert "--watch" in capsys.readouterr().err
