"""Submission of jobs to Slurm: as many as it takes, and the handling of the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from harness.jobs.documents import Document
from harness.jobs.job_status import JobStatus, end_of_job
from harness.terminal.console import Console
from reports.text import count
from results.job import Submission
from results.job_store import JobStore
from results.outcome import Ending, Outcome
from results.store import Study, utc_now
from slurm.client import Client
from slurm.cluster import NodeGroup
from slurm.job_view import JobPhase
from slurm.runner import NoAnswerError, QueueFullError, RefusedError, SlurmError
from slurm.site import SiteProfile
from slurm.site_checks import over_limits

Feed = Literal["once", "wait", "depend"]
SCRIPT = "script.sh"
POLL_S = 30.0


@dataclass
class Submitted:
    """The jobs of a call by their fate: taken, refused or left."""

    taken: list[int] = field(default_factory=list)
    """The scheduler's numbers."""
    refused: int = 0
    left: int = 0
    """Jobs for which there was no room."""


class Submitter:
    """Submits the jobs of one call, under the study's lock."""

    def __init__(self, study: Study, client: Client, site: SiteProfile, console: Console) -> None:
        self._store = JobStore(study.root)
        self._client = client
        self._site = site
        self._console = console
        self._poll_s = POLL_S
        # Asked for before a job is submitted, so that its number can be recorded at once.
        self._cluster = client.cluster_name
        # Without a partition Slurm chooses one, and a QOS may override the limits of a partition.
        self._groups: tuple[NodeGroup, ...] = ()
        if site.partition and site.qos is None:
            try:
                self._groups = client.groups()
            except NoAnswerError:
                raise
            except SlurmError:
                # sinfo refuses, or prints another form: the limits are not checked.
                pass

    def submit(self, documents: Sequence[Document], *, feed: Feed) -> Submitted:
        """Submit the jobs in order, until the queue is full.

        Then, with `wait`, wait for room. Raises NoAnswerError if the scheduler does not answer: what was
        submitted is kept, and the same command finds out about the last job.
        """
        done = Submitted()
        waiting = list(documents)
        while waiting:
            # A job that submits the others needs room as well.
            needed = 2 if feed == "depend" and len(waiting) > 1 else 1
            if self._room(patient=feed == "wait") >= needed and self._hand_over(waiting[0], (), done):
                waiting.pop(0)
            elif feed == "wait":
                self._console.note(f"{count(len(waiting), 'job')} wait for room in the queue")
                time.sleep(self._poll_s)
            else:
                break
        done.left = len(waiting)
        return done

    def follow(self, document: Document, after: Sequence[int], done: Submitted) -> bool:
        """Submit a job that starts when those in `after` have ended, however they did.

        Returns whether it was taken.
        """
        refused = done.refused
        return self._hand_over(document, after, done) and done.refused == refused

    def _room(self, *, patient: bool) -> float:
        """The number of jobs that the queue still takes; 0 if the scheduler does not answer and the call can
        wait."""
        if self._site.submit_limit is None:
            return float("inf")
        try:
            views = self._client.own_jobs()
        except NoAnswerError:
            if patient:
                return 0
            raise
        queued = [view for view in views if view.phase in (JobPhase.WAITING, JobPhase.RUNNING)]
        return self._site.submit_limit - len(queued)

    def _hand_over(self, document: Document, after: Sequence[int], done: Submitted) -> bool:
        """Submit one job. Returns False if the queue is full."""
        job = document.job
        if not (self._store.folder(job.job_id) / "job.json").exists():
            self._store.add(job, document=document.text, name=SCRIPT)
        try:
            if job.purpose == "run":
                # Slurm might take such a job, and would never start it.
                why = over_limits(self._site, job.placement.nodes, job.time_limit_s, self._groups)
                if why is not None:
                    raise RefusedError(why)
            slurm_id = self._client.submit(document.text, after=after)
        except QueueFullError:
            return False
        except RefusedError as error:
            self._console.warn(f"{job.name} was refused: {error}")
            ending = Ending(Outcome.CANCELLED, f"refused: {error}")
            self._store.add_end(end_of_job(job, None, ending))
            done.refused += 1
            return True
        self._store.add_submission(
            Submission(
                job_id=job.job_id,
                scheduler_id=str(slurm_id),
                submitted_at=utc_now(),
                cluster=self._cluster,
            )
        )
        done.taken.append(slurm_id)
        self._console.note(f"job {slurm_id}: {job.name}")
        return True


def live_ids(statuses: Sequence[JobStatus]) -> list[int]:
    """The scheduler's numbers of the jobs that may still run cells."""
    own = [status for status in statuses if status.job.launcher == "slurm" and status.job.purpose == "run"]
    submissions = [status.submission for status in own if status.is_live]
    return [int(submission.scheduler_id) for submission in submissions if submission is not None]
