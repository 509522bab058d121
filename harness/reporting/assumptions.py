"""Reads the assumptions of a report on prices and times: flags, a price file and the profile of the site."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from harness.plan.options import read_duration_s
from harness.terminal.console import Console
from reports.analysis.assumptions import KNEE, Assumptions, Goal, GoalKind, site_price
from reports.analysis.effect import SMALLEST_EFFECT
from results.catalogue.prices import Price, checked_usd, read_prices
from results.errors import SchemaError, UsageError
from results.job_store import JobStore
from results.store import Study
from workloads.datasets.facts import DATASETS


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFlags:
    """The flags as they were given."""

    price: float | None = None
    prices: str | None = None
    epoch_samples: str | None = None
    within: str | None = None
    goal: str | None = None
    smallest_effect: str | None = None
    unproven: bool | None = None


GOALS = "knee, throughput, cost, time:24h or efficiency:80%"


def read_assumptions(
    study: Study, flags: CostFlags, console: Console, epochs: Mapping[str, int] | None = None
) -> Assumptions:
    """Read the assumptions from flags and the study's jobs. Raises UsageError that names flag and rule."""
    told = flags.smallest_effect
    smallest = SMALLEST_EFFECT if told is None else _share(told, "--smallest-effect", "2% or 0.02")
    site = None
    try:
        site = site_price(JobStore(study.root).jobs())
    except SchemaError as error:
        console.warn(f"no price of the site, since a job cannot be read: {error}")
    within_s = None if flags.within is None else _seconds(flags.within, "--within")
    return Assumptions(
        price=None
        if flags.price is None
        else Price(usd_per_gpu_hour=checked_usd(flags.price, "--price"), source="given by --price"),
        prices=read_prices(Path(flags.prices)) if flags.prices is not None else {},
        site=site,
        workload_samples=epochs or {},
        dataset_samples={
            facts.name: facts.samples for facts in DATASETS.all_facts if facts.samples is not None
        },
        within_s=within_s,
        goal=replace(KNEE if flags.goal is None else read_goal(flags.goal), smallest=smallest),
        smallest_effect=smallest,
        unproven=bool(flags.unproven),
    )


def _seconds(text: str, flag: str) -> float:
    """Read the time of an epoch, which needs a unit: it takes hours, and a bare number would be seconds."""
    seconds = read_duration_s(text, flag, readings="hm")
    if not seconds:
        raise UsageError(f"{flag} must be > 0, not {text!r}")
    return seconds


def read_goal(text: str) -> Goal:
    """Read the value of `--goal`. Raises UsageError for any other text."""
    kind, colon, limit = text.strip().partition(":")
    if not colon and kind in ("knee", "throughput", "cost"):
        return Goal(kind=cast("GoalKind", kind))
    if kind == "time" and limit:
        return Goal(kind="time", limit=_seconds(limit, "--goal time:"))
    if kind == "efficiency" and limit:
        return Goal(kind="efficiency", limit=_share(limit, "--goal efficiency:", "80% or 0.8"))
    raise UsageError(f"--goal is {GOALS}, not {text!r}")


def _share(text: str, flag: str, like: str) -> float:
    """A fraction of 1, of `80%` or `0.8`."""
    number, percent, _ = text.strip().partition("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise UsageError(f"{flag} takes more than 0 and at most 100 %, like {like}, not {text!r}")
    return share
