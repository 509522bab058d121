"""The file of a review: no entry is lost to another writer or a torn line, and approvals lapse."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from launching import a_result

from results import schemas
from results.errors import NewerSchemaError, StoreError
from results.review import Review, ReviewEntry
from results.run import RunResult
from results.statistics import Metric
from results.store import Study

WRITER = """
import sys
from pathlib import Path
from results.review import ReviewEntry
from results.store import Study

study = Study(Path(sys.argv[1]))
for number in range(100):
    at, why = "2026-01-02T03:04:05Z", f"{sys.argv[2]} {number} " + "x" * 5000
    study.add_to_review([ReviewEntry(at=at, author=sys.argv[2], what="noted", why=why)])
"""


def entry(what: str, *run_ids: str, **fields: object) -> ReviewEntry:
    return ReviewEntry(at="2026-01-02T03:04:05Z", author="Ann", what=what, run_ids=run_ids, **fields)


def run_of(run_id: str, ms: float = 1.0) -> RunResult:
    step = Metric(value=ms * 1e6, unit="ns", low=None, high=None, samples=1, interval=None)
    return a_result(run_id=run_id, step_ns=step)


def test_two_reviewers_at_once_lose_nothing(tmp_path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, name]) for name in ("Ann", "Bob")]
    assert [writer.wait() for writer in writers] == [0, 0]
    review = Study(tmp_path).review()
    assert review.damaged == ()
    for name in ("Ann", "Bob"):
        numbers = [int(one.why.split()[1]) for one in review.entries if one.author == name]
        assert numbers == list(range(100))


def test_a_torn_last_line_is_reported_and_the_next_entry_is_whole(tmp_path) -> None:
    study = Study(tmp_path)
    study.add_to_review([entry("excluded", "a", why="hot"), entry("noted", why="x" * 300)])
    kept = study.review_path.read_bytes()
    study.review_path.write_bytes(kept[:-100])
    review = study.review()
    assert list(review.excluded) == ["a"]
    assert len(review.damaged) == 1
    assert f"line 2 of {study.review_path}" in review.damaged[0]
    study.add_to_review([entry("excluded", "b", why="hot")])
    assert list(study.review().excluded) == ["a", "b"]
    assert study.review().damaged == review.damaged
    assert study.review_path.read_bytes().startswith(kept[:-100])


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("target"), os.mkfifo])
def test_a_link_and_a_fifo_are_not_written_to(tmp_path, make) -> None:
    study = Study(tmp_path)
    make(study.review_path)
    with pytest.raises(StoreError):
        study.add_to_review([entry("noted", why="x")])
    assert [path.name for path in tmp_path.iterdir()] == ["review.jsonl"]


def test_a_line_of_a_newer_program_is_refused_because_it_may_exclude_a_run(tmp_path) -> None:
    line = msgspec.json.decode(schemas.REVIEW.encode(entry("noted", why="x")))
    Study(tmp_path).review_path.write_bytes(msgspec.json.encode({**line, "schema_version": 99}) + b"\n")
    with pytest.raises(NewerSchemaError):
        Study(tmp_path).review()


def test_a_later_entry_takes_an_earlier_one_back() -> None:
    first, back = entry("excluded", "a", "b", why="hot"), entry("included", "a", why="was cool")
    again = entry("excluded", "a", why="hot indeed")
    assert Review((first, back)).excluded == {"b": "excluded by review: hot"}
    assert [*Review((first, back, again)).excluded] == ["b", "a"]


def test_an_approval_holds_for_the_runs_and_exclusions_that_it_saw() -> None:
    runs, out = [run_of("a"), run_of("b")], entry("excluded", "a", why="hot")
    back = entry("included", "a", why="was cool")
    approved = entry("approved", state=Review((out,)).state_of(runs), runs=2)

    def since(*found: RunResult, more: tuple[ReviewEntry, ...] = ()) -> str:
        words, stands = Review((out, approved, *more)).approval(found)
        assert stands == (words == "approved by Ann on 2026-01-02 03:04 UTC")
        return words.partition(" UTC")[2]

    change = ", before a change of its runs or exclusions"
    assert since(*reversed(runs)) == since(*runs, more=(back, out)) == ""
    assert since(*runs, run_of("c")) == ", before 1 further run"
    assert since(*runs, run_of("c"), run_of("d")) == ", before 2 further runs"
    assert since(run_of("a", 2.0), runs[1]) == since(runs[0]) == since(*runs, more=(back,)) == change
    assert Review().approval(runs) == ("", False)
