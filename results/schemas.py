"""The schemas of a study's files, with their histories."""

from __future__ import annotations

from results.cell import Cell
from results.launch import Attempt, Launch
from results.plan import Plan
from results.record import RankRecord
from results.run import RunResult
from results.schema import Json, Schema


def _as_it_is(old: Json) -> Json:
    """The upgrade where new fields have defaults that mean what was done before."""
    return old


# History: version, bench, what came. Version 1 of every schema is 0.1.0, the first.
#   plan    2  0.1.0  collectives, links, node_size; collective and link of series, skips and patterns
#   cell    2  0.1.0  collective, node_size, link_mbit_per_s
#   launch  2  0.1.0  link_mbit_per_s
PLAN = Schema("plan", 2, Plan, {1: _as_it_is})
CELL = Schema("cell", 2, Cell, {1: _as_it_is})
LAUNCH = Schema("launch", 2, Launch, {1: _as_it_is})
ATTEMPT = Schema("attempt", 1, Attempt)
RANK_RECORD = Schema("rank-record", 1, RankRecord)
RUN_RESULT = Schema("run-result", 1, RunResult)
