"""How many planted errors `bench audit` finds, and how many of its findings on published tables are right.

    python tests/reports/audit/measure.py FOLDER aside|developed_on|all

FOLDER holds published_scaling.csv, published_single_node.csv and published_collectives.csv. The halves are
those of `sources.toml`, the judgements of findings those of `labels.toml`. Seeded: the same tables give the
same figures.
"""

from __future__ import annotations

import csv
import random
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from errors import KINDS, Around, Kind, Row, number

from reports.audit.audit import Audit, audit
from reports.audit.findings import Disagreement
from reports.audit.rows import table

HERE = Path(__file__).parent
TABLES = ("scaling", "single_node", "collectives")
PLANTED, SEED = 200, 16
Told = set[tuple[str, str, int]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """The rows of one source in one table."""

    table: str
    rows: tuple[Row, ...]
    lines: tuple[int, ...]
    """Where the rows stand in the table's file."""


@dataclass
class Score:
    """Planted errors and found ones, by kind, and each one that was missed."""

    planted: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.found.total() / max(1, self.planted.total())


def sources(folder: Path, half: str) -> list[Source]:
    """The rows of each source of a half."""
    split = tomllib.loads((HERE / "sources.toml").read_text())
    wanted = (
        tuple(name for names in split.values() for name in names) if half == "all" else tuple(split[half])
    )
    found = []
    for name in TABLES:
        by_source: dict[str, list[tuple[int, Row]]] = defaultdict(list)
        with (folder / f"published_{name}.csv").open(newline="", encoding="utf-8") as file:
            for line, row in enumerate(csv.DictReader(file), start=2):
                if row["source"].startswith(wanted):
                    by_source[row["source"]].append((line, row))
        for rows in by_source.values():
            lines, cells = zip(*rows, strict=True)
            found.append(Source(table=name, rows=cells, lines=lines))
    return found


def audited(rows: Sequence[Row]) -> Audit:
    """The audit of rows, whose lines are their places, from 2 on."""
    heads = list(dict.fromkeys(name for row in rows for name in row))
    lines = [(line, [row.get(head, "") for head in heads]) for line, row in enumerate(rows, start=2)]
    return audit(table(heads, lines, {}))


def told(found: Audit) -> Told:
    """What an audit says, of which rows."""
    return {
        (finding.check, formula, line)
        for finding in found.findings
        for formula in (finding.formula, *finding.also)
        for line in {*finding.lines, *finding.rows}
    }


def with_efficiencies(rows: Sequence[Row]) -> list[Row]:
    """The rows with the scaling efficiency that follows from their throughput."""
    printed = []
    for row in rows:
        at = Around(row=row, siblings=rows)
        if not at.is_on_a_curve or "/s" not in row["unit"]:
            printed.append({**row, "scaling_efficiency": ""})
            continue
        first = min(at.curve, key=lambda other: int(other["gpus"]))
        share = number(row["throughput"]) / number(first["throughput"])
        if "GPU" not in row["unit"]:
            share *= int(first["gpus"]) / int(row["gpus"])
        printed.append({**row, "scaling_efficiency": f"{share:.3f}"})
    return printed


def plant(sources: Sequence[Source], errors: int = PLANTED) -> Score:
    """Plant errors, the kinds in turn, each in a row that has no finding, and count those that are found."""
    rng, score = random.Random(SEED), Score()
    tables = [
        with_efficiencies(source.rows) if "throughput" in source.rows[0] else list(source.rows)
        for source in sources
    ]
    clean = [told(audited(rows)) for rows in tables]
    places = {kind.name: list(_places(kind, tables, clean)) for kind in KINDS}
    for several in places.values():
        rng.shuffle(several)
    while score.planted.total() < errors and any(places.values()):
        for kind in KINDS:
            if places[kind.name] and score.planted.total() < errors:
                which, place = places[kind.name].pop()
                _plant_one(kind, tables[which], place, clean[which], rng, score)
    return score


def _places(kind: Kind, tables: Sequence[Sequence[Row]], clean: Sequence[Told]) -> Iterator[tuple[int, int]]:
    for which, rows in enumerate(tables):
        flagged = {line for _, _, line in clean[which]}
        for place, row in enumerate(rows):
            if place + 2 not in flagged and kind.fits(Around(row=row, siblings=rows)):
                yield which, place


def _plant_one(
    kind: Kind, rows: Sequence[Row], place: int, clean: Told, rng: random.Random, score: Score
) -> None:
    row = rows[place]
    changed: Mapping[str, str] = kind.plant(Around(row=row, siblings=rows), rng)
    # Some texts have nothing to change: no two digits to exchange, no other row to copy from.
    if any(text == "" or text == row[name] for name, text in changed.items()):
        return
    line = place + 2
    several = list(rows)
    if kind.is_a_second_row:
        line = len(several) + 2
        several.append({**row, **changed})
    else:
        several[place] = {**row, **changed}
    score.planted[kind.name] += 1
    if any(where == line for _, _, where in told(audited(several)) - clean):
        score.found[kind.name] += 1
    else:
        score.missed.append(f"{kind.name}: {row['source']}, line {line} of its rows: {dict(changed)}")


def key(source: Source, finding: Disagreement) -> tuple[str, int, str]:
    """What a label names: the table, the line of the row in question in its file, the formula."""
    return source.table, source.lines[finding.lines[0] - 2], finding.formula


def judged(sources: Sequence[Source]) -> tuple[int, int, list[str]]:
    """Findings that are right, all findings, and those that no label judges."""
    labels = tomllib.loads((HERE / "labels.toml").read_text())["finding"]
    right = {(label["table"], label["line"], label["formula"]): label["right"] for label in labels}
    found = [
        (key(source, finding), finding) for source in sources for finding in audited(source.rows).findings
    ]
    unknown = [f"{where}: {finding.inputs}" for where, finding in found if where not in right]
    return sum(right.get(where, False) for where, _ in found), len(found), unknown


def main(folder: str, half: str) -> None:
    """Print both figures of one half."""
    there = sources(Path(folder), half)
    right, total, unknown = judged(there)
    print(f"findings that are right: {right} of {total}; without a label: {len(unknown)}")
    for text in unknown:
        print("   ", text)
    score = plant(there)
    for kind in KINDS:
        print(f"{score.found[kind.name]:4} of {score.planted[kind.name]:3}  {kind.name}")
    kinds = sum(count > 0 for count in score.planted.values())
    print(
        f"errors found: {score.found.total()} of {score.planted.total()} of {kinds} kinds, {score.share:.1%}"
    )
    for text in score.missed:
        print("    missed:", text)


if __name__ == "__main__":
    main(*sys.argv[1:])
