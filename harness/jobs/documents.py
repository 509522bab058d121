"""Records of jobs with their numbers and names, and what they cost before they are submitted.

The same plan and the same earlier jobs give the same records.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import msgspec

from harness.jobs.planned import PlannedJob
from harness.plan.request import plain_name
from reports.text import count, duration
from results.environment import CodeVersion
from results.errors import UsageError
from results.job import Job, Purpose, RunOptions
from results.job_store import JobStore
from results.outcome import Outcome
from results.plan import Placement, Plan
from results.site import SitePrice, TimeLimits
from results.store import Study

LONGER = 2.0
"""A job asks for this many times the limit of an earlier job with one of its cells that ran out of time."""
FOLLOW_UP_S = 900.0
"""Time limit of a job that submits other jobs, or writes a report."""
COST_HEADS = ("job", "nodes x GPUs", "cells", "expected", "time limit", "GPU-hours expected", "at most")
COST_NUMERIC = (False, False, True, True, True, True, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A job, and the script or the manifest that is submitted for it."""

    job: Job
    text: str


class ClusterProfile(Protocol):
    """The profile of a cluster states what the jobs of every scheduler need; its fields are properties."""

    @property
    def gpu_model(self) -> str | None:
        """The catalogue's name of the GPUs; None: not known, or none."""

    @property
    def time(self) -> TimeLimits: ...

    @property
    def price(self) -> SitePrice | None: ...

    def billed_gpus(self, placement: Placement) -> int | None:
        """GPUs that a job of this placement is charged for; None: not known."""


class JobMaker:
    """Numbers and names the jobs of one call."""

    def __init__(
        self,
        study: Study,
        plan: Plan,
        launcher: str,
        options: RunOptions,
        code: CodeVersion,
        profile: ClusterProfile,
    ) -> None:
        plans = study.numbered_plans()
        self.root = study.root.resolve()
        self._plan = plan
        self._number = next((number for number, one in plans.items() if one == plan), study.next_plan)
        self._launcher = launcher
        self._options = options
        self._code = code
        self._profile = profile

    def run(self, planned: PlannedJob) -> Job:
        """The job of an allocation to come.

        If one of its cells was in a job that ran out of time, it asks for longer, as far as the site allows.
        """
        placement, time = planned.placement, self._profile.time
        # In addition to the cells' own launches there may be one of the baseline.
        launches = len(planned.launches) + (planned.baseline is not None)
        estimate_s = planned.estimate_s + launches * time.startup_s
        cells = set(planned.cells)
        ran_out = [job.time_limit_s for job in self._too_short if cells & set(job.cells)]
        return self._job(
            f"{placement.nodes}x{placement.gpus_per_node}",
            placement=placement,
            cells=planned.cells,
            baseline=None if planned.baseline is None else planned.baseline.id,
            estimate_s=estimate_s,
            time_limit_s=time.limit_s(estimate_s, least_s=LONGER * max(ran_out, default=0.0)),
            billed_gpus=self._profile.billed_gpus(placement),
        )

    def follow_up(self, purpose: Purpose, arguments: tuple[str, ...]) -> Job:
        """A small job without cells that makes a call of bench when others have ended."""
        return self._job(
            purpose,
            purpose=purpose,
            placement=Placement(nodes=1, gpus_per_node=1),
            cells=(),
            baseline=None,
            estimate_s=FOLLOW_UP_S,
            time_limit_s=FOLLOW_UP_S,
            billed_gpus=0,
            arguments=arguments,
        )

    @cached_property
    def _too_short(self) -> list[Job]:
        """The jobs so far that ran out of their time, not of the user's `--max-time`."""
        store, found = JobStore(self.root), []
        for job in store.jobs():
            end, most_s = store.ended(job.job_id), job.options.max_time_s or math.inf
            if end is not None and end.outcome is Outcome.TIMED_OUT and most_s > job.time_limit_s:
                found.append(job)
        return found

    @cached_property
    def _numbers(self) -> Iterator[int]:
        """Numbers that follow the jobs which are on record when the first job is made."""
        return itertools.count(1 + len(list(self.root.glob("jobs/*"))))

    def _job(self, kind: str, **facts: Any) -> Job:
        job_id = f"{next(self._numbers):04d}-{kind}"
        # Two studies may have the same name, and two jobs of a user may not.
        digest = hashlib.sha256(str(self.root).encode()).hexdigest()[:4]
        return Job(
            job_id=job_id,
            name=f"{plain_name(self._plan.study)[:40]}-{digest}-{job_id}",
            launcher=self._launcher,
            plan=self._number,
            options=self._options,
            code=self._code,
            site=msgspec.to_builtins(self._profile),
            **facts,
        )


def gpu_hours(documents: Sequence[Document]) -> tuple[float, float] | None:
    """The GPU-hours that all jobs are expected to take, and the most that their time limits allow.

    None if it is not known for how many GPUs one of them is charged.
    """
    expected = most = 0.0
    for job in (document.job for document in documents):
        if job.billed_gpus is None:
            return None
        expected += job.billed_gpus * job.estimate_s / 3600
        most += job.billed_gpus * job.time_limit_s / 3600
    return expected, most


def require_within_budget(documents: Sequence[Document], gpu_hours_allowed: float | None) -> None:
    """Raises UsageError if the jobs may take more GPU-hours than are allowed (None: any number)."""
    if gpu_hours_allowed is None:
        return
    hours = gpu_hours(documents)
    if hours is None:
        raise UsageError(
            "--max-gpu-hours cannot be checked: the site gives whole nodes (exclusive), and its profile "
            "does not say how many GPUs a node has; add gpus_per_node to the profile"
        )
    expected, most = hours
    if most > gpu_hours_allowed:
        raise UsageError(
            f"--max-gpu-hours {gpu_hours_allowed:g}: the jobs may take {most:.2f} by their time limits "
            f"({expected:.2f} expected); ask for fewer sizes or repeats, a shorter --time, or more "
            f"hours. Nothing was submitted"
        )


def cost_rows(documents: Sequence[Document]) -> list[list[str]]:
    """The rows of a table under COST_HEADS, one for each job."""
    rows = []
    for document in documents:
        job, hours = document.job, gpu_hours([document])
        rows.append(
            [
                job.job_id,
                _held(job),
                str(len(job.cells)),
                duration(job.estimate_s * 1e9),
                duration(job.time_limit_s * 1e9),
                *(["?", "?"] if hours is None else [f"{each:.2f}" for each in hours]),
            ]
        )
    return rows


def _held(job: Job) -> str:
    """`1 x 1, 8 GPUs held`, where a job holds more than it uses."""
    held = job.billed_gpus or 0
    more = f", {count(held, 'GPU')} held" if held > job.placement.gpus else ""
    return f"{place(job.placement)}{more}"


def cost_lines(documents: Sequence[Document], price: SitePrice | None, *, gpus: bool) -> list[str]:
    """The sums over all jobs, with their price, and a warning about time limits that are too short.

    `gpus` says whether the cluster has GPUs.
    """
    sums, hours = f"{count(len(documents), 'job')}: ", gpu_hours(documents)
    if not gpus:
        lines = [sums + "no GPUs are asked for"]
    elif hours is None:
        lines = [sums + "GPU-hours are not known: give gpus_per_node in the profile of an exclusive site"]
    else:
        expected, most = hours
        limits = f"{most:.2f} at most (the time limits; a requeue begins anew)"
        dollars = "dollars are not known: give a price in the site profile"
        if price is not None:
            rate = price.usd_per_gpu_hour
            dollars = (
                f"${expected * rate:,.2f} expected, ${most * rate:,.2f} at most, at ${rate:.2f} a GPU-hour "
                f"({price.source})"
            )
        lines = [f"{sums}{expected:.2f} GPU-hours expected, {limits}", dollars]
    short = [document for document in documents if document.job.time_limit_s < document.job.estimate_s]
    if short:
        lines.append(
            f"{count(len(short), 'job')} may not end within the time limit; the same command "
            f"continues after it"
        )
    return lines


def place(placement: Placement) -> str:
    return f"{placement.nodes} x {placement.gpus_per_node}"
