"""The next run that would tell most: more repeats of a cell, another size, or another setting, as a command.

What is missing for the size to buy comes first: figures at all, a second size, runs of the cells that decide
the choice (six give an interval; where the runs leave the choice open, twice as many), the next larger size
where growing paid up to the largest, a size inside of a growth of more than a doubling. Where all of these
are there, it is the setting that a cause speaks for: twice the batch where the exchange takes most of the
time that is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from reports.analysis.cost import cell_costs
from reports.analysis.figures import CellFigures
from reports.analysis.goal import KNEE
from reports.analysis.knee import knee
from reports.analysis.matrix_call import joins, matrix_call
from reports.analysis.outcomes import NOT_RUN, outcome_words
from reports.analysis.pick import PICK, Picked, candidates_of
from reports.analysis.pieces import Piece, piece_of
from reports.analysis.scaling import Curve, Gap
from reports.analysis.series import SeriesKey
from reports.analysis.size_to_buy import ONE_LEFT, sizes_to_buy
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.scalability import reach_of
from reports.text import count, listed
from results.cell import BASELINE_STRATEGY, REFERENCE_STRATEGY
from results.statistics import FEWEST_FOR_INTERVAL

NextKind = Literal["first", "failed", "repeats", "size", "setting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRun:
    """What to run next."""

    kind: NextKind
    """`first`: planned, not run yet; `failed`: run again; more `repeats`; another `size` or `setting`."""
    workload: str
    strategy: str
    gpus: tuple[int, ...]
    cells: tuple[str, ...]
    """Ids of the study's cells that it runs; empty for work that is new."""
    what: str
    """`6 runs each of ddp on 16 and 32`."""
    why: str
    """A clause."""
    command: str

    @property
    def sentence(self) -> str:
        return f"Run next {self.what}, since {self.why}: {self.command}"


def next_run(study: StudyFigures) -> NextRun | None:
    """None where nothing is planned, where every figure is emulated and so no run here would tell more, and
    of a study of trainings, with which the call that ordered them goes on."""
    if any(plan.training is not None for plan in study.plans):
        return None
    if not study.cells:
        return _first(study)
    for size in sizes_to_buy(study):
        piece = piece_of(study.curves, size.workload, size.scaling)
        if piece is not None and piece.measured:
            return _of_piece(study, piece)
    return None


def _first(study: StudyFigures) -> NextRun | None:
    """Of a study without any figure: what was not run, else what failed, each from the smallest size on."""
    gaps = [(curve, gap) for curve in study.curves for gap in curve.gaps if gap.outcome is not None]
    if not gaps:
        return None
    curve, gap = min(gaps, key=lambda pair: (pair[1].outcome != NOT_RUN, pair[1].gpus))
    return _gap_run(study, curve, gap, "no cell has a figure")


def _gap_run(study: StudyFigures, curve: Curve, gap: Gap, why: str) -> NextRun:
    failed = gap.outcome != NOT_RUN
    told = f"; it failed before ({outcome_words(gap.outcome or '')})" if failed else ""
    return _run(
        curve,
        (gap.gpus,),
        kind="failed" if failed else "first",
        why=f"{why}{told}",
        command=matrix_call(study, curve.key, (gap.gpus,), rerun=failed),
    )


def _of_piece(study: StudyFigures, piece: Piece) -> NextRun:
    """The first rule that has something to say; the last always has."""
    costs = {cost.cell.id: cost for cost in cell_costs(study)}
    candidates, _ = candidates_of(piece, costs)
    goal = study.assumptions.goal
    sizes = {point.gpus for _, point in piece.measured}
    if len(sizes) == 1 or not candidates:
        return _second_size(study, piece) or _again(study, _lead(piece))
    if len({one.gpus for one in candidates}) < 2:
        return _more(study, _lead(piece), None, ONE_LEFT)
    picked = PICK[goal.kind](piece, candidates, goal)
    if isinstance(picked, str):
        picked = PICK[KNEE.kind](piece, candidates, KNEE)
    if isinstance(picked, str):
        return _more(study, _lead(piece), None, picked)
    curve = _curve_of(piece, picked)
    rules: tuple[Callable[[], NextRun | None], ...] = (
        lambda: _undecided(study, piece, curve, picked),
        lambda: _beyond(study, curve, picked),
        lambda: _between(study, curve),
        lambda: _setting(study, curve),
    )
    return next((run for rule in rules if (run := rule()) is not None), None) or _again(study, curve)


def _second_size(study: StudyFigures, piece: Piece) -> NextRun | None:
    """A planned size of the same work that has no figure, else a larger one."""
    why, key = "one size alone was measured", piece.curves[0].key
    gaps = [
        (curve, gap)
        for curve in study.curves
        for gap in curve.gaps
        if _work(curve.key) == _work(key) and gap.outcome is not None
    ]
    if gaps:
        return _gap_run(study, *min(gaps, key=lambda pair: (pair[1].outcome != NOT_RUN, pair[1].gpus)), why)
    return _larger(study, _lead(piece), why)


def _work(key: SeriesKey) -> tuple[object, ...]:
    return key.workload, key.kind, key.batch, key.setting, key.link


def _lead(piece: Piece) -> Curve:
    """The curve with the most measured sizes, and of these the fastest."""
    return max(
        (curve for curve, _ in piece.measured),
        key=lambda curve: (len(curve.points), curve.points[-1].figures.samples_per_s.value),
    )


def _curve_of(piece: Piece, picked: Picked) -> Curve:
    """Of those with the chosen cell, or measured against it, the one with the most sizes."""
    chosen = picked.candidate.figures.cell.id
    with_it = [curve for curve in piece.curves if any(one.cell.id == chosen for one in _figures(curve))]
    return max(with_it, key=lambda curve: len(curve.points))


def _figures(curve: Curve) -> list[CellFigures]:
    single = [] if curve.single is None else [curve.single.figures]
    return [*single, *(point.figures for point in curve.points)]


def _undecided(study: StudyFigures, piece: Piece, curve: Curve, picked: Picked) -> NextRun | None:
    """More runs of the cells that decide the choice, where they are few or leave it open."""
    deciding = {one.cell.id: one for one in (picked.candidate.figures, *picked.deciding)}
    fewest = min(len(one.runs) for one in deciding.values())
    if fewest >= FEWEST_FOR_INTERVAL and not picked.open:
        return None
    wanted = FEWEST_FOR_INTERVAL if fewest < FEWEST_FOR_INTERVAL else 2 * fewest
    ids = {cell_id for cell_id, one in deciding.items() if len(one.runs) < wanted}

    def asked(of: Curve) -> list[int]:
        return [point.gpus for point in of.points if point.figures.cell.id in ids]

    def single(of: Curve) -> CellFigures | None:
        there = of.single.figures if of.single is not None and joins(of) else None
        return there if there is not None and there.cell.id in ids and asked(of) else None

    # One call is of one series, and of its single device: the one with most of these cells, that of the
    # chosen cell where several have as many.
    series = [curve, *(other for other in piece.curves if other is not curve)]
    at = max(
        series, key=lambda one: (len(asked(one)) + (single(one) is not None), max(asked(one), default=0))
    )
    if picked.open:
        why = "it is open whether growth pays there" if picked.shown_to else picked.open[0]
    else:
        why = f"the answer rests on {count(fewest, 'run')} a size"
    run = _more(study, at, (asked(at), wanted), why)
    return run if (alone := single(at)) is None else _with_single(study, at, run, alone, wanted)


def _with_single(
    study: StudyFigures, curve: Curve, run: NextRun, alone: CellFigures, repeats: int
) -> NextRun:
    """The run with the single device in the same call."""
    what = f"{alone.cell.strategy} on 1 and {curve.key.label} on {listed([f'{gpus:,}' for gpus in run.gpus])}"
    return replace(
        run,
        gpus=(1, *run.gpus),
        cells=(alone.cell.id, *run.cells),
        what=f"{count(repeats, 'run')} each of {what}",
        command=matrix_call(study, curve.key, run.gpus, repeats=repeats, alone=alone.cell.strategy),
    )


def _more(study: StudyFigures, curve: Curve, asked: tuple[Sequence[int], int] | None, why: str) -> NextRun:
    """More runs of some sizes of a curve; of all as many as were planned, where nothing else is asked."""
    gpus = tuple(asked[0]) if asked else tuple(point.gpus for point in curve.points)
    repeats = asked[1] if asked else None
    run = _run(
        curve,
        gpus,
        kind="repeats",
        why=why,
        command=matrix_call(study, curve.key, gpus, repeats=repeats),
    )
    return run if repeats is None else replace(run, what=f"{count(repeats, 'run')} each of {run.what}")


def _beyond(study: StudyFigures, curve: Curve, picked: Picked) -> NextRun | None:
    if not picked.or_more:
        return None
    largest = curve.points[-1].gpus
    by_knee = study.assumptions.goal.kind == KNEE.kind
    why = "growing still pays at" if by_knee else "the choice is"
    return _larger(study, curve, f"{why} {largest:,}, the largest size measured")


def _larger(study: StudyFigures, curve: Curve, why: str) -> NextRun | None:
    """The next planned size that has no figure, else twice the largest; None where the plan left it out."""
    last = curve.points[-1]
    gap = next((gap for gap in curve.gaps if gap.gpus > last.gpus), None)
    if gap is not None:
        return None if gap.skipped else _gap_run(study, curve, gap, why)
    environment, gpus = last.figures.newest.environment, 2 * last.gpus
    on_cpu = last.figures.cell.device == "cpu"
    if on_cpu and environment is not None and gpus > environment.cores * environment.nodes:
        return None
    key = curve.key
    if key.strategy == BASELINE_STRATEGY:
        # It is of one device alone.
        key = replace(key, strategy=REFERENCE_STRATEGY)
    call = matrix_call(study, key, (gpus,))
    return _run(replace(curve, key=key), (gpus,), kind="size", why=why, command=call)


def _between(study: StudyFigures, curve: Curve) -> NextRun | None:
    """A size inside of the growth at the knee, where this is more than a doubling."""
    beyond = knee(curve).beyond
    if beyond is None or beyond.larger <= 2 * beyond.smaller:
        return None
    gpus = 2 * beyond.smaller
    if any(gap.gpus == gpus for gap in curve.gaps):
        return None
    why = f"growing stops paying somewhere between {beyond.smaller:,} and {beyond.larger:,}"
    call = matrix_call(study, curve.key, (gpus,))
    return _run(curve, (gpus,), kind="size", why=why, command=call)


def _setting(study: StudyFigures, curve: Curve) -> NextRun | None:
    """Twice the batch where the exchange takes most of what is lost: half as many exchanges a sample."""
    key = curve.key
    found = reach_of(study, key.workload, key.kind, key.label)
    lost = found.dominant if found else None
    if lost is None or lost.part != "transfer" or not (lost.blames and lost.shown) or lost.contenders:
        return None
    if lost.part_share <= 0.5:
        return None
    batch = 2 * key.batch
    if any(other.key.batch == batch and other.key.kind == key.kind for other in study.curves):
        return None
    noun = "replica" if key.kind == "weak" else "update"
    run = _run(
        curve,
        (lost.gpus,),
        kind="setting",
        why=f"at {lost.gpus:,} most is lost to exposed transfer, and a larger batch has fewer exchanges "
        "a sample (compare its convergence too)",
        command=matrix_call(study, replace(key, batch=batch), (lost.gpus,)),
    )
    return replace(run, what=f"{run.what} with a batch of {batch:,} per {noun}", cells=())


def _again(study: StudyFigures, curve: Curve) -> NextRun:
    """Twice the runs of the cells that have fewest: nothing else is open."""
    fewest = min(len(point.figures.runs) for point in curve.points)
    gpus = [point.gpus for point in curve.points if len(point.figures.runs) == fewest]
    return _more(study, curve, (gpus, 2 * fewest), "nothing is left open; more runs narrow the intervals")


def _run(curve: Curve, gpus: Sequence[int], *, kind: NextKind, why: str, command: str) -> NextRun:
    points = [point for point in curve.points if point.gpus in gpus]
    return NextRun(
        kind=kind,
        workload=curve.key.workload,
        strategy=curve.key.label,
        gpus=tuple(gpus),
        cells=tuple(point.figures.cell.id for point in points),
        what=f"{curve.key.label} on {listed([f'{size:,}' for size in gpus])}",
        why=why,
        command=command,
    )
