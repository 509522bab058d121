"""Replays of a study's series by a network table, also by one of another network (`--what-if`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from harness.features.project import series
from harness.features.project.laws import FARTHEST
from harness.features.project.recorded import Stragglers, recorded_buckets
from harness.features.project.series import Replayed, Replays
from harness.plan.estimate import predicted_times
from harness.plan.surroundings import Devices, Measured, Surroundings
from reports.analysis.figures import CellFigures
from reports.analysis.study import StudyFigures
from reports.text import listed, percent
from results.cell import BASELINE_STRATEGY
from results.errors import BenchError, SchemaError, UsageError, nearest
from results.network import Measurement, NetworkFacts, NetworkTable
from results.parts import Unknown
from results.record import RankRecord
from results.store import Study
from strategies.catalog import STRATEGIES
from strategies.closed_form.terms import Term
from strategies.predictions import traffic
from workloads.catalog import WORKLOADS, facts

TERMS = {"inter_node_gbps": True, "intra_node_gbps": False}
"""Terms of `--what-if`, each with whether it describes groups that span several nodes."""


@dataclass(frozen=True, kw_only=True)
class Replayer:
    """Replays series of a study by a network table."""

    study: Study
    figures: StudyFigures
    table: NetworkTable
    other: NetworkTable | None = None
    """The network that the targets are asked for, if it is not the one that the study ran on."""

    @cached_property
    def measured(self) -> Measured:
        """The computation that the study has measured, and this table."""
        runs = [run for one in self.figures.cells.values() for run in one.runs]
        return Measured.of(runs, (one.cell for one in self.figures.cells.values()), self.table)

    def unlike(self, one: CellFigures) -> list[str]:
        """The facts in which the network of the table differs from the network of a cell's runs."""
        environment, cell = one.newest.environment, one.cell
        if environment is None:
            return ["the environment of the runs is not known"]
        return self.table.facts.unlike(NetworkFacts.of(environment, cell))

    def __call__(self, of: series.Measured) -> Replays:
        """Replay the measured sizes and the targets of a series, or say why that cannot be done."""
        last = of.last
        try:
            parts = facts(WORKLOADS.parse(last.cell.workload)).parts
            strategy = STRATEGIES.facts(last.cell.strategy)
        except BenchError as error:
            return str(error)
        if isinstance(parts, Unknown):
            return f"the messages of {last.cell.workload} are not known: {parts.reason}"
        if not (strategy.projected and strategy.distributed and last.cell.dense):
            return f"the messages of {last.cell.strategy} are not replayed"
        if unlike := self.unlike(last):
            return f"the network table describes another network ({listed(unlike, last='; ')})"
        if self.measured.work(last.cell) is None:
            if last.cell.model_parallel > 1:
                ranks = f"{last.cell.model_parallel} ranks compute each sample together"
                return (
                    f"{ranks}, and the computation of one was not measured: measure {BASELINE_STRATEGY} too"
                )
            return "the computation of its batch of a replica was not measured: a budget needs --quads"
        records = self._records(last)
        here, there = self.measured, replace(self.measured, network=self.other or self.table)
        near = [gpus for gpus in of.targets if gpus <= FARTHEST * of.largest]
        return {gpus: self._replayed(of, gpus, records, here) for gpus in of.steps.gpus} | {
            gpus: self._replayed(of, gpus, records, there) for gpus in near
        }

    def _records(self, one: CellFigures) -> list[list[RankRecord]]:
        """The rank records of the counted runs of a cell; those that are damaged or gone are left out."""
        found = []
        for run in one.runs:
            try:
                found.append(self.study.rank_records(run.cell_id, run.run_id))
            except SchemaError:
                continue
        return [records for records in found if len(records) == one.cell.gpus]

    def _replayed(
        self, of: series.Measured, gpus: int, records: Sequence[Sequence[RankRecord]], known: Measured
    ) -> Replayed | str:
        cell = of.cell(gpus)
        per_node = min(of.per_node, cell.gpus)
        if cell.gpus % per_node:
            return f"{cell.gpus:,} devices do not fill whole nodes of {per_node:,}"
        environment, parts = of.last.newest.environment, facts(WORKLOADS.parse(cell.workload)).parts
        assert environment is not None
        assert not isinstance(parts, Unknown)
        devices = Devices(
            cores=environment.cores,
            gpu_name=environment.device_name,
            gpu_bytes=environment.device_memory_bytes,
            measured=known,
        )
        around = Surroundings.of(cell, devices, per_node)
        placed, nodes = around.placed(cell), cell.gpus // around.node_size
        terms = [_recorded(term, records) for term in traffic(placed, parts)]
        delays = _stragglers(records).delays_s(cell.gpus, nodes) if cell.gpus > 1 else ()
        times = predicted_times(placed, parts, terms, around, delays_s=delays)
        if terms and "network" not in times.measured:
            where = f"{cell.gpus:,} ranks on {nodes:,} node{'s' if nodes > 1 else ''}"
            return f"the network table does not cover {where}"
        lost = {
            "exposed transfer": times.exposed,
            "waiting for the slowest rank": times.waits,
            "pipeline bubbles": times.bubble,
        }
        part = max(lost, key=lambda name: lost[name])
        widest = max((row.nodes for row in self.table.measurements), default=1)
        return Replayed(
            step_ns=1e9 * times.step,
            loss=f"{part}, {percent(lost[part] / times.step)} of a step",
            # More nodes than were measured may take another algorithm, or more switches: another level.
            levels=int(widest < nodes),
        )


def _recorded(term: Term, records: Sequence[Sequence[RankRecord]]) -> Term:
    """The term with the moments at which its sums were recorded to be ready, if their sizes are the same."""
    if not term.pieces or term.collective != "all-reduce":
        return term
    for ranks in records:
        pieces = recorded_buckets(ranks)
        if [piece.payload_bytes for piece in pieces] == [piece.payload_bytes for piece in term.pieces]:
            return replace(term, pieces=pieces)
    return term


def _stragglers(records: Sequence[Sequence[RankRecord]]) -> Stragglers:
    """How ranks differ in their steps without exchange; nothing if these were not recorded."""
    runs: list[tuple[Any, list[int]]] = []
    for ranks in records:
        steps = [rank.quads.off_step_ns for rank in ranks if rank.quads is not None]
        length = min(map(len, steps), default=0)
        if len(ranks) > 1 and len(steps) == len(ranks) and length > 1:
            seconds = np.array([own[:length] for own in steps]) / 1e9
            runs.append((seconds, [rank.node_rank for rank in ranks]))
    return Stragglers.of(runs)


def other_network(table: NetworkTable, asked: Sequence[str]) -> NetworkTable:
    """The table of a network with other rates: what is not latency takes as much less as the rate is higher.

    The latency is the time of the smallest array of the same group. Raises UsageError for a term that was not
    measured.
    """
    told: dict[str, float] = {}
    for text in asked:
        name, equals, value = text.partition("=")
        if name not in TERMS or not equals:
            known = listed([f"{term}=VALUE" for term in TERMS], last=" or ")
            raise UsageError(f"--what-if takes {known}, not {text!r}{nearest(name, TERMS)}")
        if name in told:
            raise UsageError(f"--what-if {name} is given twice: give one value")
        told[name] = _rate(text, value)
    measurements = table.measurements
    for name, gbps in told.items():
        old = measured_gbps(table, name)
        measurements = tuple(
            _faster(row, measurements, old / gbps) if (row.nodes > 1) == TERMS[name] else row
            for row in measurements
        )
    return msgspec.structs.replace(table, measurements=measurements)


def measured_gbps(table: NetworkTable, term: str) -> float:
    """The rate that a term of `--what-if` replaces, in Gbit/s: the highest busbw of the largest groups of its
    level, between nodes thus of whole nodes. Raises UsageError if that level was not measured."""
    level = [row for row in table.measurements if (row.nodes > 1) == TERMS[term]]
    if not level:
        where = "over several nodes" if TERMS[term] else "inside a node"
        raise UsageError(
            f"--what-if {term}: the network table has nothing {where}; measure it by bench network"
        )
    most = max((row.nodes, row.ranks) for row in level)
    return 8e-9 * max(row.busbw for row in level if (row.nodes, row.ranks) == most)


def _rate(text: str, value: str) -> float:
    try:
        gbps = float(value)
    except ValueError:
        gbps = 0.0
    if not 1e-3 <= gbps <= 1e9:
        raise UsageError(f"--what-if {text}: a rate is a number of Gbit/s from 0.001 to 1e9, like 800")
    return gbps


def _faster(row: Measurement, every: Sequence[Measurement], factor: float) -> Measurement:
    """A measurement whose time beyond its group's latency is `factor` times as long."""
    group = (row.collective, row.ranks, row.nodes)
    least = min(one.median_s for one in every if (one.collective, one.ranks, one.nodes) == group)
    scaled = {
        name: min(least, time) + factor * max(0.0, time - least)
        for name in ("low_s", "median_s", "high_s")
        for time in [getattr(row, name)]
    }
    return msgspec.structs.replace(row, **scaled)
