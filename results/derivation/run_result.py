"""From the rank records of a run to its result. The functions are pure, and tests check every formula by
hand."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from results.catalogue.gpus import peak_flops_per_s
from results.cell import Cell
from results.derivation.accounts import copies_of, rank_columns, step_budget, why_no_accounts
from results.derivation.communication import step_communication
from results.derivation.contradictions import contradiction
from results.derivation.counters import counters, device_energy, telemetry_means, why_energy_unknown
from results.derivation.load import busiest_expert, dropped_flops, dropped_share
from results.derivation.matching import match
from results.environment import unlike_devices, unlike_nodes
from results.errors import SchemaError
from results.launch import Attempt
from results.outcome import Ending, Evidence, Outcome
from results.record import Proof, Quads, RankRecord
from results.run import PHASES, RunResult
from results.statistics import Metric, differences, slow_steps, within_run

Ints = npt.NDArray[np.int64]
N = TypeVar("N", int, float)

DISTURBED_ABOVE = 0.05
"""Share of the used cores that others may take before a run is marked disturbed (5 %)."""
RESIDUAL_ABOVE = 0.05
"""Share of a step outside of its phases above which the run carries a warning."""
MOST_LOSSES = 60
"""Points of a run's loss curve."""
_WORST_FIRST = (
    Outcome.OUT_OF_MEMORY,
    Outcome.DIVERGED,
    Outcome.PROOF_FAILED,
    Outcome.SKIPPED,
    Outcome.CRASHED,
    Outcome.HUNG,
    Outcome.TIMED_OUT,
    Outcome.PREEMPTED,
    Outcome.NODE_FAILED,
    Outcome.CANCELLED,
    Outcome.MISSING_RANKS,
    Outcome.UNKNOWN,
)
"""The outcome of a run is the first of these that one of its ranks has."""


def derive(cell: Cell, run_id: str, records: Sequence[RankRecord], attempt: Attempt | None) -> RunResult:
    """The result of one run from the records that its ranks left, in any order.

    Raises SchemaError if the records cannot be of one run of this cell.
    """
    ranks = sorted(records, key=lambda record: record.rank)
    facts = _facts(cell, run_id, ranks, attempt)
    if facts.outcome is not Outcome.OK or not ranks[0].has_steps:
        return replace(facts, warnings=_warnings(ranks))
    return _measured(facts, cell, ranks, startup_ns=attempt.startup_ns if attempt else None)


def _facts(cell: Cell, run_id: str, ranks: list[RankRecord], attempt: Attempt | None) -> RunResult:
    """The fields that every run has, with any outcome, from its records in the order of ranks, which are
    checked.

    Raises SchemaError if they cannot be of one run of this cell.
    """
    _check_ranks(cell, run_id, ranks)
    ending = _ending(cell, run_id, ranks, attempt)
    if ending is None and ranks[0].has_steps:
        _check_shapes(cell, run_id, ranks)
        if (found := contradiction(cell, ranks)) is not None:
            ending = Ending(Outcome.CRASHED, found)
    outcome, reason = ending or (Outcome.OK, None)
    facts = RunResult(
        cell_id=cell.id,
        run_id=run_id,
        launch_id=attempt.launch_id if attempt else "unknown",
        repeat=0,
        outcome=outcome,
        reason=reason,
        evidence=Evidence.MEASURED,
        started_at=None,
        ranks_expected=_expected(cell, ranks),
        ranks_present=len(ranks),
    )
    if not ranks:
        return facts
    first = ranks[0]
    return replace(
        facts,
        launch_id=first.launch_id,
        repeat=first.repeat,
        evidence=first.evidence,
        started_at=min(rank.started_at for rank in ranks),
        environment=first.environment,
        hosts=tuple(sorted({rank.environment.host for rank in ranks})),
        fingerprint=first.environment.fingerprint,
    )


def _absent(ranks: Sequence[RankRecord]) -> dict[str, str]:
    """Why values are None, by the first rank that says so."""
    return {key: why for rank in reversed(ranks) for key, why in rank.absent.items()}


def _expected(cell: Cell, ranks: Sequence[RankRecord]) -> int:
    """The number of ranks of a run: of its cell, unless its training was resumed on another number."""
    trained = [rank.gpus for rank in ranks if rank.trained_steps is not None]
    return trained[0] if trained else cell.gpus


def _check_ranks(cell: Cell, run_id: str, ranks: list[RankRecord]) -> None:
    gpus = _expected(cell, ranks)
    for rank in ranks:
        if rank.gpus != gpus or not 0 <= rank.rank < gpus:
            raise SchemaError(
                f"a record of run {run_id} of {cell.id} is of rank {rank.rank} of {rank.gpus}; "
                f"the cell has {gpus} ranks: it was edited, move the run away"
            )


def _check_shapes(cell: Cell, run_id: str, ranks: list[RankRecord]) -> None:
    shapes = set()
    for rank in ranks:
        quads, blocks, steps = rank.quads, len(rank.blocks_ns), len(rank.steps.step_ns)
        off_on = () if quads is None else (quads.steps, len(quads.on_first_ns), len(quads.off_step_ns))
        shapes.add((rank.block_steps, blocks, steps, len(rank.warmup_loss), rank.period, *off_on))
    if len(shapes) > 1 or 0 in shapes.pop()[:3]:
        raise SchemaError(
            f"the ranks of run {run_id} of {cell.id} did not measure the same blocks and steps: "
            f"their records were edited, move the run away"
        )


def _ending(cell: Cell, run_id: str, ranks: list[RankRecord], attempt: Attempt | None) -> Ending | None:
    """Return how a run ended that is not OK.

    A rank's own record counts first, so that HUNG may come from a rank. The supervisor's `attempt` counts if
    ranks left no record, or only record that a peer went away.
    """
    worst, concluded = _worst(ranks), None if attempt is None else attempt.ending(run_id)
    if worst is not None:
        # A rank that only lost a peer is `cancelled`; the supervisor knows how that peer ended.
        own = Ending(worst.outcome, f"rank {worst.rank}: {worst.reason}")
        return concluded or own if own.outcome is Outcome.CANCELLED else own
    expected, present = _expected(cell, ranks), len({rank.rank for rank in ranks})
    if present == expected:
        return _unequal_replicas(ranks)
    if attempt is None:
        return Ending(Outcome.UNKNOWN, "no record says how its launch ended; the launch may still be running")
    reason = f"{expected - present} of {expected} ranks left no record"
    return concluded or Ending(Outcome.MISSING_RANKS, reason)


def _unequal_replicas(ranks: list[RankRecord]) -> Ending | None:
    """Return the ending of a run whose replicas should be equal and are not; a failed proof says more."""
    proof = _proof(ranks)
    if _replicas_agree(ranks) is False and (proof is None or proof.passed):
        return Ending(Outcome.CRASHED, "the replicas' parameters differ at the end of the run")
    return None


def _worst(ranks: Sequence[RankRecord]) -> RankRecord | None:
    """The rank whose outcome is the outcome of the run; None if all are OK."""
    bad = (rank for rank in ranks if rank.outcome is not Outcome.OK)
    return min(bad, key=lambda rank: (_WORST_FIRST.index(rank.outcome), rank.rank), default=None)


def _measured(facts: RunResult, cell: Cell, ranks: list[RankRecord], *, startup_ns: int | None) -> RunResult:
    """The result of a run whose outcome is ok, with every figure that its ranks allow."""
    first = ranks[0]
    step_ns = step_time(ranks)
    per_step = _longest([rank.steps.step_ns for rank in ranks])
    phases = _phases(ranks, step_ns.value)
    p10, median, p90, p99 = (float(q) for q in np.percentile(per_step, [10, 50, 90, 99]))
    foreign, disturbed = _foreign(ranks)
    absent = _absent(ranks)
    quads = [rank.quads for rank in ranks if rank.quads is not None]
    rates, no_rates = _rates(cell, ranks, step_ns.value / 1e9)
    accounts, no_accounts = _accounts(cell, ranks, step_ns.value, phases, absent)
    return replace(
        facts,
        **rates,
        **accounts,
        **counters(ranks),
        **_memory(ranks),
        **_losses(ranks),
        steps=len(first.steps.step_ns),
        step_ns=step_ns,
        step_ns_median=median,
        step_ns_p10=p10,
        step_ns_p90=p90,
        step_ns_p99=p99,
        slow_steps=slow_steps(per_step),
        phase_ns=phases,
        busiest_expert=busiest_expert(ranks),
        dropped_share=dropped_share(ranks),
        even_workload=first.even_workload,
        exposed_ns=exposed_time(quads),
        copies_ns=copies_of(quads),
        first_steps=first.first_steps,
        warmup_steps=len(first.warmup_loss),
        warmup_steady=first.warmup_steady,
        stop=first.stop,
        proof=_proof(ranks),
        training=first.training,
        replicas_agree=_replicas_agree(ranks),
        foreign_cpu_cores=foreign,
        disturbed=disturbed,
        setup_ns=_largest(rank.setup_ns for rank in ranks),
        first_step_ns=_largest(rank.first_step_ns for rank in ranks),
        startup_ns=startup_ns,
        spent_ns={part: max(rank.spent_ns.get(part, 0) for rank in ranks) for part in first.spent_ns},
        warnings=(
            *_warnings(ranks),
            *_warnings_of_figures(phases.get("other", 0.0) / step_ns.value, accounts["telemetry"]),
        ),
        absent=absent | no_rates | no_accounts,
    )


def _memory(ranks: list[RankRecord]) -> dict[str, int | None]:
    """The memory of the rank that has most of each kind."""
    memories = [rank.memory for rank in ranks if rank.memory is not None]
    return {
        "rss_peak_bytes": _largest(memory.rss_peak_bytes for memory in memories),
        "rss_over_idle_bytes": _largest(memory.rss_peak_bytes - memory.rss_idle_bytes for memory in memories),
        "device_allocated_peak_bytes": _largest(memory.device_allocated_peak_bytes for memory in memories),
    }


def _foreign(ranks: list[RankRecord]) -> tuple[float | None, bool]:
    """The cores that other processes took, and whether this disturbs the run."""
    foreign = _largest(rank.foreign_cpu_cores for rank in ranks)
    ranks_of_hosts = Counter(rank.environment.host for rank in ranks)
    cores_used = max(ranks_of_hosts.values()) * ranks[0].environment.threads
    return foreign, foreign is not None and foreign > DISTURBED_ABOVE * cores_used


def _rates(cell: Cell, ranks: list[RankRecord], seconds: float) -> tuple[dict[str, Any], dict[str, str]]:
    """The rates of steps that take `seconds`, and why one of them is None; none unless all ranks recorded
    their work."""
    works = [rank.work for rank in ranks if rank.work is not None]
    if len(works) < len(ranks):
        return {}, {}
    flops = _total([work.flops for work in works])
    # The ranks of one replica all have its work on record, and do it together.
    together = cell.model_parallel
    total = flops // together - dropped_flops(ranks, cell.replicas) if flops is not None else None
    rate = total / seconds if total is not None else None
    mfu, why = _mfu(rate, cell, ranks)
    rates = {
        "samples_per_s": sum(work.samples for work in works) / together / seconds,
        "units_per_s": sum(work.units for work in works) / together / seconds,
        "unit": works[0].unit,
        "parameters": works[0].parameters,
        "flops_per_step": total,
        "flops_per_s": rate,
        "mfu": mfu,
        "exchange_payload_bytes": _largest(work.exchange_payload_bytes for work in works),
        "exchange_operations": _largest(work.exchange_operations for work in works),
        "bubble_ideal": works[0].bubble_ideal,
    }
    return rates, why


def _mfu(rate: float | None, cell: Cell, ranks: list[RankRecord]) -> tuple[float | None, dict[str, str]]:
    if rate is None:
        unknown = _absent(ranks).get("flops")
        words = "the FLOPs of this workload were not counted" + (f": {unknown}" if unknown else "")
        return None, {"mfu": words}
    if cell.device == "cpu":
        return None, {"mfu": "no peak is known for a CPU core"}
    peaks = [peak_flops_per_s(rank.environment.device_name, cell.precision) for rank in ranks]
    known = [peak for peak in peaks if peak is not None]
    if len(known) < len(peaks):
        names = sorted({rank.environment.device_name for rank in ranks})
        return None, {"mfu": f"no {cell.precision} peak of {', '.join(names)} in the catalogue"}
    return rate / sum(known), {}


def _accounts(
    cell: Cell,
    ranks: list[RankRecord],
    step_ns: float,
    phases: Mapping[str, float],
    absent: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """The accounts of a step, and why one is None; formulas are in `accounts` and `communication`."""
    matched = match(ranks)
    budget = step_budget(ranks, step_ns, phases, matched)
    found = step_communication(ranks, matched, cell.backend)
    energy_j = device_energy(ranks, step_ns)
    reasons = {
        "budget": None if budget else why_no_accounts(ranks),
        "communication": None if found else absent.get("recorded", "not all ranks recorded steps"),
        "energy_j": None if energy_j is not None else why_energy_unknown(ranks),
    }
    accounts = {
        "budget": budget,
        "communication": found,
        "bubble_replayed": None if (own := ranks[0].recorded) is None else own.bubble_replayed,
        "ranks": rank_columns(ranks, matched),
        "telemetry": telemetry_means(ranks),
        "energy_j": energy_j,
    }
    return accounts, {key: why for key, why in reasons.items() if why}


def block_walls(ranks: Sequence[RankRecord]) -> Ints:
    """Wall time of each measured block to the last rank, in ns: the maximum over ranks, block by block."""
    return _longest([rank.blocks_ns for rank in ranks])


def step_time(ranks: Sequence[RankRecord]) -> Metric:
    """Time of a step in ns: the wall time of the measured blocks to the last rank over their steps."""
    per_step = block_walls(ranks) / ranks[0].block_steps
    return within_run(per_step.tolist(), "ns")


def exposed_time(quads: Sequence[Quads]) -> Metric | None:
    """Exposed communication of a step in ns: sync-on minus sync-off of the same quad, to the last rank.

    Per quad ((on1 + on2) - (off1 + off2)) / (2 steps). It includes how much the exchange slows compute down.
    The copies of off blocks widen its interval.
    """
    if not quads or not quads[0].on_first_ns:
        return None
    on = _longest([q.on_first_ns for q in quads]) + _longest([q.on_second_ns for q in quads])
    off = _longest([q.off_first_ns for q in quads]) + _longest([q.off_second_ns for q in quads])
    each = differences(((on - off) / (2 * quads[0].steps)).tolist(), "ns", of="t95-quads")
    return each.or_more(copies_of(quads) or 0.0)


def _largest(values: Iterable[N | None]) -> N | None:
    """The largest of the known values; None if all are unknown."""
    return max((value for value in values if value is not None), default=None)


def _total(values: Sequence[N | None]) -> N | None:
    """The sum over ranks; None unless the value of each is known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _longest(rows: list[list[int]]) -> Ints:
    return np.array([max(values) for values in zip(*rows, strict=True)], dtype=np.int64)


def _phases(ranks: Sequence[RankRecord], step_ns: float) -> dict[str, float]:
    """Return the mean times of the phases of a step; empty where bench did not take the steps."""
    phases: dict[str, float] = {}
    if not ranks[0].steps.data_ns:
        return phases
    for phase in PHASES:
        columns = (getattr(rank.steps, f"{phase}_ns") for rank in ranks)
        phases[phase] = float(np.mean([sum(column) / len(column) for column in columns]))
    return {**phases, "other": step_ns - sum(phases.values())}


def _warnings(ranks: Sequence[RankRecord]) -> tuple[str, ...]:
    """The warnings of ranks, and the differences between their devices and nodes."""
    own = sorted({warning for rank in ranks for warning in rank.warnings})
    environments = [rank.environment for rank in ranks]
    return (*own, *unlike_devices(environments), *unlike_nodes(environments))


def _warnings_of_figures(outside: float, telemetry: Mapping[str, float]) -> Iterator[str]:
    """Warn if a large share of the step is `outside` of its phases, and if a device was throttled."""
    if abs(outside) > RESIDUAL_ABOVE:
        yield f"{outside:.1%} of the step is outside of its phases: ranks waited for each other or the host"
    if (share := telemetry.get("throttled", 0.0)) > 0:
        yield f"a device was throttled in {share:.0%} of the samples"


def _losses(ranks: Sequence[RankRecord]) -> dict[str, Any]:
    losses, every = mean_losses(ranks)
    return {
        "loss_first": _mean_loss([(rank.warmup_loss or rank.steps.loss)[0] for rank in ranks]),
        "loss_last": _mean_loss([rank.steps.loss[-1] for rank in ranks]),
        "losses": losses,
        "losses_every": every,
    }


def _mean_loss(losses: Sequence[float | None]) -> float | None:
    """The mean over ranks; None unless it is known of all ranks."""
    total = _total(losses)
    return total / len(losses) if total is not None else None


def mean_losses(ranks: Sequence[RankRecord]) -> tuple[tuple[float, ...], int]:
    """The loss curve of a run in at most 60 points, and the number of steps of a point.

    A point is the mean over ranks and that number of steps in a row; the last one may have fewer steps. The
    curve is from the first step of the warm-up until a loss of any rank is not finite.
    """
    rows = [rank.warmup_loss + rank.steps.loss for rank in ranks]
    known = list(takewhile(lambda losses: None not in losses, zip(*rows, strict=True)))
    if not known:
        return (), 1
    every = math.ceil(len(known) / MOST_LOSSES)
    means = np.array(known, dtype=np.float64).mean(axis=1)
    return tuple(float(means[at : at + every].mean()) for at in range(0, len(means), every)), every


def _proof(ranks: Sequence[RankRecord]) -> Proof | None:
    proofs = [rank.proof for rank in ranks if rank.proof is not None]
    failed = [proof for proof in proofs if not proof.passed]
    return next(iter(failed or proofs), None)


def _replicas_agree(ranks: Sequence[RankRecord]) -> bool | None:
    """Whether all replicas have equal parameters; None where the strategy does not keep them equal."""
    if any("parameters_hash" in rank.absent for rank in ranks):
        return None
    return len({rank.parameters_hash for rank in ranks}) <= 1
