"""The grid of llama-nano: each row of grid.txt ends as it says, proven or refused before the launch.

`make grid` trains all rows on real ranks over Gloo, more than this machine has cores; CI trains the sample.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from builders import plan_of

from results.errors import BenchError
from results.outcome import Outcome
from strategies.catalog import STRATEGIES, group_layout

SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev")
ATTENTION = ("ulysses", "gathered")
WORKLOAD = "llama-nano:seq=32"
MOST_IN_CI = 20


class Row(msgspec.Struct, frozen=True):
    dimensions: str
    strategy: str
    ends: str
    sampled: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.dimensions.split(" x "))

    @property
    def ranks(self) -> int:
        return int(2 ** len(self.names))

    @property
    def node_size(self) -> int | None:
        """Nodes make the replicas of hsdp."""
        return self.ranks // 2 if self.strategy.startswith("hsdp") else None

    def refusal(self) -> str | None:
        """Why a plan refuses it; None if it plans it."""
        fields = {"node_size": self.node_size} if self.node_size else {}
        try:
            plan = plan_of(
                workload=WORKLOAD, strategy=self.strategy, gpus=str(self.ranks), batch_size="4", **fields
            )
        except BenchError as error:
            return str(error)
        return None if plan.cells else plan.skips[0].reason


def _rows() -> list[Row]:
    lines = Path(__file__).with_name("grid.txt").read_text(encoding="utf-8").splitlines()
    found = (re.split(r" {2,}", line) for line in lines if not line.startswith("#"))
    return [Row(words[0], words[1], words[2], words[3:] == ["ci"]) for words in found]


def _words(row: Row) -> str:
    return f"{row.dimensions}: {row.strategy}"


ROWS = _rows()


def _expected() -> Iterable[frozenset[str]]:
    """The dimensions that the list has to have: single ones, pairs, and the triples."""
    tensor = ("tensor", "sequence")
    each = (SCHEDULES, ("replicate",), ("shard",), tensor, ATTENTION)
    for number in (1, 2):
        for kinds in itertools.combinations(each, number):
            yield from map(frozenset, itertools.product(*kinds))
    for kinds in ((SCHEDULES, ("tensor",)), (tensor, ATTENTION), (SCHEDULES, ("ulysses",))):
        yield from (frozenset({*names, "shard"}) for names in itertools.product(*kinds))


def test_the_list_has_every_pair_and_the_triples_once_and_a_sample_of_all() -> None:
    listed = [row.names for row in ROWS]
    assert set(_expected()) <= set(listed)
    assert len(listed) == len(set(listed))
    assert {row.ends for row in ROWS} <= {"proven", "refused"}
    sampled = [row for row in ROWS if row.sampled]
    assert len(sampled) <= MOST_IN_CI
    assert frozenset().union(*(row.names for row in sampled)) == frozenset().union(*listed)


@pytest.mark.parametrize("row", ROWS, ids=_words)
def test_a_row_is_refused_by_name_before_the_launch_or_has_the_grid_that_it_says(row) -> None:
    why = row.refusal()
    if row.ends == "refused":
        assert why is not None, f"{row.strategy} is planned: run `make grid`, and say how it ends"
        assert row.strategy.partition(":")[0] in why
        return
    assert why is None
    groups, facts = group_layout(row.strategy, row.ranks, row.node_size), STRATEGIES.facts(row.strategy)
    found: set[str] = set(groups.dimensions) - {"expert-shard"}
    other = {"pipeline": str(facts.spec.positional), "context": facts.attention}
    if facts.splits_tokens:
        other["tensor"] = "sequence"
    assert {other.get(name, name) for name in found} == row.names


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=_words(row), marks=[] if row.sampled else [pytest.mark.long])
        for row in sorted(ROWS, key=lambda row: row.ranks)
        if row.ends == "proven"
    ],
)
def test_a_row_that_is_planned_is_proven_in_a_whole_run(whole_runs, row) -> None:
    fields = {"workload": WORKLOAD, "strategy": row.strategy, "micro_batch": 4, "optimizer": "adamw:lr=0.001"}
    records = whole_runs(row.ranks, fields | {"node_size": row.node_size})
    assert [record["outcome"] for record in records] == [Outcome.OK] * row.ranks, records[0]["reason"]
    assert records[0]["proof"].passed
    assert records[0]["proof"].method == "serial-simulation"
