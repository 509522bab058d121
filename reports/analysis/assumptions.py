"""Assumptions of a report in addition to what was measured: prices, the size of an epoch, the time for it,
and the goal by which it chooses a size to buy (`--goal`).

A study's records do not contain them: the call that writes the report gives them. Equal assumptions give
an equal page.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from reports.analysis.effect import SMALLEST_EFFECT
from reports.text import count, duration, percent
from results.catalogue.prices import Price, Prices, catalogue_prices, chosen, device_prices
from results.cell import Cell
from results.job import Job
from results.run import RunResult

GoalKind = Literal["knee", "throughput", "cost", "time", "efficiency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A rule with its limit."""

    kind: GoalKind = "knee"
    limit: float | None = None
    """Seconds of an epoch (`time`), or an efficiency as a fraction of 1 (`efficiency`); None for other
    rules."""
    smallest: float = SMALLEST_EFFECT
    """Share by which two points must differ to count as different."""

    @property
    def text(self) -> str:
        """A clause: `the last size up to which every growth pays`."""
        if self.kind == "time":
            assert self.limit is not None
            return f"the cheapest size that finishes an epoch within {duration(self.limit * 1e9)}"
        if self.kind == "efficiency":
            assert self.limit is not None
            return f"the largest size with an efficiency of {percent(self.limit)} or more"
        return _TEXTS[self.kind]


KNEE = Goal()
"""The default: see `reports.analysis.knee`."""
_TEXTS: dict[GoalKind, str] = {
    "knee": "the last size up to which every growth pays",
    "throughput": "the fewest devices to which no size is shown to be faster",
    "cost": "the lowest cost of a sample",
}


OLD_AFTER_DAYS = 180
"""The number of days from which on a price is shown with its age: clouds change list prices a few times a
year."""

Origin = Literal["flag", "file", "site", "catalogue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Assumptions of a report; each of them may be left out."""

    price: Price | None = None
    """The price of every device: `--price`."""
    prices: Prices = field(default_factory=dict)
    """Prices of the user's file, by device: `--prices`."""
    site: Price | None = None
    """The price in the site profile, for runs in a scheduler's allocation."""
    epoch_samples: int | None = None
    """Samples of one epoch, of any data set."""
    workload_samples: Mapping[str, int] = field(default_factory=dict)
    """Samples of one epoch, by workload."""
    dataset_samples: Mapping[str, int] = field(default_factory=dict)
    """Samples of data sets whose size is known, by name."""
    within_s: float | None = None
    """Time in which an epoch is to be finished."""
    goal: Goal = KNEE
    """The goal by which the size to buy is chosen."""
    smallest_effect: float = SMALLEST_EFFECT
    """Share from which on a difference between cells matters."""
    unproven: bool = False
    """Whether cells that are not proven may be bought: `--unproven`."""

    def epoch_of(self, cell: Cell) -> int | None:
        """Samples of one epoch of a cell's data; None if not known."""
        given = self.workload_samples.get(cell.workload) or self.epoch_samples
        return given or self.dataset_samples.get(cell.dataset.partition(":")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """The price that a cell is counted with, and where it comes from."""

    price: Price
    origin: Origin
    device_name: str
    alternatives: tuple[Price, ...] = ()
    """All prices of the device in the same catalogue or file, with the chosen one."""

    def warning(self, day: datetime.date | None) -> str | None:
        """A warning if the price is old on the `day` of the study; None if it is not."""
        if self.origin in ("flag", "site"):
            return None
        if self.price.date is None:
            return "the date of this price is not known: it may be out of date"
        if day is None:
            return None
        age = (day - self.price.date).days
        if abs(age) <= OLD_AFTER_DAYS:
            return None
        side = "older" if age > 0 else "newer"
        return f"this price is {count(abs(age), 'day')} {side} than the study's runs of {day}"


def quote(assumptions: Assumptions, run: RunResult, *, gpus_per_node: int) -> Quote | None:
    """The price of the device that a run used: the flag's, the file's, the site's, the catalogue's, or None.

    `gpus_per_node` is the smallest number of GPUs of the rented instance.
    """
    environment = run.environment
    if environment is None:
        return None
    name = environment.device_name
    if assumptions.price is not None:
        return Quote(price=assumptions.price, origin="flag", device_name=name)
    listed = _listed(assumptions.prices, "file", name, gpus_per_node)
    if listed is None and assumptions.site is not None and environment.allocation is not None:
        return Quote(price=assumptions.site, origin="site", device_name=name)
    return listed or _listed(catalogue_prices(), "catalogue", name, gpus_per_node)


def site_price(jobs: Iterable[Job]) -> Price | None:
    """The price in the profile of the newest job with a price above 0; None without such a job."""
    for job in sorted(jobs, key=lambda job: job.job_id, reverse=True):
        told = job.site.get("price") or {}
        if told.get("usd_per_gpu_hour"):
            return Price(usd_per_gpu_hour=told["usd_per_gpu_hour"], source=told["source"])
    return None


def study_day(runs: Iterable[RunResult]) -> datetime.date | None:
    """The day of the newest run, from which the ages of prices are counted; None if no run has a date."""
    started = [run.started_at for run in runs if run.started_at is not None]
    return datetime.date.fromisoformat(max(started)[:10]) if started else None


def _listed(prices: Prices, origin: Origin, name: str, gpus_per_node: int) -> Quote | None:
    found = device_prices(prices, name)
    price = chosen(found, gpus_per_node=gpus_per_node)
    if price is None:
        return None
    return Quote(price=price, origin=origin, device_name=name, alternatives=tuple(found))
