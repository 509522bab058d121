"""Memory: the peak of each way to train, compared with the memory of the device or host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from markupsafe import Markup

from reports import fields
from reports.analysis.memory import CellMemory, cell_memories, cells_out_of_memory
from reports.analysis.study import StudyFigures
from reports.fields import Field
from reports.page.looks import cell_label
from reports.page.section import Block, Definition, Paragraph, Section, Table
from reports.table import Column, TextTable, figures, table, words
from reports.text import capital, count, listed, percent, size
from results.cell import label
from results.grouping import grouped

_FULL_ABOVE = 0.9
"""Share above which a larger batch or model hardly fits, because allocators lose memory to fragments."""
DEFINITIONS = (
    Definition(
        "method-memory",
        "Memory",
        Markup(
            "Peak: the largest memory of any rank in any counted run, on a device by the allocator, on the "
            "host the resident set; over idle is the peak less what the process held before the run. Its "
            "share of the memory is <code>peak of the largest rank / memory of the device</code>, on a CPU "
            "<code>peak x ranks a host / memory of the host</code>, an upper bound."
        ),
    ),
    Definition(
        "method-predicted-memory",
        "Predicted memory",
        Markup(
            "In closed form, when the study was planned: parameters, gradients, optimizer state, buckets "
            "and activations of the fullest rank at its fullest moment (docs/memory.md), under autocast an "
            "upper estimate. It is compared with the peak on a device, and on a CPU with what a run took "
            "over idle, which includes freed memory that the C library keeps unless "
            "<code>--memory-limit-mb</code> is given."
        ),
    ),
)


_Kind = tuple[str, CellMemory, list[CellMemory]]
"""The cells of one workload and way to train: their name, the fullest, and all of them."""


def memory_section(study: StudyFigures) -> Section | None:
    """Make the section; None if no cell has a figure or ran out of memory."""
    memories, failed = cell_memories(study), cells_out_of_memory(study)
    if not memories and not failed:
        return None
    found = [
        *_finding(study, memories),
        *_against_prediction(study, memories),
        *_unpredicted(study, memories),
        *_fitted(study),
    ]
    blocks: list[Block] = [Paragraph(" ".join(found))] if found else []
    if failed:
        named = listed([cell_label(study, cell) for cell in failed], last="; ")
        blocks.append(Paragraph(f"{count(len(failed), 'cell')} ran out of memory: {named}."))
    if memories:
        blocks.append(Table(_table(study, memories), "Peak memory of the largest rank, by way to train"))
    predicted = any(one.over_prediction is not None for one in memories)
    return Section(
        anchor="memory",
        title="Memory",
        blocks=tuple(blocks),
        definitions=DEFINITIONS if predicted else DEFINITIONS[:1],
    )


def _unpredicted(study: StudyFigures, memories: Sequence[CellMemory]) -> Iterator[str]:
    known = {one.cell.workload for one in memories if one.predicted_bytes is not None}
    for workload, why in study.unpredicted.items():
        if workload not in known:
            yield f"The memory of {workload} was not predicted, because {why}."


def _fitted(study: StudyFigures) -> Iterator[str]:
    """The batches that were fitted into the memory."""
    batches = dict.fromkeys(one.words for plan in study.plans for one in plan.request.batches or ())
    return (f"{capital(words)}." for words in batches)


def _table(study: StudyFigures, memories: Sequence[CellMemory]) -> TextTable:
    """One row for each workload and way to train, with its fullest cell."""
    several = len({one.cell.workload for one in memories}) > 1
    kinds = grouped((f"{one.cell.workload}, " * several + label(one.cell), one) for one in memories)
    rows: list[_Kind] = [(name, max(those, key=_fullness), those) for name, those in kinds.items()]

    def smallest(row: _Kind) -> Field:
        return fields.size(min(filter(None, map(_bytes, row[2])), default=None))

    memory, predicted = "method-memory", "method-predicted-memory"
    size_of = f"fullest at {study.devices_word}"
    columns: list[Column[_Kind]] = [
        words("strategy", lambda row: row[0]),
        figures(size_of, lambda row: fields.whole(row[1].cell.gpus), anchor=memory),
        figures(
            "batch per replica",
            lambda row: fields.whole(row[1].cell.batch_per_replica),
            anchor="method-scaling",
        ),
        figures("peak", lambda row: fields.size(_bytes(row[1])), anchor=memory),
        figures("of the memory", lambda row: fields.percent(row[1].share), anchor=memory),
        figures("smallest peak of its cells", smallest, anchor=memory),
    ]
    if any(one.over_prediction is not None for one in memories):
        # The prediction for the fullest cell, and the measured memory that it is compared with.
        if any(one.cell.device == "cpu" for one in study.cells.values()):
            columns.append(figures("over idle", lambda row: fields.size(row[1].step_bytes), anchor=memory))
        columns += [
            figures("predicted", lambda row: fields.size(row[1].predicted_bytes), anchor=predicted),
            figures(
                "measured over predicted",
                lambda row: fields.number(row[1].over_prediction),
                anchor=predicted,
            ),
        ]
    return table(rows, columns)


def _fullness(one: CellMemory) -> tuple[float, int]:
    return one.share or 0.0, one.device_peak_bytes or one.rss_peak_bytes or 0


def _bytes(one: CellMemory) -> int | None:
    return one.rss_peak_bytes if one.cell.device == "cpu" else one.device_peak_bytes


def _finding(study: StudyFigures, memories: Sequence[CellMemory]) -> Iterator[str]:
    """The cell that is nearest to its limit."""
    known = [one for one in memories if one.share is not None]
    if not known:
        return
    fullest = max(known, key=lambda one: one.share or 0.0)
    share, named = percent(fullest.share or 0.0), cell_label(study, fullest.cell)
    if fullest.cell.device == "cpu":
        yield f"Fullest: {named}, at most {share} of the host's {size(fullest.host_bytes or 0)}."
        return
    room = ": there is hardly room for more" if (fullest.share or 0.0) > _FULL_ABOVE else ""
    yield f"Fullest: {named}, {share} of a GPU's {size(fullest.device_bytes or 0)}{room}."


def _against_prediction(study: StudyFigures, memories: Sequence[CellMemory]) -> Iterator[str]:
    """A sentence on the smallest and the largest ratio of measured to predicted memory."""
    ratios = [(ratio, one) for one in memories if (ratio := one.over_prediction) is not None]
    if not ratios:
        return
    (low, least), (high, most) = (end(ratios, key=lambda pair: pair[0]) for end in (min, max))
    if least is most:
        yield f"{cell_label(study, most.cell)} took {high:.2f} times the memory predicted."
        return
    yield (
        f"{count(len(ratios), 'cell')} took {low:.2f} times ({cell_label(study, least.cell)}) to {high:.2f} "
        f"times ({cell_label(study, most.cell)}) the memory predicted."
    )
