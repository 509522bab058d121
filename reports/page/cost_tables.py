"""The tables of costs, of the work of a step, and of memory."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from reports import fields
from reports.analysis.cost import CellCost, energy_per_sample
from reports.analysis.figures import CellFigures
from reports.analysis.memory import CellMemory
from reports.analysis.study import StudyFigures
from reports.fields import Field
from reports.page.tables import CellWords
from reports.table import Shown, TextTable, figures, table, words
from reports.text import duration
from results.statistics import Metric


def cost_table(study: StudyFigures, costs: Sequence[CellCost], best: frozenset[str]) -> TextTable:
    """Cells with a price; `best` are the ids of those on a frontier."""
    columns: list[Shown[CellCost]] = [
        *CellWords(study).columns(attrgetter("cell")),
        figures(
            "an hour",
            lambda row: fields.shown(row.usd_per_hour, usd, "USD"),
            anchor="method-cost",
        ),
        figures(
            "time of a million samples",
            lambda row: fields.duration(row.million_samples_ns.value),
            anchor="method-frontier",
        ),
        figures(
            "a million samples",
            lambda row: fields.figure(row.usd_per_million_samples, ends=True),
            anchor="method-cost",
        ),
        words("frontier", lambda row: "yes" if row.cell.id in best else "no", anchor="method-frontier"),
        figures(
            "1,000 steps", lambda row: fields.figure(row.usd_per_1000_steps, ends=True), anchor="method-cost"
        ),
        figures(
            "a billion tokens",
            lambda row: fields.figure(row.usd_per_billion_tokens, ends=True),
            anchor="method-cost",
        ),
        figures("time of an epoch", lambda row: _time(row.epoch_ns), anchor="method-epoch"),
        figures("an epoch", lambda row: fields.figure(row.usd_per_epoch, ends=True), anchor="method-epoch"),
    ]
    return table(costs, columns)


def work_table(study: StudyFigures) -> TextTable:
    """What a step is, and how well the devices are used for it."""
    columns: list[Shown[CellFigures]] = [
        *CellWords(study).columns(attrgetter("cell")),
        figures("parameters", lambda row: fields.whole(row.newest.parameters), anchor="method-parameters"),
        figures(
            "FLOPs a step", lambda row: fields.si(row.newest.flops_per_step, "FLOP"), anchor="method-flops"
        ),
        figures("rate", _flop_rate, anchor="method-flops"),
        figures("MFU", lambda row: fields.percent(row.mfu), anchor="method-flops"),
        figures(
            "energy of a sample", lambda row: fields.figure(energy_per_sample(row)), anchor="method-energy"
        ),
    ]
    return table(study.cells.values(), columns)


def memory_table(study: StudyFigures, memories: Sequence[CellMemory]) -> TextTable:
    """Peaks against what there is."""
    columns: list[Shown[CellMemory]] = [
        *CellWords(study).columns(attrgetter("cell")),
        figures("peak, device", lambda row: fields.size(row.device_peak_bytes), anchor="method-memory"),
        figures(
            "memory of the device", lambda row: fields.size(row.device_bytes), anchor="method-memory-share"
        ),
        figures(
            "share of the device", lambda row: fields.percent(row.device_share), anchor="method-memory-share"
        ),
        figures("peak, host", lambda row: fields.size(row.rss_peak_bytes), anchor="method-memory"),
        figures("over idle", lambda row: fields.size(row.rss_over_idle_bytes), anchor="method-memory-idle"),
        figures(
            "ranks a host",
            lambda row: fields.whole(row.ranks_per_host if row.host_bytes else None),
            anchor="method-memory-share",
        ),
        figures("memory of the host", lambda row: fields.size(row.host_bytes), anchor="method-memory-share"),
        figures(
            "share of the host, at most",
            lambda row: fields.percent(row.host_share),
            anchor="method-memory-share",
        ),
    ]
    return table(memories, columns)


def mfu_reasons(study: StudyFigures) -> list[str]:
    """Why cells have no MFU, once each."""
    runs = [cell.newest for cell in study.cells.values()]
    return sorted({run.absent["mfu"] for run in runs if run.mfu is None and "mfu" in run.absent})


def usd(value: float) -> str:
    """A price, as lists print it: to the cent, or as far as it is given."""
    whole, _, decimals = f"{value:,.4f}".partition(".")
    return f"{whole}.{decimals.rstrip('0').ljust(2, '0')} USD"


def _time(figure: Metric | None) -> Field:
    """In hours and minutes, unlike the times of steps."""
    if figure is None or figure.low is None or figure.high is None:
        return fields.duration(figure.value if figure else None)
    ends = f"{duration(figure.low)} to {duration(figure.high)}"
    return Field(f"{duration(figure.value)} ({ends})", figure.value, "ns")


def _flop_rate(row: CellFigures) -> Field:
    flops = row.newest.flops_per_step
    return fields.si(None if flops is None else flops / (row.step_ns.value / 1e9), "FLOP/s")
