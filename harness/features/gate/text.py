"""A comparison as text for a terminal and a pull request, and in the formats of CI services."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

import msgspec

from harness.features.gate.comparison import FAILING, ORDER, Comparison, Finding
from harness.features.gate.effect import Verdict
from harness.features.gate.metrics import EXACT, TIMED, TimedMetric
from harness.features.gate.records.baseline import Acceptance, Baseline, Exact, exact_text
from harness.features.gate.trends import Step, Trend, Within
from reports.fields import Field, whole
from reports.table import TextTable, figures, table, words
from reports.text import NOTHING, count, duration, number, percent, size, whole_percent
from results.foreign_text import in_json, shortened, visible

MOST_ROWS = 100
MOST_CHARACTERS = 300
"""Longest reason in characters. Markdown has both limits, as a comment on GitHub has at most 65,536
characters."""
SURE = 0.99
"""Odds beyond this are not shown as a figure."""


def comparison_headline(comparison: Comparison) -> str:
    """`2 regressed, 1 improved, 14 unchanged: NEW against BASE`."""
    counts = Counter(finding.verdict for finding in comparison.findings)
    told = [f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict]]
    return f"{', '.join(told) or 'nothing to compare'}: {comparison.new} against {comparison.base}"


def finding_table(comparison: Comparison, *, every: bool) -> TextTable:
    """One row for each finding; without `every`, only for changes and for what could not be judged."""
    return table(
        [
            one
            for one in comparison.findings
            if every or one.verdict not in (Verdict.UNCHANGED, Verdict.SHOWN)
        ],
        [
            words("verdict", lambda one: str(one.verdict)),
            words("cell", lambda one: one.subject),
            words("metric", lambda one: NOTHING if one.metric is None else metric_title(one.metric)),
            figures("BASE", lambda one: Field(_values(one, one.base))),
            figures("NEW", lambda one: Field(_values(one, one.new))),
            figures("change", lambda one: Field(change_text(one))),
            words("interval", interval_text),
        ],
    )


def finding_sentence(finding: Finding) -> str:
    """`step time of mlp, ddp, 2 x 32: regressed, +12.1 % (8.3 to 16.0 %), 4.10 ms to 4.60 ms`."""
    parts: list[str] = [str(finding.verdict)]
    if finding.effect is not None:
        parts.append(f"{change_text(finding)} ({interval_text(finding)})")
    if finding.base and finding.new:
        parts.append(f"{_values(finding, finding.base)} to {_values(finding, finding.new)}")
    if finding.reason:
        parts.append(finding.reason)
    return f"{finding_name(finding)}: {', '.join(parts)}"


def finding_name(finding: Finding) -> str:
    """`step time of mlp, ddp, 2 x 32`."""
    if finding.metric is None:
        return finding.subject
    return f"{metric_title(finding.metric)} of {finding.subject}"


def metric_title(metric: str) -> str:
    """The title of a metric; its name, if this version does not know the metric."""
    known = TIMED.get(metric) or EXACT.get(metric)
    return metric if known is None else known.title


def change_text(finding: Finding) -> str:
    """The effect with its sign: `+12.1 %`."""
    return NOTHING if finding.effect is None else _signed(finding.effect.value)


def interval_text(finding: Finding) -> str:
    """The ends of its interval: `+8.3 % to +16.0 %`."""
    effect = finding.effect
    return NOTHING if effect is None else f"{_signed(effect.low)} to {_signed(effect.high)}"


def comparison_markdown(comparison: Comparison) -> str:
    """A summary for a job or a comment: the headline, a table, and how to read it."""
    lines = [f"### {comparison_headline(comparison)}", ""]
    shown = finding_table(comparison, every=False)
    if shown.rows:
        rows = (shown.titles, ("---",) * len(shown.titles), *shown.texts[:MOST_ROWS])
        cells = ([_plain(cell).replace("|", r"\|") for cell in row] for row in rows)
        lines += [*(f"| {' | '.join(row)} |" for row in cells), ""]
    reasons = list(
        dict.fromkeys(
            f"- {_plain(f'{finding_name(finding)}: {shortened(finding.reason, MOST_CHARACTERS)}')}"
            for finding in comparison.findings
            if finding.reason
        )
    )
    lines += [*reasons[:MOST_ROWS], ""] if reasons else []
    if max(len(shown.rows), len(reasons)) > MOST_ROWS:
        lines += [
            f"The first {MOST_ROWS} of {count(len(shown.rows), 'verdict')} are shown; JSON has all.",
            "",
        ]
    lines.append(method_text(comparison))
    return "\n".join(lines) + "\n"


def method_text(comparison: Comparison) -> str:
    """The method of the verdicts, in a sentence or two."""
    judged = sum(finding.margin is not None for finding in comparison.findings)
    if not judged:
        return "No figure was judged by an interval. Counters are compared without tolerance."
    return (
        f"Intervals of {percent(comparison.confidence)}, corrected for {count(judged, 'comparison')}; "
        f"{comparison.sample}. Counters are compared without tolerance."
    )


def baseline_sentences(kept: Baseline) -> list[str]:
    """Describe the origin of a baseline's figures, and its margins."""
    told = [f"{kept.name}: commit {kept.commit or 'unknown'}, measured {kept.measured_at}"]
    cells: dict[str, list[str]] = {}
    for subject in kept.subjects:
        if subject.facts:
            facts = ", ".join(f"{name} {fact}" for name, fact in subject.facts.items())
            cells.setdefault(facts, []).append(subject.label)
    told += [facts if len(cells) == 1 else f"{'; '.join(labels)}: {facts}" for facts, labels in cells.items()]
    if kept.fail_above:
        told.append(f"margins: {', '.join(f'{name} {percent(at)}' for name, at in kept.fail_above.items())}")
    return told


def accepted_sentence(one: Acceptance) -> str:
    """`accepted 2026-01-02: mlp, ddp, 2 x 32: the second buffer is new (payload_bytes 4,096 to 8,192)`."""
    changes = "; ".join(f"{name} {change}" for name, change in one.changes.items())
    return f"accepted {one.at[:10]}: {one.subject}: {one.reason}{f' ({changes})' if changes else ''}"


def baseline_table(kept: Baseline) -> TextTable:
    """One row for each counter and each mean of a timed metric in a baseline."""
    found: list[tuple[str, str, str, str]] = []
    for subject in kept.subjects:
        if subject.failed is not None:
            found.append((subject.label, NOTHING, subject.failed, "0"))
        for metric, values in subject.exact.items():
            found.append((subject.label, metric_title(metric), exact_text(values), str(subject.runs)))
        for metric, runs in subject.timed.items():
            mean = sum(runs) / len(runs)
            text = figure_text(TIMED[metric], mean) if metric in TIMED else number(mean)
            found.append((subject.label, metric_title(metric), text, str(len(runs))))
        for steps in sorted(set[int]().union(*subject.losses.values())):
            losses = [loss for one in subject.losses.values() if (loss := one.get(steps)) is not None]
            title, text = f"final loss of {steps:,} steps", number(fmean(losses)) if losses else NOTHING
            found.append((subject.label, title, text, str(len(losses))))
    return table(
        found,
        [
            words("cell", lambda row: row[0]),
            words("metric", lambda row: row[1]),
            figures("figure", lambda row: Field(row[2])),
            figures("runs", lambda row: Field(row[3])),
        ],
    )


def trend_table(found: Sequence[Trend]) -> TextTable:
    """One row for each series."""
    return table(
        found,
        [
            words("machine", lambda one: one.machine),
            words("cell", lambda one: one.label),
            words("metric", lambda one: one.metric.title),
            figures("nights", lambda one: whole(len(one.nights))),
            figures("first", lambda one: Field(figure_text(one.metric, one.nights[0].value))),
            figures("last", lambda one: Field(figure_text(one.metric, one.nights[-1].value))),
        ],
    )


def step_sentence(trend: Trend, step: Step) -> str:
    """`step time of mlp, ddp, 2 x 32: worse, +10.1 % between 2026-01-09 and 2026-01-12 (seen on 2026-01-15),
    commits abc to def with odds of 94 %, most likely bcd to cde (60 %), torch ...`."""
    facts = "".join(f", {name} {before} to {after}" for name, (before, after) in step.facts.items())
    first, last = (night.measured_at[:10] for night in (step.range.before, step.range.after))
    seen = step.seen.measured_at[:10]
    lead = f"{trend.metric.title} of {trend.label}: {'worse' if step.is_worse else 'better'}"
    rest = facts or ", nothing changed in the environment"
    if step.drift:
        return (
            f"{lead}, a drift between {first} and {last} ({_signed(step.effect)} in the median of its later "
            f"nights): a slope explains these nights as well as a step, so that no commit is named{rest}"
        )
    when = f"between {first} and {last} (seen on {seen})"
    likeliest = f", most likely {commits_text(step.likeliest, 12)} ({odds_text(step.likeliest.odds)})"
    if step.range.after == step.after and step.range.before == step.before:
        when = f"from {last} on (the night before was {first}, seen on {seen})"
        likeliest = ""
    pooled = f", by {step.series} series" if step.series > 1 else ""
    return (
        f"{lead}, {_signed(step.effect)} {when}, {commits_text(step.range, 12)} with odds of "
        f"{odds_text(step.range.odds)}{pooled}{likeliest}{rest}"
    )


def commits_text(within: Within, digits: int) -> str:
    """`commits abc to def`, or `commit abc` where it is the same on both nights."""
    commits = dict.fromkeys((night.commit or "unknown")[:digits] for night in (within.before, within.after))
    return f"commit{'s' if len(commits) > 1 else ''} {' to '.join(commits)}"


def odds_text(odds: float) -> str:
    """`94 %`; no odds are shown as certain."""
    return whole_percent(odds) if odds < SURE else f"over {whole_percent(SURE)}"


def _plain(text: str) -> str:
    """Text in one line, without HTML and control characters: a reason may come from a crashed program."""
    return visible(" ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;")


def _values(finding: Finding, values: tuple[Exact, ...]) -> str:
    if finding.timed is None or not values:
        return exact_text(values) if values else NOTHING
    return figure_text(finding.timed, float(values[0]))


def figure_text(metric: TimedMetric, value: float) -> str:
    forms = {"ns": duration, "bytes": size}
    return forms[metric.unit](value) if metric.unit in forms else f"{number(value)} {metric.unit}".rstrip()


def _signed(share: float) -> str:
    return f"{'+' if share >= 0 else ''}{percent(share)}"


MOST_ANNOTATIONS = 10
"""Largest number of annotations that GitHub shows for a step and level."""


def json_text(comparison: Comparison) -> str:
    """The complete comparison as one JSON object (docs/gate.md)."""
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
                    "odds": None if step.drift else step.likeliest.odds,
                    "drift": step.drift,
                    "range": msgspec.to_builtins(step.range),
                    "series": step.series,
                    "environment": step.facts,
                    "sentence": step_sentence(trend, step),
                }
                for trend, step in found
            ]
        }
    )


def junit(comparison: Comparison) -> str:
    """JUnit XML: a test case for each verdict; what was not judged counts as skipped.

    It has the attributes that Jenkins, GitLab and GitHub's actions read. The reason of a failed cell may
    contain control characters, which XML 1.0 does not allow; they are written as U+FFFD.
    """
    suite = ElementTree.Element(
        "testsuite",
        name=_xml(f"{comparison.new} against {comparison.base}"),
        tests=str(len(comparison.findings)),
        failures=str(comparison.count(*FAILING)),
        skipped=str(comparison.count(*_NOT_JUDGED)),
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
        elif finding.verdict in _NOT_JUDGED:
            ElementTree.SubElement(case, "skipped", message=_xml(finding_sentence(finding)))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def github(comparison: Comparison) -> str:
    """Write workflow commands of GitHub Actions: errors and warnings, the most urgent first.

    An inconclusive metric is a warning if further runs are worth their time.
    """
    lines = []
    failing = [finding for finding in comparison.findings if finding.verdict in FAILING]
    open_ = [one for one in comparison.findings if one.verdict in _WARNING or one.is_open]
    for level, found in (("error", failing), ("warning", open_)):
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
            # Bencher's own measure of time is `latency`, in nanoseconds.
            measure = "latency" if finding.metric == "step_time" else str(finding.metric)
            found.setdefault(finding.subject, {})[measure] = {"value": finding.new[0]}
    return _json(found)


def github_action_benchmark(comparison: Comparison) -> str:
    """github-action-benchmark's `customSmallerIsBetter`: NEW's figures of metrics where less is better."""
    return _json(
        [
            {
                "name": finding_name(finding),
                # The schema of github-action-benchmark requires a unit.
                "unit": finding.timed.unit or finding.timed.name,
                "value": finding.new[0],
                "extra": finding_sentence(finding),
            }
            for finding in comparison.findings
            if finding.timed and finding.new and finding.timed.better == "lower"
        ]
    )


_WARNING = (Verdict.INCOMPARABLE, Verdict.NOTHING)
_NOT_JUDGED = (*_WARNING, Verdict.INCONCLUSIVE, Verdict.SHOWN)
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


def _json(value: object) -> str:
    return in_json(msgspec.json.format(msgspec.json.encode(value)).decode()) + "\n"


def _xml(text: str) -> str:
    return _NO_XML.sub("\ufffd", text)


_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""The characters that XML 1.0 forbids (section 2.2, Char)."""


def _escaped(text: str) -> str:
    """Escape the data of a workflow command. The log that shows it is a terminal."""
    return visible(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))
