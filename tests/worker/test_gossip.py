"""A strategy from another package, `docs/examples/gossip`: registered, proven, and caught when wrong."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from results.cell import Cell
from results.errors import SpecError
from strategies.catalog import STRATEGIES
from strategies.closed_form.traffic import traffic
from strategies.refusal import refusal
from workloads.catalog import WORKLOADS, facts

Proofs = Callable[..., list[dict[str, Any]]]
Fields = dict[str, Any]
NORMED: Fields = {
    "workload": "py:proof_models:normed",
    "micro_batch": 4,
    "optimizer": "sgd:lr=0.05",
    "strategy": "gossip",
}
CELL: Fields = {
    "workload": "gpt-nano",
    "dataset": "synthetic",
    "strategy": "gossip",
    "micro_batch": 4,
    "device": "cpu",
    "backend": "gloo",
    "optimizer": "sgd",
}


def _register() -> None:
    if "gossip" not in STRATEGIES:
        sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "examples"))
        from gossip.facts import Gossip

        STRATEGIES.register(Gossip)


@pytest.fixture
def gossip() -> Iterator[None]:
    """The strategy in this process, for one test."""
    _register()
    yield
    STRATEGIES.forget("gossip")


@contextmanager
def _right(rank: int, size: int) -> Iterator[None]:
    _register()
    yield


@contextmanager
def _mean(wrong: Callable[[Any, Any], Tensor]) -> Iterator[None]:
    _register()
    from gossip.model import GossipModel

    with patch.object(GossipModel, "_mean", wrong):
        yield


@contextmanager
def _weight_off(rank: int, size: int) -> Iterator[None]:
    """A rank itself counts by a hundredth more than its neighbours."""
    _register()
    from gossip.model import GossipModel

    right = GossipModel._mean

    def wrong(self: Any, bucket: Any) -> Tensor:
        own = bucket.values.clone()
        return right(self, bucket).mul_(0.99).add_(own, alpha=0.01)

    with patch.object(GossipModel, "_mean", wrong):
        yield


@contextmanager
def _neighbour_skipped(rank: int, size: int) -> Iterator[None]:
    """The last rank averages with one neighbour of two, or with none."""
    _register()
    from gossip.model import GossipModel

    right = GossipModel._mean

    def wrong(self: Any, bucket: Any) -> Tensor:
        mean = right(self, bucket)
        return bucket.values.clone() if rank == size - 1 else mean

    with patch.object(GossipModel, "_mean", wrong):
        yield


@contextmanager
def _never_averaged(rank: int, size: int) -> Iterator[None]:
    with _mean(lambda self, bucket: bucket.values.clone()):
        yield


@contextmanager
def _all_averaged(rank: int, size: int) -> Iterator[None]:
    """The mean over all ranks, which is not that of the neighbours on a ring of 4."""

    def wrong(self: Any, bucket: Any) -> Tensor:
        return self._link.all_gather(bucket.values).mean(dim=0)

    with _mean(wrong):
        yield


@contextmanager
def _gradient_doubled(rank: int, size: int) -> Iterator[None]:
    _register()
    from strategies.training.parallel import ParallelModel

    right = ParallelModel.compute_gradients

    def wrong(self: Any, *arguments: Any) -> Tensor:
        loss = right(self, *arguments)
        for parameter in self.parameters():
            parameter.grad.mul_(2 if rank == size - 1 else 1)
        return loss

    with patch.object(ParallelModel, "compute_gradients", wrong):
        yield


@pytest.mark.parametrize("fields", [{}, {"accumulation": 2}, {"optimizer": "adamw:lr=0.001"}], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_averages_with_its_neighbours(proofs: Proofs, size: int, fields: Fields) -> None:
    for found in proofs(size, NORMED | fields, broken=_right):
        assert (found["passed"], found["method"]) == (True, "serial-simulation"), found["detail"]
        assert "parameters averaged with its partners' within their rounding" in found["detail"]


@pytest.mark.parametrize(
    ("broken", "size", "found"),
    [
        (_weight_off, 2, "gradient or average of"),
        (_weight_off, 4, "gradient or average of"),
        (_neighbour_skipped, 2, "another rank found a difference"),
        (_neighbour_skipped, 4, "another rank found a difference"),
        (_never_averaged, 2, "gradient or average of"),
        (_never_averaged, 4, "gradient or average of"),
        (_all_averaged, 4, "gradient or average of"),
        (_gradient_doubled, 4, "another rank found a difference"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_wrong_averages_are_caught(
    proofs: Proofs, broken: Callable[..., object], size: int, found: str
) -> None:
    first = proofs(size, NORMED, broken=broken)[0]
    assert not first["passed"]
    assert re.search(found, first["detail"]), first["detail"]


def test_the_plan_knows_its_rules_and_its_traffic(gossip: None) -> None:
    """Two neighbours take all parameters each, of 4 bytes."""
    cell = Cell(gpus=4, **CELL)
    assert refusal(cell) is None
    told = refusal(Cell(gpus=4, **CELL, compression="bf16"))
    assert told is not None
    assert told.startswith("gossip goes with --compression none and --collective default alone, not bf16 and")
    assert "each rank would scale its own loss" in str(refusal(Cell(gpus=4, **CELL, precision="fp16")))
    parts = facts(WORKLOADS.parse("gpt-nano")).parts
    [sent] = traffic(cell, parts)
    assert sent.payload_bytes == 2 * 4 * parts.values


def test_a_name_that_is_taken_is_refused(gossip: None) -> None:
    from gossip.facts import Gossip

    with pytest.raises(SpecError, match=r"strategy 'gossip' of gossip\.facts exists already"):
        STRATEGIES.register(Gossip)
