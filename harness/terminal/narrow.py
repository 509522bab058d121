"""The headline on a narrow terminal: fewer columns, and no fact is lost by it.

Rows are grouped by workload, setting, scaling and batch: a line above each group has these, and the baseline,
proof and runs of most of its rows. A row that differs says so at its end. Intervals of step times are left
out first, then the shares that the exchange adds, throughputs and intervals of efficiencies; a line names
what is left out. A long name has a separate line.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from harness.terminal.table_text import GAP, column_widths, table_lines, total_width
from reports import fields
from reports.analysis.headline import HeadlineRow, efficiency_field, on_less_off, runs_text
from reports.text import NOTHING, percent
from results.cell import label
from results.grouping import grouped

LONGEST_NAME = 24
"""Characters of a strategy that share a line with its figures."""
_Show = Callable[[HeadlineRow], str]


_SHARED: dict[str, _Show] = {
    "against": lambda row: row.against if row.against == NOTHING else f"against {row.against}",
    "proof": lambda row: row.figures.proof_method,
    "runs": lambda row: runs_text(row.figures),
}
_STEP: tuple[str, _Show] = ("step time", lambda row: fields.figure(row.figures.step_ns).text)
_STEP_ENDS: tuple[str, _Show] = ("step time", lambda row: fields.figure(row.figures.step_ns, ends=True).text)
_RATE: tuple[str, _Show] = ("throughput", lambda row: fields.figure(row.figures.throughput).text)
_SHARE_ENDS: tuple[str, _Show] = ("efficiency", lambda row: efficiency_field(row.efficiency).text)
_ON_LESS_OFF: tuple[str, _Show] = ("added by the exchange", lambda row: on_less_off(row).text)


def _share(row: HeadlineRow) -> str:
    one = row.efficiency
    return percent(one.metric.value) if one and one.metric and not one.is_baseline else _SHARE_ENDS[1](row)


_LEVELS: tuple[tuple[tuple[tuple[str, _Show], ...], str], ...] = (
    ((_STEP_ENDS, _RATE, _SHARE_ENDS, _ON_LESS_OFF), ""),
    ((_STEP, _RATE, _SHARE_ENDS, _ON_LESS_OFF), "intervals of step times"),
    ((_STEP, _RATE, _SHARE_ENDS), "intervals of step times, added by the exchange"),
    ((_STEP, _SHARE_ENDS), "intervals of step times, added by the exchange, throughputs"),
    ((_STEP, ("efficiency", _share)), "added by the exchange, throughputs, all intervals"),
)
"""Columns from wide to narrow, and what they leave out."""


def narrow_lines(rows: Sequence[HeadlineRow], sizes_count: str, width: int) -> list[str]:
    """The headline in lines of at most `width` columns (of at least 40)."""
    groups = grouped((_group(row), row) for row in rows)
    forms = [
        (
            [line for rows in groups.values() for line in _group_lines(rows, columns, sizes_count, width)],
            left_out,
        )
        for columns, left_out in _LEVELS
    ]
    lines, left_out = next((form for form in forms if max(map(len, form[0])) <= width), forms[-1])
    note = _wrapped(f"Left out on {width} columns: {left_out}. The report has all.", width)
    return [*lines, *note] if left_out else lines[:-1]


def _wrapped(text: str, width: int, *, indent: str = "") -> list[str]:
    """Wrap a text; only words that are longer than a line are broken, and never at hyphens."""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False)


def _name(row: HeadlineRow) -> str:
    return label(row.cell)


def _group(row: HeadlineRow) -> tuple[str, ...]:
    cell = row.cell
    weak = "weak" in row.of
    size = f"batch {cell.batch_per_replica:,} per replica" if weak else f"global batch {cell.global_batch:,}"
    return cell.workload, row.setting, f"{' and '.join(row.of)} scaling", size


def _group_lines(
    rows: Sequence[HeadlineRow], columns: Sequence[tuple[str, _Show]], sizes_count: str, width: int
) -> Iterator[str]:
    common = {key: _most_frequent(map(show, rows)) for key, show in _SHARED.items()}
    yield from _wrapped(_head(rows[0], common), width, indent="    ")
    titles = ["strategy", sizes_count, *(title for title, _ in columns)]
    names = list(map(_name, rows))
    long = [name if len(name) > LONGEST_NAME else None for name in names]
    body = [
        ["" if name in long else name, f"{row.cell.gpus:,}", *(show(row) for _, show in columns)]
        for row, name in zip(rows, names, strict=True)
    ]
    lines = table_lines(titles, body, numeric=[False, *[True] * (len(titles) - 1)])
    heads = len(lines) - len(body)
    yield from lines[:heads]
    used = total_width(column_widths(titles, body))
    for row, name, line in zip(rows, long, lines[heads:], strict=True):
        if name:
            yield from _wrapped(name, width)
        yield from _with_difference(line.ljust(used), _difference(row, common), width)
    yield ""


def _most_frequent(texts: Iterable[str]) -> str:
    counts = Counter(text for text in texts if text != NOTHING)
    return counts.most_common(1)[0][0] if counts else NOTHING


def _head(row: HeadlineRow, common: Mapping[str, str]) -> str:
    told = [common["against"]] if common["against"] != NOTHING else []
    return ", ".join(filter(None, (*_group(row), *told, common["proof"], common["runs"])))


def _difference(row: HeadlineRow, common: Mapping[str, str]) -> str:
    """The facts of a row in which it differs from most rows of its group."""
    texts = {key: show(row) for key, show in _SHARED.items()}
    return ", ".join(text for key, text in texts.items() if text not in (common[key], NOTHING))


def _with_difference(line: str, differs: str, width: int) -> Iterator[str]:
    if not differs or len(line) + len(GAP) + len(differs) <= width:
        yield f"{line}{GAP}{differs}".rstrip()
    else:
        yield line.rstrip()
        yield from _wrapped(f"    {differs}", width, indent="    ")
