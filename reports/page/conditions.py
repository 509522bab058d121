"""Under which conditions the runs were made: the environment, what differs in it, warnings, disturbances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from reports import fields
from reports.analysis.allocations import Drift, MeasuredAllocation
from reports.analysis.pooling import LeftOut, machine_facts
from reports.analysis.study import StudyFigures
from reports.fields import Field
from reports.page.tables import CellWords
from reports.table import Shown, TextColumn, TextTable, figures, table, words
from reports.text import NOTHING, count, size
from results.cell import Cell
from results.environment import Environment
from results.run import RunResult

_PLACEMENT = "nodes x devices a node"
_CELLS_NAMED = 3
"""So many cells are named where many have the same warning."""


@dataclass(frozen=True, slots=True)
class CellRun:
    """A run with its cell."""

    cell: Cell
    run: RunResult


def environment_table(study: StudyFigures) -> TextTable:
    """One column an environment whose runs stand in figures, one row a fact."""
    groups = _environments(study)
    facts = [_facts(group) for group in groups]
    names = list(facts[0]) if facts else []
    heads = ["environment"] if len(groups) == 1 else [f"environment {n}" for n in range(1, len(groups) + 1)]
    return TextTable(
        columns=tuple(TextColumn(title=title) for title in ("fact", *heads)),
        rows=tuple((Field(name), *(Field(fact[name]) for fact in facts)) for name in names),
    )


def environments_finding(study: StudyFigures) -> str:
    """What the machines, software and code of the counted runs do not share, in words."""
    facts = [_facts(group) for group in _environments(study)]
    hosts = {host for run in study.runs for host in run.hosts}
    if len(facts) < 2:
        return (
            f"{count(len(study.runs), 'counted run')} on {count(len(hosts), 'host')}: one kind of machine, "
            f"one set of versions, one state of the code."
        )
    # Not how many runs there are, nor the placement, which a scaling study changes on purpose.
    names = [name for name in facts[0] if name not in ("runs", _PLACEMENT)]
    differing = [name for name in names if len({fact[name] for fact in facts}) > 1]
    return (
        f"{count(len(study.runs), 'counted run')} in {len(facts)} environments, which differ in "
        f"{', '.join(differing)}. A figure is over runs of one of them; cells of unlike ones are not divided."
    )


def allocations_table(drift: Drift) -> TextTable:
    """One row an allocation."""
    columns: list[Shown[MeasuredAllocation]] = [
        words("allocation", attrgetter("name")),
        words("host of the baseline", lambda row: ", ".join(row.hosts)),
        figures("runs", lambda row: fields.whole(row.runs), hint="of the cell in this allocation"),
        figures("step time", lambda row: fields.duration(row.step_ns), anchor="method-step-time"),
        figures(
            "against the median",
            lambda row: fields.shown(row.ratio, "{:.3f}".format),
            anchor="method-allocations",
        ),
    ]
    return table(drift.allocations, columns)


def allocations_finding(drift: Drift) -> str:
    """What the comparison comes to, in words."""
    finding = (
        f"Each of {len(drift.allocations)} allocations timed the cell {drift.cell_id} on one of its devices: "
        f"from {drift.lowest:.3f} to {drift.highest:.3f} of their median. A difference between cells of "
        f"different allocations that is not larger may be one between allocations."
    )
    if drift.others:
        finding += (
            f" {count(drift.others, 'allocation')} with other machines, software or code: not compared."
        )
    return finding


def left_out_table(study: StudyFigures) -> TextTable:
    """Successful runs that are not in a figure, with what differs."""
    columns: list[Shown[LeftOut]] = [
        *CellWords(study).columns(attrgetter("cell")),
        words("run", lambda row: row.run.run_id),
        words("differs in", lambda row: row.reason),
    ]
    return table(study.left_out, columns)


def disturbed_table(study: StudyFigures) -> TextTable:
    """Runs during which other processes used more of the CPU than a quiet run allows."""
    disturbed = [CellRun(one.cell, run) for one in study.cells.values() for run in one.runs if run.disturbed]
    columns: list[Shown[CellRun]] = [
        *CellWords(study).columns(attrgetter("cell")),
        words("run", lambda row: row.run.run_id),
        figures(
            "cores used by others",
            lambda row: fields.number(row.run.foreign_cpu_cores),
            anchor="method-disturbed",
        ),
    ]
    return table(disturbed, columns)


def warnings_table(study: StudyFigures) -> TextTable:
    """Each warning once, with the cells that it is about."""
    found: dict[str, dict[str, Cell]] = {}
    runs: dict[str, int] = {}
    for cell, run in [(one.cell, run) for one in study.cells.values() for run in one.runs]:
        for warning in (*run.warnings, *_own_warnings(run)):
            found.setdefault(warning, {})[cell.id] = cell
            runs[warning] = runs.get(warning, 0) + 1
    label = CellWords(study).label
    columns: list[Shown[str]] = [
        words("warning", str),
        figures(
            "runs", lambda warning: fields.whole(runs[warning]), hint="counted runs that gave this warning"
        ),
        words("cells", lambda warning: _named([label(cell) for cell in found[warning].values()])),
    ]
    return table(sorted(found), columns)


def _own_warnings(run: RunResult) -> list[str]:
    """Facts of a record that a reader should know as warnings."""
    warnings = []
    if run.warmup_steady is False:
        warnings.append("warm-up ended at its limit before the step time was steady")
    if run.stop == "budget":
        warnings.append("measuring ended with the time budget before the target precision was met")
    return warnings


def _named(labels: Sequence[str]) -> str:
    named = "; ".join(labels[:_CELLS_NAMED])
    rest = len(labels) - _CELLS_NAMED
    return f"{named}; and {count(rest, 'other')}" if rest > 0 else named


def _environments(study: StudyFigures) -> list[list[RunResult]]:
    """The counted runs by machine and software, placements together."""
    groups: dict[str, list[RunResult]] = {}
    for run in study.runs:
        if run.environment is not None:
            groups.setdefault(repr(sorted(machine_facts(run.environment).items())), []).append(run)
    return list(groups.values())


def _facts(runs: Sequence[RunResult]) -> Mapping[str, str]:
    environments = [run.environment for run in runs if run.environment is not None]
    first = environments[0]
    return {
        "runs": f"{len(runs):,}",
        "hosts": ", ".join(sorted({host for run in runs for host in run.hosts})) or NOTHING,
        "device": first.device_name,
        "device memory": size(first.device_memory_bytes) if first.device_memory_bytes else NOTHING,
        "CPU": first.cpu_model,
        "cores usable on the host": _distinct(str(one.cores) for one in environments),
        "threads a rank": str(first.threads),
        _PLACEMENT: _distinct(f"{one.nodes} x {one.gpus_per_node}" for one in environments),
        "operating system": _distinct(one.os for one in environments),
        "Python": first.python,
        "torch": first.torch,
        "CUDA": first.cuda or NOTHING,
        "NCCL": first.nccl or NOTHING,
        "driver": first.driver or NOTHING,
        "NCCL settings": " ".join(f"{k}={v}" for k, v in sorted(first.nccl_settings.items())) or NOTHING,
        "commit": _distinct(_commit(one) for one in environments),
        "code hash": first.code.code_hash,
        **{
            f"code of {name}": _distinct(
                one.code.packages[name] for one in environments if name in one.code.packages
            )
            for name in sorted({name for one in environments for name in one.code.packages})
        },
    }


def _distinct(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _commit(environment: Environment) -> str:
    code = environment.code
    return f"{code.commit or 'unknown'}{' with local changes' if code.dirty else ''}"
