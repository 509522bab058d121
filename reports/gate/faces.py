"""A comparison as the machines of CI read it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

import msgspec

from reports.gate.comparison import FAILING, Comparison, Finding, Verdict
from reports.gate.text import (
    comparison_headline,
    comparison_markdown,
    finding_name,
    finding_sentence,
    step_sentence,
)
from reports.gate.trends import Step, Trend
from results.foreign_text import visible

MOST_ANNOTATIONS = 10
"""GitHub shows ten a step and level."""


def json_text(comparison: Comparison) -> str:
    """Everything, as one JSON object (docs/gate.md)."""
    return _json(
        {
            "base": comparison.base,
            "new": comparison.new,
            "confidence": comparison.confidence,
            "exit_code": comparison.exit_code,
            "findings": [msgspec.to_builtins(finding) for finding in comparison.findings],
        }
    )


def changes_json(found: Sequence[tuple[Trend, Step]]) -> str:
    """Changes of a history, as one JSON object: `{"changes": [...]}` (docs/gate.md)."""
    return _json(
        {
            "changes": [
                {
                    "machine": trend.machine,
                    "cell": trend.label,
                    "metric": trend.metric.name,
                    "effect": step.effect,
                    "is_worse": step.is_worse,
                    "before": msgspec.to_builtins(step.before),
                    "after": msgspec.to_builtins(step.after),
                    "seen": msgspec.to_builtins(step.seen),
                    "environment": step.facts,
                    "sentence": step_sentence(trend, step),
                }
                for trend, step in found
            ]
        }
    )


def junit(comparison: Comparison) -> str:
    """JUnit XML: a test case for each verdict; inconclusive and incomparable ones count as skipped.

    Attributes are those that Jenkins, GitLab and GitHub's actions read; the reason of a cell that failed may
    hold characters of a terminal, which XML 1.0 does not allow: they are written as U+FFFD.
    """
    suite = ElementTree.Element(
        "testsuite",
        name=_xml(f"{comparison.new} against {comparison.base}"),
        tests=str(len(comparison.findings)),
        failures=str(comparison.count(*FAILING)),
        skipped=str(comparison.count(*_SKIPPED)),
        errors="0",
    )
    for finding in comparison.findings:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_xml(finding.subject), name=finding.metric or "cell"
        )
        if finding.verdict in FAILING:
            told = _xml(finding_sentence(finding))
            failure = ElementTree.SubElement(case, "failure", type=finding.verdict, message=told)
            failure.text = told
        elif finding.verdict in _SKIPPED:
            ElementTree.SubElement(case, "skipped", message=_xml(finding_sentence(finding)))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def github(comparison: Comparison) -> str:
    """Workflow commands of GitHub Actions: errors and warnings, the most telling first."""
    lines = []
    for level, verdicts in (("error", FAILING), ("warning", _SKIPPED)):
        found = [finding for finding in comparison.findings if finding.verdict in verdicts]
        shown = found if len(found) <= MOST_ANNOTATIONS else found[: MOST_ANNOTATIONS - 1]
        for finding in shown:
            title = _escaped(f"{finding.verdict}: {finding_name(finding)}")
            title = title.replace(":", "%3A").replace(",", "%2C")
            lines.append(f"::{level} title={title}::{_escaped(finding_sentence(finding))}")
        if len(shown) < len(found):
            lines.append(f"::{level}::{len(found) - len(shown)} more, in the summary")
    lines.append(f"::notice::{_escaped(comparison_headline(comparison))}")
    return "\n".join(lines) + "\n"


def bencher(comparison: Comparison) -> str:
    """Bencher Metric Format: `{benchmark: {measure: {value}}}`, NEW's figures."""
    found: dict[str, dict[str, Any]] = {}
    for finding in comparison.findings:
        if finding.timed and finding.new:
            found.setdefault(finding.subject, {})[_measure(finding)] = {"value": finding.new[0]}
    return _json(found)


def github_action_benchmark(comparison: Comparison) -> str:
    """github-action-benchmark's `customSmallerIsBetter`: NEW's figures of which less is better."""
    return _json(
        [
            {
                "name": finding_name(finding),
                # Its schema wants one.
                "unit": finding.timed.unit or finding.timed.name,
                "value": finding.new[0],
                "extra": finding_sentence(finding),
            }
            for finding in comparison.findings
            if finding.timed and finding.new and finding.timed.better == "lower"
        ]
    )


_SKIPPED = (Verdict.INCONCLUSIVE, Verdict.INCOMPARABLE)
FACES: Mapping[str, Callable[[Comparison], str]] = MappingProxyType(
    {
        "markdown": comparison_markdown,
        "json": json_text,
        "junit": junit,
        "github": github,
        "bencher": bencher,
        "github-action-benchmark": github_action_benchmark,
    }
)


def _measure(finding: Finding) -> str:
    # Bencher's own measure of time is `latency`, in nanoseconds.
    return "latency" if finding.metric == "step_time" else str(finding.metric)


def _json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode() + "\n"


def _xml(text: str) -> str:
    return _NO_XML.sub("\ufffd", text)


_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 allows nowhere (section 2.2, Char)."""


def _escaped(text: str) -> str:
    """As the data of a workflow command; the log that shows it is a terminal."""
    return visible(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))
