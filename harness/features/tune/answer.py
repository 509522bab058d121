"""The answer of a tune: the setting to use, what it gains over the default, and what each choice brings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean

import msgspec

from harness.features.tune.records import Contribution, Tuning, TuningAnswer
from harness.features.tune.space import SEARCHED, Candidate, Space, call_words, differing
from reports.analysis.effect import SMALLEST_EFFECT, sides
from reports.analysis.pooling import pool
from reports.text import count, metric, number
from results.cell import StepPolicy
from results.errors import bench_call
from results.outcome import Outcome
from results.plan import Plan
from results.run import RunResult
from results.statistics import Metric, over_runs, ratio_of_runs
from strategies.catalog import STRATEGIES
from workloads.catalog import WORKLOADS, facts

STEPS = 1000
"""The length of the training in the command that the answer prints."""


def answer_of(
    tuning: Tuning,
    space: Space,
    plan: Plan,
    results: Sequence[RunResult],
    *,
    trains: bool,
    lost: Sequence[RunResult] = (),
) -> TuningAnswer | None:
    """Compare the settings of the final by its runs; None if none of them has a run that ended well.

    The settings that do not differ significantly from the fastest are equal, and the answer is the simplest.
    `trains` says whether the launcher runs `bench train`; `lost` are the runs that the cluster took away.
    """
    rates, missing = _rates(plan, results)
    if not rates:
        return None
    by_id, default = space.by_id, tuning.default
    best, *others = sorted(rates, key=lambda one: -fmean(rates[one]))
    found = sides([(rates[best], rates[one]) for one in others], SMALLEST_EFFECT)
    equal = [best, *(one for one, side in zip(others, found, strict=True) if side is None)]
    if default in rates and default not in equal:
        # What is like the fastest, but not shown to be faster than the default, does not stand for it.
        found = sides([(rates[one], rates[default]) for one in equal[1:]], SMALLEST_EFFECT)
        equal = [best, *(one for one, side in zip(equal[1:], found, strict=True) if side == "faster")]
    chosen = default if default in equal else min(equal, key=lambda one: by_id[one].complexity)
    one, faster = by_id[chosen], best if chosen == default else chosen
    known = faster != default and default in rates
    gain = ratio_of_runs(rates[faster], rates[default], "x") if known else None
    alike = [by_id[each].words for each in equal if each != chosen]
    words = call_words(space.options_of(one))
    train = bench_call("train", *words, "--steps", STEPS)
    taken = _taken(tuning, rates) if lost else 0
    return TuningAnswer(
        setting=chosen,
        sentence=_sentence(one, by_id[faster], rates, gain, len(alike), is_default=chosen == default),
        gain=None if chosen == default else gain,
        contributions=tuple(_contributions(tuning, chosen)),
        remarks=(
            *([_loss(taken, lost)] if taken else []),
            *_remarks(tuning, space, rates, alike, missing),
            *_learning(one, space.default),
        ),
        commands=() if chosen == default else (bench_call("matrix", *words), *([train] if trains else [])),
        taken=taken,
    )


def _taken(tuning: Tuning, rates: Mapping[str, Sequence[float]]) -> int:
    """Count the settings without a rate that the cluster ended, or for which it left no time."""
    ended = {trial.setting for trial in tuning.trials if trial.outcome is Outcome.NODE_FAILED}
    without = [one for one in tuning.settings if one.rate is None and one.id not in rates]
    return sum(one.state == "waiting" or one.id in ended or one.id in tuning.final for one in without)


def _loss(taken: int, lost: Sequence[RunResult]) -> str:
    return (
        f"The cluster took away {count(len(lost), 'run')}, the last one as {lost[-1].reason}: "
        f"{count(taken, 'setting')} could not be measured, and another --name searches again."
    )


def _rates(plan: Plan, results: Sequence[RunResult]) -> tuple[dict[str, list[float]], int]:
    """The samples/s of each setting of the final, a value a run, and the number of runs that are left."""
    rates, missing = dict[str, list[float]](), 0
    for cell in plan.cells:
        own = [run for run in results if run.cell_id == cell.id]
        found = pool(cell, own, planned=plan.request.repeats)
        if found.runs:
            times = (run.step_ns.value for run in found.runs if run.step_ns is not None)
            setting = msgspec.structs.replace(cell, steps=StepPolicy()).id
            rates[setting] = [cell.global_batch / time * 1e9 for time in times]
        if found.runs or all(run.outcome.runs_again for run in found.lost):
            missing += max(0, found.planned - len(found.with_disturbed))
    return rates, missing


def _sentence(
    one: Candidate,
    faster: Candidate,
    rates: Mapping[str, Sequence[float]],
    gain: Metric | None,
    alike: int,
    *,
    is_default: bool,
) -> str:
    """Say that `one` is the answer. `gain` is the ratio of the rate of `faster` to the default's.

    They are two settings only where the default is the answer.
    """
    said = f"{one.words}: {number(fmean(rates[one.setting.id]))} samples/s"
    over = "" if gain is None else metric(gain).with_ends
    if len(rates) == 1:
        return f"The only setting that was measured is {said}."
    if is_default and not alike:
        return f"The default is best: {said}."
    if alike:
        said += (
            f"; {count(alike, 'other setting')} of the final do not differ from it significantly, and it is "
            f"the simplest"
        )
    if not is_default:
        return f"Fastest that fits: {said}{over and f'; {over} the default'}."
    said = f"Nothing is shown to be faster than the default: {said}."
    if faster is one:
        return said
    return (
        f"{said} The fastest that was measured, {faster.words}, has {over} the default's rate: the same "
        f"command with more --repeats adds runs, which may decide it; so may another --name with a longer "
        f"--max-time."
    )


def _remarks(
    tuning: Tuning, space: Space, rates: Mapping[str, Sequence[float]], equal: Sequence[str], missing: int
) -> Iterator[str]:
    if missing:
        yield f"The final still lacks {count(missing, 'run')}: the same command continues."
    if equal:
        yield f"Not significantly different: {'; '.join(equal)}."
    if lost := [space.by_id[one].words for one in tuning.final if one not in rates]:
        yield f"Without a figure in the final: {'; '.join(lost)}."
    if tuning.default not in rates:
        yield "The default has no figure, so that no gain over it is stated."
    untried = sum(one.state == "waiting" for one in tuning.settings)
    if untried and len(tuning.settings) > 1:
        yield f"{count(untried, 'setting')} of {len(tuning.settings):,} had no trial, as {tuning.ended}."


def _learning(one: Candidate, default: Candidate) -> Iterator[str]:
    """Say what the answer changes in training, compared with the default."""
    mine, theirs = one.cell, default.cell
    if mine.global_batch != theirs.global_batch:
        yield (
            f"Its global batch is {mine.global_batch:,}, and the default's {theirs.global_batch:,}: "
            f"training changes with it."
        )
    for told in STRATEGIES.facts(mine.strategy).differences:
        yield f"{mine.strategy} {told}: what is learnt changes."
    for key, value in one.setting.choices.items():
        learning = SEARCHED[key][0] if key in SEARCHED and default.setting.choices[key] != value else "same"
        if learning == "changed":
            yield f"{key} {value} changes what is learnt: compare the losses before use."
        elif learning == "rounding":
            yield f"{key} {value} rounds differently: results are equal up to rounding."
    if mine.micro_batch != theirs.micro_batch and facts(WORKLOADS.parse(mine.workload)).batch_norm is True:
        yield "BatchNorm takes its statistics from a micro-batch, which differs from the default's."


def _contributions(tuning: Tuning, winner: str) -> Iterable[Contribution]:
    """Compare the winner, choice by choice, with the fastest setting that differs from it in this choice.

    Trials are compared if they ran interleaved.
    """
    rates: dict[str, dict[tuple[int, int], float]] = {one.id: {} for one in tuning.settings}
    for trial in tuning.trials:
        if trial.rate is not None:
            rates[trial.setting][trial.rung, trial.block] = trial.rate
    mine = next(one.choices for one in tuning.settings if one.id == winner)
    found: dict[tuple[str, str], Contribution] = {}
    for other in tuning.settings:
        differ, own = differing(mine, other.choices), rates[other.id]
        ratios = [rate / own[place] for place, rate in rates[winner].items() if place in own]
        if len(differ) == 1 and ratios:
            [key] = differ
            # A setting has the options of its strategy that are not at their default.
            value, instead = (choices.get(key, "default") for choices in (mine, other.choices))
            ratio, least = over_runs(ratios, "x"), found.get((key, instead))
            if least is None or ratio.value < least.ratio.value:
                found[key, instead] = Contribution(choice=key, value=value, instead=instead, ratio=ratio)
    return found.values()
