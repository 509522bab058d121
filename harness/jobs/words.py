"""Jobs in words: their cost before they are submitted, and their status afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from harness.jobs.documents import Document
from harness.jobs.gpu_hours import gpu_hours
from harness.jobs.job_status import JobStatus
from reports.text import count, duration
from results.plan import Placement
from results.site import SitePrice

COST_HEADS = ("job", "nodes x GPUs", "cells", "expected", "time limit", "GPU-hours expected", "at most")
COST_NUMERIC = (False, False, True, True, True, True, True)
STATUS_HEADS = ("job", "id", "nodes x GPUs", "state", "cells", "words")
STATUS_NUMERIC = (False, True, False, False, True, False)


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


def status_rows(statuses: Sequence[JobStatus]) -> list[list[str]]:
    """A row a job."""
    return [
        [
            status.job.job_id,
            "" if status.submission is None else status.submission.scheduler_id,
            place(status.job.placement) if status.job.purpose == "run" else "",
            status.state,
            str(len(status.job.cells)) if status.job.purpose == "run" else "",
            status.words,
        ]
        for status in statuses
    ]


def place(placement: Placement) -> str:
    return f"{placement.nodes} x {placement.gpus_per_node}"


def _hours(hours: float | None) -> str:
    return "?" if hours is None else f"{hours:.2f}"
