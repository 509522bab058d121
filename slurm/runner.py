"""Running one Slurm command: the interface to the scheduler, and its errors."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence

from results.errors import SchedulerError


class SlurmError(SchedulerError):
    """A Slurm command failed; the message has the command and Slurm's own words."""


class RefusedError(SlurmError):
    """The scheduler refused: no job was submitted."""


class QueueFullError(RefusedError):
    """The scheduler takes no more jobs of this user for now."""


class NoAnswerError(SlurmError):
    """The scheduler did not answer: whether it did what was asked is not known."""


Completed = subprocess.CompletedProcess[str]
Runner = Callable[..., Completed]
"""A function that runs a command as `run_program` does; tests replace it by recorded output."""


def run_program(
    command: Sequence[str], *, stdin: str, environment: Mapping[str, str], timeout_s: float
) -> Completed:
    """Run a command and wait for it.

    Raises NoAnswerError after `timeout_s`, SlurmError if the program cannot be started.
    """
    try:
        return subprocess.run(
            command,
            input=stdin,
            env=dict(environment),
            capture_output=True,
            encoding="utf-8",
            # Names of other users' jobs may have any encoding.
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"no answer in {timeout_s:g} s to: {shlex.join(command)}") from error
    except FileNotFoundError as error:
        raise SlurmError(f"there is no {command[0]} here; run this where Slurm's commands are") from error
    except OSError as error:
        raise SlurmError(f"cannot run {command[0]}: {error.strerror}") from error


_SCHEDULER = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SACCT|SACCTMGR|SCANCEL|SINFO|SCONTROL)_")
_OF_THE_CLUSTER = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"}
"""Variables that identify the cluster and the user."""
_OF_THE_USER = {"HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "TZ", "USER"}


def client_environment(inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for a command of Slurm, without variables that would change its output or
    actions."""
    return {
        name: value
        for name, value in inherited.items()
        if name in _OF_THE_CLUSTER or not _SCHEDULER.match(name)
    }


def job_environment(inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that sbatch gets and passes to the job: only the user and the locale.

    `--export=NONE` is not used: it makes the node imitate a login, which is slow and fails on some sites, and
    it applies to the steps as well unless they override it (--export in sbatch's manual).
    """
    return {
        name: value
        for name, value in inherited.items()
        if name in _OF_THE_CLUSTER | _OF_THE_USER or name.startswith("LC_")
    }


_UNREACHABLE = re.compile(
    r"unable to contact slurm controller|socket timed out|connection refused|unable to connect"
    r"|temporarily unable|zero bytes were transmitted|slurm backup controller in standby",
    re.IGNORECASE,
)


def command_failure(command: Sequence[str], done: Completed) -> SlurmError:
    """Return the error of a command that did not end with 0."""
    said = " ".join((done.stderr.strip() or done.stdout.strip()).split()) or "it said nothing"
    kind = NoAnswerError if _UNREACHABLE.search(said) else SlurmError
    return kind(f"{shlex.join(command)} ended with {done.returncode}: {said}")
