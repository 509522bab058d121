"""Every verdict from two baselines made by hand, their order, and the exit code that follows."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from harness.features.gate.comparison import Comparison, Finding, Rules, compare
from harness.features.gate.effect import Effect, PairedSample, Verdict
from harness.features.gate.metrics import read_margins
from harness.features.gate.records.baseline import Baseline, Subject
from harness.features.gate.reduce import reduce_study, subject_key
from harness.features.gate.text import finding_sentence
from results.cell import StepPolicy
from results.outcome import Outcome

PLAIN = Rules(margins={})
QUIET = (100.0, 100.1, 99.9, 100.0, 100.05)
STEP = {"step_time": QUIET}
NOISY = (99.0, 100.0, 101.0, 100.5, 99.5)


def subject(**fields: Any) -> Subject:
    return Subject(**{"key": "one", "label": "mlp, ddp, 2 x 32", "timed": STEP, "runs": 5, **fields})


def times(factor: float) -> dict[str, tuple[float, ...]]:
    return {"step_time": tuple(factor * value for value in QUIET)}


def held(base: Subject | None, new: Subject | None, rules: Rules = PLAIN) -> Comparison:
    sides = [
        Baseline(name=name, measured_at="2026-01-01T00:00:00Z", subjects=() if one is None else (one,))
        for name, one in (("before", base), ("after", new))
    ]
    return compare(*sides, rules)


def only(comparison: Comparison) -> Finding:
    (finding,) = comparison.findings
    return finding


@pytest.mark.parametrize(
    ("new", "verdict", "code"),
    [
        (subject(timed=times(1.06)), Verdict.REGRESSED, 1),
        (subject(timed=times(0.94)), Verdict.IMPROVED, 0),
        (subject(timed=times(1.02)), Verdict.UNCHANGED, 0),
        (subject(timed={"step_time": (90.0, 100.0, 110.0)}), Verdict.INCONCLUSIVE, 0),
        (subject(timed={"step_time": QUIET[:2]}), Verdict.INCONCLUSIVE, 0),
        (subject(failed="crashed: rank 1 was killed by SIGKILL"), Verdict.FAILED, 1),
        (None, Verdict.MISSING, 1),
        (subject(facts={"torch": "2.14"}), Verdict.INCOMPARABLE, 3),
    ],
)
def test_each_verdict_of_a_timed_cell_and_its_exit_code(new, verdict, code) -> None:
    base = subject(facts={"torch": "2.13"}) if verdict is Verdict.INCOMPARABLE else subject()
    found = held(base, new)
    assert only(found).verdict is verdict
    assert found.exit_code == code
    assert replace(found, strict=True).exit_code == (1 if verdict is Verdict.INCONCLUSIVE else code)


def test_a_cell_that_base_lacks_is_new_and_one_that_failed_there_too() -> None:
    assert only(held(None, subject())).verdict is Verdict.NEW
    assert only(held(subject(failed="crashed: x"), subject())).verdict is Verdict.NEW
    assert held(None, subject(failed="crashed: x")).exit_code == 1


def test_incomparable_names_the_facts_and_the_flag_and_across_makes_them_the_subject() -> None:
    base, new = subject(facts={"torch": "2.13", "python": "3.11"}), subject(facts={"torch": "2.14"})
    reason = only(held(base, new)).reason
    assert reason == (
        "python is 3.11 in BASE, unknown in NEW; torch is 2.13 in BASE, 2.14 in NEW; "
        "measure BASE and NEW on one machine with the same versions, or, if their difference is the "
        "question, pass --across python,torch"
    )
    allowed = Rules(margins={}, across=frozenset({"torch", "python"}))
    assert only(held(base, new, allowed)).verdict is Verdict.UNCHANGED


def test_a_baseline_of_another_machine_is_told_once_and_not_for_each_cell() -> None:
    cells = [msgspec.structs.replace(subject(facts={"cores": "2"}), key=key, label=key) for key in "abc"]
    there = [msgspec.structs.replace(one, facts={"cores": "64"}) for one in cells]
    base, new = (
        Baseline(name=name, measured_at="2026-01-01T00:00:00Z", subjects=tuple(subjects))
        for name, subjects in (("base", there), ("new", cells))
    )
    found = compare(base, new, Rules(margins={}))
    assert only(found).subject == "all 3 cells"
    assert only(found).reason.startswith("cores is 64 in BASE, 2 in NEW; measure BASE and NEW on one machine")
    assert found.exit_code == 3
    mixed = msgspec.structs.replace(base, subjects=(there[0], *cells[1:]))
    assert compare(mixed, new, Rules(margins={})).count(Verdict.INCOMPARABLE) == 1


@pytest.mark.parametrize(
    ("name", "before", "after", "verdict"),
    [
        ("payload_bytes", (4096,), (4096,), Verdict.UNCHANGED),
        ("payload_bytes", (4096,), (4097,), Verdict.REGRESSED),
        ("payload_bytes", (4096,), (4095,), Verdict.IMPROVED),
        ("flops", (10,), (11,), Verdict.CHANGED),
        ("operations", (3.0,), (), Verdict.MISSING),
        ("buckets", (4.0,), (3.0,), Verdict.CHANGED),
        ("early_buckets", (3.0,), (0.0,), Verdict.REGRESSED),
        ("early_buckets", (0.0,), (3.0,), Verdict.IMPROVED),
        ("backward_left", (0.375,), (0.374,), Verdict.REGRESSED),
        ("first_hash", ("aa",), ("ab",), Verdict.CHANGED),
        ("first_hash", ("aa", "ab"), ("aa",), Verdict.INCONCLUSIVE),
        ("device_peak_bytes", (1000,), (1001,), Verdict.REGRESSED),
        ("operations", (3.0, 4.0), (3.0,), Verdict.INCONCLUSIVE),
        ("operations", (3.0, 4.0), (4.0, 3.0), Verdict.UNCHANGED),
        # What NEW does now and then, BASE never did.
        ("operations", (3.0,), (3.0, 4.0), Verdict.CHANGED),
    ],
)
def test_a_counter_has_no_tolerance(name, before, after, verdict) -> None:
    base = subject(timed={}, exact={name: before} if before else {})
    new = subject(timed={}, exact={name: after} if after else {})
    assert only(held(base, new)).verdict is verdict


def test_another_exchange_names_the_first_collective_that_differs() -> None:
    before = ("allreduce 0-1 4096 B", "allreduce 0-1 512 B")
    base = subject(timed={}, exact={"operations": (2.0,)}, collectives=before)
    new = subject(timed={}, exact={"operations": (3.0,)}, collectives=(*before, "allreduce 0-1 4 B"))
    found = held(base, new)
    assert only(found).verdict is Verdict.REGRESSED
    assert only(found).reason == (
        "the first collective that differs is number 3 of the step: none in BASE, allreduce 0-1 4 B in NEW "
        "(collectives a step: 2 in BASE, 3 in NEW)"
    )


@pytest.mark.parametrize("name", ["buckets", "early_buckets", "backward_left", "first_hash"])
def test_a_counter_that_base_was_too_old_to_have_is_said_and_never_red(name) -> None:
    value = "aa" if name == "first_hash" else 3.0
    found = held(subject(), subject(exact={name: (value,)}))
    (said,) = [finding for finding in found.findings if finding.metric == name]
    assert said.verdict is Verdict.NEW
    assert said.reason == "BASE has no figure of it: it was not counted there"
    assert replace(found, strict=True).exit_code == 0


def test_a_hash_is_not_compared_across_what_changes_bits() -> None:
    rules = Rules(margins={}, across=frozenset({"torch", "python"}))
    sides = [
        subject(timed={}, exact={"first_hash": (bits,), "operations": (3.0,)}, facts=facts)
        for bits, facts in (("aa", {"torch": "2.13"}), ("bb", {"torch": "2.14"}))
    ]
    shown, same = sorted(held(*sides, rules).findings, key=lambda finding: finding.metric or "")
    assert (shown.verdict, shown.reason) == (Verdict.SHOWN, "it is not compared across torch")
    assert same.verdict is Verdict.UNCHANGED
    sides[1] = msgspec.structs.replace(sides[1], facts={"torch": "2.13", "python": "3.12"})
    assert held(*sides, rules).exit_code == 1


def test_a_lost_overlap_is_told_in_words() -> None:
    found = held(subject(exact={"early_buckets": (3.0,)}), subject(exact={"early_buckets": (0.0,)}))
    assert finding_sentence(found.findings[0]) == (
        "buckets that start before the backward pass ends of mlp, ddp, 2 x 32: regressed, 3 to 0, buckets "
        "that started before the last gradient now wait for it, so less of their exchange hides "
        "behind the backward pass"
    )


def test_the_worst_verdict_decides_the_exit_code() -> None:
    for verdicts, code, strict in (
        ("new", 0, 0),
        ("inconclusive", 0, 1),
        ("incomparable", 3, 3),
        ("incomparable inconclusive", 3, 1),
        *(
            (f"incomparable {worse}", 1, 1)
            for worse in ("regressed", "missing", "failed", "changed improved")
        ),
        ("improved unchanged shown new", 0, 0),
    ):
        findings = tuple(
            Finding(subject="a", key="a", metric=None, verdict=Verdict(word), reason="")
            for word in verdicts.split()
        )
        found = Comparison(base="before", new="after", findings=findings, confidence=0.98)
        assert (found.exit_code, replace(found, strict=True).exit_code) == (code, strict), verdicts


@pytest.mark.parametrize("strict", [False, True])
def test_a_comparison_that_judged_nothing_ends_with_3_and_says_why(strict) -> None:
    spoiled = PairedSample(logs=(), means=(1.0, 1.0), spoiled=6)
    busy = held(subject(), subject(), Rules(margins={}, paired={"one": spoiled}))
    assert [one.verdict for one in busy.findings] == [Verdict.NOTHING, Verdict.INCONCLUSIVE]
    assert replace(busy, strict=strict).exit_code == 3
    assert "6 pairs" in busy.findings[0].reason
    # One counter is enough.
    counter = {"payload_bytes": (10,)}
    judged = held(subject(exact=counter), subject(exact=counter), Rules(margins={}, paired={"one": spoiled}))
    assert judged.exit_code == 0


def test_the_verdict_says_how_many_more_runs_would_tell() -> None:
    noisy = (98.0, 100.0, 102.0, 104.0, 96.0)
    (finding,) = held(subject(timed={"step_time": noisy}), subject(timed={"step_time": noisy})).findings
    assert finding.verdict is Verdict.INCONCLUSIVE
    # Standard deviation 3.16 % of a run; (2.326 x 0.0316 / 0.015)^2 x 2 = 48 by the normal quantile, a few
    # more by Student's.
    assert (told := re.fullmatch(r"about (\d+) runs on each side .*", finding.reason))
    assert 48 <= int(told[1]) <= 51
    enough = held(subject(timed={"step_time": noisy * 10}), subject(timed={"step_time": noisy * 10}))
    assert only(enough).verdict is Verdict.UNCHANGED
    wild = (50.0, 100.0, 200.0)
    (finding,) = held(subject(timed={"step_time": wild}), subject(timed={"step_time": wild})).findings
    assert finding.reason.startswith("the runs differ too much")


def test_an_interval_is_wider_the_more_rows_are_judged() -> None:
    """A regression of 5 % is found in 1 cell; in 1 of 200 cells with such runs it may be chance."""
    slower = tuple(1.05 * value for value in NOISY)
    for cells, verdict in ((1, Verdict.REGRESSED), (200, Verdict.INCONCLUSIVE)):
        sides = [
            Baseline(
                name="side",
                measured_at="",
                subjects=tuple(
                    subject(key=str(number), timed={"step_time": times if not number else NOISY})
                    for number in range(cells)
                ),
            )
            for times in (NOISY, slower)
        ]
        found = compare(*sides, PLAIN)
        assert found.confidence == pytest.approx(1 - 2 * 0.01 / cells)
        (first,) = [finding for finding in found.findings if finding.key == "0"]
        assert first.verdict is verdict


def test_a_metric_without_a_margin_is_shown_and_judged_where_one_is_given() -> None:
    base = subject(timed={"exposed": (1.0, 1.1, 0.9), **STEP})
    new = subject(timed={"exposed": (31.0, 31.1, 30.9), **STEP})
    plain = {finding.metric: finding.verdict for finding in held(base, new).findings}
    assert plain == {"exposed": Verdict.SHOWN, "step_time": Verdict.UNCHANGED}
    judged = held(base, new, Rules(margins=read_margins(("exposed=5%",))))
    first = judged.findings[0]
    # 30 ns more of a step of 100 ns, not thirty times as much.
    assert first.effect.value == pytest.approx(0.3, rel=1e-3)
    assert first.verdict is Verdict.REGRESSED


def test_a_judged_metric_that_one_side_lacks_is_inconclusive() -> None:
    base = subject(timed={"exposed": (1.0, 1.1, 0.9), **STEP})
    rules = Rules(margins=read_margins(("exposed=5%",)))
    found = held(base, subject(), rules)
    assert found.findings[0].verdict is Verdict.INCONCLUSIVE
    assert found.findings[0].reason == "NEW has no figure of it"
    assert replace(found, strict=True).exit_code == 1
    assert [one.metric for one in held(base, subject()).findings] == ["step_time"]


def test_a_figure_of_0_has_a_reason_of_its_own() -> None:
    base, new = subject(timed={"peak_memory": (0.0,) * 5}), subject(timed={"peak_memory": (4096.0,) * 5})
    assert only(held(base, new)).reason == "a figure is not above 0, so the change has no percentage"


def test_a_verdict_for_the_worse_says_which_runs_others_disturbed() -> None:
    base, new = subject(disturbed=1), subject(timed=times(1.06), disturbed=2)
    assert (
        only(held(base, new)).reason == "other processes disturbed 1 of 5 runs of BASE and 2 of 5 runs of NEW"
    )
    assert only(held(base, subject(disturbed=2))).reason == ""


def test_the_most_severe_findings_come_first() -> None:
    base = Baseline(
        name="before", measured_at="", subjects=(subject(key="a", label="a"), subject(key="b", label="b"))
    )
    new = Baseline(name="after", measured_at="", subjects=(subject(key="a", label="a"),))
    assert [finding.verdict for finding in compare(base, new, PLAIN).findings] == [
        Verdict.MISSING,
        Verdict.UNCHANGED,
    ]


def test_sides_over_other_networks_are_incomparable(new_study, tmp_path, new_timing, new_environment) -> None:
    sides = []
    for network in ("InfiniBand (NET/IB)", "TCP sockets (NET/Socket)"):
        planted = new_study(tmp_path / network[:3])
        [cell] = planted.series("weak", "ddp", [2], batch=8)
        planted.plan()
        where = new_environment(transports=("NVLink (P2P/CUMEM)", network))
        planted.run(cell, new_timing(step_ms=10.0, environment=where))
        sides.append(reduce_study(planted.study, planted.study.results()))
    found = compare(*sides, Rules(margins={}))
    assert found.exit_code == 3
    assert "network is InfiniBand (NET/IB) in BASE" in found.findings[0].reason


def test_subjects_of_other_settings_have_other_names(planted) -> None:
    for precision in ("fp32", "bf16"):
        planted.points("ddp", {2: 10.0}, precision=precision)
    planted.plan()
    names = [one.label for one in reduce_study(planted.study, planted.study.results()).subjects]
    assert names == ["gpt-nano, ddp, 2 x 8, precision=fp32", "gpt-nano, ddp, 2 x 8, precision=bf16"]


def test_a_study_becomes_subjects_with_one_value_a_run(planted, new_timing) -> None:
    good, bad = planted.series("weak", "ddp", [2, 4], batch=8)
    planted.plan()
    planted.runs(good, [10.0, 11.0, 12.0], exposed_ms=2.0)
    planted.run(bad, new_timing(step_ms=1, outcome=Outcome.OUT_OF_MEMORY, reason="allocating 2 GiB"))
    reduced = reduce_study(planted.study, planted.study.results())
    one, other = reduced.subjects
    assert one.label == "gpt-nano, ddp, 2 x 8"
    assert one.timed["step_time"] == (10e6, 11e6, 12e6)
    assert one.exact["payload_bytes"] == (4_000_000,)
    assert one.facts["torch"] == "2.13.0"
    assert "code_hash" not in one.facts
    assert "network" not in one.facts
    assert other.failed == "out of memory: rank 0: allocating 2 GiB"
    longer = msgspec.structs.replace(good, steps=StepPolicy(quads=9), source_hash="abc")
    assert subject_key(longer) == one.key == good.id


def test_further_pairs_are_for_step_times_and_for_what_looks_worse() -> None:
    for metric, change, verdict, expected in (
        ("step_time", 0.0, Verdict.INCONCLUSIVE, True),
        ("step_time", 0.06, Verdict.REGRESSED, False),
        ("peak_memory", 0.06, Verdict.INCONCLUSIVE, True),
        ("peak_memory", 0.04, Verdict.INCONCLUSIVE, False),
        ("peak_memory", -0.06, Verdict.INCONCLUSIVE, False),
        ("throughput", -0.06, Verdict.INCONCLUSIVE, True),
        ("throughput", 0.06, Verdict.INCONCLUSIVE, False),
        # Different values of a counter in the runs of one side: more of them say no more.
        ("operations", None, Verdict.INCONCLUSIVE, False),
    ):
        effect = None
        if change is not None:
            effect = Effect(value=change, low=change - 0.1, high=change + 0.1, error=0.05, runs=(6, 6))
        finding = Finding(
            subject="mlp", key="k", metric=metric, verdict=verdict, reason="", effect=effect, margin=0.05
        )
        assert finding.is_open is expected, (metric, change)
