"""The report: a study's figures put into one HTML file that needs no network and no script.

The same study gives the same bytes: nothing in the page comes from the time or the place of its making.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from reports.analysis.exchange import ExchangePart, exchange_parts
from reports.analysis.headline import headline_table
from reports.analysis.scaling import Curve
from reports.analysis.study import StudyFigures, analyse
from reports.page import conditions, tables
from reports.page.bars import exposed_dots, phase_bars
from reports.page.curves import efficiency, throughput
from reports.page.frames import cells_csv, runs_csv
from reports.page.groups import Group, Hands, hands
from reports.page.svg import Drawing
from reports.table import TextTable
from reports.text import count, moment
from results.link import NO_LINK
from results.outcome import Evidence
from results.plan import Scaling
from results.run import RunResult
from results.store import Study

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def _segments(text: str) -> list[str]:
    """Where a figure's text may be broken: before its interval, and before what the interval is."""
    return text.replace(" (", "\n(").replace(", ", ",\n").split("\n")


_TEMPLATES.filters["segments"] = _segments


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPart:
    """One piece of work that was scaled: drawings, table, baselines."""

    title: str
    drawings: tuple[Drawing, ...]
    table: TextTable
    baselines: tuple[str, ...]
    no_claims: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeText:
    """One workload over one network: what came of it in a sentence, and the numbers."""

    title: str
    finding: str
    table: TextTable
    reasons: tuple[str, ...]


def render(study: Study, results: Sequence[RunResult]) -> str:
    """The report of a study as one HTML document, from its plans and the results of all its runs."""
    return render_figures(analyse(study.name, study.plans(), results))


def cells_as_csv(study: Study, results: Sequence[RunResult]) -> str:
    """The full table as CSV, one row a cell."""
    return cells_csv(analyse(study.name, study.plans(), results))


def runs_as_csv(study: Study, results: Sequence[RunResult]) -> str:
    """Every run as CSV, one row a run."""
    return runs_csv(analyse(study.name, study.plans(), results))


def render_figures(study: StudyFigures) -> str:
    """The report of a study that is analysed already."""
    drawn = hands(study.curves)
    cells = list(study.cells.values())
    words = tables.CellWords(study)
    labels = {cell.cell.id: words.label(cell.cell) for cell in cells}
    by_work = [
        (title, [point.figures for curve in group for point in curve.points])
        for title, group in _works(study)
    ]
    workloads = dict.fromkeys(cell.cell.workload for cell in cells)
    by_workload = [(name, [cell for cell in cells if cell.cell.workload == name]) for name in workloads]
    return _TEMPLATES.get_template("report.html.j2").render(
        study=study,
        summary=_summary(study),
        created=[moment(plan.created_at) for plan in study.plans],
        cpu=any(pool.cell.device == "cpu" for pool in study.pools.values()),
        emulated=any(cell.evidence is Evidence.EMULATED for cell in cells),
        headline=headline_table(study),
        scaling={kind: _scaling(study, kind, drawn) for kind in ("weak", "strong")},
        phases=(phase_bars(by_work, labels), tables.phases_table(study)),
        spread=tables.spread_table(study),
        communication=(exposed_dots(by_workload, labels), tables.communication_table(study)),
        exchange=[_exchange(study, part) for part in exchange_parts(study)],
        work=tables.work_table(study),
        mfu_reasons=tables.mfu_reasons(study),
        failures=tables.failures_table(study),
        lost=tables.lost_table(study),
        skipped=tables.skipped_table(study),
        warnings=conditions.warnings_table(study),
        disturbed=conditions.disturbed_table(study),
        environment=conditions.environment_table(study),
        allocations=None
        if study.drift is None
        else (conditions.allocations_finding(study.drift), conditions.allocations_table(study.drift)),
        left_out=conditions.left_out_table(study),
        downloads={"cells.csv": _data(cells_csv(study)), "runs.csv": _data(runs_csv(study))},
    )


def _summary(study: StudyFigures) -> str:
    """The study in a sentence of counts."""
    skipped = sum(len(group.gpus) for group in study.skipped)
    parts = [
        f"{count(len(study.pools), 'cell')} planned",
        f"{len(study.cells):,} with figures",
        f"{len(study.failures):,} without",
        f"{count(skipped, 'point')} skipped",
        f"{count(len(study.runs), 'run')} counted",
    ]
    return ", ".join(parts)


def _works(study: StudyFigures) -> list[tuple[str, tuple[Curve, ...]]]:
    """The curves of the same work by the same rule over the same network; none without a point."""
    groups: dict[tuple[object, ...], list[Curve]] = {}
    for curve in study.curves:
        key = (curve.key.workload, curve.key.kind, curve.key.batch, curve.key.setting, curve.key.link)
        groups.setdefault(key, []).append(curve)
    found = [curves for curves in groups.values() if any(curve.points for curve in curves)]
    return [(_title(study, curves[0]), tuple(curves)) for curves in found]


def _scaling(study: StudyFigures, kind: Scaling, drawn: Hands) -> list[ScalingPart]:
    works = [(title, curves) for title, curves in _works(study) if curves[0].key.kind == kind]
    return [
        _part(
            study,
            Group(name=f"{kind}-{place}", title=title, curves=curves, devices_word=study.devices_word),
            drawn,
        )
        for place, (title, curves) in enumerate(works)
    ]


def _part(study: StudyFigures, group: Group, drawn: Hands) -> ScalingPart:
    return ScalingPart(
        title=group.title,
        drawings=(throughput(group, drawn), efficiency(group, drawn)),
        table=tables.scaling_table(study, group.curves),
        baselines=_baselines(group.curves),
        no_claims=tuple(tables.no_claim_reasons(group.curves)),
    )


def _exchange(study: StudyFigures, part: ExchangePart) -> ExchangeText:
    network = "network as it is" if part.link == NO_LINK else f"{part.link} links"
    return ExchangeText(
        title=f"{part.workload}, {network}",
        finding=part.finding,
        table=tables.exchange_table(study, part),
        reasons=tuple(tables.exchange_reasons(part)),
    )


def _title(study: StudyFigures, curve: Curve) -> str:
    key = curve.key
    batch = f"batch {key.batch:,} per replica" if key.kind == "weak" else f"global batch {key.batch:,}"
    setting = study.settings[key.setting]
    link = "" if key.link == NO_LINK else f"{key.link} links"
    return ", ".join(part for part in (key.workload, batch, setting, link) if part)


def _baselines(curves: Sequence[Curve]) -> tuple[str, ...]:
    singles = [curve.single for curve in curves if curve.single is not None]
    first = f"single device: {singles[0].label}" if singles else "single device: none ran this work"
    taken = {single.figures.cell.id for single in singles}
    owns = [curve.own for curve in curves if curve.own is not None]
    return (first, *(f"own smallest: {own.label}" for own in owns if own.figures.cell.id not in taken))


def _data(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
