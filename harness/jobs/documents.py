"""Records of jobs with their numbers and names: the same plan and earlier jobs give the same ones."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from harness.jobs.job_status import place
from harness.jobs.planned import PlannedJob
from harness.plan.naming import plain_name
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
"""What a job asks for where one before it ran out of time, in parts of that one's limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A job, and the script or the manifest that is submitted for it."""

    job: Job
    text: str

    @property
    def gpu_hours_expected(self) -> float | None:
        return self._gpu_hours(self.job.estimate_s)

    @property
    def gpu_hours_at_most(self) -> float | None:
        """Those of its time limit; None if the number of GPUs that it is charged for is not known."""
        return self._gpu_hours(self.job.time_limit_s)

    def _gpu_hours(self, seconds: float) -> float | None:
        return None if self.job.billed_gpus is None else self.job.billed_gpus * seconds / 3600


class JobMaker:
    """Numbers and names the jobs of one call."""

    def __init__(
        self, study: Study, plan: Plan, launcher: str, options: RunOptions, code: CodeVersion
    ) -> None:
        plans = study.numbered_plans()
        self.root = study.root.resolve()
        self._plan = plan
        self._number = next((number for number, one in plans.items() if one == plan), study.next_plan)
        self._launcher = launcher
        self._options = options
        self._code = code
        self._made = len(list(self.root.glob("jobs/*")))

    def run(self, planned: PlannedJob, time: TimeLimits, *, billed_gpus: int | None, site: object) -> Job:
        """The job of an allocation to come. Where one of its cells was in a job that ran out of time, it asks
        for longer, as far as the site allows."""
        place = planned.placement
        # Beside the cells' own launches there may be one of the baseline.
        launches = len(planned.launches) + (planned.baseline is not None)
        estimate_s = planned.estimate_s + launches * time.startup_s
        return self._job(
            f"{place.nodes}x{place.gpus_per_node}",
            placement=place,
            cells=planned.cells,
            baseline=None if planned.baseline is None else planned.baseline.id,
            estimate_s=estimate_s,
            time_limit_s=time.limit_s(estimate_s, least_s=LONGER * self._ran_out_s(planned.cells)),
            billed_gpus=billed_gpus,
            site=msgspec.to_builtins(site),
        )

    def follow_up(self, purpose: Purpose, time_limit_s: float, site: object) -> Job:
        """A job without cells that starts when other jobs have ended."""
        return self._job(
            purpose,
            purpose=purpose,
            placement=Placement(nodes=1, gpus_per_node=1),
            cells=(),
            baseline=None,
            estimate_s=time_limit_s,
            time_limit_s=time_limit_s,
            billed_gpus=0,
            site=msgspec.to_builtins(site),
        )

    def _ran_out_s(self, cells: Sequence[str]) -> float:
        """The longest limit of a job with one of these cells that ran out of it; 0.0 if none did."""
        wanted = set(cells)
        return max((job.time_limit_s for job in self._too_short if wanted & set(job.cells)), default=0.0)

    @cached_property
    def _too_short(self) -> list[Job]:
        """The jobs so far that ran out of their time, not of the user's `--max-time`."""
        store, found = JobStore(self.root), []
        for job in store.jobs():
            end, most_s = store.ended(job.job_id), job.options.max_time_s
            if (
                end is not None
                and end.outcome is Outcome.TIMED_OUT
                and (most_s or math.inf) > job.time_limit_s
            ):
                found.append(job)
        return found

    def _job(self, kind: str, **facts: Any) -> Job:
        self._made += 1
        job_id = f"{self._made:04d}-{kind}"
        return Job(
            job_id=job_id,
            name=f"{plain_name(self._plan.study)[:40]}-{self._digest}-{job_id}",
            launcher=self._launcher,
            plan=self._number,
            options=self._options,
            code=self._code,
            **facts,
        )

    @property
    def _digest(self) -> str:
        """4 digits of the study's folder: two studies may have the same name, two jobs of a user may not."""
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:4]


def require_within_budget(documents: Sequence[Document], gpu_hours_allowed: float | None) -> None:
    """Raises UsageError if the jobs may take more GPU-hours than are allowed (None: any number)."""
    if gpu_hours_allowed is None:
        return
    expected, most = gpu_hours(documents)
    if expected is None or most is None:
        raise UsageError(
            "--max-gpu-hours cannot be checked: the site gives whole nodes (exclusive), and its profile "
            "does not say how many GPUs a node has; add gpus_per_node to the profile"
        )
    if most > gpu_hours_allowed:
        raise UsageError(
            f"--max-gpu-hours {gpu_hours_allowed:g}: the jobs may take {most:.2f} by their time limits "
            f"({expected:.2f} expected); ask for fewer sizes or repeats, a shorter --time, or more "
            f"hours. Nothing was submitted"
        )


def gpu_hours(documents: Sequence[Document]) -> tuple[float | None, float | None]:
    """Expected and at most, of all jobs; None if that of one is not known."""
    expected = [document.gpu_hours_expected for document in documents]
    most = [document.gpu_hours_at_most for document in documents]
    return _sum(expected), _sum(most)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


COST_HEADS = ("job", "nodes x GPUs", "cells", "expected", "time limit", "GPU-hours expected", "at most")
COST_NUMERIC = (False, False, True, True, True, True, True)


def cost_rows(documents: Sequence[Document]) -> list[list[str]]:
    """A row a job."""
    return [
        [
            document.job.job_id,
            place(document.job.placement),
            str(len(document.job.cells)),
            duration(document.job.estimate_s * 1e9),
            duration(document.job.time_limit_s * 1e9),
            _hours(document.gpu_hours_expected),
            _hours(document.gpu_hours_at_most),
        ]
        for document in documents
    ]


def cost_lines(documents: Sequence[Document], price: SitePrice | None, *, gpus: bool) -> list[str]:
    """The sums over all jobs, with their price, and what to know of the time limits.

    `gpus` says whether the cluster has some.
    """
    expected, most = gpu_hours(documents)
    sums = f"{count(len(documents), 'job')}: "
    if not gpus:
        lines = [sums + "no GPUs are asked for"]
    elif expected is None or most is None:
        lines = [sums + "GPU-hours are not known: give gpus_per_node in the profile of an exclusive site"]
    else:
        limits = f"{most:.2f} at most (the time limits; a requeue begins anew)"
        lines = [sums + f"{expected:.2f} GPU-hours expected, {limits}"]
        lines.append(_price(expected, most, price))
    short = [document for document in documents if document.job.time_limit_s < document.job.estimate_s]
    if short:
        lines.append(
            f"{count(len(short), 'job')} may not end within the time limit; the same command goes on after it"
        )
    return lines


def _price(expected: float, most: float, price: SitePrice | None) -> str:
    if price is None:
        return "dollars are not known: give a price in the site profile"
    rate = price.usd_per_gpu_hour
    return (
        f"${expected * rate:,.2f} expected, ${most * rate:,.2f} at most, at ${rate:.2f} a GPU-hour "
        f"({price.source})"
    )


def _hours(hours: float | None) -> str:
    return "?" if hours is None else f"{hours:.2f}"
