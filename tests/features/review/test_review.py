"""`bench review`: excluded runs are in no figure, and the page, the terminal and the gate say so."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

import reports
from harness.cli import run
from harness.launch.tally import Conditions, study_tally
from results.job import RunOptions
from results.store import Study

SLOW = "ddp on 4, batch 8 a replica, run 3"


@pytest.fixture
def study(planted, monkeypatch) -> Study:
    """ddp on 2 and 4; the third run of 4 took 30 ms, the others 10."""
    cells = planted.series("weak", "ddp", [2, 4], batch=8)
    planted.plan()
    planted.runs(cells[0], [10.0, 10.0, 10.0])
    planted.runs(cells[1], [10.0, 10.0, 30.0])
    monkeypatch.chdir(planted.study.root.parent)
    return planted.study


def review(*words: str) -> int:
    return run(["review", "planted", *words, "--author", "Ann Example"])


def exclude(name: str = SLOW) -> None:
    assert review("--exclude", name, "--reason", "node-a was hot, Ann Example saw it") == 0


def row(path: Path, **fields: str) -> dict[str, str]:
    with path.open(newline="", encoding="utf-8") as file:
        (found,) = [one for one in csv.DictReader(file) if fields.items() <= one.items()]
    return found


def test_an_excluded_run_is_in_no_figure_and_comes_back(study, capsys) -> None:
    assert run(["report", "planted"]) == 0
    before = {name: (study.root / name).read_bytes() for name in ("report.html", "cells.csv", "runs.csv")}
    exclude()
    assert run(["report", "planted"]) == 0
    assert "1 of 6 runs excluded by review" in capsys.readouterr().out
    cell = row(study.root / "cells.csv", gpus="4")
    assert (float(cell["step_ns"]), cell["runs"], cell["runs_left_out"]) == (1e7, "2", "1")
    slow = row(study.root / "runs.csv", reason="excluded by review: node-a was hot, Ann Example saw it")
    assert (slow["counted"], slow["gpus"]) == ("False", "4")
    page = (study.root / "report.html").read_text(encoding="utf-8")
    assert re.findall(r'class="run excluded"[^>]*><title>(\S+), ([^<]*)<', page)[0] == (
        slow["run_id"],
        "30.0 ms: excluded by review: node-a was hot, Ann Example saw it",
    )
    assert SLOW in page.partition('id="review"')[2].partition("</section>")[0]
    capsys.readouterr()
    assert run(["export", "planted", "--format", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["studies"]
    (cell_4,) = [one for one in found["cells"] if one["cell"]["gpus"] == 4]
    assert cell_4["runs_left_out"] == {
        slow["run_id"]: "excluded by review: node-a was hot, Ann Example saw it"
    }
    assert found["review"][0]["run_ids"] == [slow["run_id"]]
    assert review("--include", slow["run_id"], "--reason", "it was not") == 0
    study.review_path.rename(study.root / "aside.jsonl")
    assert run(["report", "planted"]) == 0
    assert {name: (study.root / name).read_bytes() for name in before} == before
    (study.root / "aside.jsonl").rename(study.review_path)
    frames = reports.load(study.root)
    assert frames.runs.counted.all()
    assert frames.cells.set_index("gpus").step_ns[4] == pytest.approx(5e7 / 3)


def test_an_excluded_run_does_not_count_as_done(study) -> None:
    exclude()
    plan, results = study.plan(1), study.collect()
    conditions = Conditions.elsewhere(results[0].environment.code)
    done = study_tally(study, plan, results, conditions, RunOptions()).ok_runs
    assert [done[cell.id] for cell in plan.cells] == [3, 2]


def test_a_cell_whose_runs_are_all_excluded_has_no_figure_and_the_next_command_runs_it(study, capsys) -> None:
    for number in (1, 2, 3):
        exclude(f"ddp on 4, batch 8 a replica, run {number}")
    assert run(["report", "planted"]) == 0
    cell = row(study.root / "cells.csv", gpus="4")
    assert (cell["outcome"], cell["step_ns"]) == ("excluded", "")
    assert "node-a was hot" in cell["reason"]
    assert "reviewers excluded its runs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--exclude", "ddp on 4, batch 8 a replica, run 4", "--reason", "x"],
            "did you mean 'ddp on 4, batch 8 a replica, run",
        ),
        (["--exclude", "20260102T030405Z-00000", "--reason", "x"], "did you mean '20260102T030405Z-00000"),
        (["--include", SLOW, "--reason", "x"], "is not excluded"),
        (["--exclude", SLOW], "--reason"),
        (["--reason", "x"], "--reason"),
    ],
)
def test_a_wrong_call_is_a_sentence_and_writes_nothing(study, capsys, words, says) -> None:
    assert review(*words) == 2
    assert says in capsys.readouterr().err
    assert not study.review_path.exists()


def test_several_runs_in_one_call_and_the_list_names_them(study, capsys) -> None:
    names = [f"ddp on 2, batch 8 a replica, run {number}" for number in (1, 2)]
    words = [word for name in names for word in ("--exclude", name)]
    assert review(*words, "--reason", "hot", "--note", "look again", "--approve") == 0
    assert [one.what for one in study.review().entries] == ["excluded", "noted", "approved"]
    capsys.readouterr()
    assert run(["review", "planted"]) == 0
    shown = capsys.readouterr().out
    assert all(re.search(f"{re.escape(name)} .*excluded by review: hot", shown) for name in names)
    assert "approved by Ann Example" in shown
    assert "look again" in shown


def test_the_author_is_the_name_in_git(study, monkeypatch) -> None:
    for name, value in (("COUNT", "1"), ("KEY_0", "user.name"), ("VALUE_0", "Git Name")):
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    assert run(["review", "planted", "--note", "x"]) == 0
    assert study.review().entries[0].author == "Git Name"


def test_a_reviewed_promotion_needs_an_approval_of_the_study_as_it_is(study, planted, capsys) -> None:
    assert run(["baseline", "save", "main", "planted"]) == 0
    promote = ["baseline", "promote", "main", "planted", "--reason", "x", "--reviewed"]
    exclude()
    assert run(promote) == 2
    assert "bench review planted --approve" in capsys.readouterr().err
    assert review("--approve") == 0
    assert run(promote) == 0
    kept = json.loads(Path("baselines/main.json").read_text(encoding="utf-8"))
    assert [subject["runs"] for subject in kept["subjects"]] == [3, 2]
    planted.runs(study.cell(study.cell_ids()[0]), [10.0])
    assert run(promote) == 2
    assert "before 1 further run" in capsys.readouterr().err
    assert run([*promote[:3], "main", *promote[4:]]) == 2
    assert "is not a study" in capsys.readouterr().err


def test_a_study_without_a_review_lists_its_runs(study, capsys) -> None:
    assert run(["review", "planted"]) == 0
    assert SLOW in capsys.readouterr().out


def test_a_damaged_line_is_reported_with_every_report(study, capsys) -> None:
    assert run(["baseline", "save", "main", "planted"]) == 0
    assert review("--approve") == 0
    exclude()
    study.review_path.write_bytes(study.review_path.read_bytes()[:-9])
    # The torn line may have been an exclusion after the approval.
    assert run(["baseline", "promote", "main", "planted", "--reason", "x", "--reviewed"]) == 2
    assert run(["report", "planted"]) == 0
    assert "line 2 of planted/review.jsonl" in capsys.readouterr().err
    assert "Line 2 of planted/review.jsonl" in (study.root / "report.html").read_text(encoding="utf-8")
    with pytest.warns(UserWarning, match="line 2 of"):
        reports.load(study.root)


def test_a_redacted_page_has_no_reviewer_and_no_host_of_a_reason(study) -> None:
    exclude()
    assert review("--approve", "--note", "ask ann@example.org on node-a") == 0
    assert run(["report", "planted", "--redact"]) == 0
    page = (study.root / "report.html").read_text(encoding="utf-8")
    assert "was hot" in page
    assert "approved by user-" in page
    assert not re.findall(r"Ann\b|Example\b(?! CPU)|node-a|ann@", page)


def test_a_site_says_what_was_reviewed(study, tmp_path) -> None:
    assert run(["site", str(tmp_path), "-o", "public"]) == 0
    index = Path("public/index.html")
    assert "review" not in index.read_text(encoding="utf-8")
    exclude()
    assert review("--approve") == 0
    assert run(["site", str(tmp_path), "-o", "public"]) == 0
    assert "1 of 6 runs excluded by review; approved by Ann Example" in index.read_text(encoding="utf-8")
    assert SLOW in Path("public/studies/planted.html").read_text(encoding="utf-8")
