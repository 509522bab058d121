"""A cell's figures from its pooled runs: step time, throughput, phases, added by the exchange.

A configuration may train differently, so a higher throughput is not enough to recommend it:
`differences_in_training` names the differences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import msgspec
import numpy as np

from reports.analysis.pooling import Pool
from results.cell import Cell, Precision, label
from results.outcome import Evidence
from results.record import Proof, Training, by_nodes_before, training_before
from results.run import NOT_PROVEN, RunResult
from results.statistics import FEWEST_FOR_INTERVAL, Metric, differences, over_runs, t_interval

_STRONGEST_PROOF = ("serial-simulation", "sampled-gradients", "replica-agreement", "earlier-run")
NOT_CHECKED = "not checked"
EMULATED = "emulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFigures:
    """The figures of a cell over the runs of its pool (one at least)."""

    pool: Pool
    evidence: Evidence
    step_ns: Metric
    run_step_ns: tuple[float, ...]
    """The step time of each run, oldest first."""
    samples_per_s: Metric
    units_per_s: Metric | None
    """Throughput in the workload's own unit (`images/s`, `tokens/s`)."""
    phase_ns: dict[str, float]
    exposed_ns: Metric | None
    """Added by the exchange: how much longer a step takes with the exchange than without it."""
    exposed_share: Metric | None
    """Added by the exchange, as a share of the step time."""
    exposed_absent: str | None
    """The reason for a missing exposed time."""
    proof: Proof | None
    """The strongest proof that a counted run carries, or a failed one."""
    accepted: bool = False
    """Whether the reader takes it although it is not proven."""

    @property
    def cell(self) -> Cell:
        return self.pool.cell

    @property
    def name(self) -> str:
        """`ddp on 4`."""
        return f"{label(self.cell)} on {self.cell.gpus:,}"

    @property
    def rate(self) -> float:
        return self.samples_per_s.value

    @property
    def runs(self) -> tuple[RunResult, ...]:
        return self.pool.runs

    @property
    def rounds(self) -> tuple[int, ...]:
        """The round of each run; empty where the study does not grow by rounds."""
        return tuple(run.repeat for run in self.runs) if self.pool.by_rounds else ()

    @property
    def newest(self) -> RunResult:
        return self.pool.runs[-1]

    @property
    def throughput(self) -> Metric:
        """Throughput in the workload's unit, or in samples if the unit is unknown."""
        return self.units_per_s or self.samples_per_s

    @property
    def flops_per_step(self) -> int | None:
        """FLOPs of a step; None where they are unknown, or the runs of the cell contradict each other."""
        return None if self._flops_differ else self.newest.flops_per_step

    @property
    def _flops_differ(self) -> bool:
        return len({run.flops_per_step for run in self.runs} - {None}) > 1

    @property
    def why_no_mfu(self) -> str | None:
        """Why the MFU is missing, if it is; None if no reason is known."""
        if self._flops_differ:
            return "runs of one cell contradict each other in the FLOPs of a step"
        return self.newest.absent.get("mfu") if self.mfu is None else None

    @property
    def mfu(self) -> float | None:
        """MFU at the mean step time of all runs; None where peak or FLOPs are unknown."""
        run = self.newest
        if run.mfu is None or run.step_ns is None or self._flops_differ:
            return None
        return run.mfu * run.step_ns.value / self.step_ns.value

    @property
    def disturbed(self) -> bool:
        """Whether some run that counts was disturbed."""
        return any(run.disturbed for run in self.pool.runs)

    @property
    def proof_method(self) -> str:
        if self.pool.unproven is not None:
            return NOT_PROVEN
        return self.proof.method if self.proof else NOT_CHECKED

    @property
    def proven(self) -> bool:
        """Whether its training was checked, and was right."""
        return self.proof is not None and self.proof.passed

    @property
    def no_claim(self) -> str | None:
        """Why the figures are drawn and decide nothing: `emulated` or `not proven`; None if they decide."""
        if self.evidence is Evidence.EMULATED:
            return EMULATED
        return NOT_PROVEN if self.pool.unproven and not self.accepted else None

    @property
    def why_no_proof(self) -> str | None:
        """Why the newest run has no proof, where its strategy declares so, or why its proof failed."""
        return self.pool.unproven if self.proof else self.newest.absent.get("proof")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfCell:
    """The base class of what is derived from the figures of a cell."""

    figures: CellFigures

    @property
    def cell(self) -> Cell:
        return self.figures.cell


def cell_figures(pool: Pool, *, unproven: bool = False) -> CellFigures | None:
    """The figures of a pool; None if no run of it counts. `unproven`: whether a reader takes it without a
    proof."""
    if not pool.runs:
        return None
    steps = [run.step_ns.value for run in pool.runs if run.step_ns is not None]
    step_ns = over_runs(steps, "ns")
    exposed = [run.exposed_ns.value for run in pool.runs if run.exposed_ns is not None]
    complete, copies_ns = len(exposed) == len(steps), copies_of_runs(pool.runs)
    proofs = [run.proof for run in pool.runs if run.proof is not None]
    return CellFigures(
        pool=pool,
        evidence=pool.runs[-1].evidence,
        step_ns=step_ns,
        run_step_ns=tuple(steps),
        # Total work over total time: a mean of the runs' rates would overstate it.
        samples_per_s=step_ns.over(pool.cell.global_batch * 1e9, "samples/s"),
        units_per_s=_units_per_s(pool.runs, step_ns),
        phase_ns=_phases(pool.runs),
        exposed_ns=differences(exposed, "ns").or_more(copies_ns) if complete else None,
        exposed_share=share_of_runs(exposed, steps).or_more(copies_ns / step_ns.value) if complete else None,
        exposed_absent=None if complete else _why_not_exposed(pool.runs),
        # The strongest one.
        proof=min(proofs, key=lambda proof: _STRONGEST_PROOF.index(proof.method), default=None),
        accepted=unproven and not any(proof.passed for proof in proofs),
    )


def _phases(runs: Sequence[RunResult]) -> dict[str, float]:
    """The mean time of each phase of a step; empty if the runs have unlike phases."""
    names = runs[-1].phase_ns.keys()
    if any(run.phase_ns.keys() != names for run in runs):
        return {}
    return {name: sum(run.phase_ns[name] for run in runs) / len(runs) for name in names}


def copies_of_runs(runs: Sequence[RunResult]) -> float:
    """The mean time of a step's copies without exchange: what they add may be more by this; 0 if unknown."""
    return fmean(run.copies_ns or 0.0 for run in runs)


def share_of_runs(parts: Sequence[float], wholes: Sequence[float]) -> Metric:
    """The mean of the parts over the mean of the wholes, with the spread of the runs' own shares.

    From six runs on, Student's t on the residuals of the ratio estimator (Cochran, Sampling Techniques,
    ch. 6); below, the range of the runs' shares.
    """
    part, whole = np.asarray(parts, dtype=np.float64), np.asarray(wholes, dtype=np.float64)
    share = float(part.mean() / whole.mean())
    if len(part) < FEWEST_FOR_INTERVAL:
        return msgspec.structs.replace(differences([*map(float, part / whole)], "ratio"), value=share)
    residuals = (part - share * whole) / whole.mean()
    return t_interval(share, residuals, "ratio", "t95-runs")


def _units_per_s(runs: Sequence[RunResult], step_ns: Metric) -> Metric | None:
    work = [
        run.units_per_s * run.step_ns.value / 1e9
        for run in runs
        if run.units_per_s is not None and run.step_ns is not None
    ]
    units = {run.unit for run in runs}
    if len(work) < len(runs) or len(units) > 1:
        return None
    # Every run of a cell does the same whole number of units a step; the division above loses its last bits.
    return step_ns.over(round(sum(work) / len(work)) * 1e9, f"{units.pop()}/s")


def _why_not_exposed(runs: Sequence[RunResult]) -> str:
    if all(run.exchange_payload_bytes == 0 for run in runs):
        return "nothing is exchanged"
    reasons = [run.absent[key] for run in runs for key in ("exposed_ns", "quads") if key in run.absent]
    return reasons[0] if reasons else "not measured"


_BITS: dict[Precision, int] = {"fp32": 32, "tf32": 19, "bf16": 16, "fp16": 16, "float8": 8}


def training_of(figures: CellFigures) -> Training:
    """How the newest run trained, as its strategy recorded it."""
    return figures.newest.training or training_before(figures.cell.strategy)


def exchanges_by_nodes(figures: CellFigures) -> bool:
    """Whether its exchange has separate stages inside of nodes and across them."""
    told = training_of(figures).exchanges_by_nodes
    return by_nodes_before(figures.cell.collective) if isinstance(told, msgspec.UnsetType) else told


def differences_in_training(figures: CellFigures, others: Iterable[Cell]) -> tuple[str, ...]:
    """Clauses such as `averages every 4 steps`, for a comparison with `others`.

    Under weak scaling, ranks that share a replica train on fewer samples a step than others of their size.
    """
    cell, others = figures.cell, list(others)
    clauses = [*training_of(figures).differences]
    if cell.compresses:
        clauses.append("compresses its gradients")
    if any(_BITS[other.precision] > _BITS[cell.precision] for other in others):
        clauses.append(f"computes in {cell.precision}")
    largest = max((other.global_batch for other in others if other.gpus == cell.gpus), default=0)
    if largest > cell.global_batch:
        clauses.append(f"trains on {cell.global_batch:,} samples a step instead of {largest:,}")
    return tuple(clauses)
