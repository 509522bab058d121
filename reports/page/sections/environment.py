"""The conditions of the runs: machine, software, code, differences and disturbances."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

from markupsafe import Markup

from reports.analysis.pooling import DISTURBED, machine_facts
from reports.analysis.study import Drift, StudyFigures
from reports.page.looks import cell_label
from reports.page.section import Block, Bullets, Definition, Facts, Folded, Paragraph, Section
from reports.table import TextTable, table, words
from reports.text import NOTHING, count, listed, moment, size
from results.cell import Cell
from results.environment import Environment
from results.features import MEASURED
from results.grouping import grouped
from results.run import RunResult
from results.version import VERSION

_NAMED = 3
"""The number of cells or runs that are named with one remark."""
_PLACEMENT = "nodes x devices a node"
_OWN = ("runs", _PLACEMENT)
"""The facts that a scaling study changes on purpose."""


def environment_section(study: StudyFigures) -> Section:
    """Make the section: facts of every environment whose runs count, then remarks on single runs."""
    return Section(
        anchor="environment", title="Environment", blocks=tuple(_blocks(study)), definitions=_DEFINITIONS
    )


def _blocks(study: StudyFigures) -> Iterator[Block]:
    groups = [_facts(group) for group in _environments(study)]
    if not groups:
        yield Paragraph("No successful run recorded its environment.", "plain")
    elif len(groups) > 1:
        yield Paragraph(
            f"{count(len(study.runs), 'counted run')} in {len(groups)} environments, which differ in "
            f"{', '.join(_differing(groups))}. A figure is over runs of one of them; cells of different ones "
            "are not divided."
        )
    told = [tuple((name, value) for name, value in facts.items() if value) for facts in groups]
    last = (*(told.pop() if told else ()), *_asked(study))
    yield Folded("Devices, versions and settings", (*map(Facts, told), Facts(last)))
    remarks = tuple(_remarks(study))
    yield (
        Bullets(remarks, "plain") if remarks else Paragraph("No run warned, and none was disturbed.", "plain")
    )


def _differing(groups: Sequence[Mapping[str, str]]) -> Iterator[str]:
    for name in groups[0]:
        if name not in _OWN and len({one.get(name) for one in groups}) > 1:
            yield name


def _asked(study: StudyFigures) -> Iterator[tuple[str, str]]:
    """When the study was planned and ran, and its settings."""
    started = sorted(run.started_at for run in study.runs if run.started_at)
    yield "planned", ", ".join(moment(plan.created_at) for plan in study.plans)
    if started:
        yield "ran", f"{moment(started[0])} to {moment(started[-1])}"
    cells = [pool.cell for pool in study.pools.values()]
    for name in ("backend", "precision", "dataset", "optimizer", "seed"):
        if values := _distinct(str(getattr(cell, name)) for cell in cells):
            yield name, values
    if study.commands:
        yield "asked by", "; ".join(study.commands)
    yield "page by", f"bench {VERSION}"


def _remarks(study: StudyFigures) -> Iterator[str]:
    runs = [run for one in study.cells.values() for run in one.runs if run.disturbed]
    if runs:
        named = listed([f"{run.run_id} ({run.foreign_cpu_cores:.2g} cores)" for run in runs], most=_NAMED)
        yield f"Disturbed, {count(len(runs), 'run')}, because other processes used cores: {named}."
    for warning, cells in _warnings(study).items():
        named = listed([cell_label(study, cell) for cell in cells.values()], most=_NAMED, last="; ")
        yield f"{warning}: {named}."
    left_out = ((left.reason, left.run.run_id) for left in study.left_out if not left.excluded)
    why = {DISTURBED: "where two others are left"}
    for reason, ids in grouped(left_out).items():
        told = why.get(reason, "as a figure is over runs of one environment")
        yield f"Left out, {told} ({reason}): {listed(ids, most=_NAMED)}."
    if study.drift is not None:
        yield allocations_finding(study.drift)


def allocations_finding(drift: Drift) -> str:
    """A sentence on how much the allocations differ."""
    ends = f"{min(drift.ratios.values()):.3f} to {max(drift.ratios.values()):.3f}"
    finding = (
        f"Each of {len(drift.ratios)} allocations timed the cell {drift.cell_id} on one of its devices: "
        f"from {ends} of their median. A smaller difference between "
        f"cells of different allocations may be due to the allocations."
    )
    if drift.others:
        finding += (
            f" {count(drift.others, 'allocation')} with other machines, software or code: not compared."
        )
    return finding


def _warnings(study: StudyFigures) -> Mapping[str, Mapping[str, Cell]]:
    """Each warning once, with its cells: warnings of runs, and warnings that follow from their records."""
    found: dict[str, dict[str, Cell]] = {}
    for cell, run in [(one.cell, run) for one in study.cells.values() for run in one.runs]:
        warnings = list(run.warnings)
        if run.warmup_steady is False:
            limit = "warm-up ended at its limit before the step time, or the clock of a GPU, was steady"
            warnings.append(limit)
        if run.stop == "budget":
            warnings.append("measuring ended with the time budget before the target precision was met")
        for warning in warnings:
            found.setdefault(warning, {})[cell.id] = cell
    return dict(sorted(found.items()))


def environment_table(study: StudyFigures) -> TextTable:
    """One column for each environment whose runs are counted, one row for each fact."""
    facts = [_facts(group) for group in _environments(study)]
    heads = ["environment"] if len(facts) == 1 else [f"environment {n}" for n in range(1, len(facts) + 1)]
    rows = [(name, *(fact.get(name) or NOTHING for fact in facts)) for name in (facts[0] if facts else ())]
    return table(rows, [words(head, itemgetter(n)) for n, head in enumerate(("fact", *heads))])


def _environments(study: StudyFigures) -> list[list[RunResult]]:
    """The counted runs, or the runs that trained, grouped by machine and software over all placements."""
    others = () if study.kind == MEASURED else study.pools.values()
    runs = study.runs or [run for pool in others for run in (*pool.runs, *pool.lost)]
    groups = grouped(
        (repr(sorted(machine_facts(run.environment).items())), run) for run in runs if run.environment
    )
    return list(groups.values())


def _facts(runs: Sequence[RunResult]) -> Mapping[str, str]:
    environments = [run.environment for run in runs if run.environment is not None]
    hosts = sorted({host for run in runs for host in run.hosts})
    return {
        "runs": f"{len(runs):,}",
        "hosts": listed(hosts, most=_NAMED + 1) if hosts else "",
        **_machine(environments),
        **_libraries(environments),
        **_code(environments),
    }


def _machine(environments: Sequence[Environment]) -> Mapping[str, str]:
    first = environments[0]
    return {
        "device": first.device_name,
        "device memory": size(first.device_memory_bytes) if first.device_memory_bytes else "",
        "CPU": first.cpu_model,
        "cores usable on the host": _distinct(str(one.cores) for one in environments),
        "threads a rank": str(first.threads),
        _PLACEMENT: _distinct(f"{one.nodes} x {one.gpus_per_node}" for one in environments),
        "operating system": _distinct(one.os for one in environments),
    }


def _libraries(environments: Sequence[Environment]) -> Mapping[str, str]:
    first = environments[0]
    return {
        "Python": first.python,
        "torch": first.torch,
        "CUDA": first.cuda or "",
        "NCCL": first.nccl or "",
        "driver": first.driver or "",
        "network interfaces": _settings(first.interfaces),
        "transport of NCCL": ", ".join(sorted({name for one in environments for name in one.transports})),
        "kernels of attention": _distinct(", ".join(one.attention) for one in environments),
        "NCCL settings": _settings(first.nccl_settings),
        "other settings": _settings(first.settings),
    }


def _code(environments: Sequence[Environment]) -> Mapping[str, str]:
    packages = sorted({name for one in environments for name in one.code.packages})
    return {
        "commit": _distinct(_commit(one) for one in environments),
        "code hash": environments[0].code.code_hash,
        **{
            f"code of {name}": _distinct(filter(None, (one.code.packages.get(name) for one in environments)))
            for name in packages
        },
    }


def _settings(settings: Mapping[str, str] | None) -> str:
    if settings is None:
        return "not recorded"
    return " ".join(f"{key}={value}" for key, value in sorted(settings.items()))


def _distinct(values: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(values))


def _commit(environment: Environment) -> str:
    code = environment.code
    text = f"{(code.measured_commit or 'unknown')[:12]}{' with local changes' if code.measured_dirty else ''}"
    own = code.user_commit and code.commit not in (None, code.user_commit)
    return f"{text} (bench {code.commit[:12]})" if own and code.commit else text


_DEFINITIONS = (
    Definition(
        "method-disturbed",
        "Disturbed",
        Markup(
            "Other processes used more than 5 % of the cores that the ranks of a run had on a host, while "
            "it measured. It does not count where two undisturbed runs of its cell are left; elsewhere its "
            "figure counts and is marked. The first screen shows a price of another day, "
            "code with local changes and disturbed runs."
        ),
    ),
)
