"""The strategy `auto`: of those that fit into memory, the one with the least predicted time a sample.

Memory and traffic are closed forms (`strategies.footprint`, `strategies.traffic`), and the time of a step
follows from them by stated rules (`harness.plan.predict`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from harness.plan.predict import MIB, Devices, Surroundings, Times, predicted_times
from results.cell import Cell
from results.parts import ModelParts
from strategies.catalog import STRATEGIES
from strategies.footprint import Footprint, footprint
from strategies.traffic import Term, traffic
from workloads.activations import model_parts
from workloads.catalog import WORKLOADS

AUTO = "auto"
TIE = 0.10
"""Candidates that are so much slower than the fastest count as equal, since predictions tell no closer: the
simplest of them is taken."""

_MICROBATCHES = (4, 8, 16, 32, 64)
_ADVICE = "give more ranks, a smaller --batch-size, or more --accumulation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One strategy, and what is predicted of it."""

    cell: Cell
    memory: Footprint
    terms: tuple[Term, ...]
    times: Times
    room: int

    @property
    def strategy(self) -> str:
        return self.cell.strategy

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.room

    @property
    def sample_s(self) -> float:
        """Seconds of a sample: strategies differ in how many a step has."""
        return self.times.step / self.cell.global_batch

    @property
    def sent(self) -> float:
        return sum(term.wire_bytes for term in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was weighed for one point, and what came of it."""

    candidates: tuple[Candidate, ...]
    """From the simplest on."""
    refused: tuple[tuple[str, str], ...]
    """Strategies that make no sense there, and why."""
    around: Surroundings

    @property
    def chosen(self) -> Candidate | None:
        """The fastest that fits, or a simpler one that is as fast; None if none fits."""
        return _best([candidate for candidate in self.candidates if candidate.fits])

    @property
    def reason(self) -> str:
        """One clause: why this one, or why none."""
        chosen, wanted = self.chosen, _best(self.candidates)
        if chosen is None or wanted is None:
            return self._nothing()
        if wanted is not chosen:
            need, there = wanted.memory.total / MIB, self.around.memory / MIB
            return f"because {wanted.strategy} needs {need:,.0f} MiB of {there:,.0f}"
        others = [candidate for candidate in self.candidates if candidate.fits and candidate is not chosen]
        if not others:
            return "which alone fits" if len(self.candidates) > 1 else "which alone there is to choose"
        second = min(others, key=lambda candidate: candidate.sample_s)
        if second.sample_s <= chosen.sample_s:
            return f"because it fits, is within {TIE:.0%} of {second.strategy}, and simpler"
        ratio = second.sample_s / chosen.sample_s
        return f"because it fits, and {second.strategy} is predicted to take {ratio:.2f} times as long"

    def _nothing(self) -> str:
        """What is nearest, and what would help."""
        if not self.candidates:
            [(why, _)] = Counter(why for _, why in self.refused).most_common(1)
            return f"auto: no strategy goes with this point: {why}"
        nearest = min(self.candidates, key=lambda candidate: candidate.memory.total)
        need = f"{nearest.strategy} needs {nearest.memory.total / MIB:,.0f} MiB"
        planned = f"{self.around.room / MIB:,.0f} of {self.around.memory / MIB:,.0f} may be planned"
        return f"auto: nothing fits: the nearest, {need}, and {planned}; {self._help()}"

    def _help(self) -> str:
        cells = [candidate.cell for candidate in self.candidates]
        parts = model_parts(WORKLOADS.parse(cells[0].workload))
        if parts is None or not parts.blocks or cells[0].activation_checkpointing is True:
            return _ADVICE
        lighter = [msgspec.structs.replace(cell, activation_checkpointing=True) for cell in cells]
        needs = {cell.strategy: footprint(cell, parts).total for cell in lighter}
        strategy = min(needs, key=lambda strategy: needs[strategy])
        fits = "fits" if needs[strategy] <= self.around.room else f"is not enough: {_ADVICE}"
        return f"with --activation-checkpointing {strategy} needs {needs[strategy] / MIB:,.0f}, which {fits}"


def _best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The simplest of those that are as fast as the fastest."""
    most = (1 + TIE) * min((candidate.sample_s for candidate in candidates), default=0.0)
    return next((candidate for candidate in candidates if candidate.sample_s <= most), None)


def strategies_for(cell: Cell, node_size: int) -> Iterator[str]:
    """What may be chosen, from the simplest on, as canonical texts."""
    plain = ("single", "ddp", "zero1", "zero2", "zero3")
    ours = ("scratch-fsdp:stage=1", "scratch-fsdp:stage=2", "scratch-fsdp")
    yield from (STRATEGIES.parse(text).text for text in (*plain, *ours))
    nodes = cell.gpus // node_size
    if nodes > 1 and cell.node_size is not None:
        yield "hsdp"
    if nodes == 1:
        yield "tp"
    for tensor in (2, 4, 8):
        if tensor < cell.gpus and node_size % tensor == 0:
            yield f"fsdp:tp={tensor}"
    for copies in (1, 2, 4, 8):
        if cell.gpus % copies == 0 and cell.gpus // copies > 1:
            for pieces in _MICROBATCHES:
                text = f"pipeline:1f1b:microbatches={pieces}:dp={copies}"
                yield STRATEGIES.parse(text).text
    if cell.device == "cuda":
        yield "fsdp:offload=cpu"


def choose(
    cell: Cell, made: Callable[[str], Cell | str], *, devices: Devices, gpus_per_node: int | None
) -> Choice | str:
    """Weigh what there is for the point of `cell`, whose own strategy and micro-batch are not looked at.

    `made` gives the cell of the point with another strategy, or why there is none. Returns a reason where
    nothing can be weighed.
    """
    parts = model_parts(WORKLOADS.parse(cell.workload))
    if parts is None:
        return f"auto knows no measures of {cell.workload}, whose own code has them: name a strategy"
    if (cell.compression, cell.collective) != ("none", "default"):
        return (
            "auto weighs gradients that are exchanged as they are, by the default collective: name a strategy"
        )
    around = Surroundings.of(cell, devices, gpus_per_node)
    candidates, refused = [], []
    for strategy in strategies_for(cell, around.node_size):
        there = made(strategy)
        if isinstance(there, str):
            refused.append((strategy, there))
        else:
            candidates.append(_weighed(there, parts, around))
    return Choice(candidates=tuple(candidates), refused=tuple(refused), around=around)


def _weighed(cell: Cell, parts: ModelParts, around: Surroundings) -> Candidate:
    terms = tuple(traffic(cell, parts))
    return Candidate(
        cell=cell,
        memory=footprint(cell, parts),
        terms=terms,
        times=predicted_times(cell, parts, terms, around),
        room=around.room,
    )


COLUMNS = (
    *("candidate", "parameters", "gradients", "optimizer", "gathered", "buckets", "activations", "MiB"),
    *("sent MiB", "compute s", "update s", "bubble s", "exposed s", "ms a sample", "verdict"),
)
"""Of a table of candidates: memory by its parts at the fullest moment, and seconds of a step."""


def rows(choice: Choice) -> list[list[str]]:
    """A row a candidate, from the simplest on; then those that make no sense, by the reason."""
    told = [_row(candidate, choice.chosen) for candidate in choice.candidates]
    reasons: dict[str, list[str]] = {}
    for strategy, why in choice.refused:
        reasons.setdefault(why, []).append(strategy)
    blank = [""] * (len(COLUMNS) - 2)
    for why, strategies in reasons.items():
        more = f" and {len(strategies) - 1} more" if len(strategies) > 1 else ""
        told.append([strategies[0] + more, *blank, why])
    return told


def _row(candidate: Candidate, chosen: Candidate | None) -> list[str]:
    memory, times = candidate.memory, candidate.times
    sizes = (memory.parameters, memory.gradients, memory.optimizer, memory.gathered, memory.buckets)
    seconds = (times.compute, times.update, times.bubble, times.exposed)
    over = f"does not fit into {candidate.room / MIB:,.0f}"
    verdict = "chosen" if candidate is chosen else "fits" if candidate.fits else over
    return [
        candidate.strategy,
        *(f"{size / MIB:,.0f}" for size in (*sizes, memory.activations, memory.total)),
        f"{candidate.sent / MIB:,.1f}",
        *(f"{value:.3g}" for value in seconds),
        f"{1e3 * candidate.sample_s:.3g}",
        verdict,
    ]
