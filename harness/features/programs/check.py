"""One short run of a program, and what bench understood of it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from harness.features.programs import file as programs
from harness.features.programs.reading import Waits, interpreter_words, read_waits, slow_words
from harness.matrix import Matrix
from harness.plan.study_file import StudyFile
from harness.reporting.reading import Reading
from reports import fields
from reports.analysis.figures import CellFigures
from reports.analysis.study import analyse
from reports.text import duration, rate
from results.outcome import Outcome
from results.plan import Plan
from results.run import RunResult
from results.store import Study


def check(path: Path, *, gpus: int, strategy: str | None, batch: int | None) -> int:
    """Run one cell of a program in a folder that is removed, and print what was found: the exit code."""
    file = programs.read(path)
    with TemporaryDirectory(prefix="bench-program-") as folder:
        options = StudyFile(
            workload=f"program:{path}",
            strategy=strategy or next(programs.names(file)),
            gpus=gpus,
            batch_size=None if batch is None else str(batch),
            repeats=1,
            hang_after="60s",
            budget="3s",
            oversubscribe=True,
            out=folder,
        )
        return _Check(options, study_file=None).run(report=False)


class _Check(Matrix):
    """A study of one cell that ends with what was found in its run."""

    def _finish(self, study: Study, plan: Plan, results: list[RunResult], *, report: bool) -> int:
        for skip in plan.skips:
            self._console.error(skip.reason)
        for run in results:
            if run.outcome is not Outcome.OK:
                self._console.error(f"{run.outcome}: {run.reason}")
        figures = analyse(study.name, study.told_plans(), results)
        waits = read_waits(Reading(study=study, figures=figures, console=self._console))
        for cell_id, one in figures.cells.items():
            self._console.table(["what", "found"], _rows(one, waits[cell_id]), numeric=[False, False])
        return int(not figures.cells)


def _rows(one: CellFigures, waits: Waits) -> list[tuple[str, str]]:
    """Rows on the run of a program: its steps, its work, its ranks, and what is not known."""
    run = one.newest
    assert run.step_ns is not None
    measured = f"{run.warmup_steps} of warm-up and {run.steps} measured"
    known = [
        ("program", f"{one.cell.workload}, {one.cell.strategy}"),
        ("interpreter", interpreter_words(run)),
        ("ranks", f"{run.ranks_present}, {one.cell.model_parallel} a replica"),
        ("steps", f"{measured}, {duration(run.step_ns.value)} each"),
        ("work", rate(run.units_per_s or 0.0, run.unit or "samples")),
        ("last loss", fields.number(run.loss_last).text),
        ("memory", fields.size(run.device_allocated_peak_bytes or run.rss_peak_bytes).text),
        ("slow rank", slow_words(one.cell, waits)),
        ("proof", run.absent.get("proof", "")),
    ]
    return known + [("note", note) for note in waits.notes]
