"""A study in other forms: Markdown and LaTeX to paste, JSON for programs, and tables for a notebook."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import msgspec
import pandas as pd

from reports.analysis.assumptions import Assumptions, site_price
from reports.analysis.study import StudyFigures, analyse
from reports.page.columns import run_rows
from reports.page.json_document import json_document
from reports.page.markup import latex, markdown
from reports.page.tables import TABLES, frame_of
from results.catalogue.prices import Price, checked_usd
from results.errors import SchemaError, UsageError, nearest
from results.foreign_text import visible
from results.job_store import JobStore
from results.record import Operations, RankRecord
from results.run import PHASES
from results.store import Study, study_names

TextForm = Literal["markdown", "json", "latex"]


def export_text(studies: Sequence[StudyFigures], form: TextForm) -> str:
    """All studies as one string."""
    return {"markdown": markdown, "json": json_document, "latex": latex}[form](studies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The tables of one study or of several, with pandas' nullable types. Units are in the names of columns.

    docs/exports.md describes the columns; a column is never renamed or given another meaning.
    """

    cells: pd.DataFrame
    """One row for each planned cell, with or without figures."""
    runs: pd.DataFrame
    """One row for each run, oldest first; `counted` says whether its cell's figure includes it."""
    ranks: pd.DataFrame
    """One row for each rank of a counted run that recorded its ranks."""
    losses: pd.DataFrame
    """One row for each recorded loss of a counted run: the mean over ranks and over the steps since the last
    row."""
    skips: pd.DataFrame
    """One row for each point that was planned to be left out, with its reason."""
    figures: tuple[StudyFigures, ...]
    """The analysed studies, the input of functions of `reports.analysis`, whose names may change."""
    folders: tuple[Study, ...]
    """The folders of the studies, from which the methods read records when they are called."""

    def steps(self, runs: str | Iterable[str] | None = None) -> pd.DataFrame:
        """Read one row for each timed step of each rank of these runs (ids), or of all counted runs.

        `step` counts from 0. Times are by the rank's own clock. Raises UsageError for an unknown run.
        """
        return self._read(runs, _step_columns, STEPS)

    def phases(self, runs: str | Iterable[str] | None = None) -> pd.DataFrame:
        """Read the same steps with one row for each of their phases (`PHASES`), in `duration_ns`."""
        steps, times = self.steps(runs), [f"{phase}_ns" for phase in PHASES]
        rows = steps.melt(["study", "cell_id", "run_id", "rank", "step"], times, "phase", "duration_ns")
        return rows.assign(phase=rows["phase"].str.removesuffix("_ns").astype("string"))

    def operations(self, runs: str | Iterable[str] | None = None) -> pd.DataFrame:
        """Read one row for each recorded operation of each rank of these runs, or of all counted runs.

        `step` counts from 0 over the recorded steps, which come after the timed ones. `issued_ns` is from the
        start of the step. Raises UsageError for an unknown run.
        """
        return self._read(runs, _operation_columns, OPERATIONS)

    def _read(
        self,
        runs: str | Iterable[str] | None,
        columns_of: Callable[[RankRecord], dict[str, Any]],
        dtypes: Mapping[str, str],
    ) -> pd.DataFrame:
        wanted = None if runs is None else {runs} if isinstance(runs, str) else set(runs)
        known = set(self.runs["run_id"])
        for run_id in sorted((wanted or set()) - known):
            raise UsageError(f"no study here has the run {run_id!r}{nearest(run_id, known)}")
        frames = [pd.DataFrame(columns=[*dtypes]).astype(dtypes)]
        for figures, folder in zip(self.figures, self.folders, strict=True):
            for row in run_rows(figures):
                if row.counted if wanted is None else row.run.run_id in wanted:
                    for record in folder.rank_records(row.cell.id, row.run.run_id):
                        own = {"study": figures.name, "cell_id": row.cell.id, "run_id": record.run_id}
                        found = pd.DataFrame({**own, "rank": record.rank, **columns_of(record)})
                        frames.append(found[[*dtypes]].astype(dtypes))
        return pd.concat(frames, ignore_index=True)


_OWN = {"study": "string", "cell_id": "string", "run_id": "string", "rank": "Int64", "step": "Int64"}
STEPS = {**_OWN, "step_ns": "Int64", **{f"{phase}_ns": "Int64" for phase in PHASES}, "loss": "Float64"}
OPERATIONS = {**_OWN, "operation": "string", "group": "string"}
OPERATIONS |= dict.fromkeys(("payload_bytes", "issued_ns", "duration_ns"), "Int64")


def _step_columns(record: RankRecord) -> dict[str, Any]:
    return {"step": range(len(record.steps.step_ns)), **msgspec.structs.asdict(record.steps)}


def _operation_columns(record: RankRecord) -> dict[str, Any]:
    rows = record.recorded.operations if record.recorded else Operations()
    columns = {name: getattr(rows, name) for name in ("step", "payload_bytes", "issued_ns", "duration_ns")}
    groups = [rows.groups[place] for place in rows.group]
    return {**columns, "operation": [rows.names[place] for place in rows.name], "group": groups}


def loaded(
    paths: Sequence[str | Path], *, usd_per_device_hour: float | None, epoch_samples: int | None
) -> Loaded:
    """The studies at `paths`: see `reports.load`."""
    told = _assumptions(usd_per_device_hour, epoch_samples)
    studies = [Study.existing(Path(path)) for path in paths]
    names = study_names([study.root for study in studies])
    figures = [
        analyse(name, study.told_plans(), study.results(), replace(told, site=_site(study)), study.review())
        for name, study in zip(names, studies, strict=True)
    ]
    for sentence in chain.from_iterable(one.review.damaged for one in figures):
        warnings.warn(visible(sentence), stacklevel=3)
    frames = {name: frame_of(figures, name) for name in TABLES}
    return Loaded(**frames, figures=tuple(figures), folders=tuple(studies))


def _assumptions(usd_per_device_hour: float | None, epoch_samples: int | None) -> Assumptions:
    if epoch_samples is not None and epoch_samples < 1:
        raise UsageError(f"epoch_samples is at least 1, not {epoch_samples}")
    price = None
    if usd_per_device_hour is not None:
        usd = checked_usd(usd_per_device_hour, "usd_per_device_hour")
        price = Price(usd_per_gpu_hour=usd, source="given to reports.load")
    return Assumptions(price=price, epoch_samples=epoch_samples)


def _site(study: Study) -> Price | None:
    """The price in the profile of the site that the study's jobs ran on."""
    try:
        return site_price(JobStore(study.root).jobs())
    except SchemaError as error:
        why = visible(str(error))
        warnings.warn(f"no price of the site, because a job cannot be read: {why}", stacklevel=4)
        return None
