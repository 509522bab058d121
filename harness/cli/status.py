"""`bench status`: where a study stands."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click

from harness.code import code_version
from harness.console import Console
from harness.launch.tally import Conditions
from reports.analysis.outcomes import pruned
from results.outcome import Outcome
from results.store import Study


@click.command(name="status")
@click.argument("study")
def command(study: str) -> int:
    """Say how many runs of each cell of STUDY are done, and what became of the others.

    Runs of other code or versions than the present ones are counted apart: they are not pooled with new
    ones. Exit code 1 if a cell is without one of its runs.
    """
    rows = _standing(Study.existing(Path(study)))
    Console().table(["cell", "ok", "planned", "others"], rows, numeric=[False, True, True, False])
    return int(any(int(done) < int(planned) for _, done, planned, _ in rows))


def _standing(study: Study) -> list[tuple[str, str, str, str]]:
    """Cell, runs that are ok, runs that were planned, and the outcomes of the other runs."""
    outcomes: dict[str, Counter[str]] = {}
    conditions, plans = Conditions.here(code_version()), study.plans()
    virtual = {cell_id for plan in plans for cell_id in plan.virtual_cells}
    results = study.results()
    for result in results:
        there = conditions.allow(result, virtual=result.cell_id in virtual)
        other = result.outcome is Outcome.OK and not there
        kind = "ok under other conditions" if other else str(result.outcome)
        outcomes.setdefault(result.cell_id, Counter())[kind] += 1
    inferred = pruned(plans, results)
    planned = {cell.id: plan.request.repeats for plan in plans for cell in plan.cells}
    rows = []
    for cell_id, repeats in planned.items():
        found = outcomes.get(cell_id, Counter())
        others = ", ".join(f"{n} {name}" for name, n in sorted(found.items()) if name != Outcome.OK)
        if cell_id in inferred:
            others = f"{Outcome.SKIPPED}: {inferred[cell_id]}"
        rows.append((cell_id, str(found[Outcome.OK]), str(repeats), others))
    return rows
