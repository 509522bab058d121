"""Memory: what each cell took, against what there is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from reports.analysis.memory import CellMemory, cell_memories, out_of_memory
from reports.analysis.study import StudyFigures
from reports.page.cost_tables import memory_table
from reports.page.section import Block, Definition, Paragraph, Section, Table
from reports.page.tables import CellWords
from reports.text import count, percent, size

_FULL_ABOVE = 0.9
"""A larger batch or model hardly fits beyond this: allocators lose some to fragments."""
_DEFINITIONS = (
    Definition(
        "method-memory-share",
        "Share of memory",
        Markup(
            "The peak over what there is: on a GPU <code>peak of the largest rank / memory of the "
            "device</code>, on a CPU <code>peak of the largest rank x ranks a host / memory of the "
            "host</code>. The second is an upper bound: the largest rank stands for all, and pages that "
            "ranks share (libraries) are counted for each. The peak on a GPU is what the allocator gave "
            "out; what it holds in reserve, the context of the driver and buffers of the backend come on "
            "top."
        ),
    ),
    Definition(
        "method-memory-idle",
        "Over idle",
        "The peak on the host less what the rank's process held before the run: libraries, and the "
        "communication backend.",
    ),
)


def memory_section(study: StudyFigures) -> Section:
    memories = cell_memories(study)
    blocks = list(_blocks(study, memories)) or [Paragraph("No cell has a figure.", "plain")]
    definitions = _DEFINITIONS if memories else ()
    return Section(anchor="memory", title="Memory", blocks=tuple(blocks), definitions=definitions)


def _blocks(study: StudyFigures, memories: Sequence[CellMemory]) -> Iterator[Block]:
    if memories:
        yield from _finding(study, memories)
    failed = out_of_memory(study)
    if failed:
        label = CellWords(study).label
        named = "; ".join(label(cell) for cell in failed)
        yield Paragraph(f"{count(len(failed), 'cell')} ran out of memory: {named}.", "finding")
    if memories:
        yield Table(memory_table(study, memories), "Peak memory of the largest rank")


def _finding(study: StudyFigures, memories: Sequence[CellMemory]) -> Iterator[Block]:
    """The cell that is nearest to its limit."""
    known = [one for one in memories if one.share is not None]
    if not known:
        return
    fullest = max(known, key=lambda one: one.share or 0.0)
    share, label = percent(fullest.share or 0.0), CellWords(study).label(fullest.cell)
    if fullest.cell.device == "cpu":
        yield Paragraph(
            f"Fullest: {label}, at most {share} of the host's {size(fullest.host_bytes or 0)}.", "finding"
        )
        return
    room = ": there is hardly room for more" if (fullest.share or 0.0) > _FULL_ABOVE else ""
    yield Paragraph(
        f"Fullest: {label}, {share} of a GPU's {size(fullest.device_bytes or 0)}{room}.", "finding"
    )
