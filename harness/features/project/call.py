"""`bench project`: project a study by its records and a network table, and write and print the projection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path

import msgspec

from harness.features.project.project import projected_series
from harness.features.project.records import PROJECTION, Projection, digest, projection_path
from harness.features.project.refusals import NOT_DENSE, Outside
from harness.features.project.replays import Replayer, measured_gbps, other_network
from harness.plan.estimate import predicted_bytes
from harness.plan.surroundings import Devices, Surroundings
from harness.reporting.assumptions import CostFlags
from harness.reporting.report import command_lines
from harness.reporting.studies import read_figures, read_network
from harness.terminal.console import Console
from reports.analysis.figures import CellFigures
from reports.analysis.study import StudyFigures
from reports.text import count, listed
from results import files
from results.cell import Cell
from results.errors import BenchError, UsageError, bench_call
from results.network import NETWORK_FILE, NetworkTable
from results.store import Study
from strategies.catalog import STRATEGIES


def project(
    path: str,
    to: int,
    prices: CostFlags,
    console: Console,
    *,
    network: str | None = None,
    what_if: Sequence[str] = (),
) -> Projection:
    """Project the study at `path` up to `to` devices.

    Raises UsageError, and SchemaError for a damaged table.
    """
    study = Study.existing(Path(path))
    [figures] = read_figures([path], prices, console)
    table, told = _table(study, network, console)
    if table is None and what_if:
        raise UsageError(f"--what-if {what_if[0]} needs a network table: give --network FILE")
    other = None
    if table is not None and what_if:
        other = other_network(table, what_if)
        for term in (one.partition("=")[0] for one in what_if):
            told = f"{told}; {term} measured {measured_gbps(table, term):.4g}"
    if table is not None and network is not None:
        _require_same(Replayer(study=study, figures=figures, table=table), network)
    flags = [("--network", network), *(("--what-if", one) for one in what_if)]
    flags += [(f"--{field.name.replace('_', '-')}", getattr(prices, field.name)) for field in fields(prices)]
    words = [word for flag, value in flags if value is not None for word in (flag, value)]
    found = Projection(
        digest=digest(figures),
        to=to,
        command=bench_call("project", path, "--to", to, *words),
        network=told,
        what_if=tuple(what_if),
        series=projected_series(figures, to, outside_of(study, figures, table, other)),
    )
    files.replace(projection_path(study), PROJECTION.encode(found), in_study=True)
    show(found, console)
    console.result(f"projection: {projection_path(study)} ({bench_call('report', path)} draws it)")
    return found


def _table(study: Study, network: str | None, console: Console) -> tuple[NetworkTable | None, str | None]:
    """The table that was given, or the study's own, and what it is in words."""
    table = read_network(study, console, network)
    if table is None:
        return None, None
    path = network or study.root / NETWORK_FILE
    groups = len({(row.ranks, row.nodes) for row in table.measurements})
    told = f"{path}, {count(groups, 'group')} measured {table.measured_at[:10]}, {table.evidence}"
    return table, told


def _require_same(replayer: Replayer, network: str) -> None:
    """Raises UsageError if no cell of the study ran on the network of the table."""
    unlike = [replayer.unlike(one) for one in replayer.figures.cells.values()]
    if unlike and all(unlike):
        raise UsageError(
            f"--network {network} is of another machine or network than {replayer.study.root} "
            f"({listed(unlike[0], last='; ')}): measure this one, {_network_call(replayer.study, 2)}"
        )


def outside_of(
    study: Study, figures: StudyFigures, table: NetworkTable | None, other: NetworkTable | None = None
) -> Outside:
    """Return what strategies and network tables say of the cells of a study and of its targets."""
    return Outside(
        replay=Replayer(study=study, figures=figures, table=table, other=other)
        if table
        else lambda of: "no network table was given (--network FILE, of bench network)",
        unprojected=_unprojected,
        memory=cache(_memory),
        room=_room,
        fitting=_fitting,
        network_call=None if table else lambda gpus: _network_call(study, gpus),
        what_if=other is not None,
    )


def show(found: Projection, console: Console) -> None:
    """Print the table, and how far each series pays; with `-v` also the refusals with what lifts them.

    It is one line if every size is refused.
    """
    from harness.features.project import section as section
    from reports.page.section import Table

    refused, every = section.refusals(found), Console.loudness > 0
    told = (
        f"{count(len(refused), 'refusal')}; -v lists {'it' if len(refused) == 1 else 'them'}, with what to do"
    )
    if not every and not any(series.of("projected") for series in found.series):
        console.result(f"every size up to {found.to:,} is refused: {refused[0].refusal.reason} ({told})")
        return
    for series in found.series:
        console.result(f"{section.named(series)}:")
        table = Table(section.size_table(series), section.named(series)).shown
        console.table(table.titles, table.texts, numeric=table.numeric)
        console.result()
    if refused and not every:
        console.result(told)
    for one in refused if every else ():
        console.sentence(one.text)
        for line in command_lines(one.command, console.width) if one.command else ():
            console.result(line)
    console.result()
    for series in found.series:
        if series.advice is not None:
            console.sentence(f"{section.named(series)}: {series.advice}{':' if series.verify else ''}")
        for line in command_lines(series.verify, console.width) if series.verify else ():
            console.result(line)
    for remark in section.remarks(found):
        console.sentence(remark)


def _unprojected(cell: Cell) -> str | None:
    """Why sizes of the cell's strategy are not projected, such as a package that is not installed."""
    try:
        strategy = STRATEGIES.facts(cell.strategy)
    except BenchError as error:
        return str(error)
    if strategy.projected:
        return None if cell.dense else NOT_DENSE
    return strategy.unprojected


def _memory(cell: Cell, per_node: int) -> int | None:
    whole = per_node if cell.gpus % per_node == 0 else None
    try:
        return predicted_bytes([cell], whole).get(cell.id)
    except BenchError:
        # The cell's strategy, optimizer or workload is not installed here.
        return None


def _room(one: CellFigures) -> int | None:
    """Bytes of a rank's memory that a plan would fill; None where they are not known."""
    there = one.newest.environment
    if there is None:
        return None
    devices = Devices(gpu_name=there.device_name, gpu_bytes=there.device_memory_bytes)
    return Surroundings.of(one.cell, devices, None).room or None


def _fitting(cell: Cell, share: float) -> str | None:
    """A strategy, or activation checkpointing, that takes at most a share of a cell's memory."""
    others = {"--activation-checkpointing": msgspec.structs.replace(cell, activation_checkpointing=True)}
    for facts in STRATEGIES.all_facts:
        if facts.projected and facts.distributed:
            others[f"--strategy {facts.name}"] = msgspec.structs.replace(cell, strategy=facts.name)
    room = share * (_memory(cell, cell.gpus) or 0)
    known = {words: _memory(other, cell.gpus) for words, other in others.items()}
    return next((words for words, needed in known.items() if needed and needed <= room), None)


def _network_call(study: Study, gpus: int) -> str:
    return bench_call("network", study.root, "--gpus", gpus)
