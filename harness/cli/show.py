"""`bench show`: one cell, with the last lines that a failed rank printed."""

from __future__ import annotations

from pathlib import Path

import click

from harness.launch.rank_output import last_lines, rank_output
from harness.terminal.console import Console
from results.errors import UsageError
from results.foreign_text import REASON_CHARACTERS, shortened
from results.outcome import Outcome
from results.run import RunResult
from results.store import Study

LAST_LINES = 15


@click.command(name="show")
@click.argument("study")
@click.argument("cell")
def command(study: str, cell: str) -> int:
    """Show CELL (its id, or the beginning of it) of STUDY: its runs, why one failed, and its traces."""
    folder = Study.existing(Path(study))
    cell_id = one_cell(folder, cell)
    console = Console()
    console.result(cell_id)
    results = [result for result in folder.results() if result.cell_id == cell_id]
    if not results:
        console.result("not run yet")
    for result in results:
        console.result(f"  {result.run_id}  {_line(result)}")
        if result.outcome is not Outcome.OK:
            for words in _last_words(folder, result):
                console.result(f"    {words}")
        for path in folder.trace_paths(result.cell_id, result.run_id):
            console.result(f"    trace: {path}")
    return 0


def one_cell(study: Study, beginning: str) -> str:
    """The cell whose id begins so. Raises UsageError if none or several do."""
    found = [cell_id for cell_id in study.cell_ids() if cell_id.startswith(beginning)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"no cell of {study.root} begins with {beginning!r}; bench status lists them")
    raise UsageError(f"{beginning!r} begins the ids of {len(found)} cells: {', '.join(found[:3])}, ...")


def _line(result: RunResult) -> str:
    if result.step_ns is None:
        return f"{result.outcome}: {shortened(str(result.reason), REASON_CHARACTERS)}"
    proof = "not checked" if result.proof is None else f"{result.proof.method}: {result.proof.detail}"
    proof = result.absent.get("proof", proof)
    return f"{result.outcome}: step {result.step_ns.value / 1e6:.2f} ms over {result.steps} steps; {proof}"


def _last_words(study: Study, result: RunResult) -> list[str]:
    """The last lines of the first rank that printed something in a failed run, under a line that names it."""
    launch = next((one for one in study.launches() if one.launch_id == result.launch_id), None)
    if launch is None:
        return []
    files = rank_output(study.launch_folder(result.launch_id), launch)
    found = last_lines([file for file in files if file.stream == "stderr"], result.run_id, LAST_LINES)
    if found is None:
        return []
    file, lines = found
    return [f"{file.words}, {file.path}:", *(shortened(line) for line in lines)]
