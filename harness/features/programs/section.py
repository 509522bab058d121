"""The section of programs that bench did not train: which rank is slow, and which losses are unknown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from harness.features.programs.reading import Waits, interpreter_words, slow_words
from reports import fields
from reports.analysis.figures import CellFigures
from reports.analysis.study import StudyFigures
from reports.page.looks import cell_label
from reports.page.section import Block, Bullets, Definition, Paragraph, Section, Table
from reports.table import Column, figures, table, words
from results.grouping import grouped

DEFINITION = Definition(
    "method-program-wait",
    "Wait of a program's ranks",
    "Time of a step that a rank spends inside of collectives. Ranks that train together leave each exchange "
    "together, so that their steps take equally long: the slow rank is the one that waits least.",
)

TRACE_DEFINITION = Definition(
    "method-program-trace",
    "Compute, exposed communication and idle",
    "Means over the last three steps of a traced rank, which torch's profiler makes longer. Compute is the "
    "time in which kernels run that do not communicate, or on a CPU the operators of aten. Communication is "
    "exposed while nothing computes, and idle is the rest.",
)


def program_section(study: StudyFigures) -> Section | None:
    """Make the section; None for a study without programs."""
    waits: Mapping[str, Waits] = study.added.get("program") or {}
    cells = [study.cells[cell_id] for cell_id in waits if cell_id in study.cells]
    if not cells:
        return None
    columns: list[Column[CellFigures]] = [
        words("cell", lambda one: cell_label(study, one.cell)),
        figures("least wait", lambda one: _end(waits[one.cell.id], min), anchor=DEFINITION.anchor),
        figures("most wait", lambda one: _end(waits[one.cell.id], max), anchor=DEFINITION.anchor),
        words("slow rank", lambda one: slow_words(one.cell, waits[one.cell.id])),
        figures("last loss", lambda one: fields.number(one.newest.loss_last), anchor="method-losses"),
    ]
    told = (
        "bench did not train these cells. Their steps and times are measured. Whether they train is not "
        "known, and what of their communication is exposed only where steps were traced."
    )
    blocks: list[Block] = [
        Paragraph(told, "plain"),
        Table(table(cells, columns), "Programs, by their newest runs"),
    ]
    traced = [(one, rank) for one in cells for rank in sorted(waits[one.cell.id].traced)]
    if traced:
        blocks.append(_trace_table(study, waits, traced))
    blocks += [Bullets((*_unlike(cells), *_notes(waits.values(), cells)))]
    title = "Programs that bench did not write"
    return Section(
        anchor="program", title=title, blocks=tuple(blocks), definitions=(DEFINITION, TRACE_DEFINITION)
    )


def _trace_table(
    study: StudyFigures, waits: Mapping[str, Waits], traced: Sequence[tuple[CellFigures, int]]
) -> Table:
    """The parts of the traced steps of each rank."""

    def part(name: str) -> Callable[[tuple[CellFigures, int]], fields.Field]:
        return lambda one: fields.duration(getattr(waits[one[0].cell.id].traced[one[1]], name))

    columns: list[Column[tuple[CellFigures, int]]] = [
        words("cell", lambda one: cell_label(study, one[0].cell)),
        words("rank", lambda one: str(one[1])),
        figures("compute", part("compute_ns"), anchor=TRACE_DEFINITION.anchor),
        figures("exposed communication", part("exposed_ns"), anchor=TRACE_DEFINITION.anchor),
        figures("idle", part("idle_ns"), anchor=TRACE_DEFINITION.anchor),
    ]
    return Table(table(traced, columns), "Steps under torch's profiler")


def _notes(waits: Collection[Waits], cells: Sequence[CellFigures]) -> Iterator[str]:
    """Say how the waits were taken, what ran the programs, and what was noted of them."""
    yield from sorted({one.why_not or f"waits by {one.by}" for one in waits})
    own = grouped((interpreter_words(one.newest), one.cell.workload) for one in cells)
    yield from (f"{', '.join(sorted(set(names)))}: run by {words}" for words, names in own.items() if words)
    yield from dict.fromkeys(note for one in waits for note in one.notes)


def _end(waits: Waits, which: Callable[[Sequence[float]], float]) -> fields.Field:
    return fields.duration(which(waits.by_rank_ns) if waits.by_rank_ns else None)


def _unlike(cells: Sequence[CellFigures]) -> Iterator[str]:
    """Name the programs whose strategies cannot be compared by their losses."""
    alike = grouped(((one.cell.workload, one.cell.gpus, one.cell.global_batch), one) for one in cells)
    for (workload, gpus, _), several in alike.items():
        if len(several) > 1 and not all(one.newest.losses for one in several):
            yield (
                f"{workload} on {gpus}: not all losses are known: equal work of its strategies is the "
                f"claim of whoever wrote the program"
            )
