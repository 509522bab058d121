"""The rules by which a size is not projected, each with the cheapest measurement that lifts it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from harness.features.project.laws import FARTHEST, refused
from harness.features.project.records import Lift, Refusal
from harness.features.project.series import Answer, Measured, Replays
from reports.analysis.figures import CellFigures
from reports.analysis.knee import knee
from reports.analysis.next_run import gpu_hours, matrix_call
from reports.analysis.scaling import unlike_conditions
from reports.analysis.series import SeriesKey
from reports.analysis.study import StudyFigures
from reports.text import count, device_word, percent, size
from results.cell import BASELINE_STRATEGY, REFERENCE_STRATEGY, Cell
from results.outcome import Evidence, Outcome
from results.run import NOT_PROVEN

NETWORK_HOURS = 1 / 20
"""Assumed hours of a measurement of the network, which takes a minute and its start-up."""


NOT_DENSE = "what a compressor, or another collective than the default, takes has no closed form"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Functions for facts of cells that only strategies know. By default these are unknown."""

    replay: Callable[[Measured], Replays] = lambda of: "no network table was given"
    unprojected: Callable[[Cell], str | None] = lambda cell: None if cell.dense else NOT_DENSE
    """Why sizes of its strategy, with its exchange, are not projected, as a clause; None if they are."""
    memory: Callable[[Cell, int], int | None] = lambda cell, per_node: None
    """Bytes of the fullest rank in closed form, on nodes of a number of devices; None if not known."""
    room: Callable[[CellFigures], int | None] = lambda one: None
    """Bytes of memory that a rank of a cell may take; None if not known."""
    fitting: Callable[[Cell, float], str | None] = lambda cell, share: None
    """A setting by which a cell takes at most a share of its memory; None without one."""
    network_call: Callable[[int], str] | None = None
    """The command that measures the network of a number of devices."""
    what_if: bool = False
    """Whether the targets are asked for another network than the measured sizes ran on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A series of a study whose sizes are asked for."""

    study: StudyFigures
    of: Measured
    answer: Answer
    price: float | None
    """The highest price of a device and hour; None if no price is known."""
    outside: Outside

    @property
    def key(self) -> SeriesKey:
        return self.of.curve.key

    @property
    def unprojected(self) -> str | None:
        return self.outside.unprojected(self.of.last.cell)

    def memory(self, gpus: int) -> int | None:
        """The measured peak of the largest size, times what the closed form says that it changes."""
        of, outside = self.of, self.outside
        here, there = (outside.memory(of.cell(size), of.per_node) for size in (of.largest, gpus))
        peak = peak_memory(of.last)
        return there if not peak or not here or there is None else round(peak * there / here)

    def runs(
        self, what: str, sizes: Sequence[int], key: SeriesKey | None = None, repeats: int | None = None
    ) -> Lift:
        """A lift by runs of a series on `sizes`; `repeats` is the final number of runs (None: as planned).

        Behind the knee of the curve it names no run of a larger size.
        """
        beyond = knee(self.of.curve).beyond if sizes[-1] > self.of.largest else None
        if beyond is not None:
            return Lift(command=None, what=f"a run beyond the knee, which does not pay: {beyond.text}")
        key = key or self.key
        if key.strategy == BASELINE_STRATEGY and sizes[-1] > 1:
            key = replace(key, strategy=REFERENCE_STRATEGY)
        hours = gpu_hours(self.of.curve, sizes, repeats or self.of.last.pool.planned)
        command = matrix_call(self.study, key, sizes, repeats=repeats)
        return self._priced(command, what, hours)

    def itself(self, gpus: int) -> Lift:
        """A lift by runs of the size that was asked for."""
        return self.runs(f"{gpus:,} itself", [gpus])

    def network(self, gpus: int) -> Lift | None:
        """A lift by a network table of a number of devices; None where a replay would not use it."""
        computed = any(run.budget for one in self.of.cells for run in one.runs)
        call = self.outside.network_call
        if call is None or self.unprojected or not (self.of.weak and computed):
            return None
        hours = gpus * NETWORK_HOURS if self.of.last.cell.device == "cuda" else None
        return self._priced(call(gpus), f"the network of {gpus:,} devices", hours)

    def _priced(self, command: str, what: str, hours: float | None) -> Lift:
        usd = None if hours is None or self.price is None else hours * self.price
        return Lift(command=command, what=what, gpu_hours=hours, usd=usd)


def peak_memory(one: CellFigures) -> int | None:
    """The largest memory of a rank: on a GPU by the allocator, on a CPU over idle."""
    peaks = [run.device_allocated_peak_bytes or run.rss_over_idle_bytes for run in one.runs]
    return max((peak for peak in peaks if peak is not None), default=None)


def refusal(asked: Asked, gpus: int) -> Refusal | None:
    """Why a size is not projected; None if it is. Reasons that no other size lifts are first."""
    return next((found for rule in _RULES if (found := rule(asked, gpus)) is not None), None)


def _strategy(asked: Asked, gpus: int) -> Refusal | None:
    if (why := asked.unprojected) is None:
        return None
    reason = f"{asked.key.label} is not projected: {why} (docs/projection.md)"
    return Refusal(kind="strategy", reason=reason, lift=asked.itself(gpus))


def _emulated(asked: Asked, gpus: int) -> Refusal | None:
    emulated = [point.gpus for point in asked.of.curve.points if point.figures.evidence is Evidence.EMULATED]
    if not emulated:
        return None
    named = ", ".join(f"{one:,}" for one in emulated)
    word = device_word(asked.of.last.cell.device)
    reason = (
        f"{named} was emulated: ranks that share cores, or a virtual network, show nothing about larger sizes"
    )
    needs = f"it needs other hardware, a separate device for each {word} on {named}"
    return Refusal(kind="emulated", reason=reason, lift=Lift(command=None, what=needs))


def _unproven(asked: Asked, gpus: int) -> Refusal | None:
    wrong = [one.cell.gpus for one in asked.of.cells if one.no_claim == NOT_PROVEN]
    if not wrong:
        return None
    reason = f"{', '.join(f'{one:,}' for one in wrong)} was {NOT_PROVEN}, so its steps may train otherwise"
    needs = "it needs runs that are proven: docs/proof.md says what a proof compares"
    return Refusal(kind="unproven", reason=reason, lift=Lift(command=None, what=needs))


def _cores(asked: Asked, gpus: int) -> Refusal | None:
    last, environment = asked.of.last, asked.of.last.newest.environment
    if last.cell.device != "cpu" or environment is None or environment.nodes > 1:
        return None
    if gpus <= environment.cores:
        return None
    cores = count(environment.cores, "core")
    reason = f"ranks on CPU share the {cores} of their host, which are fewer than {gpus:,}"
    needs = f"it needs other hardware, a host with {count(gpus, 'core')}"
    return Refusal(kind="cores", reason=reason, lift=asked.runs(needs, [gpus]))


def _mixed(asked: Asked, gpus: int) -> Refusal | None:
    last = asked.of.last
    for smaller in asked.of.cells[:-1]:
        unlike = unlike_conditions(smaller, last)
        if unlike is not None:
            gpus, why = smaller.cell.gpus, unlike.detail or unlike
            reason = f"{gpus:,} and {last.cell.gpus:,} were measured in two environments: {why}"
            key = replace(asked.key, strategy=smaller.cell.strategy)
            return Refusal(kind="mixed runs", reason=reason, lift=asked.runs(f"{gpus:,} again", [gpus], key))
    return None


def _disturbed(asked: Asked, gpus: int) -> Refusal | None:
    for one in asked.of.cells[-2:]:
        disturbed = sum(run.disturbed for run in one.runs)
        if disturbed:
            at, key = one.cell.gpus, replace(asked.key, strategy=one.cell.strategy)
            reason = f"{count(disturbed, 'disturbed run')} of {len(one.runs):,} on {at:,} decide"
            more = asked.runs(f"more runs of {at:,}", [at], key, repeats=len(one.runs) + 2)
            return Refusal(kind="disturbed", reason=reason, lift=more)
    return None


def _batch(asked: Asked, gpus: int) -> Refusal | None:
    if asked.of.weak:
        return None
    batch = asked.of.batch(gpus)
    if batch < 1 or batch != int(batch):
        whole = f"a global batch of {asked.key.constant_batch:,} has no whole batch for a replica on {gpus:,}"
        return Refusal(kind="batch", reason=whole, lift=Lift(command=None, what="another global batch"))
    reason = f"{gpus:,} would have a batch of {batch:,.0f} a replica, which only a weak series projects"
    sizes = sorted({max(1, asked.of.largest // 2), asked.of.largest})
    weak = replace(asked.key, kind="weak", constant_batch=int(batch))
    sized = asked.runs(f"this batch on {' and '.join(f'{one:,}' for one in sizes)}", sizes, weak)
    return Refusal(kind="batch", reason=reason, lift=sized)


def _memory(asked: Asked, gpus: int) -> Refusal | None:
    of = asked.of
    if any((gap.gpus, gap.outcome) == (gpus, Outcome.OUT_OF_MEMORY) for gap in of.curve.gaps):
        return Refusal(kind="memory", reason="it was run, and memory ran out", lift=asked.itself(gpus))
    room, needed = asked.outside.room(of.last), asked.memory(gpus) if of.weak else None
    if room is None or needed is None or needed <= room:
        return None
    more = f"{size(needed - room)} more than the {size(room)} that a rank may take"
    reason = f"its fullest rank takes {size(needed)}, {more}"
    fitting = asked.outside.fitting(of.cell(gpus), room / needed)
    fits = Lift(command=None, what=f"another setting: {fitting or 'a smaller batch of a replica'}")
    return Refusal(kind="memory", reason=reason, lift=fits)


def _law(asked: Asked, gpus: int) -> Refusal | None:
    """The rules that depend on the law: a replay may answer where the step times alone cannot."""
    of, replays = asked.of, asked.answer.replays
    if not isinstance(replays, str):
        if of.largest <= of.per_node < gpus:
            return _boundary(asked, gpus)
        if gpus > FARTHEST * of.largest:
            return _far(asked, gpus)
        why = replays[gpus]
        missing = Refusal(kind="not replayed", reason=str(why), lift=asked.itself(gpus))
        return missing if isinstance(why, str) else None
    if asked.outside.what_if:
        reason = f"only a replay answers for another network, and it does not: {replays}"
        return Refusal(kind="what-if", reason=reason, lift=None)
    kind = refused(of.steps, gpus, of.per_node)
    return None if kind is None else _LAW_REFUSALS[kind](asked, gpus)


def _one_size(asked: Asked, gpus: int) -> Refusal:
    largest, replay = asked.of.largest, asked.answer.replays
    reason = f"one size was measured, and a replay does not answer: {replay}"
    half, each = largest // 2, asked.of.last.cell.model_parallel
    if max(half, 1) < each:
        lift = asked.runs(f"{2 * largest:,} as well", [2 * largest])
    elif half >= 2:
        lift = asked.runs(f"{half:,} as well", [half])
    elif largest == 2:
        alone = replace(asked.key, strategy=BASELINE_STRATEGY)
        lift = asked.runs("the same work on 1 device as well", [1], alone)
    else:
        lift = asked.runs("2 as well", [2])
    return Refusal(kind="one size", reason=reason, lift=lift)


def _boundary(asked: Asked, gpus: int) -> Refusal:
    of, two = asked.of, 2 * asked.of.per_node
    replays = asked.answer.replays
    why = replays if isinstance(replays, str) else "it was compared with no step between nodes"
    reason = f"sizes were measured inside of a node of {of.per_node:,}, and a replay does not answer: {why}"
    return Refusal(kind="node boundary", reason=reason, lift=asked.runs(f"two nodes, {two:,}", [two]))


def _irregular(asked: Asked, gpus: int) -> Refusal:
    of = asked.of
    changes = list(zip(of.steps.gpus[1:], of.steps.changes, strict=True))
    at, change = max(changes, key=lambda one: abs(one[1]))
    word = "lost" if change > 0 else "gained"
    reason = (
        f"efficiency {word} {percent(abs(math.expm1(-change)))} a doubling up to {at:,}, more than 10 %, and "
        f"a replay does not answer: {asked.answer.replays}"
    )
    table = asked.network(max(of.largest, 2 * of.per_node))
    itself = asked.itself(gpus)
    cheaper = table is not None and (table.gpu_hours or 0.0) < (itself.gpu_hours or math.inf)
    lift = table if cheaper and itself.command is not None else itself
    return Refusal(kind="irregular", reason=reason, lift=lift)


def _far(asked: Asked, gpus: int) -> Refusal:
    near = asked.of.largest
    while FARTHEST * near < gpus:
        near *= 2
    reason = f"more than {FARTHEST} times the largest measured size, {asked.of.largest:,}"
    return Refusal(kind="too far", reason=reason, lift=asked.runs(f"{near:,} as well", [near]))


_LAW_REFUSALS: dict[str, Callable[[Asked, int], Refusal]] = {
    "one size": _one_size,
    "node boundary": _boundary,
    "irregular": _irregular,
    "too far": _far,
}
_RULES = (_strategy, _emulated, _unproven, _cores, _mixed, _disturbed, _batch, _memory, _law)
