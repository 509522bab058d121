"""The size to buy: which strategy on how many devices a study recommends by its goal, and how surely.

By default that is the knee of a curve, the last size up to which every growth pays: `reports.analysis.knee`.
A size is recommended of GPUs alone, of measured points whose training was proven, where more than one size
was measured: ranks on CPU share the cores of a machine, and stand-ins are not what one buys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from reports.analysis.cost import EMULATED, CellCost, cell_costs
from reports.analysis.pick import PICK, Candidate, Picked, candidates_of
from reports.analysis.pieces import Piece, piece_of
from reports.analysis.study import StudyFigures
from reports.text import count, devices
from results.cell import Device
from results.plan import Scaling
from results.statistics import FEWEST_FOR_INTERVAL, Metric

Confidence = Literal["high", "medium", "low"]
"""low: the runs leave the choice open, or a size has one run. medium: fewer than six runs a size, or runs
that were disturbed or of changed code. high: none of these."""
CPU = "ranks on CPU share the cores of a machine"
ONE_SIZE = "one size alone was measured: at least two are needed to say whether growing pays"
NOT_PROVEN = "no measured cell has a proof that it trained"
ONE_LEFT = "one size alone is left to choose from: the others train in another way, or are not proven"
OTHER_TRAINING = "all measured strategies train in another way than plain data parallelism"
ALL_EMULATED = EMULATED.partition(":")[0] + ": stand-ins say nothing of devices that one buys"


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """What to buy."""

    cell_id: str
    strategy: str
    gpus: int
    device: Device
    shown_to: int | None
    """Where the runs leave open whether growing pays: the last size up to which every growth is shown to pay,
    smaller than `gpus` (by the knee alone)."""
    or_more: bool
    """Whether it is the largest measured size, so that growing may pay beyond it (by the knee alone)."""
    throughput: Metric
    efficiency: Metric | None
    """None for the baseline itself, and where none is claimed."""
    shown_efficiency: Metric | None
    """At `shown_to`, by the same strategy; None where the efficiency is."""
    against: str | None
    """The baseline of the efficiency: `single on 1`."""
    epoch_ns: Metric | None
    usd_per_epoch: Metric | None

    @property
    def size(self) -> str:
        """`16 GPUs`; `64 GPUs or more`; `4 to 64 GPUs` where growing beyond 4 may pay or not."""
        least = "" if self.shown_to is None else f"{self.shown_to:,} to "
        return f"{least}{devices(self.gpus, self.device)}{' or more' if self.or_more else ''}"

    @property
    def text(self) -> str:
        """`16 GPUs with ddp`."""
        return f"{self.size} with {self.strategy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestsOn:
    """The measurements that a choice is made from."""

    cells: tuple[str, ...]
    """Ids of all cells that it was chosen from."""
    deciding: tuple[str, ...]
    """Those whose runs decide it: the choice, and the sizes that it is compared with."""
    runs: int
    """Counted runs of all cells."""
    fewest_runs: int
    """Of a deciding cell."""
    disturbed: int
    """Runs, of all, that other processes disturbed."""
    dirty: int
    """Runs, of all, of code with local changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeToBuy:
    """What a study says of one workload under one rule of scaling."""

    workload: str
    scaling: Scaling
    batch: int
    """Of a replica under weak scaling, else of all replicas."""
    goal: str
    """What it is chosen by, a clause."""
    choice: Purchase | None
    absent: str | None
    """Why there is none; None if there is."""
    why: str | None
    """Why this size, a clause."""
    confidence: Confidence | None
    doubts: tuple[str, ...]
    """What lowers the confidence, clauses."""
    rests_on: RestsOn | None
    left_out: tuple[str, ...]
    """Points that were not chosen from: `topk on 8 (compresses its gradients)`."""

    @property
    def text(self) -> str:
        """`16 GPUs with ddp`, or `none: ...`."""
        return self.choice.text if self.choice else f"none: {self.absent}"

    @property
    def sentence(self) -> str:
        """The answer, why, and how sure it is."""
        if self.choice is None:
            return f"No size to buy: {self.absent}."
        told = f"To buy: {self.choice.text}, {self.goal}"
        return f"{told} ({self.confidence} confidence{self._because}): {self.why}."

    @property
    def _because(self) -> str:
        return f": {'; '.join(self.doubts)}" if self.doubts else ""


def sizes_to_buy(study: StudyFigures) -> tuple[SizeToBuy, ...]:
    """Of each workload under each rule that has a figure; those with a size first."""
    costs = {cost.cell.id: cost for cost in cell_costs(study)}
    names = dict.fromkeys(one.cell.workload for one in study.cells.values())
    found = [
        _size_to_buy(study, name, kind, piece, costs)
        for name in names
        for kind in KINDS
        if (piece := piece_of(study.curves, name, kind)) is not None
    ]
    return tuple(sorted(found, key=lambda one: one.choice is None))


KINDS: tuple[Scaling, ...] = ("weak", "strong")


def _size_to_buy(
    study: StudyFigures, workload: str, kind: Scaling, piece: Piece, costs: dict[str, CellCost]
) -> SizeToBuy:
    candidates, left_out = candidates_of(piece, costs)
    goal = study.assumptions.goal
    picked = _why_none(piece, candidates) or PICK[goal.kind](piece, candidates, goal)
    found = picked if isinstance(picked, Picked) else None
    rests_on = _rests_on(candidates, found) if found else None
    doubts = _doubts(found, rests_on) if found and rests_on else ()
    return SizeToBuy(
        workload=workload,
        scaling=kind,
        batch=piece.curves[0].key.constant_batch,
        goal=goal.text,
        choice=_choice(found, candidates) if found else None,
        absent=picked if isinstance(picked, str) else None,
        why=found.why if found else None,
        confidence=_confidence(found, rests_on, doubts) if found and rests_on else None,
        doubts=doubts,
        rests_on=rests_on,
        left_out=left_out,
    )


def _why_none(piece: Piece, candidates: Sequence[Candidate]) -> str | None:
    """Why nothing can be recommended; None if something may."""
    measured = [point.figures for _, point in piece.measured]
    if not measured:
        return ALL_EMULATED
    if any(one.cell.device == "cpu" for one in measured):
        return CPU
    if all(one.proof is None for one in measured):
        return NOT_PROVEN
    if not candidates:
        return OTHER_TRAINING
    if len({one.cell.gpus for one in measured}) < 2:
        return ONE_SIZE
    return ONE_LEFT if len({one.gpus for one in candidates}) < 2 else None


def _choice(picked: Picked, candidates: Sequence[Candidate]) -> Purchase:
    one, claim = picked.candidate, picked.candidate.efficiency
    claimed = None if claim.is_baseline else claim
    smaller = [
        other.efficiency.metric
        for other in candidates
        if (other.strategy, other.gpus) == (one.strategy, picked.shown_to)
        and not other.efficiency.is_baseline
    ]
    return Purchase(
        cell_id=one.figures.cell.id,
        strategy=one.strategy,
        gpus=one.gpus,
        device=one.figures.cell.device,
        shown_to=picked.shown_to,
        or_more=picked.or_more,
        throughput=one.figures.throughput,
        efficiency=claimed.metric if claimed else None,
        shown_efficiency=smaller[0] if claimed and smaller else None,
        against=claimed.baseline.short if claimed and claimed.baseline else None,
        epoch_ns=one.cost.epoch_ns,
        usd_per_epoch=one.cost.usd_per_epoch,
    )


def _rests_on(candidates: Sequence[Candidate], picked: Picked) -> RestsOn:
    deciding = {one.cell.id: one for one in (picked.candidate.figures, *picked.deciding)}
    runs = [run for one in candidates for run in one.figures.runs]
    return RestsOn(
        cells=tuple(one.figures.cell.id for one in candidates),
        deciding=tuple(deciding),
        runs=len(runs),
        fewest_runs=min(len(one.runs) for one in deciding.values()),
        disturbed=sum(run.disturbed for run in runs),
        dirty=sum(bool(run.environment and run.environment.code.dirty) for run in runs),
    )


def _doubts(picked: Picked, rests_on: RestsOn) -> tuple[str, ...]:
    few = rests_on.fewest_runs < FEWEST_FOR_INTERVAL
    told = {
        f"{count(rests_on.fewest_runs, 'run')} a size (fewer than {FEWEST_FOR_INTERVAL})": few,
        f"{_part(rests_on.disturbed, rests_on.runs)} disturbed": rests_on.disturbed,
        f"{_part(rests_on.dirty, rests_on.runs)} of code with local changes": rests_on.dirty,
    }
    return (*picked.open, *(text for text, holds in told.items() if holds))


def _part(these: int, runs: int) -> str:
    """`3 of 12 runs`, `all 12 runs`."""
    return f"all {count(runs, 'run')}" if these == runs > 1 else f"{these:,} of {count(runs, 'run')}"


def _confidence(picked: Picked, rests_on: RestsOn, doubts: Sequence[str]) -> Confidence:
    if picked.open or rests_on.fewest_runs == 1:
        return "low"
    return "medium" if doubts else "high"
