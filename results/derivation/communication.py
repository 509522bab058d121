"""The communication of a run, from its recorder: totals, transfer and wait, bandwidth. Pure.

Every time is the mean over recorded steps and ranks of one step, in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from results.cell import Backend
from results.derivation.intervals import length_of_columns
from results.derivation.matching import Floats, Matched, recorded_of
from results.errors import SchemaError
from results.groups import DIMENSIONS, GroupLayout
from results.record import POINT_TO_POINT, RankRecord, Recorded
from results.run import Communication, DimensionSummary, OperationSummary


def bus_factor(name: str, ranks: int, backend: Backend = "nccl") -> float | None:
    """Bytes over a rank's link, one way, for each byte that it hands over; None for other operations.

    This is the factor of the bus bandwidth of nccl-tests (doc/PERFORMANCE.md): what the slowest link moves at
    best, the same for any number of ranks. nccl-tests counts (p-1)/p of the result of an all-gather, of which
    a rank hands over 1/p. Gloo runs a reduce-scatter as an all-reduce.
    """
    others = (ranks - 1) / ranks
    factors = {
        "allreduce": 2 * others,
        "allgather": ranks - 1.0,
        "_allgather_base": ranks - 1.0,
        "_reduce_scatter_base": others if backend == "nccl" else 2 * others,
        "alltoall_base": others,
        "broadcast": 1.0,
        "reduce": 1.0,
    }
    return factors.get(name)


def step_communication(
    ranks: Sequence[RankRecord], matched: Matched | None, backend: Backend
) -> Communication | None:
    """The communication of one step; None unless all ranks recorded steps.

    total = length of the union of the intervals from issue to done. For each collective,
    transfer = the shortest duration over its ranks, and wait = duration - transfer; both are summed over a
    step's collectives.
    """
    recorded = recorded_of(ranks)
    if recorded is None or matched is None:
        return None
    cells = matched.ranks * matched.steps
    some = bool(matched.collective.any())
    blocked = blocked_by_step(recorded)
    operations = tuple(_summaries(matched))
    return Communication(
        steps=matched.steps,
        step_ns=_mean(recorded, "step_ns") or 0.0,
        total_ns=_in_flight(matched) / cells,
        blocked_ns=None if blocked is None else float(blocked.mean()),
        transfer_ns=float(matched.transfer_ns[matched.collective].sum()) / cells if some else None,
        wait_ns=float(matched.wait_ns.mean()) if some else None,
        exchange_cpu_ns=_mean(recorded, "exchange_cpu_ns"),
        dispatch_ns=_mean(recorded, "dispatch_ns"),
        bubble_ns=_mean(recorded, "bubble_ns"),
        operations=operations,
        bus_bytes_per_s=_bus_bandwidth(operations, backend),
        peak_bus_bytes_per_s=peak_bandwidth(ranks),
        dimensions=() if (layout := ranks[0].layout) is None else tuple(_by_dimension(matched, layout)),
    )


def blocked_by_step(recorded: Sequence[Recorded]) -> Floats | None:
    """Exposed communication with its wait, in ns; None unless all ranks recorded it.

    The shape is (ranks, steps): the time that the training thread waited. On CUDA (ranks, 1), the mean of the
    profiled steps: the union of the communication kernels less what overlaps with kernels that compute.
    """
    waited = [own.blocked_ns for own in recorded if own.blocked_ns is not None]
    if len(waited) == len(recorded):
        return np.array(waited, dtype=np.float64)
    kernels = [own.kernels for own in recorded if own.kernels is not None and own.kernels.steps > 0]
    if len(kernels) == len(recorded):
        return np.array([[(own.communication_ns - own.overlap_ns) / own.steps] for own in kernels])
    return None


def bubble_by_step(recorded: Sequence[Recorded]) -> Floats | None:
    """Idle time of the pipeline's stages in ns: (ranks, steps); None without stages."""
    bubbles = [own.bubble_ns for own in recorded if own.bubble_ns is not None]
    return np.array(bubbles, dtype=np.float64) if len(bubbles) == len(recorded) else None


def peak_bandwidth(ranks: Sequence[RankRecord]) -> float | None:
    """Bus bandwidth of the network while nothing else runs, in bytes/s, from the all-reduces of `link_peak`.

    Payload x 2(p-1)/p over the duration of the fastest one, on the rank that had it shortest (the last to
    arrive). None for one rank, or unless all ranks measured it. Raises SchemaError if they measured
    different all-reduces.
    """
    peaks = [rank.link_peak for rank in ranks if rank.link_peak is not None]
    factor = bus_factor("allreduce", len(ranks))
    if len(peaks) < len(ranks) or not factor:
        return None
    if len({(peak.payload_bytes, len(peak.duration_ns)) for peak in peaks}) > 1:
        raise SchemaError(
            f"the ranks of run {ranks[0].run_id} of {ranks[0].cell_id} measured different all-reduces of the "
            f"link's peak: their records were edited, move the run away"
        )
    durations = zip(*(peak.duration_ns for peak in peaks), strict=True)
    shortest = min(map(min, durations), default=0)
    return peaks[0].payload_bytes * factor / shortest * 1e9 if shortest else None


def _mean(recorded: Sequence[Recorded], field: str) -> float | None:
    """Mean over ranks and steps; None unless all ranks have the field."""
    columns = [values for own in recorded if (values := getattr(own, field)) is not None]
    return float(np.mean(columns)) if len(columns) == len(recorded) else None


def _in_flight(matched: Matched) -> int:
    """Length of the union of the intervals in flight, over all steps and ranks together."""
    if not len(matched.step):
        return 0
    done = matched.issued_ns + matched.duration_ns
    # Offsets keep the intervals of different steps and ranks apart.
    offset = (matched.rank * matched.steps + matched.step) * (int(done.max()) + 1)
    return length_of_columns(offset + matched.issued_ns, offset + done)


def _summaries(matched: Matched) -> Iterator[OperationSummary]:
    """Summaries by name, in alphabetical order, and group size; per step, means over all ranks."""
    cells, above = matched.ranks * matched.steps, matched.ranks + 1
    kinds = matched.name * above + matched.group_size
    for kind in np.unique(kinds):
        rows, name = kinds == kind, matched.names[kind // above]
        duration = int(matched.duration_ns[rows].sum())
        transfer = int(matched.transfer_ns[rows].sum())
        collective = name not in POINT_TO_POINT
        yield OperationSummary(
            name=name,
            group_size=int(kind % above),
            count=int(rows.sum()) / cells,
            payload_bytes=int(matched.payload_bytes[rows].sum()) / cells,
            duration_ns=duration / cells,
            transfer_ns=transfer / cells if collective else None,
            wait_ns=(duration - transfer) / cells if collective else None,
        )


def _by_dimension(matched: Matched, layout: GroupLayout) -> Iterator[DimensionSummary]:
    """The operations of each dimension that has some; last come those along several dimensions."""
    cells = matched.ranks * matched.steps
    of_group = [layout.dimension(members) for members in matched.members]
    for name in (*DIMENSIONS, None):
        rows = np.isin(matched.group, [at for at, own in enumerate(of_group) if own == name])
        if rows.any():
            some = rows & matched.collective
            sent = rows & ~np.isin(
                matched.name, [at for at, own in enumerate(matched.names) if own == "recv"]
            )
            transfer, duration = (int(ns[some].sum()) for ns in (matched.transfer_ns, matched.duration_ns))
            yield DimensionSummary(
                name=name,
                payload_bytes=int(matched.payload_bytes[sent].sum()) / cells,
                transfer_ns=transfer / cells if some.any() else None,
                wait_ns=(duration - transfer) / cells if some.any() else None,
            )


def _bus_bandwidth(operations: Sequence[OperationSummary], backend: Backend) -> float | None:
    """Sum over collectives of payload x factor, over the sum of their transfers, in bytes/s."""
    moved = spent_ns = 0.0
    for kind in operations:
        factor = bus_factor(kind.name, kind.group_size, backend)
        if factor is not None and kind.transfer_ns is not None:
            moved += factor * kind.payload_bytes
            spent_ns += kind.transfer_ns
    return moved / spent_ns * 1e9 if spent_ns else None
