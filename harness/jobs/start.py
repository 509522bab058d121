"""The work of a job after its scheduler has started it.

It runs the cells of the job that are left, as `bench matrix` does on one machine, and writes how it ended.
SIGUSR1 says that the job ends soon: the program asks the scheduler when. SIGTERM says that it ends now.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from harness.jobs.closing import close_launches
from harness.jobs.planned import baseline_launch
from harness.launch.campaign import Campaign, CampaignContext
from harness.launch.conduct import Deadline
from harness.launch.guarded import GRACE_S
from harness.launch.starter import Starter
from harness.launch.supervise import Interrupted
from harness.launch.tally import Conditions
from harness.machine.code import checkout, code_hash
from harness.terminal.console import Console
from results.environment import CodeVersion
from results.errors import BenchError
from results.foreign_text import REASON_CHARACTERS, shortened
from results.job import Job, JobEnd
from results.job_store import JobStore
from results.outcome import Ending, Outcome
from results.store import Study, utc_now

AGAIN = "run the same bench matrix command again"
END_S = GRACE_S + 10.0
"""Seconds before the end of the job in which its last launch is ended and recorded."""
_FINE = {Outcome.OK, Outcome.TIMED_OUT, Outcome.CANCELLED}
"""Ends after which the scheduler must not requeue the job: its program exits with 0."""


class JobStarter(Starter):
    """Starts the launches of one start of a job, in the allocation that its scheduler has given it."""

    scheduler_id: str | None = None
    start: int
    """0 for the first start; one more each time that the scheduler requeues the job."""
    nodes: tuple[str, ...]
    notice_s: float | None = None
    """Minimum number of seconds between SIGUSR1 and the end of the job's time; None: SIGUSR1 does not
    come."""

    def left_s(self) -> float | None:
        """Seconds to the end of the job, as the scheduler says now; None if it does not say."""
        return None

    def conditions(self, code: CodeVersion) -> Conditions:
        """Code, versions and settings that an earlier run must share to be pooled with runs of this start."""
        return Conditions.here(code)

    def earlier_notice(self) -> Ending | None:
        """Why the scheduler ended the start before this one; None if it did not say."""
        return None

    def obstacle(self, job: Job) -> str | None:
        """Why the job cannot run in what the scheduler gave it; None if it can."""
        return None


def obstacle(job: Job, starter: JobStarter, ended: JobEnd | None) -> str | None:
    """Why the job must not be run here and now; None if it may."""
    if ended is not None:
        return f"it was closed before ({ended.outcome}: {ended.reason}), and other jobs have its cells"
    if code_hash(checkout()) != job.code.code_hash:
        return f"the code of bench was edited after the job was submitted: {AGAIN}"
    if starter.start > job.options.retries:
        return f"it was requeued {starter.start} times (--retries {job.options.retries}): {AGAIN}"
    return starter.obstacle(job)


class JobStart:
    """One start of a job."""

    def __init__(self, study: Study, job: Job, starter: JobStarter) -> None:
        self._study = study
        self._job = job
        self._jobs = JobStore(study.root)
        self._starter = starter
        self._deadline = Deadline(job.options.max_time_s, "--max-time was over")
        if starter.notice_s is None:
            self._end_launches_before(job.time_limit_s)
        self._console = Console()

    def run(self) -> int:
        """Run the cells of the job that are not done. Returns the exit code of the job's program."""
        submission, here = self._jobs.submission(self._job.job_id), self._starter.scheduler_id
        if submission is not None and here not in (None, submission.scheduler_id):
            # Do not record an end: only starts in the job's own allocation record their ends.
            self._console.warn(
                f"{self._job.name}: it was submitted as job {submission.scheduler_id}, and this is job "
                f"{here}: a script is not submitted by hand; {AGAIN}"
            )
            return 1
        started_at = utc_now()
        end = Ending(Outcome.CRASHED, "the job's program failed; see its log")
        try:
            end = self._worked()
        finally:
            self._jobs.add_end(
                JobEnd(
                    job_id=self._job.job_id,
                    scheduler_id=self._starter.scheduler_id,
                    start=self._starter.start,
                    told_by="job",
                    nodes=self._starter.nodes,
                    started_at=started_at,
                    ended_at=utc_now(),
                    outcome=end.outcome,
                    reason=end.reason or None,
                )
            )
        self._console.note(f"{self._job.name}: {end.outcome}" + (f": {end.reason}" if end.reason else ""))
        return 0 if end.outcome in _FINE else 1

    def _worked(self) -> Ending:
        job, starter = self._job, self._starter
        with self._signals():
            try:
                reason = obstacle(job, starter, self._jobs.ended(job.job_id))
                if reason is not None:
                    return Ending(Outcome.CANCELLED, reason)
                # Launches of earlier starts: the job was requeued, so no process of them is left.
                lost = Ending(
                    Outcome.NODE_FAILED,
                    f"the job was requeued (start {starter.start}), and the start before recorded no "
                    f"end: probably its first node failed",
                )
                close_launches(self._study, job.job_id, starter.earlier_notice() or lost)
                plan, baseline = self._study.plan(job.plan), job.baseline
                campaign = Campaign(self._study, plan, job.options, self._console, deadline=self._deadline)
                campaign.run(
                    CampaignContext(
                        starter=starter,
                        checkout=checkout(),
                        code=job.code,
                        job_id=job.job_id,
                        conditions=starter.conditions(job.code),
                        only=frozenset(job.cells),
                        first=() if baseline is None else (baseline_launch(self._study.cell(baseline)),),
                    )
                )
            except Interrupted as error:
                return error.stopped
            except KeyboardInterrupt:
                return starter.interruption()
            except BenchError as error:
                return Ending(Outcome.CRASHED, shortened(str(error), REASON_CHARACTERS))
        if self._deadline.is_over:
            return Ending(Outcome.TIMED_OUT, self._deadline.reason)
        return Ending(Outcome.OK, "")

    def _ask_for_end(self) -> None:
        """Ask the scheduler when the job ends: its signal may come earlier than requested.

        Slurm sends it up to 60 s early (--signal in its manual). If the scheduler does not
        answer, the signal counts as punctual.
        """
        heard = time.monotonic()
        left_s = self._starter.left_s()
        if left_s is None:
            left_s = (self._starter.notice_s or 0.0) - (time.monotonic() - heard)
        self._end_launches_before(left_s)

    def _end_launches_before(self, left_s: float) -> None:
        """End launches so that END_S are left of the `left_s` seconds that the job still has."""
        self._deadline.bring_forward(max(0.0, left_s - END_S), "the job's time limit was near")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def near(number: int, frame: object) -> None:
            # The answer may take a while, and the launch in hand is watched meanwhile.
            threading.Thread(target=self._ask_for_end, name="ask-for-end", daemon=True).start()

        def over(number: int, frame: object) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGUSR1, near)
        signal.signal(signal.SIGTERM, over)
        try:
            yield
        finally:
            # Nothing may interrupt the writing of the job's end.
            for number in (signal.SIGUSR1, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
