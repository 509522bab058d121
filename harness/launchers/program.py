"""`python -m harness.launchers.program JOB-FOLDER`: the program of a job, which its scheduler starts."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.launchers.jobs import job_launcher
from results.errors import BenchError
from results.foreign_text import escape_unprintable
from results.job_store import JobStore
from results.store import Study


def main() -> int:
    """Run the job. Returns the exit code: 0 unless the program or the machine is at fault."""
    escape_unprintable()
    folder = Path(sys.argv[1]).resolve()
    study = Study(folder.parents[1])
    job = JobStore(study.root).job(folder.name)
    return job_launcher(job.launcher).run_job(study, job)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"error: {error}")
