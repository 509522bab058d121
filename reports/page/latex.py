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


def latex(studies: Sequence[StudyFigures]) -> str:
    """A table environment a study, to paste or to \\input; the document needs \\usepackage{booktabs}."""
    return "\n".join(["% needs \\usepackage{booktabs}", *(_study(study) for study in studies)])


def escaped(text: str) -> str:
    """A text that LaTeX prints as it is; engines of 2018 and later read UTF-8."""
    return visible(text).translate(_MARKS)


def _study(study: StudyFigures) -> str:
    table = _told(headline_table(study))
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


def _told(table: TextTable) -> TextTable:
    """Without columns that no row has something in."""
    places = range(len(table.titles))
    return table.columns_at([n for n in places if {row[n] for row in table.texts} - {NOTHING, ""}])


def _caption(study: StudyFigures) -> str:
    made = {name: made_from(study, name).sentence for name in _workloads(study)}
    several = len(made) > 1
    told = " ".join(f"{name}: {text}" if several else text for name, text in made.items() if text is not None)
    ends = (
        "Interval: of the step time over runs (below six runs their range); in parentheses: that of the "
        "efficiency."
    )
    return " ".join(part for part in (f"Scaling of {escaped(study.name)}.", escaped(told), ends) if part)


def _workloads(study: StudyFigures) -> Iterator[str]:
    yield from dict.fromkeys(one.cell.workload for one in study.cells.values())


def _row(texts: Sequence[str]) -> str:
    return " & ".join(escaped(text) for text in texts) + r" \\"
