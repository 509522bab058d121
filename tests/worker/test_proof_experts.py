"""Grids with dealt experts are proven in a whole run, and every way of dealing them wrongly is caught."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from planting import GRADIENT, UPDATE, Fields, Planted, wrapped
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from results.outcome import Outcome
from strategies.collectives.link import Link
from strategies.experts import model
from strategies.experts.model import ExpertSplit
from strategies.training.slicing import Slicings

# Where a row goes astray, a later layer may choose other experts first.
ASTRAY = f"{GRADIENT}|choice in pass"
MOE: Fields = {"workload": "moe-nano:seq=16", "micro_batch": 2, "optimizer": "sgd:lr=0.05"}
DEALT: Fields = MOE | {"strategy": "fsdp:ep=2"}
BALANCED: Fields = {"workload": "moe-nano:routing=balanced:seq=16"}
SKEWED: Fields = {"workload": "moe-nano:routing=skewed:seq=16"}


def _rows_sent_to_another_rank(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: Any, own: int, forward: Any, rows: Tensor, counts: Tensor) -> Tensor:
        result: Tensor = original(self, own, forward, rows, counts.roll(1))
        return result

    return wrapped(ExpertSplit, "_forward", wrong)


def _results_of_another_token(rank: int, size: int) -> Planted:
    def wrong(original: Any, *given: Any) -> Tensor:
        result: Tensor = original(*given).roll(1, 0)
        return result

    return wrapped(ExpertSplit, "_forward", wrong)


def _divided_by_the_ranks_of_a_shard(rank: int, size: int) -> Planted:
    return wrapped(FSDPModule, "set_gradient_divide_factor", lambda original, self, factor: None)


def _counts_late_by_a_step(rank: int, size: int) -> Planted:
    """The ranks agree on the numbers of rows of the step before, and cut or pad the rows."""
    late: dict[object, list[Tensor]] = {}

    def wrong(original: Any, self: Any, own: int, forward: Any, rows: Tensor, counts: Tensor) -> Tensor:
        before = late.setdefault(forward, [])
        before.append(counts)
        result: Tensor = original(self, own, forward, rows, before[-2] if len(before) > 1 else counts)
        return result

    return wrapped(ExpertSplit, "_forward", wrong)


def _experts_of_the_neighbour(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: Any, name: str, value: Tensor) -> Tensor:
        whole: Tensor = original(self, name, value)
        return whole.roll(len(whole) // 2, 0) if "experts" in name else whole

    return wrapped(Slicings, "whole", wrong)


def _norm_of_an_experts_copies(rank: int, size: int) -> Planted:
    return wrapped(Slicings, "copies", lambda original, self, name, ranks: 2 if self.cut(name) else ranks)


def _gradient_not_sent_back(rank: int, size: int) -> Planted:
    def wrong(original: Any, values: Tensor, link: Link, there: Any, back: Any) -> Tensor:
        moved: Tensor = original(values, link, there, lambda gradient, _: torch.zeros_like(values))
        return moved

    return wrapped(model, "exchanged", wrong)


@pytest.mark.parametrize(
    ("mutation", "fields", "detail"),
    [
        (_rows_sent_to_another_rank, DEALT, ASTRAY),
        (_results_of_another_token, DEALT, ASTRAY),
        (_divided_by_the_ranks_of_a_shard, DEALT, GRADIENT),
        (_counts_late_by_a_step, DEALT, ASTRAY),
        (_experts_of_the_neighbour, DEALT, "other initial parameters|choice in pass"),
        (_norm_of_an_experts_copies, DEALT | {"clip_norm": 0.05}, UPDATE),
        (_gradient_not_sent_back, DEALT, GRADIENT),
    ],
)
def test_experts_that_are_dealt_wrongly_are_caught(proofs, mutation, fields, detail) -> None:
    results = proofs(2, fields, broken=mutation)
    assert [found["passed"] for found in results] == [False] * 2, results[0]["detail"]
    assert re.search(detail, results[0]["detail"]), results[0]["detail"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (2, DEALT | {"clip_norm": 0.05, "accumulation": 2}),
        (2, DEALT | SKEWED | {"activation_checkpointing": True, "optimizer": "adamw:lr=0.001"}),
        (2, DEALT | BALANCED | {"precision": "bf16", "strategy": "fsdp:ep=2:params=bf16"}),
        (4, DEALT | {"clip_norm": 0.05}),
        (4, DEALT | SKEWED | {"strategy": "fsdp:ep=4:reshard=false"}),
        (4, DEALT | {"strategy": "hsdp:ep=2", "node_size": 2, "clip_norm": 0.05}),
        (4, DEALT | {"strategy": "fsdp:cp=2:ep=2"}),
        (4, DEALT | {"strategy": "fsdp:cp=2:ep=4"}),
        (4, DEALT | {"strategy": "fsdp:ep=4:sequence=true:tp=2", "clip_norm": 0.05}),
        (2, DEALT | {"strategy": "fsdp:ep=2:sequence=true:tp=2"}),
        (4, DEALT | {"strategy": "pipeline:1f1b:ep=2:pp=2", "micro_batch": 4, "clip_norm": 0.05}),
        (4, DEALT | {"strategy": "pipeline:zbv:ep=2:pp=2", "micro_batch": 4}),
        (4, DEALT | {"strategy": "pipeline:1f1b:ep=2:pp=2:sequence=true:tp=2", "micro_batch": 4}),
    ],
)
def test_dealt_experts_are_proven(whole_runs, size, fields) -> None:
    records = whole_runs(size, fields)
    assert [record["outcome"] for record in records] == [Outcome.OK] * size, records[0]["reason"]
    assert records[0]["proof"].passed
    assert records[0]["proof"].method == "serial-simulation"
