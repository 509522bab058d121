"""`bench doctor --nodes N`: examine the nodes of a launcher in one launch, and name slow or wrong ones."""

from __future__ import annotations

import time
from contextlib import suppress

import msgspec

from harness.features.preflight.section import node_names, node_table
from harness.features.preflight.verdict import PREFLIGHT, PREFLIGHT_FILE, Verdict, judge
from harness.launch.machine import Machine
from harness.launchers.jobs import job_statuses
from harness.launchers.launcher import MatrixCall
from harness.launchers.registry import launcher
from harness.matrix import Matrix, run_options
from harness.plan.launchers import DEFAULT
from harness.plan.study_file import StudyFile
from harness.terminal.console import Console
from results import files
from results.cell import REFERENCE_STRATEGY
from results.errors import SchedulerError, UsageError, bench_call
from results.outcome import Outcome
from results.plan import Order, Plan
from results.run import RunResult
from results.store import Study, utc_now

TIME = "20m"
"""The time limit of a job."""
LINK = "1gbit"
"""The network between nodes of this machine, which are virtual."""
POLL_S = 3.0


def preflight(nodes: int, slow_below: float, given: StudyFile) -> int:
    """Examine nodes of the launcher in `given`, for its budget. Returns the exit code: 1 if one is slow or
    wrong."""
    cell = {"workload": "mlp", "strategy": REFERENCE_STRATEGY, "batch_size": "1", "repeats": 1}
    options = msgspec.structs.replace(given, baseline=False, **cell)
    chosen = launcher(given.launcher or DEFAULT)
    if chosen.several_hosts:
        call = MatrixCall(options=options, run_options=run_options(options), console=Console())
        hosts = chosen.accept(call).hosts
        each = hosts.gpus_per_node if hosts.has_gpus else 1
        if each is None:
            raise UsageError("the GPUs of a node are not known: give a profile with gpus_per_node (--site)")
        place = {"gpus": str(nodes * each), "gpus_per_node": each}
        place |= {"time": TIME} if "time" in chosen.options else {}
    elif nodes == 1:
        place = {"gpus": str(len(Machine.here().gpu_names) or 1)}
    else:
        place = {"gpus": str(nodes), "link": LINK, "device": "cpu", "oversubscribe": True}
    return Preflight(msgspec.structs.replace(options, **place), slow_below).run(report=False)


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
        while self._is_live(study):
            time.sleep(POLL_S)
        return self._tell(study)

    def _is_live(self, study: Study) -> bool:
        # A scheduler that does not answer for a moment is asked again.
        with suppress(SchedulerError):
            return any(status.is_live and status.submission for status in job_statuses(study))
        return True

    def _finish(self, study: Study, plan: Plan, results: list[RunResult], *, report: bool) -> int:
        return self._tell(study)

    def _tell(self, study: Study) -> int:
        """Write and print the verdict. Returns the exit code."""
        results = study.results()
        good = next((one for one in results if one.outcome is Outcome.OK), None)
        if good is None:
            why = "; ".join(f"{one.outcome}: {one.reason}" for one in results)
            self._console.warn(f"no node was examined ({why}); see {bench_call('logs', study.root)}")
            return 1
        records = study.rank_records(good.cell_id, good.run_id)
        names = [name for one in study.launches() for name in node_names(study, one)] or [
            record.environment.host for record in records if record.local_rank == 0
        ]
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
