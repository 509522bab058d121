"""Comparisons as CI reads them: the exact words, and formats checked by their own readers."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import jsonschema
import msgspec
import pytest

from harness.features.gate.comparison import Comparison, Rules, compare
from harness.features.gate.effect import Verdict
from harness.features.gate.records.baseline import Baseline, Subject
from harness.features.gate.text import (
    FACES,
    MOST_ANNOTATIONS,
    MOST_ROWS,
    comparison_headline,
    comparison_markdown,
    finding_table,
)

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


def test_the_summary_has_a_table_of_what_changed(slower) -> None:
    assert comparison_headline(slower) == "1 regressed, 1 unchanged: after against before"
    assert len(finding_table(slower, every=False).rows) == 1
    assert len(finding_table(slower, every=True).rows) == 2
    text = comparison_markdown(slower)
    assert "| regressed | mlp, ddp \\| 0 | step time | 100 ms | 110 ms | +10.0 % |" in text
    assert "Intervals of 98.0 %, corrected for 1 comparison" in text


def test_junit_counts_failures_and_names_them(slower) -> None:
    suite = ElementTree.fromstring(FACES["junit"](slower))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("2", "1", "0")
    (failure,) = suite.iter("failure")
    assert failure.get("type") == "regressed"
    assert "100 ms to 110 ms" in str(failure.get("message"))


def test_what_is_not_judged_is_skipped_and_warned_of_only_if_more_runs_would_help(slower) -> None:
    [regressed, counter] = slower.findings
    effect = replace(regressed.effect, value=0.01)
    memory = replace(regressed, metric="peak_memory", verdict=Verdict.INCONCLUSIVE, effect=effect)
    larger = replace(memory, effect=replace(effect, value=0.2))
    shown = replace(regressed, metric="exposed", verdict=Verdict.SHOWN)
    found = replace(slower, findings=(regressed, memory, shown, counter))
    assert ElementTree.fromstring(FACES["junit"](found)).get("skipped") == "2"
    assert "::warning" not in FACES["github"](found)
    assert "::warning" in FACES["github"](replace(found, findings=(larger,)))


def test_annotations_escape_what_would_end_them_and_are_at_most_ten_a_level() -> None:
    many = compare(side("before", 1, 15), side("after", 1.1, 15), Rules(margins={}))
    lines = FACES["github"](many).splitlines()
    # The tenth says how many there are besides.
    assert len([line for line in lines if line.startswith("::error title=")]) == MOST_ANNOTATIONS - 1
    assert "::error::6 more, in the summary" in lines
    assert lines[0].startswith(
        "::error title=regressed%3A step time of mlp%2C ddp | 0::step time of mlp, ddp"
    )
    assert "+10.0 %25" in lines[0]


def test_machine_formats_hold_the_figures_of_new(slower) -> None:
    bencher = json.loads(FACES["bencher"](slower))
    assert bencher == {"mlp, ddp | 0": {"latency": {"value": pytest.approx(110e6)}}}
    (action,) = json.loads(FACES["github-action-benchmark"](slower))
    assert action["unit"] == "ns"
    assert action["value"] == pytest.approx(110e6)
    whole = json.loads(FACES["json"](slower))
    assert whole["exit_code"] == 1
    assert [finding["verdict"] for finding in whole["findings"]] == ["regressed", "unchanged"]


BMF: dict[str, Any] = {
    "type": "object",
    "patternProperties": {
        ".+": {
            "type": "object",
            "patternProperties": {
                ".+": {
                    "type": "object",
                    "properties": {
                        key: {"type": "number"} for key in ("value", "lower_value", "upper_value")
                    },
                    "required": ["value"],
                    "additionalProperties": False,
                }
            },
        }
    },
}
"""Bencher Metric Format, https://bencher.dev/docs/reference/bencher-metric-format."""
CUSTOM: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "unit": {"type": "string", "minLength": 1},
            "value": {"type": "number"},
            "range": {"type": "string"},
            "extra": {"type": "string"},
        },
        "required": ["name", "unit", "value"],
        "additionalProperties": False,
    },
}
"""The fields that github-action-benchmark reads as customSmallerIsBetter."""
JUNIT = {
    "testsuite": {"name", "tests", "failures", "errors", "skipped"},
    "testcase": {"name", "classname"},
    "failure": {"type", "message"},
    "skipped": {"message"},
}
"""Elements and their attributes, of those that the schema of Jenkins and GitLab's parser know."""


@pytest.fixture
def mixed() -> Comparison:
    """Every verdict that a face treats in its own way, with words that a terminal or markup would obey."""
    hostile = "crashed: \x1b[31m<b>&amp;\x00 | rank 1\n::error::no"
    before = side("before", 1, 4, exact={"payload_bytes": (10,)})
    slow, failed, other, few = side("after", 1.1, 4, exact={"payload_bytes": (20,)}).subjects
    after = Baseline(
        name="after",
        measured_at="",
        subjects=(
            slow,
            msgspec.structs.replace(failed, failed=hostile),
            msgspec.structs.replace(other, facts={"torch": "2"}),
            msgspec.structs.replace(few, timed={"step_time": (1.0,)}),
        ),
    )
    return compare(before, after, Rules(margins={}))


def test_machine_formats_are_what_their_readers_publish(mixed) -> None:
    jsonschema.Draft7Validator(BMF).validate(json.loads(FACES["bencher"](mixed)))
    measures = {measure for one in json.loads(FACES["bencher"](mixed)).values() for measure in one}
    assert all(len(measure) <= 64 for measure in measures), "Bencher's limit of a name"
    jsonschema.Draft7Validator(CUSTOM).validate(json.loads(FACES["github-action-benchmark"](mixed)))


def test_junit_is_xml_with_the_elements_that_ci_knows_whatever_a_reason_holds(mixed) -> None:
    suite = ElementTree.fromstring(FACES["junit"](mixed))
    for element in suite.iter():
        assert element.attrib.keys() == JUNIT[element.tag], element.tag
    cases = list(suite)
    assert len(cases) == int(str(suite.get("tests")))
    for kind, total in (("failure", "failures"), ("skipped", "skipped")):
        assert len(list(suite.iter(kind))) == int(str(suite.get(total))) > 0
    assert all(len(case) <= 1 for case in cases)
    assert any(
        "crashed: \ufffd[31m<b>&amp;\ufffd" in str(one.get("message")) for one in suite.iter("failure")
    )


def test_annotations_and_markdown_keep_a_reason_on_one_line(mixed) -> None:
    lines = FACES["github"](mixed).splitlines()
    assert all(re.match(r"::(error|warning|notice)( title=[^:,]+)?::", line) for line in lines)
    assert not any(line.startswith("::error::no") for line in lines)
    summary = FACES["markdown"](mixed)
    assert not any(line.startswith("::error::no") for line in summary.splitlines())
    assert "&lt;b>&amp;amp;" in summary
    # Nor does it act on a terminal that shows a log.
    assert all(
        "\x1b" not in text and r"crashed: \x1b[31m" in text for text in (FACES["github"](mixed), summary)
    )


def test_markdown_fits_a_comment_however_many_cells_changed() -> None:
    before, after = side("before", 1, 900), side("after", 1.1, 900)
    text = comparison_markdown(compare(before, after, Rules(margins={})))
    assert len(text) < 65_536
    assert f"The first {MOST_ROWS} of 900 verdicts are shown" in text
    crashed = [msgspec.structs.replace(one, failed="crashed: " + "x" * 2000) for one in after.subjects]
    found = compare(before, msgspec.structs.replace(after, subjects=tuple(crashed)), Rules(margins={}))
    assert len(comparison_markdown(found)) < 65_536
