"""A projection of a study to sizes that were not measured, as `bench project` keeps it in its folder."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Literal

import msgspec

from reports.analysis.study import StudyFigures
from results.plan import Scaling
from results.schema import Schema
from results.store import Study

Basis = Literal["measured", "projected", "refused"]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A figure with the ends of its band of 80 %; of a measured size, of its interval."""

    value: float
    low: float | None = None
    high: float | None = None

    def times(self, factor: float) -> Span:
        """The figure times a positive factor."""
        low, high = (None if end is None else end * factor for end in (self.low, self.high))
        return Span(value=self.value * factor, low=low, high=high)

    def over(self, work: float) -> Span:
        """Work over the figure, whose ends change places."""
        low, high = (None if end is None else work / end for end in (self.high, self.low))
        return Span(value=work / self.value, low=low, high=high)


class Lift(msgspec.Struct, frozen=True, kw_only=True):
    """The cheapest measurement that lifts a refusal."""

    command: str | None
    """None where no command here does."""
    what: str
    """The measurement in words, or the hardware that it needs."""
    gpu_hours: float | None = None
    usd: float | None = None


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Why a size is not projected."""

    kind: str
    """`strategy`, `emulated`, `cores`, `mixed runs`, `disturbed`, `batch`, `memory`, `one size`,
    `node boundary`, `irregular`, `not replayed`, `what-if` or `too far`."""
    reason: str
    """A clause."""
    lift: Lift | None


class ProjectedSize(msgspec.Struct, frozen=True, kw_only=True):
    """One size of a series."""

    gpus: int
    basis: Basis
    emulated: bool = False
    """Whether its ranks shared cores, or its nodes a host, when it was measured."""
    step_ns: Span | None = None
    efficiency: Span | None = None
    """Against the baseline of the series; None where the study claims none."""
    samples_per_s: Span | None = None
    epoch_ns: Span | None = None
    usd_per_epoch: Span | None = None
    memory_bytes: int | None = None
    """Memory of the fullest rank: measured, or in closed form."""
    loss: str | None = None
    """The part of a step that costs the most efficiency, a clause."""
    refusal: Refusal | None = None


class ProjectedSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One series, measured sizes first."""

    workload: str
    label: str
    kind: Scaling
    batch: int
    """The batch of a replica under weak scaling, else of all replicas."""
    setting: str
    """The values in which its setting differs from other settings; empty for a single setting."""

    law: str | None
    """The law that answers; None where every size is refused."""
    skill: float | None
    """1 less the law's error over the error of constant efficiency on earlier sizes; None: not tested."""
    against: str | None
    """The baseline of its efficiencies: `single on 1`."""
    sizes: tuple[ProjectedSize, ...]
    advice: str | None = None
    """How far growing pays, as measured and as projected, a clause; None where measured sizes say it."""
    verify: str | None = None
    """The command that measures the projected size of `advice`."""

    def of(self, basis: Basis) -> tuple[ProjectedSize, ...]:
        return tuple(size for size in self.sizes if size.basis == basis)


class Projection(msgspec.Struct, frozen=True, kw_only=True):
    """All series of a study up to a size."""

    digest: str
    """`digest` of the runs that the projection was made from."""
    to: int
    command: str
    network: str | None
    """The network table it used, in words; None without one."""
    what_if: tuple[str, ...]
    series: tuple[ProjectedSeries, ...]


def ahead(sizes: Iterable[ProjectedSize]) -> Iterator[ProjectedSize]:
    """The projected sizes up to the first that is refused."""
    targets = (size for size in sizes if size.basis != "measured")
    return takewhile(lambda size: size.basis == "projected", targets)


def digest(study: StudyFigures) -> str:
    """A hash of the runs that count and of failures: a projection of another hash is older than its study."""
    runs = (run for pool in study.pools.values() for run in (*pool.runs, *pool.lost))
    facts = sorted((run.run_id, run.outcome, run.step_ns.value if run.step_ns else None) for run in runs)
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()[:16]


def projection_path(study: Study) -> Path:
    return study.root / "projection.json"


PROJECTION = Schema("projection", 1, Projection, advice="write it again by bench project")
"""Version 1 is unreleased."""
