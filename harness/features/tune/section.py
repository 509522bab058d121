"""Tuning: the answer of `bench tune`, the course of its search, and every trial."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from harness.features.tune.records import Contribution, TunedTrial, Tuning, told
from reports import fields
from reports.analysis.outcomes import outcome_words
from reports.analysis.study import StudyFigures
from reports.page.chart import drawn
from reports.page.description import Chart, Line, Point
from reports.page.section import Block, Bullets, Command, Definition, Drawings, Paragraph, Section, Table
from reports.table import Column, figures, table, words
from reports.text import count, duration, metric, number, size

DEFINITION = Definition(
    "method-tuning",
    "Trial",
    "A short run of one setting. The trials of one rung and block ran interleaved. The fastest settings run "
    "again for longer, until three have run at the longest length. The best three and the default are then "
    "measured as the cells of this study: only these figures are claims.",
)
_INVISIBLE = "0 9999"
"""A dash pattern without dashes: the points of a cloud have no line."""


def tuning_section(study: StudyFigures) -> Section | None:
    """Make the section; None for a study that no tune has made."""
    tuning: Tuning | None = study.added.get("tuning")
    if tuning is None:
        return None
    blocks = tuple(_blocks(tuning))
    return Section(anchor="tuning", title="Tuning", blocks=blocks, definitions=(DEFINITION,))


def _blocks(tuning: Tuning) -> Iterator[Block]:
    answer, names = tuning.answer, {one.id: told(one.choices) for one in tuning.settings}
    if answer is None:
        yield Paragraph("The tune has no answer yet: run the same command again.", "none")
    else:
        yield Paragraph(answer.sentence, "finding")
        uses = ("To measure it again:", "To train with it:")
        for why, command in zip(uses, answer.commands, strict=False):
            yield Command(why, command)
        columns: list[Column[Contribution]] = [
            words("choice", lambda row: row.choice),
            words("value", lambda row: row.value),
            words("instead of", lambda row: row.instead),
            figures(
                "times the throughput", lambda row: fields.number(row.ratio.value), anchor=DEFINITION.anchor
            ),
            words("interval", lambda row: metric(row.ratio).note),
        ]
        caption = "What each choice of the answer brings, one at a time, by interleaved trials"
        if answer.contributions:
            yield Table(table(answer.contributions, columns), caption)
        if answer.remarks:
            yield Bullets(answer.remarks, "plain")
    ran = len({trial.setting for trial in tuning.trials})
    spent = duration(1e9 * sum(trial.device_s for trial in tuning.trials))
    ended = f"; the search ended because {tuning.ended}" if tuning.ended else ""
    yield Paragraph(
        f"{count(len(tuning.settings), 'setting')} may fit, {count(sum(tuning.refused.values()), 'point')} "
        f"were refused before. {ran:,} had {count(len(tuning.trials), 'trial')} in {spent} of "
        f"device-time{ended}."
    )
    rated = [trial for trial in tuning.trials if trial.rate is not None]
    if rated:
        charts = [_course(tuning.trials, names)]
        sized = [trial for trial in rated if trial.memory_bytes]
        charts += [_frontier(sized, names)] if sized else []
        yield Drawings(tuple(map(drawn, charts)))
    if tuning.trials:
        yield _trials(tuning, names)


def _trials(tuning: Tuning, names: Mapping[str, str]) -> Table:
    states = {one.id: f"{one.state}: {one.why}" if one.why else one.state for one in tuning.settings}
    anchor = DEFINITION.anchor
    columns: list[Column[TunedTrial]] = [
        words("setting", lambda row: names.get(row.setting, row.setting)),
        figures("rung", lambda row: fields.whole(row.rung), anchor=anchor),
        figures("block", lambda row: fields.whole(row.block), anchor=anchor),
        figures("samples/s", lambda row: fields.number(row.rate), anchor=anchor),
        figures("memory", lambda row: fields.size(row.memory_bytes), anchor=anchor),
        figures("device-time", lambda row: fields.duration(1e9 * row.device_s), anchor=anchor),
        words("end", lambda row: ": ".join(filter(None, (outcome_words(row.outcome), row.reason)))),
        words("standing of the setting", lambda row: states.get(row.setting, "")),
    ]
    return Table(table(tuning.trials, columns), "Trials, in the order of time", tools=True)


def _course(trials: Iterable[TunedTrial], names: Mapping[str, str]) -> Chart:
    """The best rate so far against the device-time spent, as steps."""
    spent, best, points = 0.0, 0.0, list[Point]()
    for trial in trials:
        spent += trial.device_s
        if trial.rate is not None and trial.rate > best:
            points += [Point(x=spent, y=best)] if points else []
            best = trial.rate
            points.append(Point(x=spent, y=best, label=f"{names.get(trial.setting, '')}: {number(best)}"))
    line = Line(name="best so far", colour="blue", points=(*points, Point(x=spent, y=best)), plain=True)
    return _chart(
        line,
        name="tuning-course",
        title="Best trial so far against device-time",
        x_title="device-seconds",
        about="A line that rises where a trial was faster than all before.",
    )


def _frontier(rated: Iterable[TunedTrial], names: Mapping[str, str]) -> Chart:
    """Throughput against memory: the last trial of each setting, and those that no other beats in both."""
    last = {trial.setting: trial for trial in rated}
    frontier: list[Point] = []
    others: list[Point] = []
    for trial in sorted(last.values(), key=lambda trial: (trial.memory_bytes or 0, -(trial.rate or 0.0))):
        memory, rate = trial.memory_bytes or 0, trial.rate or 0.0
        label = f"{names.get(trial.setting, '')}: {number(rate)} samples/s, {size(memory)}"
        point = Point(x=memory / 2**20, y=rate, label=label)
        (others if frontier and rate <= frontier[-1].y else frontier).append(point)
    lines = [Line(name="frontier", colour="blue", points=tuple(frontier))]
    if others:
        lines.append(Line(name="others", colour="orange", dash=_INVISIBLE, points=tuple(others)))
    return _chart(
        *lines,
        name="tuning-frontier",
        title="Throughput against memory of the fullest rank",
        x_title="MiB of memory",
        note="On the frontier no other setting is faster and takes less memory.",
        about="A point is the last trial of a setting.",
    )


def _chart(*lines: Line, name: str, title: str, x_title: str, about: str, note: str = "") -> Chart:
    return Chart(
        name=name,
        title=title,
        y_title="samples/s",
        x_title=x_title,
        lines=lines,
        x_axis="linear",
        y_from=0.0,
        sizes=False,
        switchable=False,
        note=note,
        about=about,
    )
