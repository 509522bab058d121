"""`bench show` and `bench logs`: one cell with its runs, and what the ranks of a launch have printed."""

from __future__ import annotations

import time
from pathlib import Path

import click

from harness.launch.rank_output import OutputFile, OutputTail, last_lines, launcher_output, rank_output
from harness.terminal.console import Console
from results.errors import UsageError, bench_call
from results.foreign_text import REASON_CHARACTERS, shortened
from results.job_store import JobStore
from results.launch import Launch
from results.outcome import Outcome
from results.run import RunResult
from results.store import Study

LAST_LINES = 15


@click.command(name="show")
@click.argument("study")
@click.argument("cell")
def show_command(study: str, cell: str) -> int:
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
    """The id that begins with `beginning`. Raises UsageError if no cell or several cells have such an id."""
    found = [cell_id for cell_id in study.cell_ids() if cell_id.startswith(beginning)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(f"no cell of {study.root} begins with {beginning!r}; bench status lists them")
    raise UsageError(f"{beginning!r} begins the ids of {len(found)} cells: {', '.join(found[:3])}, ...")


def _line(result: RunResult) -> str:
    if result.step_ns is None:
        return f"{result.outcome}: {shortened(str(result.reason), REASON_CHARACTERS)}"
    proof = "not checked" if result.proof is None else f"{result.proof_word}: {result.proof.detail}"
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


POLL_S = 0.5
NEXT_S = 10.0
"""How long the next launch may take to begin after the launch that is followed has ended."""
LINE_CHARACTERS = 2000
"""Length up to which a line is printed in full; of a longer line, the beginning and the end are printed."""


@click.command(name="logs")
@click.argument("study")
@click.option("--cell", metavar="ID", help="only the last run of this cell (its id, or the beginning of it)")
@click.option("--rank", type=int, metavar="N", help="only this rank")
@click.option("--follow", is_flag=True, help="continue until the launch has ended and no other begins")
def logs_command(study: str, *, cell: str | None, rank: int | None, follow: bool) -> int:
    """Print what the last launch of STUDY has printed: torchrun, agents of nodes, and each rank.

    With --cell or --rank it is what ranks have printed. A file that has grown to more than 8 MiB has lost its
    middle, and says how much.
    """
    folder, console = Study.existing(Path(study)), Console()
    cell_id = None if cell is None else one_cell(folder, cell)
    launch, run_id = _last_run(folder, cell_id) if cell_id else (_last_launch(folder), None)
    shown = _Shown(folder, console, rank, run_id)
    while True:
        shown.launch(launch, follow=follow)
        newer = _newer(folder, launch) if follow and cell_id is None else None
        if newer is None:
            break
        launch = newer
    if not shown.lines:
        console.note("nothing was printed")
    return 0


class _Shown:
    """Prints lines under the names of their files, as `tail` does."""

    def __init__(self, study: Study, console: Console, rank: int | None, run_id: str | None) -> None:
        self._study, self._console = study, console
        self._rank, self._run_id = rank, run_id
        self._last: Path | None = None
        self.lines = 0

    def launch(self, launch: Launch, *, follow: bool) -> None:
        """Print what a launch has printed; with `follow`, until it has ended."""
        if self._rank is not None and not 0 <= self._rank < launch.placement.gpus:
            ranks = f"ranks 0 to {launch.placement.gpus - 1}" if launch.placement.gpus > 1 else "only rank 0"
            raise UsageError(f"--rank {self._rank}: launch {launch.launch_id} has {ranks}; name one of them")
        tails: dict[Path, OutputTail] = {}
        while True:
            # Asked before the files are read, so that all that was printed before the end is read.
            ended = not follow or self._study.has_attempt(launch.launch_id)
            for file in self._files(launch):
                tail = tails.setdefault(file.path, OutputTail(file, self._run_id))
                for line in tail.lines(ended=ended):
                    if file.path != self._last:
                        gap = "" if self._last is None else "\n"
                        self._console.text(f"{gap}==> {file.words}: {file.path} <==")
                        self._last = file.path
                    self._console.text(shortened(line, LINE_CHARACTERS))
                    self.lines += 1
            if ended:
                return
            time.sleep(POLL_S)

    def _files(self, launch: Launch) -> list[OutputFile]:
        folder = self._study.launch_folder(launch.launch_id)
        ranks = rank_output(folder, launch)
        if self._rank is not None:
            return [file for file in ranks if file.rank == self._rank]
        return ranks if self._run_id is not None else [*launcher_output(folder), *ranks]


def _last_launch(study: Study) -> Launch:
    launches = study.launches()
    if launches:
        return launches[-1]
    logs = sorted(study.root.glob("jobs/*/job-*.log"))
    jobs = JobStore(study.root).jobs()
    raise UsageError(
        f"no launch of {study.root} has begun"
        + (f"; its jobs have printed {', '.join(map(str, logs))}" if logs else "")
        + (f": {bench_call('status', study.root)}" if jobs else "; bench matrix starts some")
    )


def _last_run(study: Study, cell_id: str) -> tuple[Launch, str]:
    """The launch of the last run of a cell that has begun, and the run."""
    begun = set(study.run_ids(cell_id))
    for launch in reversed(study.launches()):
        for slot in launch.slots:
            if slot.cell_id == cell_id and slot.run_id in begun:
                return launch, slot.run_id
    raise UsageError(
        f"{cell_id} has not been run yet, or its launches are gone: {bench_call('status', study.root)}"
    )


def _newer(study: Study, launch: Launch) -> Launch | None:
    """The next launch, if one begins soon."""
    end = time.monotonic() + NEXT_S
    while time.monotonic() < end:
        newer = [each for each in study.launches() if each.launch_id > launch.launch_id]
        if newer:
            return newer[0]
        time.sleep(POLL_S)
    return None
