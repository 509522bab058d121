"""The series of a study: equal series of several plans are merged, and different work is never merged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

import msgspec

from results.cell import Cell, Names, StepPolicy, exchange_label, label, named
from results.grouping import grouped
from results.notation import read_link
from results.plan import Plan, Request, Scaling, SeriesId, Skip, values_name

_TRAVEL = ("strategy", "compression", "collective", "link_mbit_per_s")
SIZED = ("gpus", "model_parallel", "micro_batch", "steps")
"""Fields of a cell that vary along its series, and the step policy."""
_KEYED = ("workload", *_TRAVEL, *SIZED)
"""Fields of a cell that its series' key contains in another form, or that vary along the series."""
_ASKED = (*map(values_name, Names.__struct_fields__), "gpus", "batch_sizes", "batches", "global_batch_sizes")
"""Fields of a request that only say which points there are."""

_TOLD = (
    *("accumulation", "optimizer", "clip_norm", "activation_checkpointing", "compile", "memory_format"),
    "env",
)
"""Settings of a study that a summary names where they are not the default."""
_DEFAULTS = Request(workloads=(), gpus=(), strategies=())

SeriesSetting = tuple[tuple[str, str], ...]
_Asked = tuple[bytes, SeriesId, int]
"""A point of any plan: the settings of its request, its series, and its gpus."""


class SeriesKey(Names, frozen=True, kw_only=True):
    """The key of a series: two series with equal keys are one."""

    kind: Scaling
    constant_batch: int
    """The batch that all sizes share: per replica under weak scaling, global under strong."""
    setting: SeriesSetting
    """All other fields of the cells: precision, data set, optimizer, step policy and so on."""

    @property
    def work(self) -> tuple[object, ...]:
        """The work of the cells, however their gradients travel."""
        return self.workload, self.kind, self.constant_batch, self.setting

    @property
    def label(self) -> str:
        return label(self)

    @property
    def exchange(self) -> str:
        """The label without the link: the same on every network."""
        return exchange_label(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedSeries:
    """One series over all plans of a study."""

    key: SeriesKey
    cells: dict[int, Cell] = field(default_factory=dict)
    """The cells by gpus, ascending."""
    skips: dict[int, str] = field(default_factory=dict)
    """The sizes that were not run, and why."""


def merged_series(plans: Sequence[Plan]) -> list[MergedSeries]:
    """Every series of the plans that has cells, in reading order, with the skips that belong to it."""
    cells: dict[SeriesKey, dict[int, Cell]] = {}
    skips: dict[SeriesKey, dict[int, str]] = {}
    for plan in plans:
        by_id = {cell.id: cell for cell in plan.cells}
        asked = grouped((skip.series_id, (skip.gpus, skip.reason)) for skip in plan.skips)
        for series in plan.series:
            members = [by_id[cell_id] for cell_id in series.cells]
            if members:
                key = SeriesKey(
                    **named(series),
                    kind=series.kind,
                    constant_batch=series.batch_size if series.global_batch is None else series.global_batch,
                    setting=setting_of(members[0]),
                )
                cells.setdefault(key, {}).update({cell.gpus: cell for cell in members})
                skips.setdefault(key, {}).update(asked.get(series.id, ()))
    merged = (
        MergedSeries(
            key=key,
            cells=dict(sorted(found.items())),
            skips={gpus: why for gpus, why in sorted(skips[key].items()) if gpus not in found},
        )
        for key, found in cells.items()
    )
    return sorted(merged, key=_reading_order)


def _reading_order(one: MergedSeries) -> tuple[object, ...]:
    """Weak before strong, the one-device baseline before its curves, networks together."""
    key, link = one.key, read_link(one.key.link) or 0.0
    work = (key.workload, key.kind == "strong", key.constant_batch, key.setting)
    return (*work, min(one.cells), link, key.exchange)


def standing_skips(plans: Sequence[Plan]) -> list[Skip]:
    """The skips of all plans, once each, without the points that another plan of equal settings ran."""
    planned: set[_Asked] = set()
    for plan in plans:
        gpus = {cell.id: cell.gpus for cell in plan.cells}
        asked = _setting_of_request(plan.request)
        planned |= {(asked, series.id, gpus[cell_id]) for series in plan.series for cell_id in series.cells}
    standing: dict[_Asked, Skip] = {}
    for plan in plans:
        asked = _setting_of_request(plan.request)
        for skip in plan.skips:
            point = (asked, skip.series_id, skip.gpus)
            if point not in planned:
                standing[point] = skip
    return list(standing.values())


def setting_labels(cells: Iterable[Cell]) -> Mapping[SeriesSetting, str]:
    """For each setting of some cells, the values that other settings of its workload lack:
    `precision=bf16`."""
    by_workload: dict[tuple[str, str], set[SeriesSetting]] = {}
    for cell in cells:
        setting = setting_of(cell)
        by_workload.setdefault(setting[0], set()).add(setting)
    labels = {}
    for settings in by_workload.values():
        names = dict.fromkeys(name for setting in settings for name, _ in setting)
        # A setting that some cells lack is always an environment variable: it is unset there.
        full = {setting: {**dict.fromkeys(names, "unset"), **dict(setting)} for setting in settings}
        for setting, values in full.items():
            unlike = [name for name in names if any(other[name] != values[name] for other in full.values())]
            labels[setting] = ", ".join(f"{name}={values[name]}" for name in unlike)
    return labels


def told_settings(plans: Iterable[Plan]) -> list[str]:
    """Values of options that differ from their defaults in some cell or request: `accumulation=1,4`."""
    known = list(plans)
    cells = [*chain.from_iterable(plan.cells for plan in known)]
    told: list[str] = []
    for name in _TOLD:
        values, default = dict.fromkeys(getattr(cell, name) for cell in cells), getattr(_DEFAULTS, name)
        asked = any(getattr(plan.request, name) != default for plan in known)
        if name == "env":
            told += dict.fromkeys(chain.from_iterable(values))
        elif asked or (name != "optimizer" and set(values) - {default}):
            told.append(f"{name}={','.join(map(value_text, values))}")
    return told if cells else []


@lru_cache(maxsize=4096)
def setting_of(cell: Cell) -> SeriesSetting:
    """The workload, and the fields of a cell that all cells of its series share, as strings."""
    names = [name for name in cell.__struct_fields__ if name not in (*_KEYED, "env")]
    values = [(name, value_text(getattr(cell, name))) for name in names]
    policy = [(name, value_text(getattr(cell.steps, name))) for name in StepPolicy.__struct_fields__]
    variables = [(name, value) for name, _, value in (text.partition("=") for text in cell.env)]
    return (("workload", cell.workload), *values, *policy, *variables)


def value_text(value: object) -> str:
    """A setting's value as labels show it: `bf16`, `yes`, `none`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    return "none" if value is None else str(value)


def _setting_of_request(request: Request) -> bytes:
    empty: dict[str, object] = dict.fromkeys(_ASKED, ())
    plain = msgspec.structs.replace(
        request,
        **empty,
        scalings=(),
        repeats=1,
        include=(),
        exclude=(),
        source_folder=None,
        gpu_model=None,
        network_gbit_per_s=None,
    )
    return msgspec.json.encode(plain, order="sorted")
