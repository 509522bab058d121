"""`bench doctor --nodes N`: examine the nodes of a launcher in one launch, and name slow or wrong ones."""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec

from harness.features.preflight.section import node_names, node_table
from harness.features.preflight.verdict import PREFLIGHT, PREFLIGHT_FILE, Verdict, judge
from harness.launch.conduct import Conduct
from harness.launchers.jobs import job_statuses
from harness.launchers.launcher import MatrixCall
from harness.launchers.registry import launcher
from harness.matrix import Matrix, run_options
from harness.plan.launchers import DEFAULT
from harness.plan.study_file import StudyFile
from harness.plan.surroundings import Machine
from harness.terminal.console import Console
from reports.text import devices
from results import files
from results.cell import BASELINE_STRATEGY, REFERENCE_STRATEGY
from results.errors import SchedulerError, UsageError, bench_call
from results.outcome import Outcome
from results.plan import Order, Plan
from results.run import RunResult
from results.store import Study, utc_now

TIME, POLL_S = "20m", 3.0
LINK = "1gbit"
"""The network between virtual nodes of this machine."""


def preflight(nodes: int, slow_below: float, given: StudyFile) -> int:
    """Examine nodes of the launcher in `given`, for its budget. Returns the exit code: 1 if one is slow or
    wrong."""
    options, chosen = msgspec.structs.replace(given, baseline=False), launcher(given.launcher or DEFAULT)
    place: dict[str, object] = {"link": LINK, "device": "cpu", "oversubscribe": True}
    each: int | None = 1
    if chosen.several_hosts and "feed" not in chosen.options:
        raise UsageError(
            f"--nodes waits for its job, and --launcher {chosen.name} submits none: leave it out"
        )
    if chosen.several_hosts:
        call = MatrixCall(options=options, run_options=run_options(options), console=Console())
        hosts = chosen.accept(call).hosts
        each = hosts.gpus_per_node if hosts.has_gpus else 1
        place = {"gpus_per_node": each, "time": TIME}
    elif nodes == 1:
        each, place = len(Machine.here().gpu_names) or 1, {}
    if each is None:
        raise UsageError("the GPUs of a node are not known: give a profile with gpus_per_node (--site)")
    strategy = BASELINE_STRATEGY if nodes * each == 1 else REFERENCE_STRATEGY
    cell = {"workload": "mlp", "strategy": strategy, "batch_size": "1", "repeats": 1}
    options = msgspec.structs.replace(options, gpus=str(nodes * each), **cell, **place)
    return Preflight(options, slow_below).run(report=False)


class PreflightConduct(Conduct):
    """Examines all nodes once, by products for the budget of its cell."""

    def header(self, study: Study, left: int) -> list[str]:
        size = devices(max(self.plan.request.gpus), self.plan.request.device)
        return [f"preflight of {size} in {study.root}: products, then all-reduces over groups of nodes"]


class Preflight(Matrix):
    """One preflight, in a new folder: nodes that were fine yesterday are examined again."""

    order = Order(kind="preflight")

    def __init__(self, options: StudyFile, slow_below: float) -> None:
        self._slow_below = slow_below
        super().__init__(options, study_file=None)

    def _folder_name(self) -> str:
        return f"preflight-{utc_now()[:19].replace(':', '-')}"

    def run(self, *, report: bool) -> int:
        """Run the launch, or submit it and stay until its job has ended. Returns the exit code."""
        code, study = super().run(report=report), Study(self._root)
        if code or not self._launcher.several_hosts:
            return code
        self._console.note(
            f"waiting for the job; Ctrl-C does not end it, and {bench_call('cancel', study.root)} ends it"
        )
        live = True
        while live:
            time.sleep(POLL_S)
            # A scheduler that does not answer for a moment is asked again.
            with suppress(SchedulerError):
                live = any(status.is_live and status.submission for status in job_statuses(study))
        return self._tell(study)

    def _finish(self, study: Study, plan: Plan, results: list[RunResult], *, report: bool) -> int:
        return self._tell(study)

    def _tell(self, study: Study) -> int:
        """Write and print the verdict. Returns the exit code."""
        results = study.results()
        good = next((one for one in results if one.outcome is Outcome.OK), None)
        if good is None:
            why = "; ".join(f"{one.outcome}: {one.reason}" for one in results)
            self._console.warn(
                f"no node was examined ({why or 'no run'}); see {bench_call('logs', study.root)}"
            )
            return 1
        records = study.rank_records(good.cell_id, good.run_id)
        launches = [one for one in study.launches() if one.launch_id == good.launch_id]
        hosts = [record.environment.host for record in records if record.local_rank == 0]
        names = node_names(study, launches[0]) or hosts
        verdict = judge(records, names, self._slow_below)
        for folder in (study.root, self._root.parent):
            files.replace(folder / PREFLIGHT_FILE, PREFLIGHT.encode(verdict), in_study=True)
        self._print(verdict)
        return 1 if verdict.named else 0

    def _print(self, verdict: Verdict) -> None:
        shown, names = node_table(verdict), [node.name for node in verdict.named]
        self._console.table(shown.titles, shown.texts, numeric=shown.numeric)
        lines = [f"{node.name}: {'; '.join(node.faults)}" for node in verdict.named]
        for line in [*lines, *verdict.notes, *(self._launcher.excluding(names) if names else ())]:
            self._console.result(line)
        path = self._root.parent / PREFLIGHT_FILE
        self._console.note(f"{path}: reports of studies in that folder mark their runs on these nodes")
