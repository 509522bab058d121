"""`--batch-size auto`: the largest micro-batch that fits, by prediction first, then by what short runs take.

The search is a function of the runs so far: it continues where it was interrupted, and repeats none of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf, lcm

import msgspec

from harness.plan.expand import expand
from harness.plan.points import series_of
from harness.plan.surroundings import MIB, Limit, Surroundings, devices_of
from results.cell import BASELINE_STRATEGY, Cell, StepPolicy
from results.parts import Unknown
from results.plan import BatchBasis, FittingBatch, Plan, Request, SeriesId
from strategies.catalog import STRATEGIES
from strategies.predictions import footprint
from workloads.catalog import WORKLOADS, facts, refusal

TENSOR_CORE_SAMPLES = 8
"""Micro-batches on tensor cores are multiples of this, unless not even that many samples fit."""
TOLERANCE = 0.03
"""The search ends when the smallest size that does not fit exceeds the largest that does by this share."""
PROBE = StepPolicy(block_steps=2, warmup_max_steps=0, min_blocks=1, max_blocks=1, budget_s=0, quads=0)
"""Two steps after those that are proven: the optimizer has its state, and every micro-batch is among them."""
_MOST_AIMED = 6
"""Runs after which the search halves, and no longer takes memory to grow equally with each sample."""
_MOST_SAMPLES = 2**20
Taken = Mapping[int, int | str]
"""Runs of one cell, by micro-batch: the bytes of the fullest rank, or how it failed, as a predicate."""


@dataclass(frozen=True)
class Candidate:
    """A cell on one number of workers, whose largest micro-batch is wanted."""

    cell: Cell
    """With the smallest micro-batch that it can have."""
    around: Surroundings
    trains: bool = False
    """Whether its batch is for a training, whose data are fewer."""

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Micro-batches are multiples of the first or, if not even one of it fits, of the second."""
        pieces = STRATEGIES.facts(self.cell.strategy).microbatches
        on_tensor_cores = self.cell.device == "cuda" and self.cell.precision != "fp32"
        return tuple(dict.fromkeys((lcm(pieces, TENSOR_CORE_SAMPLES if on_tensor_cores else 1), pieces)))

    def of(self, micro_batch: int) -> Cell:
        return msgspec.structs.replace(self.cell, micro_batch=micro_batch)

    def probe(self, micro_batch: int) -> Cell:
        """The short run that tries a micro-batch.

        On CPU its limit is the part that may be taken, and the micro-batch fits if the run ends well. A limit
        counts address space, while the peak that a run records counts resident pages, including libraries.
        """
        limit = self.cell.memory_limit_mb
        if self.cell.device == "cpu":
            limit = self.around.measured_room // MIB
        return msgspec.structs.replace(self.of(micro_batch), steps=PROBE, memory_limit_mb=limit)

    @property
    def place(self) -> str:
        """The place (`place_of`) of its short runs."""
        return place_of(self.probe(self.cell.micro_batch))

    def _fits(self, what: int | str) -> bool:
        return not isinstance(what, str) and (self.cell.device == "cpu" or what <= self.around.measured_room)

    def refusal(self, micro_batch: int) -> str | None:
        return refusal(self.of(micro_batch), trains=self.trains)

    def least(self, unit: int) -> int:
        return ceil(self.cell.micro_batch / unit) * unit

    def predicted_bytes(self, micro_batch: int) -> int | Unknown:
        parts = facts(WORKLOADS.parse(self.cell.workload)).parts
        if isinstance(parts, Unknown):
            return parts
        return footprint(self.around.placed(self.of(micro_batch)), parts).total

    @cached_property
    def predicted(self) -> int:
        """The largest micro-batch that fits by prediction; the smallest if none does or memory is unknown."""
        unit = self.units[0]

        def exceeds(pieces: int) -> bool:
            size = self.predicted_bytes(pieces * unit)
            too_large = isinstance(size, Unknown) or size > self.around.room
            return too_large or self.refusal(pieces * unit) is not None

        least = self.least(unit)
        pieces = range(least // unit + 1, _MOST_SAMPLES // unit)
        return least + unit * bisect_left(pieces, True, key=exceeds)

    def bracket(self, taken: Taken, most: int | None = None) -> tuple[int | None, int | None]:
        """Return the largest micro-batch that fits, up to `most`, and the smallest one that does not."""
        high = min((size for size, what in taken.items() if not self._fits(what)), default=None)
        last = min(high - 1 if high else _MOST_SAMPLES, most or _MOST_SAMPLES)
        return max((size for size in taken if size <= last), default=None), high

    def next_size(self, taken: Taken, unit: int, most: int | None) -> int | None:
        """Return the micro-batch to try next, up to `most`; None if the largest that fits is known."""
        low, high = self.bracket(taken, most)
        bottom = self.least(unit) if low is None else low + unit
        top = min(high or _MOST_SAMPLES, (most or _MOST_SAMPLES) + 1)
        if top <= bottom or (low is not None and top - low <= TOLERANCE * low):
            return None
        known = {size: what for size, what in taken.items() if isinstance(what, int)}
        at = next((size for size in (low, high) if size in known), None)
        rise = None if at is None or len(taken) >= _MOST_AIMED else self._rise(known, at)
        reach = top if low is None else min(top, 2 * low + unit)
        aim = reach if high is None else (bottom + top) / 2
        if low is None and high is None:
            aim = self.predicted
        if at is not None and rise is not None:
            aimed = at + (self.around.measured_room - known[at]) / rise
            # A run refutes an aim beyond it if it did not fit, and an aim below it if it did.
            if (low is None or low <= aimed) and aimed < (high or inf):
                aim = aimed
                # A predicted rise may more than double the size, a measured one may not.
                reach = top if len(known) == 1 else reach
        return max(bottom, min(int(aim), reach - 1) // unit * unit)

    def _rise(self, known: Mapping[int, int], at: int) -> float | None:
        """Bytes that each further sample takes: measured, or predicted for more than `at` samples, where
        activations make the peak; None if neither is known."""
        sizes = known
        if len(known) < 2:
            predicted = ((size, self.predicted_bytes(size)) for size in (8 * at, 16 * at))
            sizes = {size: what for size, what in predicted if isinstance(what, int)}
        if len(sizes) < 2:
            return None
        (few, less), (many, more) = min(sizes.items()), max(sizes.items())
        return (more - less) / (many - few) if more > less else None


@dataclass(frozen=True)
class Curve:
    """A weak series whose batch is wanted: its smallest and its largest size."""

    series: SeriesId
    ends: tuple[Candidate, ...]

    @property
    def work(self) -> str:
        return place_of(msgspec.structs.replace(self.ends[0].cell, gpus=1, model_parallel=1))

    def predicted(self) -> FittingBatch:
        """The batch by prediction, or the smallest one if its memory is unknown."""
        one = min(self.ends, key=lambda end: end.predicted)
        need, room = one.predicted_bytes(one.predicted), one.around.room
        why = f"not predicted, because its memory is {need}"
        if isinstance(need, int):
            takes = f"takes {need / MIB:,.0f} of the {room / MIB:,.0f} MiB that may be planned"
            why = f"by prediction a micro-batch of {one.predicted:,} on {one.cell.gpus} {takes}"
        return self._found(one.predicted, "predicted", f"{why}; short runs find the largest that fits")

    def search(self, seen: Mapping[str, Taken]) -> Cell | FittingBatch:
        """Return the cell to run next, or the batch once it is known.

        `seen` has what runs took, by the place (`place_of`) of their cells.
        """
        most: int | None = None
        why = ""
        for one in self.ends:
            taken = dict(seen.get(one.place, {}))
            for unit in one.units:
                while (size := one.next_size(taken, unit, most)) is not None:
                    refused = one.refusal(size)
                    if refused is None:
                        return one.probe(size)
                    taken[size] = f"is refused: {refused}"
                if one.bracket(taken, most)[0] is not None:
                    break
            low, high = one.bracket(taken, most)
            if low is None:
                least = one.least(one.units[-1])
                return self._found(least, "nothing fits", _told(one, taken, least))
            if most is None or low < most:
                most, why = low, _told(one, taken, low, *([] if high is None else [high]))
        assert most is not None
        return self._found(most, "measured", why)

    def _found(self, micro_batch: int, basis: BatchBasis, why: str) -> FittingBatch:
        series = msgspec.structs.replace(self.series, batch_size=micro_batch * self.ends[0].cell.accumulation)
        return FittingBatch(series=series, work=self.work, basis=basis, why=why)


def _told(one: Candidate, taken: Taken, *sizes: int) -> str:
    """Say what runs of these micro-batches took or how they failed, as a clause."""
    told = []
    for size in sizes:
        what = taken[size]
        if not isinstance(what, str):
            what = "takes no more" if one.cell.device == "cpu" else f"takes {what / MIB:,.1f}"
        told.append(f"{size:,} {what}")
    may = f"of the {one.around.measured_room / MIB:,.1f} MiB that a rank on {one.cell.gpus} may take"
    return f"{may}, a micro-batch of {', and one of '.join(told)}"


def place_of(cell: Cell) -> str:
    """The id of what cells have in common that differ only in micro-batch and in how long they run."""
    return msgspec.structs.replace(cell, micro_batch=1, steps=StepPolicy()).id


def fit_batches(request: Request, earlier: Sequence[Plan], limit: Limit) -> Request:
    """Give each series of a request with `--batch-size auto` the batch of `with_batches`."""
    return with_batches(request, earlier=earlier, limit=limit)[0]


def with_batches(
    request: Request, *, earlier: Sequence[Plan], limit: Limit
) -> tuple[Request, tuple[Curve, ...]]:
    """Give each series of a request with `--batch-size auto` the batch that its study has found, else the
    predicted one. Also return the curves whose batch is only predicted."""
    found: dict[SeriesId, FittingBatch] = {}
    for key in series_of(msgspec.structs.replace(request, batches=None)):
        samples = facts(WORKLOADS.parse(key.workload)).minimum_batch
        pieces = STRATEGIES.facts(key.strategy).microbatches * request.accumulation
        least = msgspec.structs.replace(
            key, batch_size=pieces * (1 if isinstance(samples, Unknown) else samples)
        )
        why = "none of its sizes can run"
        found[least] = FittingBatch(series=least, work="", basis="predicted", why=why)
    smallest = msgspec.structs.replace(request, batches=tuple(found.values()), include=())
    plan = expand(smallest, study="", created_at="", limit=limit)
    cells = {cell.id: cell for cell in plan.cells}
    compared = {one.workload for one in plan.series if one.strategy != BASELINE_STRATEGY}
    for key in list(found):
        if key.strategy == BASELINE_STRATEGY and key.workload in compared:
            # The baseline has the batches of the series that are measured against it.
            del found[key]
    left, devices = [], devices_of(request)
    for series in plan.series:
        if series.id in found:
            ends = dict.fromkeys((cells[series.cells[0]], cells[series.cells[-1]]))
            around = (Surroundings.of(cell, devices, request.gpus_per_node) for cell in ends)
            curve = Curve(series.id, tuple(Candidate(one.cell, one, limit.trains) for one in around))
            if (had := _found_earlier(curve, earlier)) is None:
                left.append(curve)
            found[series.id] = had or curve.predicted()
    return msgspec.structs.replace(request, batches=tuple(found.values())), tuple(left)


def _found_earlier(curve: Curve, earlier: Sequence[Plan]) -> FittingBatch | None:
    """Return the batch that a plan found for the work of a curve, on its smallest size or a smaller one."""
    for plan in earlier:
        gpus = {cell.id: cell.gpus for cell in plan.cells}
        least = {series.id: min(gpus[cell] for cell in series.cells) for series in plan.series}
        for one in plan.request.batches or ():
            if (one.work, one.basis) == (curve.work, "measured"):
                if least.get(one.series, inf) <= curve.ends[0].cell.gpus:
                    return one
    return None
