"""The headline of a study as tables of LaTeX, with the rules of the package booktabs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reports.analysis.headline import headline_table
from reports.analysis.study import StudyFigures
from reports.analysis.verdict.made_from import made_from
from reports.table import TextTable
from reports.text import NOTHING
from results.foreign_text import visible

_MARKS = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        **{mark: f"\\{mark}" for mark in "&%$#_{}"},
        "\n": " ",
        "\r": " ",
    }
)
_LEFT_OUT = ("interval",)
"""Columns whose facts stand in another column, or in the caption."""


def latex(studies: Sequence[StudyFigures]) -> str:
    """A table environment a study, to paste or to \\input; the document needs \\usepackage{booktabs}."""
    return "\n".join(["% needs \\usepackage{booktabs}", *(_study(study) for study in studies)])


def escaped(text: str) -> str:
    """A text that LaTeX prints as it is; engines of 2018 and later read UTF-8."""
    return visible(text).translate(_MARKS)


def _study(study: StudyFigures) -> str:
    table = _narrow(headline_table(study))
    if not table.rows:
        return f"% {escaped(study.name)}: no cell has a figure\n"
    columns = "".join("r" if column.numeric else "l" for column in table.columns)
    lines = [
        r"\begin{table}",
        r"  \centering",
        f"  \\caption{{{_caption(study)}}}",
        f"  \\begin{{tabular}}{{{columns}}}",
        r"    \toprule",
        f"    {_row(table.titles)}",
        r"    \midrule",
        *(f"    {_row(row)}" for row in table.texts),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _narrow(table: TextTable) -> TextTable:
    """Without columns that no row has something in, and without those that say what another one says."""
    kept = []
    for place, title in enumerate(table.titles):
        said = {row[place] for row in table.texts} - {NOTHING, ""}
        if said and title not in _LEFT_OUT:
            kept.append(place)
    return table.columns_at(kept)


def _caption(study: StudyFigures) -> str:
    made = {name: made_from(study, name).sentence for name in _workloads(study)}
    several = len(made) > 1
    told = " ".join(f"{name}: {text}" if several else text for name, text in made.items() if text is not None)
    ends = "In parentheses: the interval over runs (below six runs their range)."
    return " ".join(part for part in (f"Scaling of {escaped(study.name)}.", escaped(told), ends) if part)


def _workloads(study: StudyFigures) -> Iterator[str]:
    yield from dict.fromkeys(one.cell.workload for one in study.cells.values())


def _row(texts: Sequence[str]) -> str:
    return " & ".join(escaped(text) for text in texts) + r" \\"
