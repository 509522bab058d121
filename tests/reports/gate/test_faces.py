"""What CI reads of a comparison: its exact texts, and formats checked by their own readers."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from reports.gate.comparison import Comparison, Rules, compare
from reports.gate.faces import FACES, MOST_ANNOTATIONS
from reports.gate.text import headline, markdown, rows
from results.baseline import Baseline, Subject

STEP = (100e6, 100.1e6, 99.9e6)


def side(name: str, factor: float, subjects: int = 1, **fields: object) -> Baseline:
    times = tuple(factor * value for value in STEP)
    found = [
        Subject(key=f"{n}", label=f"mlp, ddp | {n}", timed={"step_time": times}, **fields)
        for n in range(subjects)
    ]
    return Baseline(name=name, measured_at="", subjects=tuple(found))


@pytest.fixture
def slower() -> Comparison:
    return compare(
        side("before", 1, exact={"payload_bytes": (10,)}),
        side("after", 1.1, exact={"payload_bytes": (10,)}),
        Rules(margins={}),
    )


def test_the_summary_has_a_table_of_what_changed(slower: Comparison) -> None:
    assert headline(slower) == "1 regressed, 1 unchanged: after against before"
    assert len(rows(slower, every=False)) == 1
    assert len(rows(slower, every=True)) == 2
    text = markdown(slower)
    assert "| regressed | mlp, ddp \\| 0 | step time | 100 ms | 110 ms | +10.0 % |" in text
    assert "Intervals of 98.0 %, corrected for 1 comparison" in text


def test_junit_counts_failures_and_names_them(slower: Comparison) -> None:
    suite = ElementTree.fromstring(FACES["junit"](slower))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "1", "0")
    (failure,) = suite.iter("failure")
    assert failure.get("type") == "regressed"
    assert "100 ms to 110 ms" in str(failure.get("message"))


def test_annotations_escape_what_would_end_them_and_are_at_most_ten_a_level() -> None:
    many = compare(side("before", 1, 15), side("after", 1.1, 15), Rules(margins={}))
    lines = FACES["github"](many).splitlines()
    assert len([line for line in lines if line.startswith("::error title=")]) == MOST_ANNOTATIONS
    assert "::error::5 more, in the summary" in lines
    assert lines[0].startswith(
        "::error title=regressed%3A step time of mlp%2C ddp | 0::step time of mlp, ddp"
    )
    assert "+10.0 %25" in lines[0]


def test_machine_formats_hold_the_figures_of_new(slower: Comparison) -> None:
    bencher = json.loads(FACES["bencher"](slower))
    assert bencher == {"mlp, ddp | 0": {"latency": {"value": pytest.approx(110e6)}}}
    (action,) = json.loads(FACES["github-action-benchmark"](slower))
    assert action["unit"] == "ns"
    assert action["value"] == pytest.approx(110e6)
    whole = json.loads(FACES["json"](slower))
    assert whole["exit_code"] == 1
    assert [finding["verdict"] for finding in whole["findings"]] == ["regressed", "unchanged"]
