"""Studies as frames of pandas for notebooks and scripts: what `reports.load` gives."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from reports.analysis.assumptions import Assumptions, site_price
from reports.analysis.study import StudyFigures, analyse
from reports.page.export import frame_of
from results.catalogue.prices import Price, checked_usd
from results.errors import SchemaError, UsageError
from results.job_store import JobStore
from results.store import Study, study_names


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The tables of one study or of several, with pandas' nullable types. Units are in the names of columns.

    What a column is stands in docs/exports.md; a column is never renamed or given another meaning.
    """

    cells: pd.DataFrame
    """A row a planned cell, with figures or without."""
    runs: pd.DataFrame
    """A row a run, `counted` in its cell's figure or not."""
    ranks: pd.DataFrame
    """A row a rank of a counted run."""
    losses: pd.DataFrame
    """A row a recorded loss of a counted run."""
    skips: pd.DataFrame
    """A row a point that was planned to be left out, with its reason."""
    figures: tuple[StudyFigures, ...]
    """What the tables are made from, a study each: for `reports.analysis`, whose names may change."""


def loaded(
    paths: Sequence[str | Path], *, usd_per_device_hour: float | None, epoch_samples: int | None
) -> Loaded:
    """The studies at `paths`: see `reports.load`."""
    if epoch_samples is not None and epoch_samples < 1:
        raise UsageError(f"epoch_samples is at least 1, not {epoch_samples}")
    told = Assumptions(price=_price(usd_per_device_hour), epoch_samples=epoch_samples)
    studies = [Study.existing(Path(path)) for path in paths]
    names = study_names([study.root for study in studies])
    figures = [
        analyse(name, study.told_plans(), study.results(), replace(told, site=_site(study)))
        for name, study in zip(names, studies, strict=True)
    ]
    return Loaded(
        cells=frame_of(figures, "cells"),
        runs=frame_of(figures, "runs"),
        ranks=frame_of(figures, "ranks"),
        losses=frame_of(figures, "losses"),
        skips=frame_of(figures, "skips"),
        figures=tuple(figures),
    )


def _site(study: Study) -> Price | None:
    """The price in the profile of the site that the study's jobs ran on."""
    try:
        return site_price(JobStore(study.root).jobs())
    except SchemaError as error:
        warnings.warn(f"no price of the site, since a job cannot be read: {error}", stacklevel=4)
        return None


def _price(usd: float | None) -> Price | None:
    if usd is None:
        return None
    return Price(usd_per_gpu_hour=checked_usd(usd, "usd_per_device_hour"), source="given to reports.load")
