"""Compare BASE with NEW: a verdict for each subject and metric, and the exit code of the comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from harness.features.gate.effect import (
    ALPHA,
    FEWEST_PAIRS,
    FEWEST_RUNS,
    LOOKS,
    PAIRS_A_LOOK,
    Effect,
    PairedSample,
    Verdict,
    difference_effect,
    judge,
    paired_effect,
    relative_effect,
    runs_that_tell,
)
from harness.features.gate.losses import gates, judge_losses
from harness.features.gate.metrics import EXACT, TIMED, ExactMetric, TimedMetric
from harness.features.gate.records.baseline import Baseline, Exact, Subject
from reports.analysis.pooling import differing
from reports.text import count

FAILING = (Verdict.REGRESSED, Verdict.MISSING, Verdict.FAILED, Verdict.CHANGED)
ORDER = (
    *FAILING,
    *(Verdict.NOTHING, Verdict.INCOMPARABLE, Verdict.INCONCLUSIVE, Verdict.ACCEPTED),
    *(Verdict.IMPROVED, Verdict.NEW, Verdict.UNCHANGED, Verdict.SHOWN),
)
"""The order in which findings are shown: the most urgent first."""
_COMPARED = {*FAILING, Verdict.INCOMPARABLE, Verdict.ACCEPTED, Verdict.IMPROVED, Verdict.UNCHANGED}
"""Verdicts that say something of NEW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One verdict."""

    subject: str
    """The subject's label."""
    key: str
    metric: str | None
    """None for a verdict on the whole subject."""
    verdict: Verdict
    reason: str
    """One sentence without a full stop; empty if the figures are enough."""
    base: tuple[Exact, ...] = ()
    """The mean over the runs for a timed metric, the values for an exact one."""
    new: tuple[Exact, ...] = ()
    effect: Effect | None = None
    margin: float | None = None

    @property
    def timed(self) -> TimedMetric | None:
        """The metric of a figure with noise; None for a counter and for a whole subject."""
        return TIMED.get(self.metric or "")

    @property
    def is_open(self) -> bool:
        """Whether further pairs are worth their time: a step time is not judged, or another metric, such as
        memory, looks worse by more than its margin and is not judged."""
        if self.verdict is not Verdict.INCONCLUSIVE:
            return False
        if self.metric == "step_time":
            return True
        if self.effect is None or self.timed is None or self.margin is None:
            return False
        worse = self.effect.value if self.timed.better == "lower" else -self.effect.value
        return worse > self.margin


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The tolerances of a comparison."""

    margins: Mapping[str, float]
    """Margins by metric, as shares; they override the margin of the metric itself."""
    across: frozenset[str] = frozenset()
    """Facts that may differ, because the user asks about their difference."""
    paired: Mapping[str, PairedSample] = field(default_factory=dict)
    """Pairs of alternating runs by subject. The step time of a subject is judged from its pairs."""
    looks: int = 1
    """The number of times that the same comparison is made while its runs are measured."""
    accepted: Mapping[str, str] = field(default_factory=dict)
    """Reasons why changes are right, by metric: a failing verdict becomes `accepted`. The key `missing` is
    for cells that NEW does not plan."""

    def margin(self, metric: TimedMetric) -> float | None:
        return self.margins.get(metric.name, metric.margin)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All findings, the most urgent first."""

    base: str
    new: str
    findings: tuple[Finding, ...]
    confidence: float
    """The confidence of each interval, after the correction for the number of intervals."""
    sample: str = "the run is the sample"
    """The independent sample, as a clause."""
    strict: bool = False
    """Whether inconclusive findings fail too."""

    def count(self, *verdicts: Verdict) -> int:
        return sum(finding.verdict in verdicts for finding in self.findings)

    @property
    def is_open(self) -> bool:
        """Whether further pairs are worth their time."""
        return any(finding.is_open for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """1: regressed, changed, missing or failed; 3: incomparable or nothing compared; 0: others, and
        inconclusive unless strict."""
        if self.count(Verdict.NOTHING):
            return 3
        if self.count(*FAILING) or (self.strict and self.count(Verdict.INCONCLUSIVE)):
            return 1
        return 3 if self.count(Verdict.INCOMPARABLE) else 0


def compare(base: Baseline, new: Baseline, rules: Rules) -> Comparison:
    """Compare NEW with BASE. Subjects are matched by their keys."""
    there, here = ({subject.key: subject for subject in side.subjects} for side in (base, new))
    if there and here and there.keys().isdisjoint(here):
        finding = _nothing_in_common(base, new)
        return Comparison(base=base.name, new=new.name, findings=(finding,), confidence=1 - 2 * ALPHA)
    pairs = [(there.get(key), here.get(key)) for key in there | here]
    alpha = ALPHA / rules.looks / max(1, sum(_judged(one, other, rules) for one, other in pairs))
    findings = [_unless_accepted(f, rules) for pair in pairs for f in _findings(*pair, rules, alpha)]
    findings = _summarized(findings, rules)
    findings.sort(key=lambda finding: (ORDER.index(finding.verdict), finding.subject))
    return Comparison(
        base=base.name,
        new=new.name,
        findings=tuple(findings),
        confidence=1 - 2 * alpha,
        sample=_sample(rules),
    )


def _nothing_in_common(base: Baseline, new: Baseline) -> Finding:
    first, second = base.subjects[0], new.subjects[0]
    reason = (
        f"BASE and NEW have no cell in common: BASE has {first.label}, NEW has {second.label}; compare "
        f"measurements of the same work"
    )
    return replace(_finding(second, None, Verdict.INCOMPARABLE, reason), subject=new.name)


def _summarized(findings: list[Finding], rules: Rules) -> list[Finding]:
    """One finding is enough if no cell can be compared, for the same reason; one says that no pair counts."""
    same = {(finding.verdict, finding.reason) for finding in findings}
    if len(findings) > 1 and len(same) == 1 and findings[0].verdict is Verdict.INCOMPARABLE:
        findings = [replace(findings[0], subject=f"all {count(len(findings), 'cell')}", key="")]
    spoiled = bool(rules.paired) and not any(sample.logs for sample in rules.paired.values())
    if spoiled and not any(finding.verdict in _COMPARED for finding in findings):
        return [*findings, _nothing(rules)]
    return findings


def _nothing(rules: Rules) -> Finding:
    spoiled = sum(sample.spoiled for sample in rules.paired.values())
    why = (
        f"no pair counts and no counter could be compared; other processes took too much of the cores in "
        f"{count(spoiled, 'pair')}: use a quiet runner, or accept more noise with --others-above"
    )
    return Finding(subject="all cells", key="", metric=None, verdict=Verdict.NOTHING, reason=why)


def _unless_accepted(finding: Finding, rules: Rules) -> Finding:
    why = rules.accepted.get(finding.metric or str(finding.verdict))
    if why is None or finding.verdict not in FAILING:
        return finding
    reason = f"{finding.reason}; accepted: {why}" if finding.reason else f"accepted: {why}"
    return replace(finding, verdict=Verdict.ACCEPTED, reason=reason)


def _sample(rules: Rules) -> str:
    if not rules.paired:
        return "the run is the sample"
    samples = rules.paired.values()
    if any(sample.alternation == "launches" for sample in samples):
        return "whole launches of both sides alternated, and the pair of launches is the sample"
    forked = all(sample.forked for sample in samples)
    fresh = "process groups, forked from warm ranks," if forked else "launches"
    return f"short blocks of both sides alternated, and the pair of fresh {fresh} is the sample"


def _judged(base: Subject | None, new: Subject | None, rules: Rules) -> int:
    """The number of timed metrics that get a verdict."""
    if base is None or new is None or _obstacle(base, new, rules) is not None:
        return 0
    both = base.timed.keys() & new.timed.keys()
    timed = sum(name in both and rules.margin(metric) is not None for name, metric in TIMED.items())
    return timed + gates(base, new)


def _findings(base: Subject | None, new: Subject | None, rules: Rules, alpha: float) -> Iterator[Finding]:
    if base is None or new is None:
        yield _alone(base, new)
        return
    obstacle = _obstacle(base, new, rules)
    if obstacle is not None:
        yield obstacle
        return
    for counter in EXACT.values():
        if counter.name in base.exact or counter.name in new.exact:
            yield _exact(counter, base, new)
    if base.losses or new.losses:
        metric = TIMED["final_loss"]
        verdict, reason, figures = judge_losses(base, new, rules.margin(metric) or 0.0, alpha)
        yield _finding(new, metric, verdict, reason, **figures)
    yield from _timed_findings(base, new, rules, alpha)


def _timed_findings(base: Subject, new: Subject, rules: Rules, alpha: float) -> Iterator[Finding]:
    for metric in TIMED.values():
        if metric.name == "step_time" and base.key in rules.paired:
            yield _paired(metric, new, rules.paired[base.key], rules.margin(metric), alpha)
        elif metric.name in base.timed and metric.name in new.timed:
            yield _timed(metric, base, new, rules, alpha)
        elif metric.name in base.timed.keys() | new.timed.keys() and rules.margin(metric) is not None:
            # The question stays open, because one side lacks the figure.
            side = "NEW" if metric.name in base.timed else "BASE"
            yield _finding(new, metric, Verdict.INCONCLUSIVE, f"{side} has no figure of it")


def _alone(base: Subject | None, new: Subject | None) -> Finding:
    if base is not None:
        return _finding(base, None, Verdict.MISSING, "NEW has no such cell")
    assert new is not None
    if new.failed is not None:
        return _finding(new, None, Verdict.FAILED, new.failed)
    return _finding(new, None, Verdict.NEW, "BASE has no such cell")


def _obstacle(base: Subject, new: Subject, rules: Rules) -> Finding | None:
    """The finding that two subjects cannot be compared, with the reason; None if they can."""
    if new.failed is not None:
        return _finding(new, None, Verdict.FAILED, new.failed)
    if base.failed is not None:
        return _finding(new, None, Verdict.NEW, f"BASE has no figure: {base.failed}")
    facts = {
        name: pair for name, pair in differing(base.facts, new.facts).items() if name not in rules.across
    }
    if not facts:
        return None
    texts = [f"{name} is {before} in BASE, {after} in NEW" for name, (before, after) in facts.items()]
    advice = (
        f"measure BASE and NEW on one machine with the same versions, or, if their difference is the "
        f"question, pass --across {','.join(facts)}"
    )
    return _finding(new, None, Verdict.INCOMPARABLE, f"{'; '.join(texts)}; {advice}")


def _finding(
    subject: Subject, metric: ExactMetric | TimedMetric | None, verdict: Verdict, reason: str, **figures: Any
) -> Finding:
    """A finding on one metric of a subject, or on the whole subject."""
    name = None if metric is None else metric.name
    return Finding(
        subject=subject.label, key=subject.key, metric=name, verdict=verdict, reason=reason, **figures
    )


def _exact(metric: ExactMetric, base: Subject, new: Subject) -> Finding:
    before, after = base.exact.get(metric.name, ()), new.exact.get(metric.name, ())
    unlike = differing(*({name: side.facts.get(name) for name in metric.same} for side in (base, new)))
    if unlike:
        verdict, reason = Verdict.SHOWN, f"it is not compared across {', '.join(unlike)}"
    else:
        verdict, reason = _exact_verdict(metric, before, after)
    if verdict in FAILING and metric.name in ("payload_bytes", "operations", "buckets"):
        reason = first_difference(base.collectives, new.collectives) or reason
    return _finding(new, metric, verdict, reason, base=before, new=after)


def _exact_verdict(
    metric: ExactMetric, before: tuple[Exact, ...], after: tuple[Exact, ...]
) -> tuple[Verdict, str]:
    if set(before) == set(after):
        return Verdict.UNCHANGED, ""
    if not before:
        return Verdict.NEW, "BASE has no figure of it: it was not counted there"
    if not after:
        return Verdict.MISSING, "NEW lacks the figure that BASE has: the counter is not checked"
    if len(before) > 1:
        told = f"the runs of BASE have {len(before)} different values of a counter that should have one"
        return Verdict.INCONCLUSIVE, told
    if len(after) > 1:
        told = f"the runs of NEW have {len(after)} different values, and the runs of BASE one"
        return Verdict.CHANGED, told
    first, second = before[0], after[0]
    if metric.better == "neither" or isinstance(first, str) or isinstance(second, str):
        return Verdict.CHANGED, "the counter differs"
    if (second > first) == (metric.better == "lower"):
        return Verdict.REGRESSED, metric.worse
    return Verdict.IMPROVED, "the counter differs"


def first_difference(base: Sequence[str], new: Sequence[str]) -> str:
    """Names the first collective of a step that differs; empty if none differs or a side recorded none."""
    if not base or not new:
        return ""
    for number, (before, after) in enumerate(zip_longest(base, new), 1):
        if before != after:
            return (
                f"the first collective that differs is number {number} of the step: "
                f"{before or 'none'} in BASE, {after or 'none'} in NEW (collectives a step: {len(base)} in "
                f"BASE, {len(new)} in NEW)"
            )
    return ""


def _timed(metric: TimedMetric, base: Subject, new: Subject, rules: Rules, alpha: float) -> Finding:
    margin, effect = rules.margin(metric), _effect(metric, base, new, alpha)
    before, after = base.timed[metric.name], new.timed[metric.name]
    verdict, reason = _timed_verdict(metric, effect, margin, alpha, paired=bool(rules.paired))
    if effect is None and margin is not None:
        few = min(len(before), len(after)) < FEWEST_RUNS
        whole = "BASE's step time" if metric.of_step else "a figure"
        reason = _wanted(metric, rules) if few else f"{whole} is not above 0, so the change has no percentage"
    if metric.unit == "ns" and verdict in (Verdict.REGRESSED, Verdict.INCONCLUSIVE) and not rules.paired:
        reason = "; ".join(filter(None, (reason, _disturbance(base, new))))
    return _finding(
        new,
        metric,
        verdict,
        reason,
        base=(sum(before) / len(before),),
        new=(sum(after) / len(after),),
        effect=effect,
        margin=margin,
    )


def _effect(metric: TimedMetric, base: Subject, new: Subject, alpha: float) -> Effect | None:
    before, after = base.timed[metric.name], new.timed[metric.name]
    if not metric.of_step:
        return relative_effect(before, after, alpha)
    step = base.timed.get("step_time", ())
    return difference_effect(before, after, sum(step) / len(step) if step else 0.0, alpha)


def _disturbance(base: Subject, new: Subject) -> str:
    """A clause on runs that other processes disturbed; empty if there was none."""
    told = " and ".join(
        f"{side.disturbed} of {count(side.runs, 'run')} of {name}"
        for name, side in (("BASE", base), ("NEW", new))
        if side.disturbed
    )
    return f"other processes disturbed {told}" if told else ""


def _paired(
    metric: TimedMetric, new: Subject, sample: PairedSample, margin: float | None, alpha: float
) -> Finding:
    assert margin is not None, metric.name
    effect = paired_effect(sample.logs, alpha)
    verdict, reason = Verdict.INCONCLUSIVE, f"an interval needs {FEWEST_PAIRS} pairs"
    if effect is not None:
        verdict, reason = judge(effect, margin, paired=True), ""
        if verdict is Verdict.INCONCLUSIVE:
            reason = f"{len(sample.logs)} pairs are not enough; {_wanted_pairs(effect, margin, alpha)}"
    if sample.spoiled:
        pairs = count(sample.spoiled, "pair")
        spoiled = f"not counted, because other processes used the cores (--others-above): {pairs}"
        reason = f"{reason}; {spoiled}" if reason else spoiled
    return _finding(
        new,
        metric,
        verdict,
        reason,
        base=(sample.means[0],),
        new=(sample.means[1],),
        effect=effect,
        margin=margin,
    )


def _wanted_pairs(effect: Effect, margin: float, alpha: float) -> str:
    """A clause on the number of pairs that would be enough for a verdict."""
    pairs, most = runs_that_tell(effect, margin, alpha, paired=True), LOOKS * PAIRS_A_LOOK
    if pairs is not None and pairs <= most:
        return f"about {pairs} would be"
    told = f"about {pairs} would be, and a comparison has {most}" if pairs else "no number of them would be"
    return f"{told}: measure on a quieter machine"


def _wanted(metric: TimedMetric, rules: Rules) -> str:
    """A clause on what an interval needs in addition to too few figures."""
    if not rules.paired:
        several = "files of pytest-benchmark in one folder" if metric.name == "time" else "--repeats"
        return f"an interval needs {FEWEST_RUNS} runs on each side ({several})"
    if metric.of_launch:
        return f"an interval needs {FEWEST_RUNS} launches on each side (--alternate launches)"
    return f"an interval needs {FEWEST_RUNS} pairs"


def _timed_verdict(
    metric: TimedMetric, effect: Effect | None, margin: float | None, alpha: float, *, paired: bool
) -> tuple[Verdict, str]:
    if margin is None:
        return Verdict.SHOWN, ""
    if effect is None:
        return Verdict.INCONCLUSIVE, ""
    change = judge(effect, margin, lower_is_better=metric.better == "lower", paired=paired)
    if change is not Verdict.INCONCLUSIVE:
        return change, ""
    runs = runs_that_tell(effect, margin, alpha)
    if runs is None:
        told = "the runs differ too much for a verdict from any number of them: measure on a quieter machine"
        return Verdict.INCONCLUSIVE, told
    return Verdict.INCONCLUSIVE, f"about {runs} {'pairs' if paired else 'runs on each side'} would be enough"
