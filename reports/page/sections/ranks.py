"""Slow ranks: the ranks that are persistently slow, and the cost of waiting for them.

The heat map has a strip for each cell and a place for each rank, coloured by its compute relative to the
cell's median. Its SVG is written here, because matplotlib takes some hundred bytes a rank. Here a class of
colour is one path, and adjacent ranks of one class are one stroke of about eight bytes. Classes differ in
opacity, so they keep their order in grey, on paper and in dark mode. Persistently slow ranks have a mark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from markupsafe import Markup

from reports import fields
from reports.analysis.figures import CellFigures
from reports.analysis.stragglers import FALSE_ALARM, SLOW_ABOVE, Stragglers, stragglers
from reports.analysis.study import StudyFigures
from reports.fields import NONE, Field
from reports.page.looks import cell_label
from reports.page.section import Block, Bullets, Definition, Drawing, Drawings, Section, absent, safe
from reports.table import Column, TextTable, figures, table, words
from reports.text import NOTHING, count, listed, percent
from results.grouping import grouped

_DRAWN = 4
"""The number of cells with slow ranks that are drawn, the largest first."""

Found = tuple[CellFigures, Stragglers]


def ranks_section(study: StudyFigures) -> Section | None:
    """Make the section; None if no cell of several ranks recorded its ranks."""
    cells = [(one, found) for one in study.cells.values() if (found := stragglers(one)) is not None]
    if not cells:
        return None
    if not any(found.marked for _, found in cells):
        return absent("ranks", "Slow ranks", f"none in any of {count(len(cells), 'cell')}", _DEFINITIONS)
    return Section(
        anchor="ranks", title="Slow ranks", blocks=tuple(_blocks(study, cells)), definitions=_DEFINITIONS
    )


def _blocks(study: StudyFigures, cells: Sequence[Found]) -> Iterator[Block]:
    slow = sorted((pair for pair in cells if pair[1].marked), key=lambda pair: -pair[1].ranks)
    # For each set of slow hosts (or ranks of a size): the finding of one cell, and the others like it.
    groups = grouped((pair[1].slow_places, pair) for pair in slow)
    sentences = []
    for (one, found), *rest in groups.values():
        nodes = f" ({found.node_names} as a whole)" if found.slow_nodes and not found.hosts else ""
        others = listed([cell_label(study, other.cell) for other, _ in rest], last="; ") if rest else ""
        more = f" The same in {others}." if others else ""
        sentences.append(f"{cell_label(study, one.cell)}: {found.finding}{nodes}{more}")
    yield Bullets(tuple(sentences))
    rows = [(cell_label(study, one.cell), found) for one, found in slow[:_DRAWN]]
    yield Drawings((rank_map(rows, study.devices_word),))


_DEFINITIONS = (
    Definition(
        "method-slow-rank",
        "Persistently slow",
        f"Mean compute more than {SLOW_ABOVE:.0%} above the median of the ranks in each run, on the same "
        "node, and by more than the spread of its steps explains: a one-sided t-test with Bonferroni's "
        f"correction over the ranks. With equal ranks, one run of {1 / FALSE_ALARM:,.0f} has a slow one by "
        "chance. The mean rank loses the largest mean compute of a rank less the mean over the ranks, and 0 "
        "where no rank is persistently slow; the rest of the exposed wait is random skew. A rank is laden, "
        "and its host is not slow, if its experts compute so many more rows than the median rank's that, at "
        f"the share of the compute that rows have on the ranks, no more than {SLOW_ABOVE:.0%} is left.",
    ),
)


STEPS = (SLOW_ABOVE, 2 * SLOW_ABOVE, 4 * SLOW_ABOVE)
"""Lower ends of the classes, above and below the median."""
_OPACITIES = (0.35, 0.65, 1.0)
_WIDTH, _STRIP, _LABEL, _MARK = 390.0, 9.0, 11.0, 8.0
_ROW = _LABEL + _STRIP + _MARK
_TICK_ROW, _SCALE_ROW = 15.0, 24.0
_WIDEST = 30.0
"""The largest width of a rank, so that two ranks do not fill the drawing."""
_SWATCH = 31.0
_TICKS = 8

MapRow = tuple[str, Stragglers]
"""The label of a cell, and its ranks."""


def rank_map(rows: Sequence[MapRow], devices: str) -> Drawing:
    """Draw the map, grouped by number of ranks: for cells of one size, a column is one rank."""
    rows = sorted(rows, key=lambda row: row[1].ranks)
    sizes = list(dict.fromkeys(found.ranks for _, found in rows))
    among = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    title = f"Compute of each rank compared with the median of its cell, {among} {devices}"
    description = f"{title}, one strip a cell, {len(rows)} in all. {_description(rows)}"
    parts, top = [], 0.0
    for size in sizes:
        same = [row for row in rows if row[1].ranks == size]
        parts.append(f'<g transform="translate(0 {top:.0f})">\n{"".join(_of_one_size(same))}</g>\n')
        top += len(same) * _ROW + _TICK_ROW
    parts += _scale(top)
    head = (
        f'<svg viewBox="0 0 {_WIDTH:.0f} {top + _SCALE_ROW:.0f}" role="img" '
        f'aria-labelledby="ranks-0-title ranks-0-description" '
        f'style="font-size: 9px; fill: var(--ink); overflow: hidden">\n'
        f'<title id="ranks-0-title">{safe(title)}</title>\n'
        f'<desc id="ranks-0-description">{safe(description)}</desc>\n'
    )
    return Drawing(
        name="ranks",
        title=title,
        svg=Markup(f"{head}{''.join(parts)}</svg>"),
        width=1.27 * _WIDTH,
        values=_slow_table(rows),
    )


def _description(rows: Sequence[MapRow]) -> str:
    """The map in words, for who does not see it."""
    every = [one for _, found in rows for one in found.excess]
    slow = "; ".join(
        f"{label}: {', '.join(f'rank {rank}' for rank in found.marked)}"
        for label, found in rows
        if found.marked
    )
    return (
        f"Ranks lie between {percent(min(every))} and {percent(max(every))} of it. Persistently slow: "
        f"{slow or 'none'}. The table below names them."
    )


def _slow_table(rows: Sequence[MapRow]) -> TextTable:
    """One row for each rank that is slow in every run."""
    slow = "method-slow-rank"
    ranked = [(label, found, rank) for label, found in rows for rank in found.marked]
    columns: list[Column[tuple[str, Stragglers, int]]] = [
        words("cell", lambda row: row[0]),
        figures("slow rank", lambda row: fields.whole(row[2]), anchor=slow),
        words("host", lambda row: row[1].hosts[row[2]] if row[1].hosts else NOTHING),
        figures("above the median", lambda row: fields.percent(row[1].excess[row[2]]), anchor=slow),
        figures("more rows", _more_rows, anchor=slow),
    ]
    return table(ranked, columns)


def _more_rows(row: tuple[str, Stragglers, int]) -> Field:
    """The share by which the rows of a laden rank exceed the median rank's; none for a slow rank."""
    _, found, rank = row
    return fields.percent(found.more_rows[rank]) if rank in found.laden else NONE


def _of_one_size(rows: Sequence[MapRow]) -> Iterator[str]:
    ranks = rows[0][1].ranks
    width = min(_WIDEST, _WIDTH / ranks)
    for place, (label, _) in enumerate(rows):
        yield f'<text x="0" y="{place * _ROW + _LABEL - 3:.1f}">{safe(label)}</text>\n'
    yield from _strips(rows, width)
    for place, (_, found) in enumerate(rows):
        # A triangle under each persistently slow rank.
        top = place * _ROW + _LABEL + _STRIP + 1
        marks = [f"M{(rank + 0.5) * width:.1f} {top:.1f}l3 5h-6z" for rank in found.marked]
        if marks:
            yield f'<path d="{"".join(marks)}"/>\n'
    below = len(rows) * _ROW + 4
    for rank in range(0, ranks, -(-ranks // _TICKS)):
        yield f'<text x="{rank * width:.1f}" y="{below:.1f}">{rank}</text>\n'


def _strips(rows: Sequence[MapRow], width: float) -> Iterator[str]:
    """Draw the bands, and one path for each class over all rows, in units of a rank and a row."""
    yield (
        f'<g transform="translate(0 {_LABEL + _STRIP / 2:.1f}) scale({width:.4f} {_ROW:.1f})" '
        f'style="fill: none; stroke-width: {_STRIP / _ROW:.4f}" shape-rendering="crispEdges">\n'
    )
    band = "".join(f"M0 {place}h{found.ranks}" for place, (_, found) in enumerate(rows))
    yield f'<path style="stroke: var(--rule)" d="{band}"/>\n'
    strokes: dict[int, list[str]] = {}
    for place, (_, found) in enumerate(rows):
        # One stroke for adjacent ranks of one class; the middle class has no strokes.
        first = 0
        for kind, same in groupby(map(class_of, found.excess)):
            length = len(list(same))
            if kind:
                strokes.setdefault(kind, []).append(f"M{first} {place}h{length}")
            first += length
    for kind in sorted(strokes):
        yield f'<path style="{_look(kind, "stroke")}" d="{"".join(strokes[kind])}"/>\n'
    yield "</g>\n"


def class_of(excess: float) -> int:
    """The class from -3 to 3: the number of `STEPS` by which the rank is above or below the median."""
    steps = sum(abs(excess) > step for step in STEPS)
    return steps if excess > 0 else -steps


def _look(kind: int, what: str) -> str:
    colour = "vermillion" if kind > 0 else "blue"
    return f"{what}: var(--{colour}); {what}-opacity: {_OPACITIES[abs(kind) - 1]}"


def _scale(top: float) -> Iterator[str]:
    """Draw the legend of the colours and of the mark."""
    kinds = range(-len(STEPS), len(STEPS) + 1)
    for place, kind in enumerate(kinds):
        look = _look(kind, "fill") if kind else "fill: var(--rule)"
        yield (
            f'<rect x="{place * _SWATCH:.0f}" y="{top:.0f}" width="{_SWATCH:.0f}" height="7" '
            f'style="{look}"/>\n'
        )
    for place, end in enumerate((*(-step for step in reversed(STEPS)), *STEPS), 1):
        yield f'<text x="{place * _SWATCH:.0f}" y="{top + 17:.0f}" text-anchor="middle">{end:+.0%}</text>\n'
    after = len(kinds) * _SWATCH + 14
    yield f'<path d="M{after:.0f} {top + 1:.0f}l3 5h-6z"/>\n'
    yield f'<text x="{after + 7:.0f}" y="{top + 7:.0f}">persistently slow</text>\n'
