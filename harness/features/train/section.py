"""Training runs (`bench train`): their curves, checkpoints and restarts, and time to a target over seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from harness.features.train.trained import (
    Race,
    Recovery,
    Spread,
    TimeToTarget,
    TrainedCell,
    Way,
    races,
    recoveries,
    told_not_finite,
)
from reports import fields
from reports.analysis.study import StudyFigures
from reports.fields import Field
from reports.page.chart import drawn
from reports.page.description import Chart, Line, Rule, thinned
from reports.page.looks import COLOURS, cell_label
from reports.page.section import Block, Definition, Drawing, Drawings, Heading, Paragraph, Section, Table
from reports.table import TextTable, figures, table, words
from reports.text import NOTHING, count, duration, percent, rate
from results.cell import exchange_label
from workloads.shape import METRICS

_DRAWN = 8
"""The number of runs in one drawing; the tables have all."""
Named = tuple[str, TrainedCell]
Values = Callable[[TrainedCell], Sequence[tuple[float, float]]]


def trained_of(study: StudyFigures) -> Sequence[TrainedCell]:
    """The cells that were trained, in the order of the plans."""
    found: Mapping[str, TrainedCell] = study.added.get("training") or {}
    return tuple(found.values())


def training_section(study: StudyFigures) -> Section | None:
    """Make the section; None if no cell was trained."""
    trained = [one for one in trained_of(study) if one.log.rows]
    # The exchange and the seed are enough as a name if they distinguish the runs.
    short = [f"{exchange_label(one.cell)}, seed {one.cell.seed}" for one in trained]
    names = short if len(set(short)) == len(short) else [cell_label(study, one.cell) for one in trained]
    runs = list(zip(names, trained, strict=True))
    if not runs:
        return None
    return Section(anchor="training", title="Training", blocks=tuple(_blocks(runs)), definitions=_DEFINITIONS)


def _blocks(runs: Sequence[Named]) -> Iterator[Block]:
    ended = sum(one.log.ended is not None for _, one in runs)
    yield Paragraph(f"{count(len(runs), 'training run')}, {ended:,} of them ended by themselves.", "finding")
    yield Table(_overview(runs), "Training runs")
    for name, one in runs:
        yield from (Paragraph(f"{name}: {told}.", "plain") for told in told_not_finite(one.log))
    yield Drawings(tuple(_drawings(runs)))
    if len(runs) > _DRAWN:
        yield Paragraph(f"Drawn are the first {_DRAWN} of {len(runs):,} runs.", "plain")
    interrupted = [(name, recovery) for name, one in runs for recovery in recoveries(one.log, one.attempts)]
    yield Heading("Restarts")
    if interrupted:
        yield Table(_restarts(interrupted), "Interruptions, with seconds after the last sign of life")
    else:
        yield Paragraph("No run was interrupted.", "plain")
    yield Heading("Checkpoints")
    yield Table(_checkpoints(runs), "Checkpoints of each run")


def _overview(runs: Sequence[Named]) -> TextTable:
    return table(
        runs,
        [
            words("run", lambda row: row[0]),
            figures("steps", lambda row: fields.whole(row[1].log.step)),
            figures("epochs", lambda row: fields.number(_last(row[1], "epoch"))),
            figures("loss", lambda row: fields.number(_last(row[1], "loss"))),
            figures("best val_loss", partial(_best, "val_loss")),
            figures("best val_accuracy", partial(_best, "val_accuracy")),
            *(figures(f"best {name}", partial(_best, name)) for name in _own_metrics(runs)),
            figures("throughput", lambda row: _per_s(row[1]), hint="Of all replicas."),
            figures("restarts", lambda row: fields.whole(row[1].log.restarts)),
            figures("steps lost", lambda row: fields.whole(row[1].log.wasted_steps)),
            figures(
                "goodput",
                lambda row: fields.percent(row[1].log.goodput),
                anchor="method-goodput",
                hint="Time of the counted steps over all time.",
            ),
            words("end", lambda row: _end(row[1])),
        ],
    )


def _end(one: TrainedCell) -> str:
    return one.log.ended.words if one.log.ended else "diverged" if one.over else "has not ended"


def _last(one: TrainedCell, name: str) -> float | None:
    return float(getattr(one.log.steps[-1], name)) if one.log.steps else None


def _best(metric: str, row: Named) -> Field:
    found = row[1].log.best(metric)
    return fields.NONE if found is None else Field(f"{found[1]:.4g} at step {found[0]:,}", found[1])


def _own_metrics(runs: Sequence[Named]) -> list[str]:
    """The names of the metrics that the workloads define."""
    found = {name for _, one in runs for row in one.log.validations for name in row.metrics}
    return sorted(found - set(METRICS))


def _per_s(one: TrainedCell) -> Field:
    unit, each = (one.log.launches[-1].unit, one.log.launches[-1].units_per_sample)
    per_s = one.samples_per_s
    return fields.shown(per_s and per_s * each, lambda value: rate(value, unit), f"{unit}/s")


def _drawings(runs: Sequence[Named]) -> Iterator[Drawing]:
    def of(metric: str) -> Values:
        return lambda one: one.log.values(metric)

    own = [(f"training-{name}", f"{name} of held-out samples", name, of(name)) for name in _own_metrics(runs)]
    kinds: tuple[tuple[str, str, str, Values], ...] = (
        ("training-loss", "Training loss", "loss", of("loss")),
        ("training-val-loss", "Loss of held-out samples", "val_loss", of("val_loss")),
        ("training-val-accuracy", "Accuracy on held-out samples", "val_accuracy", of("val_accuracy")),
        *own,
        ("training-gradient-norm", "Norm of the gradient", "norm", _norms),
        ("training-throughput", "Throughput", "samples/s", _throughputs),
    )
    for name, title, unit, values in kinds:
        lines = [
            Line(name=run, colour=COLOURS[place % len(COLOURS)], points=thinned(found), plain=True)
            for place, (run, one) in enumerate(runs[:_DRAWN])
            if (found := values(one))
        ]
        if lines:
            goals = {one.target for _, one in runs if one.target and one.target.metric == unit}
            yield drawn(
                Chart(
                    name=name,
                    title=f"{title} by step",
                    y_title=unit,
                    x_title="step",
                    lines=tuple(lines),
                    rules=tuple(Rule(text="", y=goal.value) for goal in goals),
                    note=" ".join(f"Target: {goal.value:g}." for goal in goals),
                    x_axis="linear",
                    sizes=False,
                    switchable=False,
                )
            )


def _norms(one: TrainedCell) -> list[tuple[float, float]]:
    """The norm of the gradient, before clipping, of the last step of each row."""
    return [(row.step, row.gradient_norm) for row in one.log.steps if row.gradient_norm is not None]


def _throughputs(one: TrainedCell) -> list[tuple[float, float]]:
    """The throughput of the row of steps that ends at each step."""
    rows = one.log.steps
    before = [0, *(row.samples for row in rows)]
    return [
        (row.step, (row.samples - earlier) / row.seconds)
        for row, earlier in zip(rows, before, strict=False)
        if row.seconds > 0 and row.samples > earlier
    ]


def _restarts(found: Sequence[tuple[str, Recovery]]) -> TextTable:
    return table(
        found,
        [
            words("run", lambda row: row[0]),
            figures("at step", lambda row: fields.whole(row[1].step)),
            words("reason", lambda row: row[1].reason or "not known"),
            figures("noticed", lambda row: _seconds(row[1].noticed_s), anchor="method-recovery"),
            figures("started", lambda row: _seconds(row[1].started_s)),
            figures("ready", lambda row: _seconds(row[1].ready_s)),
            figures("first step", lambda row: _seconds(row[1].first_step_s)),
            figures("steps lost", lambda row: fields.whole(row[1].steps_lost)),
            figures("replicas after", lambda row: fields.whole(row[1].replicas)),
        ],
    )


def _seconds(value: float | None) -> Field:
    return fields.shown(value, lambda known: duration(known * 1e9), "s")


def _checkpoints(runs: Sequence[Named]) -> TextTable:
    return table(
        runs,
        [
            words("run", lambda row: row[0]),
            figures("written", lambda row: fields.whole(sum(not one.failed for one in row[1].log.saves))),
            words("at steps", lambda row: _steps([one.step for one in row[1].log.saves if not one.failed])),
            words("best", lambda row: _steps([one.step for one in row[1].log.saves if one.best][-1:])),
            figures(
                "blocked",
                lambda row: _seconds(sum(save.seconds for save in row[1].log.saves)),
                hint="Training, by all of them.",
            ),
            words("not written", lambda row: _failures(row[1])),
        ],
    )


def _steps(steps: Sequence[int]) -> str:
    kept = [f"{step:,}" for step in steps]
    if len(kept) > 6:
        kept = [*kept[:3], "...", *kept[-2:]]
    return ", ".join(kept) or NOTHING


def _failures(one: TrainedCell) -> str:
    failed = [save for save in one.log.saves if save.failed]
    return "; ".join(f"step {save.step:,}: {save.failed}" for save in failed[-3:]) or NOTHING


def accuracy_section(study: StudyFigures) -> Section | None:
    """Make the section on time to the target; None if no work was trained to a target by several runs."""
    found = races(trained_of(study))
    if not found:
        return None
    return Section(
        anchor="accuracy",
        title="Time to accuracy",
        blocks=tuple(block for race in found for block in _race(race)),
        definitions=_ACCURACY,
    )


def _race(race: Race) -> Iterator[Block]:
    cell = race.cell
    several = any(len(way.runs) > 1 for way in race.ways)
    yield Table(
        _ways(race),
        f"{cell.workload} on {cell.dataset}, {cell.gpus:,} {'ranks' if cell.device == 'cpu' else 'GPUs'}, "
        f"batch {cell.batch_per_replica:,} a replica, {cell.global_batch:,} in all: "
        f"time and samples to {race.target}, "
        f"{'median over seeds with the range' if several else 'of one seed each'}",
    )
    for way in race.ways:
        if way.never:
            yield Paragraph(
                f"{way.label}: {_seeds(way.never)} never reached the target within the ordered training. "
                f"Such a run counts as longer than the others, and no mean includes it.",
                "plain",
            )
        if way.unfinished:
            yield Paragraph(
                f"{way.label}: {_seeds(way.unfinished)} {'has' if len(way.unfinished) == 1 else 'have'} not "
                f"ended, nor reached the target so far. Figures that this may still change are not known.",
                "plain",
            )


def _seeds(runs: Sequence[TimeToTarget]) -> str:
    return f"{'seed' if len(runs) == 1 else 'seeds'} {', '.join(str(run.seed) for run in runs)}"


def _ways(race: Race) -> TextTable:
    def ratio(way: Way) -> Field:
        return Field("baseline") if way is race.ways[0] else _spread(race.ratio(way), "{:.2f}".format)

    return table(
        race.ways,
        [
            words("strategy and compression", lambda way: way.label),
            figures("reached", _reached, hint="Of all seeds."),
            figures(
                "time",
                lambda way: _spread(way.seconds, lambda value: duration(value * 1e9)),
                anchor="method-time-to-target",
            ),
            figures("samples", lambda way: _spread(way.samples, lambda value: f"{value:,.0f}")),
            figures("time over the baseline's", ratio),
        ],
    )


def _reached(way: Way) -> Field:
    share = way.reached / len(way.runs)
    return Field(f"{way.reached} of {len(way.runs)} ({percent(share)})", share, "ratio")


def _spread(found: Spread | None, form: Callable[[float], str]) -> Field:
    if found is None:
        return fields.NONE
    if found.median is None and found.open:
        return Field("not known yet")
    if found.median is None:
        return Field("half or more never" if found.low is not None else "never")
    if found.low == found.high:
        return Field(form(found.median), found.median)
    low = NOTHING if found.low is None else form(found.low)
    latest = "not known yet" if found.open else "never"
    high = latest if found.high is None else form(found.high)
    return Field(f"{form(found.median)} ({low} to {high})", found.median)


_DEFINITIONS = (
    Definition(
        "method-goodput",
        "Goodput",
        "Time of the counted training steps over the time from the first row of the log to the last. The "
        "rest is validation, checkpoints, restarts and steps that were done again.",
    ),
    Definition(
        "method-recovery",
        "Recovery",
        "Seconds after the last sign of life of an interrupted launch: until it had been ended (noticed), "
        "the next one was started, its ranks had loaded the checkpoint (ready), and had taken a first step.",
    ),
)
_ACCURACY = (
    Definition(
        "method-time-to-target",
        "Time to the target",
        "Time of the training steps up to the first validation that reached the target, without validation, "
        "checkpoints and steps that were lost. The median over seeds is shown with the smallest and the "
        "largest; a run that never reached the target counts as longer than all others. A run that has not "
        "ended takes longer than it has so far: the figures that this leaves open are not known yet.",
    ),
)
