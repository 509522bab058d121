"""The rounds of a study that grows: what each series has shown, and the plans of the next round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import fmean

from msgspec.structs import replace as with_fields

from harness.features.until.growth import MOST_RUNS, NEAR, End, Ladder, Step, next_step
from harness.launch.tally import Tally
from harness.matrix import Rounds
from reports.analysis.holes import SETTLED, doublings
from reports.analysis.knee import LEAST_RUNS, PAYS_FROM, judged_sizes
from reports.analysis.outcomes import NOT_RUN
from reports.analysis.scaling import Curve
from reports.analysis.series import MergedSeries, merged_series
from reports.analysis.study import StudyFigures, analyse
from reports.text import number, percent
from results.cell import BASELINE_STRATEGY, Cell
from results.plan import Plan, Round
from results.store import Study, utc_now

HOUR_NS = 3600e9


@dataclass(frozen=True)
class Growing:
    """One series of a study that grows."""

    name: str
    cells: dict[int, Cell]
    """Its cells by size, with the single device that it is measured against."""
    ladder: Ladder
    step: Step
    run_ns: float
    """The mean time of a run, with its start; 0 before the first one."""
    odds: float
    unclaimed: Mapping[int, str]
    """Why sizes with figures cannot be compared."""

    @property
    def cell_ids(self) -> list[str]:
        """The cells of its next round; none if it has ended."""
        return [] if self.step.end else [self.cells[size].id for size in self.step.sizes]

    @property
    def sentence(self) -> str:
        """Say what is known of it, and why it has ended or needs another round."""
        step, knee = self.step, self.step.knee
        if knee is None or knee.size is None:
            why = "; ".join(sorted(set(self.unclaimed.values())))
            if step.end is None:
                return f"{self.name}: {' and '.join(f'{size:,}' for size in step.sizes)} are next."
            return f"{self.name}: fewer than two sizes can be compared{why and f' ({why})'}."
        known = f"odds of {percent(step.odds)}, {percent(self.odds)} asked"
        lost, again = (
            ", ".join(f"{one:,}" for one in sorted(sizes)) for sizes in (self.ladder.holes, step.sizes)
        )
        growth = knee.beyond or knee.growths[-1]
        near = abs(growth.marginal.value - PAYS_FROM) < 2 * NEAR
        if step.end is None and step.odds == 0 and knee.at is None:
            return f"{self.name}: growing pays up to {knee.size:,}, and {step.sizes[-1]:,} is next."
        clauses: dict[End | None, str] = {
            None: f"not certain yet ({known})",
            "certain": f"certain ({known}); {knee.text}",
            "hole": f"not certain, because {lost} without a figure may be it: --rerun failed, or more --gpus",
            "runs": f"not certain ({known}{', near the threshold' * near}); {knee.text}",
        }
        repeats = self.ladder.repeats if step.end == "cost" else max(MOST_RUNS, self.ladder.repeats)
        hours = number(sum(step.sizes) * self.run_ns / HOUR_NS)
        more = f"Another round of {again} takes {hours} device-hours; --repeats {repeats + 1} allows it."
        clause = clauses["runs" if step.end == "cost" else step.end]
        return (
            f"{self.name}: the size {knee.size:,} is {clause}.{f' {more}' * (step.end in ('cost', 'runs'))}"
        )

    def cost(self, stop: int) -> tuple[float, float]:
        """The runs times their devices if growing stops to pay at a size, and the most of them."""
        grown = [size for size in self.ladder.sizes if size <= stop]
        next_one = [size for size in self.ladder.sizes if size > stop][:1]
        # Two runs of each size while it grows, and two more rounds of those that decide.
        likely = 2 * sum(grown) + 3 * sum(next_one) + 2 * sum(grown[-2:])
        return min(likely, self.ladder.most), self.ladder.most


def growing(study: StudyFigures, plans: Sequence[Plan]) -> list[Growing]:
    """The series of the plans of one round."""
    series = merged_series(plans)
    several = len({(one.key.workload, one.key.kind, one.key.constant_batch) for one in series}) > 1
    curves = {curve.key: curve for curve in study.curves}
    found = []
    for one in series:
        cells, key = _with_baseline(one, series), one.key
        if len(cells) > 1:
            plan = next(plan for plan in plans if cells[max(cells)] in plan.cells)
            work = [key.workload, key.kind, f"{key.constant_batch:,}"] if several else []
            found.append(_growing(study, curves.get(key), cells, plan, ", ".join([key.label, *work])))
    return found


def _growing(
    study: StudyFigures, curve: Curve | None, cells: dict[int, Cell], plan: Plan, name: str
) -> Growing:
    assert plan.round is not None
    sizes, unclaimed = judged_sizes(curve) if curve else ([], {})
    outcomes = {one.cell.gpus: one.outcome for one in study.failures if one.cell in cells.values()}
    lost = {size: outcome for size, outcome in outcomes.items() if outcome != NOT_RUN}
    # Beyond a size that cannot be compared, no larger one can.
    lost |= {size: NOT_RUN for size in cells if unclaimed and size >= min(unclaimed)}
    runs = [run for cell in cells.values() if cell.id in study.cells for run in study.cells[cell.id].runs]
    ladder = Ladder(
        sizes=tuple(cells),
        measured=tuple(one for one in sizes if one.gpus in cells),
        lost=frozenset(lost),
        holes=frozenset(doublings(cells)).union(size for size, how in lost.items() if how not in SETTLED),
        spent=sum(size * plan.wanted(cell.id) for size, cell in cells.items()),
        repeats=max(LEAST_RUNS, plan.request.repeats),
    )
    return Growing(
        name=name,
        cells=cells,
        ladder=ladder,
        step=next_step(ladder, plan.round.odds),
        run_ns=fmean(sum(run.spent_ns.values()) for run in runs) if runs else 0.0,
        odds=plan.round.odds,
        unclaimed=unclaimed,
    )


def _with_baseline(one: MergedSeries, every: Sequence[MergedSeries]) -> dict[int, Cell]:
    singles = (
        other.cells[1]
        for other in every
        if other.key.strategy == BASELINE_STRATEGY and other.key.work == one.key.work and 1 in other.cells
    )
    single = None if 1 in one.cells else next(singles, None)
    return one.cells if single is None else {1: single, **one.cells}


def grow(study: Study, plans: Sequence[Plan], odds: float, rounds: Rounds) -> tuple[list[Plan], int | None]:
    """Run rounds of `plans`, which are of the whole matrix, until every series has ended, a round lacks runs,
    or others are to start its launches.

    Returns the plans of the last round, and the exit code if others are to start its launches.
    """
    while True:
        made, is_left = _round(study, plans, odds, rounds)
        exit_code = rounds.run(made) if rounds.run and is_left else None
        done = not is_left or rounds.run is None or exit_code is not None
        if done or any(so_far.planned("launch") for so_far in rounds.tallies(made)):
            return made, exit_code


def _round(study: Study, plans: Sequence[Plan], odds: float, rounds: Rounds) -> tuple[list[Plan], bool]:
    """The plans of the round that is to be run, or of the last one, and whether it is to be run."""
    say = rounds.console.note if rounds.run else rounds.console.result
    earlier, results, review = study.plans(), study.results(), study.review()
    last = _last_round(earlier, plans, rounds.tallies(plans), odds)
    if any(so_far.planned("launch") for so_far in rounds.tallies(last)):
        return last, True
    found = growing(analyse(study.name, [*earlier, *last], results, review=review), last)
    if found and not any(one.ladder.spent for one in found):
        one_by_one = [with_fields(plan, request=with_fields(plan.request, repeats=1)) for plan in plans]
        full, once = rounds.hours(plans), rounds.hours(one_by_one)
        say(_bounds(found, full, once, "GPU" if plans[0].request.device == "cuda" else "device"))
    else:
        for one in found:
            say(one.sentence)
    cells = {cell_id for one in found for cell_id in one.cell_ids}
    return ([_after(plan, cells) for plan in last] if cells else last), bool(cells)


def _last_round(
    earlier: Sequence[Plan], plans: Sequence[Plan], tallies: Sequence[Tally], odds: float
) -> list[Plan]:
    """The plans with their last round, which has the runs that other plans have made since."""
    had = max((plan.last_repeat for plan in earlier), default=0)
    kept = {plan.cells: plan.round for plan in earlier if plan.round is not None}
    last = []
    for plan, so_far in zip(plans, tallies, strict=True):
        own, before = {cell.id: so_far.ok_runs.get(cell.id, 0) for cell in plan.cells}, kept.get(plan.cells)
        if before is None or before.number < had:
            runs = {cell: max(ok, before.runs.get(cell, 0) if before else 0) for cell, ok in own.items()}
            before = Round(number=had, odds=odds, runs={cell: count for cell, count in runs.items() if count})
        last.append(with_fields(plan, round=with_fields(before, odds=odds)))
    return last


def _after(plan: Plan, cells: Set[str]) -> Plan:
    """The plan of the round after the one of `plan`, which runs its own ones of these cells."""
    assert plan.round is not None
    runs = {cell.id: plan.round.runs.get(cell.id, 0) + (cell.id in cells) for cell in plan.cells}
    runs = {cell_id: number for cell_id, number in runs.items() if number}
    after = with_fields(plan.round, number=plan.round.number + 1, runs=runs)
    return with_fields(plan, round=after, created_at=utc_now())


def _bounds(found: Sequence[Growing], full: float, once: float, unit: str) -> str:
    """Estimate the rounds from the device-hours of the `full` matrix and of running each cell `once`."""
    every = sum(sum(one.ladder.sizes) for one in found)
    sizes = sorted({size for one in found for size in one.ladder.sizes})
    middle = sizes[(len(sizes) - 1) // 2]
    likely, most = (
        once * sum(part) / every for part in zip(*(one.cost(middle) for one in found), strict=True)
    )
    return (
        f"by rounds, from small sizes: about {number(likely)} {unit}-hours if growing stops to pay at "
        f"{middle:,}, {number(most)} at most; the full matrix is expected to take {number(full)}"
    )
