"""`python -m harness.jobs.program JOB-FOLDER`: what a job does in its allocation.

It runs the cells of the job that are left, as `bench matrix` does on one machine, and writes how it ended.
SIGUSR1 says that its time is nearly over, SIGTERM that it is over now.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from harness.code import checkout
from harness.console import Console
from harness.jobs.allocation import Allocation
from harness.jobs.closing import close_launches
from harness.jobs.planned import baseline_launch
from harness.jobs.slurm_starter import SlurmStarter
from harness.launch.campaign import Campaign, Surroundings
from harness.launch.deadline import Deadline
from harness.launch.ending import Stopped
from harness.launch.supervise import GRACE_S, Interrupted
from results.errors import BenchError, MachineError
from results.job import Job, JobEnd
from results.job_store import JobStore
from results.outcome import Outcome
from results.plan import Plan
from results.store import Study, utc_now
from slurm.site import SiteProfile
from slurm.site_file import profile

END_S = GRACE_S + 10.0
"""What ending a launch and writing it down may take, off the time between Slurm's word and its kill."""
_FINE = {Outcome.OK, Outcome.TIMED_OUT, Outcome.CANCELLED, Outcome.PREEMPTED}


def main() -> int:
    """Run the job. Returns the exit code: 0 if nothing is wrong with the program or the machine."""
    folder = Path(sys.argv[1]).resolve()
    study = Study(folder.parents[1])
    return _SlurmJob(study, JobStore(study.root).job(folder.name)).run()


class _SlurmJob:
    """One start of a job."""

    def __init__(self, study: Study, job: Job) -> None:
        allocation = Allocation.here()
        if allocation is None:
            raise MachineError(
                f"{job.name} is for an allocation of Slurm, and this is none: bench matrix submits it"
            )
        self._study = study
        self._job = job
        self._jobs = JobStore(study.root)
        self._allocation = allocation
        self._site: SiteProfile = profile(job.site, f"the profile of {job.name}")
        self._deadline = Deadline(job.options.max_time_s, "--max-time was over")
        self._console = Console()

    def run(self) -> int:
        started_at = utc_now()
        end = Stopped(outcome=Outcome.CRASHED, reason="the job's program failed; see its log")
        try:
            end = self._worked()
        finally:
            self._jobs.add_end(
                JobEnd(
                    job_id=self._job.job_id,
                    scheduler_id=str(self._allocation.slurm_id),
                    start=self._allocation.start,
                    told_by="job",
                    nodes=self._allocation.nodes,
                    started_at=started_at,
                    ended_at=utc_now(),
                    outcome=end.outcome,
                    reason=end.reason,
                )
            )
        self._console.note(f"{self._job.name}: {end.outcome}" + (f": {end.reason}" if end.reason else ""))
        return 0 if end.outcome in _FINE else 1

    def _worked(self) -> Stopped:
        starter = SlurmStarter(self._site, self._allocation, self._jobs.folder(self._job.job_id))
        with self._signals():
            try:
                obstacle = self._obstacle()
                if obstacle is not None:
                    return Stopped(outcome=Outcome.CANCELLED, reason=obstacle)
                self._close_earlier_start()
                self._campaign().run(self._surroundings(starter))
            except Interrupted as error:
                return error.stopped
            except KeyboardInterrupt:
                return starter.interruption()
            except BenchError as error:
                return Stopped(outcome=Outcome.CRASHED, reason=str(error))
        if self._deadline.is_over:
            return Stopped(outcome=Outcome.TIMED_OUT, reason=self._deadline.reason)
        return Stopped(outcome=Outcome.OK, reason="")

    def _obstacle(self) -> str | None:
        job_id = self._job.job_id
        submission, ended = self._jobs.submission(job_id), self._jobs.ended(job_id)
        return self._allocation.obstacle(self._job, submission, ended)

    def _close_earlier_start(self) -> None:
        reason = (
            f"the job was started anew (restart {self._allocation.start}), and its supervisor had left no "
            f"word: its first node failed"
        )
        close_launches(self._study, self._job.job_id, Stopped(outcome=Outcome.NODE_FAILED, reason=reason))

    def _campaign(self) -> Campaign:
        return Campaign(self._study, self._plan(), self._job.options, self._console, deadline=self._deadline)

    def _plan(self) -> Plan:
        """The job's part of the study's plan."""
        plan = self._study.plans()[self._job.plan - 1]
        cells = tuple(cell for cell in plan.cells if cell.id in self._job.cells)
        return msgspec.structs.replace(plan, cells=cells)

    def _surroundings(self, starter: SlurmStarter) -> Surroundings:
        baseline = self._job.baseline
        return Surroundings(
            starter=starter,
            checkout=checkout(),
            code=self._job.code,
            job_id=self._job.job_id,
            first=() if baseline is None else (baseline_launch(self._study.cell(baseline)),),
        )

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def near(number: int, frame: object) -> None:
            notice_s = self._site.time.signal_s(self._job.time_limit_s)
            self._deadline.bring_forward(max(0.0, notice_s - END_S), "the job's time limit was near")

        def over(number: int, frame: object) -> None:
            raise KeyboardInterrupt

        before = {signal.SIGUSR1: signal.signal(signal.SIGUSR1, near)}
        before[signal.SIGTERM] = signal.signal(signal.SIGTERM, over)
        try:
            yield
        finally:
            # Until this process ends, what has been found out is not to be lost.
            for number in before:
                signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
