"""Score the laws of `bench project` on published scaling tables (docs/evidence.md), and learn their bands.

    python docs/studies/projection_tables.py TABLE.csv            # score the laws and bands that are shipped
    python docs/studies/projection_tables.py TABLE.csv --learn    # write the residuals of TABLE.csv first

A table has the columns source, url_or_repo_path, model, hardware, gpus, strategy, batch_per_gpu, seq_len,
throughput, unit and notes. Rows that differ only in `gpus` are a series, and the series of one source are a
family. Each size of a series is predicted from the smaller ones. A family that is among the residuals is
scored without its own.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import click

from harness.features.project.bands import FILE, SCHEMA, Family, Residual, Residuals, band, shipped
from harness.features.project.laws import CONSTANT, LAWS, Steps, chosen_law, refused
from results import files

PER_NODE = 8
"""GPUs of a node of every cluster in the tables."""
MISSED = 0.1
Series = dict[int, float]
"""Time of a device for one sample, by size: but for a factor the step time at a batch of a replica."""


def read(path: Path) -> tuple[dict[str, list[Series]], dict[str, str]]:
    """Return the series with two sizes or more by source, and the address of each source.

    Left out are rows without a number, of another work than their neighbours, and series with two figures of
    a size.
    """
    found: dict[str, dict[tuple[str, ...], list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    addresses = {}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            time = _time(row)
            if time is not None and "not constant-work" not in row["notes"]:
                found[row["source"]][_work(row)].append((int(row["gpus"]), time))
                addresses.setdefault(row["source"], row["url_or_repo_path"])
    kept = {
        source: [dict(sorted(rows)) for rows in works.values() if len(rows) == len(dict(rows)) > 1]
        for source, works in found.items()
    }
    return {source: series for source, series in kept.items() if series}, addresses


def _time(row: dict[str, str]) -> float | None:
    try:
        gpus, value = int(row["gpus"]), float(row["throughput"])
    except ValueError:
        return None
    if value <= 0:
        return None
    unit = row["unit"]
    if unit.startswith(("ms/iteration", "s/iteration")):
        return value
    if "/GPU" in unit or "per GPU" in unit:
        return 1 / value
    return gpus / value if "total" in unit else None


def _work(row: dict[str, str]) -> tuple[str, ...]:
    """Return what all sizes of a series share, with the strategy without its degree of data parallelism."""
    strategy = re.sub(r"\bFSDP ?\d+(?= x)", "FSDP", re.sub(r"\bDP=?\d+\b", "DP", row["strategy"]))
    batches = re.findall(r"microbatch \d+ x grad_accum \d+|MBS \d+; GA \d+|micro batch \d+", row["notes"])
    layers = re.findall(r"layers \d+", row["notes"])
    same = (row["model"], row["hardware"], strategy, row["batch_per_gpu"], row["seq_len"], row["unit"])
    return (*same, *batches[:1], *layers[:1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One size of a series, predicted from smaller ones."""

    source: str
    steps: Steps
    gpus: int
    true: float
    refused: str | None
    law: str

    def error(self, law: str) -> float:
        """Logarithm of the true step time over the predicted one."""
        return math.log(self.true / LAWS[law](self.steps, self.gpus))

    def missed(self, law: str) -> float:
        """Relative error of the prediction."""
        return abs(math.exp(-self.error(law)) - 1)

    @property
    def doublings(self) -> float:
        return math.log2(self.gpus / self.steps.gpus[-1])


def predictions(families: dict[str, list[Series]], pool: Residuals) -> Iterator[Prediction]:
    """Predict every size from each number of smaller ones."""
    for source, series in families.items():
        slope = pool.without(source).slope
        for one in series:
            gpus, times = tuple(one), tuple(one.values())
            for known in range(1, len(one)):
                steps = Steps(gpus=gpus[:known], ns=times[:known], pool_slope=slope)
                for size, true in zip(gpus[known:], times[known:], strict=True):
                    yield Prediction(
                        source=source,
                        steps=steps,
                        gpus=size,
                        true=true,
                        refused=refused(steps, size, PER_NODE),
                        law=chosen_law(steps)[0],
                    )


def learnt(families: dict[str, list[Series]], addresses: dict[str, str]) -> Residuals:
    """The residuals of all answered predictions of the tables, by every law."""
    slopes = Residuals(
        families=tuple(
            Family(source=source, address=addresses[source], slope=_slope(series), residuals=())
            for source, series in families.items()
        )
    )
    answered: dict[str, list[Residual]] = defaultdict(list)
    for one in predictions(families, slopes):
        if one.refused is None:
            answered[one.source].append(
                Residual(
                    gpus=(one.steps.gpus[-1], one.gpus),
                    roughness=round(one.steps.roughness, 5),
                    law=one.law,
                    errors={law: round(one.error(law), 5) for law in LAWS},
                )
            )
    return Residuals(
        families=tuple(
            Family(
                source=one.source,
                address=one.address,
                slope=None if one.slope is None else round(one.slope, 5),
                residuals=tuple(answered[one.source]),
            )
            for one in slopes.families
        )
    )


def _slope(series: Sequence[Series]) -> float | None:
    """Median log-log slope of the series that no rule calls irregular; None without one."""
    slopes = [
        math.log(times[-1] / times[0]) / math.log(gpus[-1] / gpus[0])
        for gpus, times in ((tuple(one), tuple(one.values())) for one in series)
        if refused(Steps(gpus=gpus, ns=times, pool_slope=0.0), gpus[-1], gpus[-1]) is None
    ]
    return median(slopes) if slopes else None


def report(found: Sequence[Prediction], residuals: Residuals) -> Iterator[str]:
    """The tables of docs/evidence.md, a line at a time."""
    answered = [one for one in found if one.refused is None]
    yield f"{len(answered)} of {len(found)} predictions are answered.\n"
    yield "| family | distance | answered | median error | of constant | in the band | median width |"
    yield "|---|---|---|---|---|---|---|"
    rows: dict[tuple[str, int], list[Prediction]] = defaultdict(list)
    for one in answered:
        rows[one.source, round(2**one.doublings)].append(one)
    inside: dict[int, list[tuple[bool, float]]] = defaultdict(list)
    for (source, times), those in sorted(rows.items()):
        hits = []
        for one in those:
            low, high = band(one.law, one.doublings, one.steps.roughness, residuals.without(source))
            hits.append((low <= math.exp(one.error(one.law)) <= high, high - low))
        inside[times] += hits
        own, constant = (
            100 * median(one.missed(law or one.law) for one in those) for law in (None, CONSTANT)
        )
        yield (
            f"| {source} | {times}x | {len(those)} | {own:.1f} % | {constant:.1f} % | "
            f"{sum(hit for hit, _ in hits)} of {len(hits)} | {100 * median(w for _, w in hits):.1f} % |"
        )
    for times, hits in sorted(inside.items()):
        covered = sum(hit for hit, _ in hits)
        yield (
            f"| all | {times}x | {len(hits)} | | | {covered} of {len(hits)} | "
            f"{100 * median(width for _, width in hits):.1f} % |"
        )
    every = [hit for hits in inside.values() for hit, _ in hits]
    yield f"\nCoverage of all: {100 * fmean(every):.0f} %.\n" if every else ""
    yield "| answer | predictions | constant efficiency is wrong by more than 10 % in |\n|---|---|---|"
    for kind, number in Counter(one.refused or "answered" for one in found).most_common():
        those = [one for one in found if (one.refused or "answered") == kind]
        share = fmean(one.missed(CONSTANT) > MISSED for one in those)
        yield f"| {kind} | {number} | {100 * share:.0f} % |"
    yield "\n| law | chosen in |\n|---|---|"
    for law, number in Counter(one.law for one in answered).most_common():
        yield f"| {law} | {number} |"


@click.command()
@click.argument("table", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--learn", is_flag=True, help="Write the residuals of TABLE into the program first.")
def main(table: Path, learn: bool) -> None:
    """Score the laws and bands on TABLE."""
    families, addresses = read(table)
    if learn:
        files.replace(FILE, SCHEMA.encode(learnt(families, addresses)))
        shipped.cache_clear()
    residuals = shipped()
    for line in report([*predictions(families, residuals)], residuals):
        print(line)


if __name__ == "__main__":
    main()
