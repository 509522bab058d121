"""Calls of Slurm's commands, each with a time limit; errors contain Slurm's own words."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cached_property

from slurm.cluster import (
    ASSOCIATION_FORMAT,
    LIMITS_FORMAT,
    QOS_FORMAT,
    SINFO_FORMAT,
    Association,
    Cluster,
    NodeGroup,
    read_associations,
    read_limits,
    read_settings,
    read_sinfo,
)
from slurm.job_view import SACCT_FORMAT, SQUEUE_FORMAT, JobView, read_sacct, read_squeue
from slurm.runner import (
    NoAnswerError,
    QueueFullError,
    RefusedError,
    Runner,
    SlurmError,
    client_environment,
    command_failure,
    job_environment,
    run_program,
)

TIMEOUT_S = 60.0
"""The time limit of one command: a busy controller may be slow."""

_JOB_ID = re.compile(r"^(?P<id>\d+)(?:;.*)?$", re.MULTILINE)
_QUEUE_FULL = re.compile(r"(?:Max|Grp)Submit|MaxJobCount|maximum number of jobs", re.IGNORECASE)
_NO_SUCH_JOB = "Invalid job id specified"


class Client:
    """The cluster of this machine's Slurm commands."""

    def __init__(self, runner: Runner = run_program, *, timeout_s: float = TIMEOUT_S) -> None:
        self._runner = runner
        self._timeout_s = timeout_s

    def submit(self, script: str, *, after: Sequence[int] = ()) -> int:
        """Hand a job script to the scheduler, to start when the jobs in `after` have ended, however they did.

        Returns the job's id. Raises RefusedError if the job was refused, QueueFullError if that may change by
        itself, and NoAnswerError if the job may have been accepted: look for its name among `own_jobs` before
        submitting again.
        """
        options = ["--parsable"]
        if after:
            # A job that can never start would stay in the queue for ever.
            jobs = ":".join(map(str, after))
            options += [f"--dependency=afterany:{jobs}", "--kill-on-invalid-dep=yes"]
        printed = self._sbatch(options, script)
        # Some sites print greetings before or after the job id.
        match = _JOB_ID.search(printed)
        if match is None:
            raise NoAnswerError(f"sbatch printed no job id: {printed.strip()!r}; look into squeue --me")
        return int(match["id"])

    def check(self, script: str) -> None:
        """Ask whether the scheduler would accept a script, without submitting it. Raises RefusedError if
        not."""
        self._sbatch(["--test-only"], script)

    def _sbatch(self, options: Sequence[str], script: str) -> str:
        command = ("sbatch", "--export=ALL", *options)
        done = self._runner(command, stdin=script, environment=job_environment(), timeout_s=self._timeout_s)
        if done.returncode == 0:
            return done.stdout
        error = command_failure(command, done)
        if isinstance(error, NoAnswerError):
            raise error
        raise (QueueFullError if _QUEUE_FULL.search(done.stderr) else RefusedError)(str(error))

    def query(self, job_ids: Collection[int]) -> dict[int, JobView]:
        """Return the jobs by id, from the queue, and from accounting for jobs that the queue has forgotten.

        It calls squeue once, and sacct at most once, for any number of jobs. Unknown ids are left out:
        without accounting, that is every job some minutes after its end (MinJobAge in slurm.conf). Raises
        SlurmError if one of the two does not answer: a job is never treated as unknown without an answer.
        """
        if not job_ids:
            return {}
        views: dict[int, JobView] = {}
        try:
            queued = read_squeue(self._ask("squeue", f"--jobs={_joined(job_ids)}", *_SQUEUE))
            views = {view.job_id: view for view in queued}
        except SlurmError as error:
            # squeue prints this for a single forgotten id; of several ids it leaves forgotten ones out.
            if _NO_SUCH_JOB not in str(error):
                raise
        forgotten = set(job_ids) - set(views)
        if forgotten and self._has_accounting:
            options = ("--allocations", "--parsable2", "--noheader", f"--format={SACCT_FORMAT}")
            known = read_sacct(self._ask("sacct", f"--jobs={_joined(forgotten)}", *options))
            views = {view.job_id: view for view in known} | views
        return {job_id: views[job_id] for job_id in sorted(job_ids) if job_id in views}

    def own_jobs(self) -> tuple[JobView, ...]:
        """Return all jobs of this user in the queue, including jobs that ended recently."""
        return read_squeue(self._ask("squeue", "--me", *_SQUEUE))

    def cancel(self, job_ids: Collection[int]) -> None:
        """End jobs, or remove them from the queue; a job that has already ended is not an error."""
        if not job_ids:
            return
        try:
            self._ask("scancel", *map(str, sorted(job_ids)))
        except SlurmError as error:
            if _NO_SUCH_JOB not in str(error):
                raise

    @property
    def cluster_name(self) -> str:
        """The cluster's name in its configuration."""
        return self._settings["ClusterName"]

    @property
    def unkillable_step_s(self) -> int | None:
        """The seconds after which Slurm gives up processes that outlive SIGKILL; None: not known."""
        return self._setting_s("UnkillableStepTimeout")

    def cluster(self) -> Cluster:
        """Return the facts of the cluster with which a site profile is checked."""
        return Cluster(
            has_accounting=self._has_accounting,
            kill_wait_s=self._setting_s("KillWait"),
            groups=self.groups(),
            associations=self._associations() if self._has_accounting else None,
        )

    def groups(self) -> tuple[NodeGroup, ...]:
        return read_sinfo(self._ask(*_SINFO))

    def limits(self, account: str | None, qos: str | None) -> dict[str, int]:
        """Return the limits of a job of this user (`read_limits`); none if sacctmgr gives no answer."""
        user, show = pwd.getpwuid(os.geteuid()).pw_name, ("sacctmgr", "--parsable2", "--noheader", "show")
        with suppress(SlurmError, ValueError):
            text = self._ask(*show, "user", user, "withassoc", f"format={LIMITS_FORMAT}")
            return read_limits(text, self._ask(*show, "qos", f"format={QOS_FORMAT}"), account, qos)
        return {}

    def _associations(self) -> tuple[Association, ...] | None:
        user = pwd.getpwuid(os.geteuid()).pw_name
        try:
            return read_associations(
                self._ask(
                    *("sacctmgr", "--parsable2", "--noheader", "show", "associations", f"user={user}"),
                    f"format={ASSOCIATION_FORMAT}",
                )
            )
        except NoAnswerError:
            raise
        except SlurmError:
            # Some sites forbid it; unknown facts are not checked.
            return None

    @cached_property
    def _settings(self) -> dict[str, str]:
        return read_settings(self._ask("scontrol", "show", "config"))

    def _setting_s(self, name: str) -> int | None:
        """Return a setting in seconds; None where the cluster prints no such setting."""
        text = self._settings.get(name, "").removesuffix(" sec")
        return int(text) if text.isdecimal() else None

    @property
    def _has_accounting(self) -> bool:
        return self._settings["AccountingStorageType"] == "accounting_storage/slurmdbd"

    def _ask(self, *command: str) -> str:
        done = self._runner(command, stdin="", environment=client_environment(), timeout_s=self._timeout_s)
        if done.returncode:
            raise command_failure(command, done)
        return done.stdout


_SINFO = ("sinfo", "--all", "--exact", "--noconvert", "--noheader", f"--format={SINFO_FORMAT}")
_SQUEUE = ("--all", "--states=all", "--noheader", f"--Format={SQUEUE_FORMAT}")


def _joined(job_ids: Collection[int]) -> str:
    return ",".join(map(str, sorted(job_ids)))
