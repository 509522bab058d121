"""What each way to exchange gradients gains or loses against the dense one, on the same work and network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from reports.analysis.communication import communication
from reports.analysis.compression import BreakEven, LossGuard, break_even, loss_guard, payload_ratio
from reports.analysis.figures import CellFigures
from reports.analysis.scaling import unlike_conditions
from reports.analysis.series import Setting, setting_of
from reports.analysis.study import StudyFigures
from reports.text import number
from results.cell import Cell
from results.label import exchange_label
from results.link import NO_LINK, read_link
from results.outcome import Evidence
from results.statistics import Metric, ratio_of_runs

Verdict = Literal["faster", "no gain", "slower"]

REFERENCE = "ddp"
"""The strategy whose dense exchange the others' are compared with."""
NO_DENSE = "no dense exchange has a figure here"
GRADIENT_BYTES = 4
"""Of one parameter: gradients are in single precision, whatever they are sent as."""
FEWEST_RUNS = 3
"""Of each side for a verdict: n runs of two equal exchanges are apart by chance 2 n! n! / (2n)! of the times,
one in three with two runs, one in ten with three."""
FEW_RUNS = f"a verdict needs {FEWEST_RUNS} runs of each"
ALONE = "every strategy has its dense exchange alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRow:
    """One cell beside the dense exchange of the same point."""

    figures: CellFigures
    dense: CellFigures | None
    """What it is compared with; None for what others are compared with, and where there is nothing."""
    speed_up: Metric | None
    """Step time of the dense exchange over its own: above 1 it is faster."""
    reason: str | None
    """Why there is no speed-up, or none that can be judged; None for what others are compared with."""

    @property
    def cell(self) -> Cell:
        return self.figures.cell

    @property
    def name(self) -> str:
        """`ddp + topk:0.01, ring`."""
        return exchange_label(self.cell)

    @property
    def verdict(self) -> Verdict | None:
        """Whether its runs are apart from those of the dense exchange, and on which side; None: unknown."""
        if self.reason is not None or self.speed_up is None:
            return None
        assert self.speed_up.low is not None
        assert self.speed_up.high is not None
        if self.speed_up.low > 1:
            return "faster"
        return "slower" if self.speed_up.high < 1 else "no gain"

    @property
    def gradients_per_exposed_s(self) -> float | None:
        """Bytes of the model's gradients, 4 a parameter however few are sent, over the exposed seconds; None
        where these may be 0."""
        exposed, parameters = communication(self.figures).exposed_ns, self.figures.newest.parameters
        if exposed is None or exposed.low is None or exposed.low <= 0 or not parameters:
            return None
        return GRADIENT_BYTES * parameters / (exposed.value / 1e9)

    @property
    def payload_ratio(self) -> float | None:
        """Payload over that of the dense exchange."""
        return None if self.dense is None else payload_ratio(self.figures, self.dense)

    @property
    def exchange_cpu_ns(self) -> float | None:
        """CPU time a step beside the training thread: encoding, decoding and adding up, hidden or not."""
        return communication(self.figures).mean("exchange_cpu_ns")

    @property
    def loss_guard(self) -> LossGuard | None:
        """Its loss beside that of the dense exchange; None where the two cannot be compared."""
        return None if self._comparable is None else loss_guard(self.figures, self._comparable)

    @property
    def break_even(self) -> BreakEven | None:
        """The bandwidth below which it would be faster; None where the two cannot be compared."""
        return None if self._comparable is None else break_even(self.figures, self._comparable)

    @property
    def _comparable(self) -> CellFigures | None:
        """The dense exchange, of runs under the same conditions."""
        return None if self.speed_up is None else self.dense


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangePart:
    """All that exchanged the gradients of one workload over one network."""

    workload: str
    link: str
    rows: tuple[ExchangeRow, ...]
    """By size and batch; at each point the dense exchange first."""

    @property
    def finding(self) -> str:
        """Which were faster than the dense exchange and which slower, in a sentence."""
        where = "On this network" if self.link == NO_LINK else f"Over {self.link} links"
        if all(row.figures.evidence is Evidence.EMULATED for row in self.rows):
            where += " (emulated)"
        judged = [row for row in self.rows if row.verdict is not None]
        if not judged:
            reasons = dict.fromkeys(row.reason for row in self.rows if row.reason is not None)
            return f"{where} nothing can be told apart: {'; '.join(reasons) or ALONE}."
        if any(row.verdict == "faster" for row in judged):
            return f"{where} {_gains(judged, _names(self.rows))}."
        return f"{where} {_no_gain(judged, _names(self.rows))}."


def exchange_parts(study: StudyFigures) -> list[ExchangePart]:
    """Every workload and network on which gradients were exchanged in more than one way."""
    parts: dict[tuple[str, str], list[CellFigures]] = {}
    for one in study.cells.values():
        if one.cell.gpus > 1:
            parts.setdefault((one.cell.workload, one.cell.link), []).append(one)
    return [
        ExchangePart(workload=workload, link=link, rows=tuple(_rows(parts[workload, link])))
        for workload, link in sorted(parts, key=lambda part: (part[0], read_link(part[1]) or 0.0))
        if len({exchange_label(one.cell) for one in parts[workload, link]}) > 1
    ]


Names = Mapping[str, str]
Point = tuple[Setting, int, int]
"""What cells must share before their exchanges are compared: the setting, the size and a replica's batch."""


def _point(cell: Cell) -> Point:
    return setting_of(cell), cell.gpus, cell.micro_batch * cell.accumulation


def _is_dense(cell: Cell) -> bool:
    return (cell.compression, cell.collective) == ("none", "default")


def _rows(cells: Iterable[CellFigures]) -> Iterator[ExchangeRow]:
    points: dict[Point, list[CellFigures]] = {}
    for one in cells:
        points.setdefault(_point(one.cell), []).append(one)
    for point in sorted(points):
        dense = {one.cell.strategy: one for one in points[point] if _is_dense(one.cell)}
        rows = [_row(one, dense) for one in points[point]]
        yield from sorted(rows, key=lambda row: row.dense is not None or not _is_dense(row.cell))


def _row(figures: CellFigures, dense: Mapping[str, CellFigures]) -> ExchangeRow:
    against = _against(figures.cell, dense)
    if against is None:
        reason = None if _is_dense(figures.cell) else NO_DENSE
        return ExchangeRow(figures=figures, dense=None, speed_up=None, reason=reason)
    reason = _incomparable(figures, against)
    if reason is not None:
        return ExchangeRow(figures=figures, dense=against, speed_up=None, reason=reason)
    speed_up = ratio_of_runs(against.run_step_ns, figures.run_step_ns, "x")
    reason = FEW_RUNS if speed_up.samples < FEWEST_RUNS else None
    return ExchangeRow(figures=figures, dense=against, speed_up=speed_up, reason=reason)


def _against(cell: Cell, dense: Mapping[str, CellFigures]) -> CellFigures | None:
    """The dense exchange of the same strategy; for that itself, and where there is none, the one of ddp."""
    own = dense.get(cell.strategy)
    if own is not None and not _is_dense(cell):
        return own
    variants = [one for strategy, one in dense.items() if strategy.partition(":")[0] == REFERENCE]
    reference = dense.get(REFERENCE) or next(iter(variants), None)
    return None if reference is not None and reference.cell.id == cell.id else reference


def _incomparable(figures: CellFigures, dense: CellFigures) -> str | None:
    if figures.evidence is not dense.evidence:
        return f"{figures.evidence} here, {dense.evidence} there"
    return unlike_conditions(figures, dense)


def _gains(rows: Sequence[ExchangeRow], names: Names) -> str:
    """What was faster at some point, and what became of the others."""
    parts = [f"these were faster than the dense exchange: {_times(rows, 'faster', names)}"]
    if any(row.verdict == "slower" for row in rows):
        parts.append(f"slower: {_times(rows, 'slower', names)}")
    moved = {row.name for row in rows if row.verdict != "no gain"}
    even = dict.fromkeys(names[row.name] for row in rows if row.name not in moved)
    if even:
        parts.append(f"no gain: {', '.join(even)}")
    return "; ".join(parts)


def _no_gain(rows: Sequence[ExchangeRow], names: Names) -> str:
    """That nothing was faster, and what came nearest to it."""
    noun = "other exchange" if any(row.cell.compression == "none" for row in rows) else "compressor"
    nothing = f"no {noun} was faster than the dense exchange"
    even = dict.fromkeys(names[row.name] for row in rows if row.verdict == "no gain")
    if not even:
        best = min(rows, key=_factor)
        return f"{nothing}; the fastest, {names[best.name]}, was {number(_factor(best))} times slower"
    slower = [row for row in rows if row.verdict == "slower"]
    told = f"; slower: {_times(rows, 'slower', names)}" if slower else ""
    return f"{nothing}; within the spread of it: {', '.join(even)}{told}"


def _times(rows: Sequence[ExchangeRow], verdict: Verdict, names: Names) -> str:
    """`topk:0.01 (up to 2.10 times, at 2 of 3 points), bf16 (1.20 times)`, the largest first."""
    factors: dict[str, list[float]] = {}
    for row in rows:
        if row.verdict == verdict:
            factors.setdefault(row.name, []).append(_factor(row))
    texts = []
    for name, found in sorted(factors.items(), key=lambda item: -max(item[1])):
        points = sum(row.name == name for row in rows)
        up_to = "up to " if len(found) > 1 else ""
        where = f", at {len(found)} of {points} points" if len(found) < points else ""
        texts.append(f"{names[name]} ({up_to}{number(max(found))} times{where})")
    return ", ".join(texts)


def _factor(row: ExchangeRow) -> float:
    """How many times faster or, if it is slower, slower."""
    assert row.speed_up is not None
    return 1 / row.speed_up.value if row.verdict == "slower" else row.speed_up.value


def _names(rows: Sequence[ExchangeRow]) -> Names:
    """What each exchange is called in a sentence, where commas part a list: `topk:0.01 over ring`."""
    several = len({row.cell.strategy for row in rows}) > 1
    return {row.name: _name(row.cell, several=several) for row in rows}


def _name(cell: Cell, *, several: bool) -> str:
    sent = "" if cell.compression == "none" else cell.compression
    if several:
        what = f"{cell.strategy} + {sent}" if sent else cell.strategy
    else:
        what = sent or "dense"
    return what if cell.collective == "default" else f"{what} over {cell.collective}"
