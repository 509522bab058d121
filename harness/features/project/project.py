"""The projection of a study: every series, its measured sizes, and its larger sizes with bands or refusals.

What only strategies know (memory, a replay) is injected as an `Outside`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from harness.features.project.bands import band
from harness.features.project.records import ProjectedSeries, ProjectedSize, Span, ahead
from harness.features.project.refusals import Asked, Outside, peak_memory, refusal
from harness.features.project.series import Measured, Replayed, answer, measured
from reports.analysis.budget import LOSS_NAMES, budget, lost
from reports.analysis.cost import HOUR_NS, CellCost, cell_costs
from reports.analysis.figures import CellFigures
from reports.analysis.knee import PAYS_FROM
from reports.analysis.next_run import highest_price, matrix_call
from reports.analysis.scaling import Curve
from reports.analysis.study import StudyFigures
from reports.text import devices, percent
from results.cell import BASELINE_STRATEGY
from results.errors import UsageError
from results.outcome import Evidence
from results.statistics import Metric


def projected_series(study: StudyFigures, to: int, outside: Outside) -> tuple[ProjectedSeries, ...]:
    """Every series of the study with its sizes up to `to`. Raises UsageError if all were measured."""
    if not study.cells:
        raise UsageError(f"{study.name} has no size with a figure to project from: `bench report` says why")
    costs = {cost.cell.id: cost for cost in cell_costs(study)}
    found = [
        measured(curve, to=to, per_node=costs[curve.figures[-1].cell.id].gpus_per_node)
        for curve in _curves(study)
    ]
    if not any(of.targets for of in found):
        most = max((of.largest for of in found), default=0)
        raise UsageError(f"--to {to} is not above what was measured ({most:,}): give a larger size")
    price = highest_price(study)
    why = "the batch of a replica changes under strong scaling"
    made = []
    for of in found:
        answered = answer(of, outside.replay(of) if of.weak and of.targets else why)
        asked = Asked(study=study, of=of, answer=answered, price=price, outside=outside)
        made.append(_Projector(asked, costs[of.last.cell.id]).series())
    return tuple(made)


def _curves(study: StudyFigures) -> Iterator[Curve]:
    """The curves with a figure, without single devices that are the baseline of another curve."""
    others = {
        curve.key.work for curve in study.curves if curve.key.strategy != BASELINE_STRATEGY and curve.points
    }
    for curve in study.curves:
        if curve.points and (curve.key.strategy != BASELINE_STRATEGY or curve.key.work not in others):
            yield curve


@dataclass(frozen=True, slots=True)
class _Projector:
    """One series of the study."""

    asked: Asked
    cost: CellCost
    """The cost of the largest measured size."""

    @property
    def of(self) -> Measured:
        return self.asked.of

    def series(self) -> ProjectedSeries:
        of, key, found = self.of, self.asked.key, self.asked.answer
        sizes = [*map(self._measured, of.cells), *map(self._target, of.targets)]
        answered = any(size.basis == "projected" for size in sizes)
        advice, verify = self._advice(sizes)
        against = of.curve.points[-1].efficiency.baseline
        return ProjectedSeries(
            workload=key.workload,
            label=key.label,
            kind=key.kind,
            batch=key.constant_batch,
            setting=self.asked.study.settings[key.setting],
            law=found.law if answered else None,
            skill=found.skill if answered else None,
            against=against.name if against else None,
            sizes=tuple(sizes),
            advice=advice,
            verify=verify,
        )

    def _measured(self, one: CellFigures) -> ProjectedSize:
        gpus, curve = one.cell.gpus, self.of.curve
        claims = {point.gpus: point.efficiency.metric for point in curve.points}
        single = curve.single is not None and curve.single.cell.gpus == gpus
        efficiency = Span(value=1.0) if single and gpus not in claims else _span(claims.get(gpus))
        step = _span(one.step_ns)
        assert step is not None
        return msgspec.structs.replace(
            self._row(gpus, step, efficiency),
            basis="measured",
            emulated=one.evidence is Evidence.EMULATED,
            memory_bytes=peak_memory(one),
            loss=_loss(curve, one),
        )

    def _target(self, gpus: int) -> ProjectedSize:
        why = refusal(self.asked, gpus)
        if why is not None:
            return ProjectedSize(gpus=gpus, basis="refused", refusal=why)
        step, loss = self._step(gpus)
        row = self._row(gpus, step, self._efficiency(gpus, step))
        return msgspec.structs.replace(row, memory_bytes=self.asked.memory(gpus), loss=loss)

    def _step(self, gpus: int) -> tuple[Span, str | None]:
        """The step time, its band, which contains the interval of the largest size, and what costs most."""
        of, by, loss, levels = self.of, self.asked.answer, _loss(self.of.curve, self.of.last), 0
        one = by.replays if isinstance(by.replays, str) else by.replays[gpus]
        if isinstance(one, Replayed):
            loss, levels = one.loss, one.levels
        least, most = band(by.law, math.log2(gpus / of.largest) + levels, by.roughness)
        value, known = by.step_ns[gpus], of.last.step_ns
        low, high = ((end or known.value) / known.value for end in (known.low, known.high))
        return Span(value=value, low=value * least * low, high=value * most * high), loss

    def _row(self, gpus: int, step: Span, efficiency: Span | None) -> ProjectedSize:
        """A size with what follows from its step time."""
        of, cost = self.of, self.cost
        samples = of.samples(gpus)
        epoch = step.times(cost.epoch_samples / samples) if cost.epoch_samples else None
        usd = cost.usd_per_hour / of.largest * gpus / HOUR_NS if cost.usd_per_hour else None
        return ProjectedSize(
            gpus=gpus,
            basis="projected",
            step_ns=step,
            efficiency=efficiency,
            samples_per_s=step.over(samples * 1e9),
            epoch_ns=epoch,
            usd_per_epoch=epoch.times(usd) if epoch and usd else None,
        )

    def _efficiency(self, gpus: int, step: Span) -> Span | None:
        """E(m) (X(n) / n) / (X(m) / m), with X the throughput and m the largest measured size."""
        of = self.of
        claim = of.curve.points[-1].efficiency.metric
        if claim is None:
            return None
        each = of.last.cell.global_batch / of.last.step_ns.value / of.largest
        return step.over(claim.value * of.samples(gpus) / gpus / each)

    def _advice(self, sizes: Sequence[ProjectedSize]) -> tuple[str | None, str | None]:
        """How far growing pays, as measured and, even at the slow end of the bands, as projected; and the
        command that measures the projected size."""
        of = self.of
        known, more = [size for size in sizes if size.basis == "measured"], [*ahead(sizes)]
        if not more or (len(known) > 1 and not _pays(known[-2], known[-1])):
            return None, None
        measured = f"{devices(of.largest, of.last.cell.device)} measured"
        paying = [size.gpus for size in more if _pays(known[-1], size)]
        if not paying:
            return f"{measured}; no projected size pays at the slow end of its band", None
        verify = matrix_call(self.asked.study, of.curve.key, paying[-1:])
        return f"{measured}; {paying[-1]:,} projected, verify by", verify


def _pays(smaller: ProjectedSize, larger: ProjectedSize) -> bool:
    """Whether an added device brings at least `PAYS_FROM` of what each brought before, at the slow end."""
    assert smaller.samples_per_s is not None
    assert larger.samples_per_s is not None
    slow = larger.samples_per_s.value
    if larger.basis == "projected" and larger.samples_per_s.low is not None:
        slow = larger.samples_per_s.low
    speed_up = slow / smaller.samples_per_s.value
    return (speed_up - 1) / (larger.gpus / smaller.gpus - 1) >= PAYS_FROM


def _span(metric: Metric | None) -> Span | None:
    return None if metric is None else Span(value=metric.value, low=metric.low, high=metric.high)


def _loss(curve: Curve, one: CellFigures) -> str | None:
    """The part that a step loses most by against the smallest size: `exposed transfer, 7.1 %`."""
    own, base = budget(one), budget(curve.figures[0])
    if own is None or base is None or one.cell.gpus == curve.figures[0].cell.gpus:
        return None
    found = lost(own, base)
    part = found.largest
    if found.part_ns[part] <= 0:
        return None
    return f"{LOSS_NAMES[part]}, {percent(found.part_ns[part] / own.step_ns)} of a step"
