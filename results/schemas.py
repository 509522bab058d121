"""The schemas of a study's files, with their histories."""

from __future__ import annotations

from results.cell import Cell
from results.launch import Attempt, Launch
from results.plan import Plan
from results.record import RankRecord
from results.run import RunResult
from results.schema import Schema

# History of every schema below:
#   1  0.1.0  first
PLAN = Schema("plan", 1, Plan)
CELL = Schema("cell", 1, Cell)
LAUNCH = Schema("launch", 1, Launch)
ATTEMPT = Schema("attempt", 1, Attempt)
RANK_RECORD = Schema("rank-record", 1, RankRecord)
RUN_RESULT = Schema("run-result", 1, RunResult)
