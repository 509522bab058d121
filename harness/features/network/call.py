"""`bench network`: plans a study that measures collectives instead of steps, and writes its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.features.network.derivation import network_table
from harness.features.network.nccl_tests import read_nccl_tests
from harness.features.network.order import NetworkOrder
from harness.features.network.section import summary_table
from harness.launchers.launcher import JobLauncher
from harness.launchers.registry import launcher
from harness.matrix import Matrix
from harness.plan.launchers import DEFAULT
from harness.plan.options import read_duration_s, read_gpus, read_names
from harness.plan.study_file import StudyFile, merge
from harness.plan.surroundings import Machine
from harness.reporting.assumptions import CostFlags
from harness.reporting.reading import place_words
from harness.reporting.report import write_report
from harness.reporting.studies import read_figures
from harness.terminal.console import Console
from results import files
from results.cell import REFERENCE_STRATEGY, Cell
from results.errors import UsageError, bench_call
from results.network import COLLECTIVES, NETWORK_FILE, Collective, NetworkFacts, NetworkTable
from results.outcome import Outcome
from results.parts import Unknown
from results.plan import Plan
from results.record import RankRecord
from results.run import RunResult
from results.schemas import NETWORK
from results.store import Study
from strategies.predictions import traffic
from workloads.catalog import WORKLOADS, facts

BUDGET = "1m"
STARTUP_S = 900.0
"""The time of a job in addition to the budget: connections, first operations, six samples of each."""


class Network(Matrix):
    """One `bench network` call that measures."""

    def __init__(
        self,
        options: StudyFile,
        network: NetworkOrder,
        *,
        beside: Study | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        """`beside` is a study whose folder gets the table as well."""
        self.order, self._beside = network.stored, beside
        super().__init__(_completed(options), study_file=None, arguments=arguments)

    def _folder_name(self) -> str:
        if self._name is not None:
            return super()._folder_name()
        request = self._request
        words = [f"network-{request.device}-{request.backend}-{request.gpus[0]}"]
        words += [f"x{size}" for size in (request.gpus_per_node, request.node_size) if size is not None]
        words += [f"{link}" for link in request.links if link != "none"]
        return "-".join(words)

    def run(self, *, report: bool) -> int:
        """Run what is left; a call whose launches others have run writes their table."""
        code = super().run(report=report)
        study = Study(self._root)
        if self._launcher.several_hosts and study.is_there:
            return self._tell(study, report=report) if read_runs(study)[1] else code
        return code

    def _finish(self, study: Study, plan: Plan, results: list[RunResult], *, report: bool) -> int:
        return max(self._tell(study, report=report), self._without_cells(plan))

    def _tell(self, study: Study, *, report: bool) -> int:
        """Write and print the table of a study's runs. Returns the exit code."""
        cell, runs = read_runs(study)
        if cell is None:
            self._console.note(f"nothing was measured: {bench_call('status', study.root)} says why")
            return 1
        write_table(network_table(cell, runs), [study, self._beside], self._console)
        if self._beside is not None:
            self._console.note(f"{bench_call('report', self._beside.root)} shows it in the study's page")
        if report:
            (figures,) = read_figures([str(study.root)], CostFlags(), self._console)
            write_report(study, figures, self._console)
        return 0


def _completed(options: StudyFile) -> StudyFile:
    """The options with the values that a measurement of the network has. Raises UsageError."""
    if options.link is not None and len(read_names(options.link)) > 1:
        raise UsageError(f"--link {options.link}: a table describes one network: give one rate")
    if options.gpus is not None and len(read_gpus(options.gpus, "--gpus")) > 1:
        raise UsageError(
            f"--gpus {options.gpus}: give the largest number of workers, whose smaller groups are measured "
            f"in the same launch"
        )
    chosen, repeats = launcher(options.launcher or DEFAULT), options.repeats or 1
    gpus, budget = options.gpus, options.budget or BUDGET
    if gpus is None:
        if chosen.several_hosts:
            raise UsageError(f"--gpus is missing: how many workers does --launcher {chosen.name} start?")
        here = Machine.here()
        gpus = len(here.gpu_names) if here.gpu_names and options.device != "cpu" else here.cores
    if read_gpus(gpus, "--gpus") == (1,):
        raise UsageError("a network has two workers or more, and --gpus is 1: give --gpus 2")
    limit = options.time
    if limit is None and isinstance(chosen, JobLauncher):
        limit = f"{STARTUP_S + repeats * read_duration_s(budget, '--budget'):.0f}s"
    return msgspec.structs.replace(
        options,
        workload="mlp",
        strategy=REFERENCE_STRATEGY,
        batch_size="1",
        baseline=False,
        # Its ranks run no code of the user's, which would fail again.
        rerun="failed",
        gpus=gpus,
        repeats=repeats,
        budget=budget,
        time=limit,
    )


def read_runs(study: Study) -> tuple[Cell | None, list[list[RankRecord]]]:
    """The cell of the newest good run, and the records of all its good runs of that run's network."""
    good = [result for result in study.results() if result.outcome is Outcome.OK]
    if not good:
        return None, []
    newest = max(good, key=lambda result: (result.started_at or "", result.run_id))
    cell = study.cell(newest.cell_id)
    kept = []
    for result in good:
        if result.cell_id == cell.id and _facts(cell, result) == _facts(cell, newest):
            kept.append(study.rank_records(cell.id, result.run_id))
    return cell, kept


def _facts(cell: Cell, result: RunResult) -> NetworkFacts | None:
    if result.environment is None:
        return None
    return NetworkFacts.of(result.environment, cell)


def read_outputs(paths: Sequence[Path], beside: Study | None, options: StudyFile) -> int:
    """Write the table of outputs of nccl-tests into the folders of a study and of `--out`."""
    out = options.out
    if beside is None and out is None:
        raise UsageError("--read needs a place for the table: name a STUDY, or give --out FOLDER")
    table, console = read_nccl_tests(paths, options.gpus_per_node), Console()
    for place, why in table.absent.items():
        console.warn(f"{place} is left out: {why}")
    write_table(table, [Study(Path(out)) if out else None, beside], console)
    return 0


def write_table(table: NetworkTable, studies: Sequence[Study | None], console: Console) -> None:
    """Write a table into the folders of studies, and print its groups."""
    shown = summary_table(table)
    console.table(shown.titles, shown.texts, numeric=shown.numeric)
    for study in studies:
        if study is not None:
            path = study.root / NETWORK_FILE
            files.replace(path, NETWORK.encode(table), in_study=True)
            console.result(f"network table: {path}")


def options_of(study: Study, given: StudyFile) -> StudyFile:
    """The options that measure the network of a study: its device, placement and launcher, unless given."""
    plans = [plan for plan in study.told_plans() if plan.cells]
    if not plans:
        raise UsageError(f"{study.root} has no cell to measure the network of: give --gpus, and no STUDY")
    request = plans[-1].request
    links = list(dict.fromkeys(cell.link for plan in plans for cell in plan.cells))
    if len(links) > 1 and given.link is None:
        raise UsageError(f"the cells of {study.root} are over {', '.join(links)}: say which by --link")
    found: dict[str, object] = {
        "gpus": str(max(cell.gpus for plan in plans for cell in plan.cells)),
        "link": links[0],
        "name": None if given.out is not None else f"network-{study.name}"[:100],
    }
    found |= {name: getattr(request, name) for name in ("device", "backend", "gpus_per_node", "node_size")}
    words = iter(place_words(study)[2:])
    found |= {flag[2:].replace("-", "_"): value for flag, value in zip(words, words, strict=True)}
    known = {name: value for name, value in found.items() if value is not None}
    return merge(msgspec.convert(known, StudyFile, strict=False), given)


def collectives_of(study: Study | None, given: str | None) -> tuple[Collective, ...]:
    """The collectives of `--collectives`, else the usual ones and what the cells of a study send."""
    if given is not None:
        names = read_names(given)
        unknown = [name for name in names if name not in COLLECTIVES]
        if unknown or not names:
            raise UsageError(f"--collectives takes some of {', '.join(COLLECTIVES)}, not {given!r}")
        return tuple(name for name in COLLECTIVES if name in names)
    asked = set(NetworkOrder().collectives)
    for cell in [cell for plan in study.told_plans() for cell in plan.cells] if study else []:
        parts = facts(WORKLOADS.parse(cell.workload)).parts
        if not isinstance(parts, Unknown):
            asked |= {term.collective for term in traffic(cell, parts)}
    return tuple(name for name in COLLECTIVES if name in asked)
