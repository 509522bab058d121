"""A study as text to paste: a page of Markdown for a pull request or a wiki, and a LaTeX table of the
headline."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from reports.analysis.headline import headline_table
from reports.analysis.side_by_side import SideBySide, side_by_side
from reports.analysis.study import StudyFigures, summary
from reports.analysis.verdict.verdict import verdict
from reports.page.sections.comparison import comparison_table
from reports.page.sections.environment import environment_table
from reports.page.sections.over import over_table
from reports.table import TextTable
from reports.text import NOTHING
from results.foreign_text import visible

_MARKS = re.compile(r"([\\`*_~\[\]#|])")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;", "\n": " "})
_NAMED = ("device", "CPU", "nodes x devices a node", "operating system", "torch", "CUDA", "NCCL", "commit")
SOURCE = (
    "Numbers: step time is the wall time of timed blocks to the last rank over their steps, the mean over "
    "runs; an interval is over runs and is shown with its kind. `bench report` defines all numbers, and "
    "`bench export --format csv` has them for each run."
)


def markdown(studies: Sequence[StudyFigures]) -> str:
    """One page; several studies are first compared, and each follows under its name."""
    parts = [part for study in studies for part in _study(study)]
    if len(studies) > 1:
        parts = ["# Studies side by side", *_comparison(side_by_side(studies)), *parts]
    return "\n\n".join([*parts, SOURCE]) + "\n"


def github_table(table: TextTable) -> str:
    """A table in GitHub's Markdown, with figures flush right."""
    heads = [plain(title) for title in table.titles]
    rules = ["---:" if column.numeric else "---" for column in table.columns]
    rows = [heads, rules, *([plain(text) for text in row] for row in table.texts)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plain(text: str) -> str:
    """The text, escaped so that the rendered page shows it literally, without marks, tags or mentions."""
    return _MARKS.sub(r"\\\1", visible(text.replace("\r", " "))).translate(_ENTITIES)


def _study(study: StudyFigures) -> Iterator[str]:
    yield f"# {plain(study.name)}"
    yield plain(summary(study))
    sentences = verdict(study).sentences
    if sentences:
        yield "\n".join(f"- {plain(sentence)}" for sentence in sentences)
    if study.compare_over is not None:
        yield github_table(over_table(study))
    table = headline_table(study)
    yield github_table(table) if table.rows else "No cell of this study has a figure."
    yield f"Environment: {plain(_environment(study))}"


def _comparison(comparison: SideBySide) -> Iterator[str]:
    yield "\n".join(f"- {plain(finding)}" for finding in comparison.findings)
    table = comparison_table(comparison)
    if table.rows:
        yield github_table(table)
    if comparison.unlike:
        yield "\n".join(f"- Not compared: {plain(text)}" for text in comparison.unlike)


def _environment(study: StudyFigures) -> str:
    """The facts of each environment in a row: `Example CPU; torch 2.13.0`."""
    facts = {name: cells for name, *cells in environment_table(study).texts}
    if not facts:
        return "no successful run recorded it."
    count = len(facts["device"])
    lines = [
        ", ".join(f"{name} {facts[name][place]}" for name in _NAMED if facts[name][place] != NOTHING)
        for place in range(count)
    ]
    return "; ".join(lines) + "."


_LATEX_MARKS = str.maketrans(
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
    """A table environment for each study, to paste or to \\input; the document needs
    \\usepackage{booktabs}."""
    return "\n".join(["% needs \\usepackage{booktabs}", *(_latex_table(study) for study in studies)])


def escaped(text: str) -> str:
    """The text escaped for LaTeX. Engines of 2018 and later read UTF-8."""
    return visible(text).translate(_LATEX_MARKS)


def _latex_table(study: StudyFigures) -> str:
    table = headline_table(study)
    places = range(len(table.titles))
    # Columns without a value are left out.
    table = table.columns_at([n for n in places if {row[n] for row in table.texts} - {NOTHING, ""}])
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


def _caption(study: StudyFigures) -> str:
    ends = (
        "Interval: of the step time over runs (below six runs their range); in parentheses: the "
        "interval of the efficiency."
    )
    return f"Scaling of {escaped(study.name)}. {escaped(study.run_counts.text)}. {ends}"


def _row(texts: Sequence[str]) -> str:
    return " & ".join(escaped(text) for text in texts) + r" \\"
