"""The run that a study needs next, by two rules, and the `bench matrix` call of points of a series.

The first rule names the sizes without a figure at which the size to buy may lie, then other planned cells
without one. If every cell has a figure, the second rule asks for more runs of the cells that decide the
choice, while these are few or leave it open, or for twice the largest size if growing paid up to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import log
from statistics import fmean
from typing import Literal

from msgspec.structs import replace as with_fields

from reports.analysis.assumptions import KNEE
from reports.analysis.cost import HOUR_NS, cell_costs
from reports.analysis.holes import SETTLED, Hole
from reports.analysis.outcomes import EXCLUDED, NOT_RUN, outcome_words
from reports.analysis.scaling import Curve, Piece, piece_of, rate
from reports.analysis.series import SeriesKey, setting_of
from reports.analysis.size_to_buy import PICK, Picked, candidates_of, holes_of, sizes_to_buy
from reports.analysis.study import StudyFigures
from reports.text import count, listed, order
from results.cell import BASELINE_STRATEGY, DEFAULT_COLLECTIVE, REFERENCE_STRATEGY, UNCOMPRESSED, StepPolicy
from results.errors import bench_call
from results.notation import NO_LINK
from results.plan import Request
from results.run import RunResult
from results.statistics import FEWEST_FOR_INTERVAL

NextKind = Literal["first", "failed", "repeats", "size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRun:
    kind: NextKind
    """`first`: planned, not run yet; `failed`: run again; more `repeats`; another `size`."""
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
    gpu_hours: float | None = None
    """The GPU-hours of set-up and steps, estimated from the nearest measured size; None on CPU."""
    usd: float | None = None
    """The price of these hours; None if no price is known."""

    @property
    def order(self) -> str:
        """Return what to run with what it takes: `6 runs of ddp on 16 (about 0.4 GPU-hours, 1.20 USD)`."""
        return order(self.what, self.gpu_hours, self.usd)


def next_run(study: StudyFigures) -> NextRun | None:
    """The run that the study needs next.

    None if every planned cell has a figure and no size is open. Also None for a study with an order: the call
    that ordered it continues it.
    """
    if any(plan.order is not None for plan in study.plans):
        return None
    found = (piece_of(study.curves, size.workload, size.scaling) for size in sizes_to_buy(study))
    piece = next((one for one in found if one is not None and one.measured), None)
    if piece is None:
        return _without_figure(study)
    picked, holes = _choice(study, piece)
    return _hole(study, holes) or _without_figure(study) or _left_open(study, piece, picked)


def _choice(study: StudyFigures, piece: Piece) -> tuple[Picked | None, tuple[Hole, ...]]:
    """Choose by the study's goal, or else by the knee, and find the holes in which the choice may lie."""
    candidates, _ = candidates_of(piece, {cost.cell.id: cost for cost in cell_costs(study)})
    if len({one.gpus for one in candidates}) < 2:
        return None, ()
    picks = (PICK[goal.kind](piece, candidates, goal) for goal in (study.assumptions.goal, KNEE))
    picked = next((one for one in picks if isinstance(one, Picked)), None)
    return picked, holes_of(study, piece, picked, candidates) if picked else ()


def _without_figure(study: StudyFigures) -> NextRun | None:
    """The smallest size that was planned and not run, else the smallest that failed."""
    gaps = [(curve, gap) for curve in study.curves for gap in curve.gaps if gap.outcome not in SETTLED]
    if not gaps:
        return None
    curve, gap = min(gaps, key=lambda pair: (pair[1].outcome != NOT_RUN, pair[1].gpus))
    whys = {NOT_RUN: "it was planned and not run", EXCLUDED: "reviewers excluded its runs"}
    why = whys.get(gap.outcome or "", f"it failed ({outcome_words(gap.outcome or '')})")
    return _run(study, curve, (gap.gpus,), kind=_kind_of(curve, (gap.gpus,)), why=why)


def _hole(study: StudyFigures, found: Sequence[Hole]) -> NextRun | None:
    """The sizes without a figure at which the choice may lie, of the curve with the most of them."""
    if not found:
        return None
    hole = max(found, key=lambda one: len(one.sizes))
    largest = max((point.gpus for point in hole.curve.points), default=0)
    # Beyond the largest size the next one may show that growing does not pay.
    sizes = tuple(size for size in hole.sizes if size < largest) or hole.sizes[:1]
    low, high = min(one.low for one in found), max(one.high for one in found)
    why = f"the size to buy may be {low:,} to {high:,}, and {hole.text}"
    return _run(study, hole.curve, sizes, kind=_kind_of(hole.curve, sizes), why=why)


def _kind_of(curve: Curve, sizes: Sequence[int]) -> NextKind:
    """Whether a run at sizes without a figure repeats what failed, is their first one, or adds sizes."""
    outcomes = {gap.outcome for gap in curve.gaps if gap.gpus in sizes}
    if outcomes - {NOT_RUN, EXCLUDED}:
        return "failed"
    return "first" if outcomes else "size"


def _left_open(study: StudyFigures, piece: Piece, picked: Picked | None) -> NextRun | None:
    """The size that leaves the choice open."""
    if len({point.gpus for _, point in piece.measured}) == 1:
        return _larger(study, max(piece.measured, key=rate)[0], "only one size was measured")
    if picked is None:
        return None
    # Take the curve with the most sizes among those that have the chosen cell or are measured against it.
    chosen = picked.candidate.cell.id
    with_it = [curve for curve in piece.curves if any(one.cell.id == chosen for one in curve.figures)]
    curve = max(with_it, key=lambda curve: len(curve.points))
    more = _more_runs(study, piece, curve, picked)
    # If the larger sizes cannot be compared, it is unknown whether growing beyond the chosen one pays.
    unjudged = picked.knee is not None and picked.knee.unclaimed
    if more is not None or unjudged or not picked.or_more:
        return more
    why = "growing still pays at" if study.assumptions.goal.kind == KNEE.kind else "the choice is"
    return _larger(study, curve, f"{why} {curve.points[-1].gpus:,}, the largest size measured")


def _more_runs(study: StudyFigures, piece: Piece, curve: Curve, picked: Picked) -> NextRun | None:
    """More runs of the cells that decide the choice, if they are few or leave it open."""
    if not picked.has_few and not picked.open:
        return None
    fewest = picked.fewest_runs
    enough = FEWEST_FOR_INTERVAL if fewest < FEWEST_FOR_INTERVAL else 2 * fewest
    few = {one.cell.id: one for one in picked.cells if len(one.runs) < enough}
    # Disturbed runs stay in the study, and others come in addition to them.
    wanted = max(one.pool.disturbed_out for one in few.values()) + enough

    def sizes_of(of: Curve) -> tuple[int, ...]:
        own = tuple(point.gpus for point in of.points if point.cell.id in few)
        alone = own and of.single is not None and of.single.cell.id in few and joins(of)
        return (1, *own) if alone else own

    # One call runs one series and its single device: the series with most of these cells, and the series of
    # the chosen cell if several have the same number.
    series = [curve, *(other for other in piece.curves if other is not curve)]
    at = max(series, key=lambda one: (len(sizes_of(one)), max(sizes_of(one), default=0)))
    why = picked.open[0] if picked.open else f"the answer rests on {count(fewest, 'run')} a size"
    return _run(study, at, sizes_of(at), kind="repeats", why=why, repeats=wanted)


def _larger(study: StudyFigures, curve: Curve, why: str) -> NextRun | None:
    """Twice the largest size of a curve; None where a larger one was planned, or hosts lack the cores."""
    last = curve.points[-1]
    environment, gpus = last.figures.newest.environment, 2 * last.gpus
    on_cpu = last.cell.device == "cpu"
    if on_cpu and environment is not None and gpus > environment.cores * environment.nodes:
        return None
    if any(gap.gpus > last.gpus for gap in curve.gaps):
        return None
    # The strategy of one device runs on no more.
    name = REFERENCE_STRATEGY if curve.key.strategy == BASELINE_STRATEGY else curve.key.strategy
    own = replace(curve, key=with_fields(curve.key, strategy=name))
    return _run(study, own, (gpus,), kind="size", why=why)


def _run(
    study: StudyFigures,
    curve: Curve,
    gpus: Sequence[int],
    *,
    kind: NextKind,
    why: str,
    repeats: int | None = None,
) -> NextRun:
    """More `repeats` of a series may include its single device, as the first of `gpus`."""
    key, alone, own = curve.key, None, {one.gpus: one.figures.cell for one in curve.points}
    if repeats is not None and 1 in gpus and 1 not in own and curve.single is not None:
        own[1] = curve.single.cell
        alone = own[1].strategy
    hours = gpu_hours(curve, gpus, repeats or _request(study, key).repeats)
    price = highest_price(study)
    return NextRun(
        kind=kind,
        workload=key.workload,
        strategy=key.label,
        gpus=tuple(gpus),
        cells=tuple(own[size].id for size in gpus if size in own),
        what=_what(key, gpus, repeats, alone),
        why=why,
        command=matrix_call(study, key, gpus, repeats=repeats, rerun=kind == "failed", alone=alone),
        gpu_hours=hours,
        usd=None if hours is None or price is None else hours * price,
    )


def _what(key: SeriesKey, gpus: Sequence[int], repeats: int | None, alone: str | None) -> str:
    """`6 runs each of single on 1 and ddp on 2 and 4`, where `alone` is the strategy of the single device."""
    sizes = listed([f"{size:,}" for size in gpus if size > 1 or alone is None])
    what = f"{f'{alone} on 1 and ' if alone else ''}{key.label} on {sizes}"
    if repeats is None:
        return what
    return f"{count(repeats, 'run')}{' each' if len(gpus) > 1 else ''} of {what}"


def highest_price(study: StudyFigures) -> float | None:
    """The highest price of a device and hour among the study's cells; None if no price is known."""
    prices = [cost.usd_per_hour / cost.cell.gpus for cost in cell_costs(study) if cost.usd_per_hour]
    return max(prices, default=None)


def gpu_hours(curve: Curve, gpus: Sequence[int], repeats: int) -> float | None:
    """The hours of all GPUs in the runs that are missing of `repeats` on each size; None on CPU."""
    measured = [one for one in curve.figures if one.cell.device == "cuda"]
    if not measured:
        return None
    hours = 0.0
    for size in gpus:
        nearest = min(measured, key=lambda one: abs(log(one.cell.gpus / size)))
        there = len(nearest.runs) if nearest.cell.gpus == size else 0
        hours += max(1, repeats - there) * size * fmean(map(_run_ns, nearest.runs)) / HOUR_NS
    return hours


def _run_ns(run: RunResult) -> float:
    """Set-up and steps of a run."""
    step_ns = run.step_ns.value if run.step_ns else 0.0
    return (run.setup_ns or 0) + (run.first_step_ns or 0) + (run.warmup_steps + run.steps) * step_ns


_DEFAULTS = Request(workloads=(), gpus=(), strategies=())
_VALUES = (
    *("dataset", "precision", "accumulation", "optimizer", "clip_norm", "memory_limit_mb", "memory_format"),
    *("seed", "gpus_per_node", "node_size"),
)
"""Fields of a request that are options of the same name, with a value."""
_STEPS = {"warmup_max_steps": "warmup_steps", "block_steps": "", "target": "", "quads": ""}
"""Fields of a step policy, and their options where these have another name."""


def matrix_call(
    study: StudyFigures,
    key: SeriesKey,
    gpus: Sequence[int],
    *,
    repeats: int | None = None,
    rerun: bool = False,
    alone: str | None = None,
) -> str:
    """The call that runs a series on `gpus`: its cells have the ids that they have in the study.

    `repeats` is the final number of runs of a cell (None: as planned). With `rerun`, cells that failed for
    good run again. `alone` is a strategy of one device, whose cell of the same work is run too, as the first
    of `gpus`: `joins` says whether one call can do both.
    """
    request = _request(study, key)
    words: list[object] = [*(study.placed or ("--name", study.name)), "--workload", key.workload]
    words += ["--strategy", key.strategy if alone is None else f"{alone},{key.strategy}"]
    words += ["--gpus", ",".join(map(str, gpus))]
    scaling = ("--scaling", key.kind, "--global-batch-size") if key.kind == "strong" else ("--batch-size",)
    words += [*scaling, key.constant_batch, "--repeats", request.repeats if repeats is None else repeats]
    defaults = {"compression": UNCOMPRESSED, "collective": DEFAULT_COLLECTIVE, "link": NO_LINK}
    for name, default in defaults.items():
        words += _option(name, getattr(key, name), default)
    return bench_call("matrix", *words, *_settings(request), *(("--rerun", "failed") if rerun else ()))


def _request(study: StudyFigures, key: SeriesKey) -> Request:
    """The request of the newest plan with cells of the same settings."""
    newest_first = reversed(study.plans)
    return next(
        plan.request for plan in newest_first if any(setting_of(cell) == key.setting for cell in plan.cells)
    )


def joins(curve: Curve) -> bool:
    """Whether one call can run sizes of the curve and its single device without a further cell.

    A call is a product of its axes. So the plan must have refused the curve's strategy on one device, and the
    single device must have the same values on all other axes.
    """
    key, single = curve.key, curve.single
    plain = (key.compression, key.collective, key.link) == (UNCOMPRESSED, DEFAULT_COLLECTIVE, NO_LINK)
    return (
        single is not None
        and plain
        and single.cell.strategy != key.strategy
        and single.cell.compression == UNCOMPRESSED
        and any(gap.gpus == 1 and gap.skipped for gap in curve.gaps)
    )


def _option(name: str, value: object, default: object) -> tuple[object, ...]:
    return () if value == default else (f"--{name.replace('_', '-')}", value)


def _settings(request: Request) -> Iterator[object]:
    """Options of the matrix that differ from their defaults."""
    for name in _VALUES:
        yield from _option(name, getattr(request, name), getattr(_DEFAULTS, name))
    yield from ("--device", request.device)
    yield from _option("backend", request.backend, "nccl" if request.device == "cuda" else "gloo")
    if request.activation_checkpointing:
        kind = "selective" if request.activation_checkpointing == "selective" else "activation"
        yield f"--{kind}-checkpointing"
    if request.compile:
        yield "--compile"
    for variable in request.env:
        yield from ("--env", variable)
    steps, default = request.steps, StepPolicy()
    for name, option in _STEPS.items():
        yield from _option(option or name, getattr(steps, name), getattr(default, name))
    yield from _option("budget", f"{steps.budget_s:g}s", f"{default.budget_s:g}s")
