"""From the rank records of `bench network` to the network table."""

from __future__ import annotations

from collections.abc import Sequence

from results.cell import Cell
from results.errors import SchemaError
from results.grouping import grouped
from results.network import Key, Measurement, NetworkFacts, NetworkTable
from results.outcome import Evidence
from results.record import RankRecord
from results.statistics import median_of


def network_table(cell: Cell, runs: Sequence[Sequence[RankRecord]]) -> NetworkTable:
    """The table of a cell's runs, each with the records of all of its ranks; at least one run.

    A sample lasts as long as on the slowest rank of its group. The samples of all runs are pooled; where
    there are several runs, the interval includes the median of each. Raises SchemaError if the ranks of a run
    did not take the same samples.
    """
    pooled = grouped(pair for records in runs for pair in _slowest(records).items())
    first = runs[0][0]
    emulated = any(record.evidence is Evidence.EMULATED for records in runs for record in records)
    return NetworkTable(
        source="bench",
        measured_at=max(record.ended_at for records in runs for record in records),
        facts=NetworkFacts.of(first.environment, cell),
        evidence=Evidence.EMULATED if emulated else Evidence.MEASURED,
        measurements=tuple(_measurement(key, samples) for key, samples in pooled.items()),
    )


def _slowest(records: Sequence[RankRecord]) -> dict[Key, list[float]]:
    """Nanoseconds of each sample on the slowest rank."""
    rows_of_ranks = (row for record in records for row in record.network or ())
    found = grouped(
        ((row.collective, row.payload_bytes, row.ranks, row.nodes), row.duration_ns) for row in rows_of_ranks
    )
    for key, rows in found.items():
        if len(rows) != key[2] or len({len(row) for row in rows}) > 1 or not rows[0]:
            raise SchemaError(
                f"the ranks of run {records[0].run_id} did not take the same samples of {key[0]} over "
                f"{key[2]} ranks: their records were edited, move the run away"
            )
    return {key: [max(times) for times in zip(*rows, strict=True)] for key, rows in found.items()}


def _measurement(key: Key, runs: Sequence[Sequence[float]]) -> Measurement:
    samples = [sample / 1e9 for run in runs for sample in run]
    median, low, high = median_of(samples)
    middles = [median_of(run)[0] / 1e9 for run in runs]
    if len(runs) > 1:
        low, high = min(low, *middles), max(high, *middles)
    return Measurement.of(key, median, low, high, len(samples))
