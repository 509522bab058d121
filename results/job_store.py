"""The jobs of a study, below its folder::

jobs/<job-id>/job.json          what is to be done, written before it is submitted
jobs/<job-id>/script.sh         the very script that was submitted (Kubernetes: manifest.yaml)
jobs/<job-id>/site.yaml         on Kubernetes, the profile for the call that the job makes (and space.yaml)
jobs/<job-id>/submitted.json    the scheduler's name for it
jobs/<job-id>/end-0000.json ... written by the job at the end of each of its starts
jobs/<job-id>/ended.json        how it ended for good, written by the first command that saw it
jobs/<job-id>/job-<id>.log      what it printed
"""

from __future__ import annotations

from pathlib import Path

from results import files, schemas
from results.job import Job, JobEnd, Submission


class JobStore:
    """Reads and writes the jobs of the study in `root`; every file is written once."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, job_id: str) -> Path:
        return self._root / "jobs" / job_id

    def add(self, job: Job, *, document: str, name: str) -> Path:
        """Keep a new job and the document that is submitted, under `name`. Returns the document's path."""
        path = self.folder(job.job_id) / name
        files.write_once(path, document.encode())
        files.write_once(self.folder(job.job_id) / "job.json", schemas.JOB.encode(job))
        return path

    def job(self, job_id: str) -> Job:
        return schemas.JOB.read(self.folder(job_id) / "job.json")

    def jobs(self) -> list[Job]:
        """All jobs, oldest first. Raises SchemaError for a damaged file: it may be about a job that lives."""
        return [schemas.JOB.read(path) for path in sorted(self._root.glob("jobs/*/job.json"))]

    def add_submission(self, submission: Submission) -> None:
        path = self.folder(submission.job_id) / "submitted.json"
        files.write_once(path, schemas.SUBMISSION.encode(submission))

    def submission(self, job_id: str) -> Submission | None:
        path = self.folder(job_id) / "submitted.json"
        return schemas.SUBMISSION.read(path) if path.exists() else None

    def add_end(self, end: JobEnd) -> None:
        """Keep the end of one start, or of the whole job."""
        name = "ended.json" if end.start is None else f"end-{end.start:04d}.json"
        files.write_once(self.folder(end.job_id) / name, schemas.JOB_END.encode(end))

    def ended(self, job_id: str) -> JobEnd | None:
        """How the job ended for good; None while that is not known."""
        path = self.folder(job_id) / "ended.json"
        return schemas.JOB_END.read(path) if path.exists() else None

    def starts(self, job_id: str) -> list[JobEnd]:
        """The ends of the job's starts, as the job wrote them."""
        paths = sorted(self.folder(job_id).glob("end-[0-9][0-9][0-9][0-9].json"))
        return [schemas.JOB_END.read(path) for path in paths]
