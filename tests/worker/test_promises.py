"""Averages with only some replicas: `docs/examples/gossip`, from another package, and averages in pairs.

Each is registered, proven, and caught when wrong.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from planting import NORMED as NORMED_MODEL
from planting import Fields, Planted, gradients_times, no_time, wrapped
from torch import Tensor

from harness.worker.proof import proof
from results.cell import Cell
from results.errors import SpecError
from strategies.catalog import STRATEGIES
from strategies.compression.promise import Largest, Rounded, UnbiasedLevels
from strategies.predictions import traffic
from strategies.promise import OuterStep, Promise
from strategies.refusal import refusal
from strategies.training.parallel import ParallelModel
from workloads.catalog import WORKLOADS, facts

NORMED: Fields = NORMED_MODEL | {"strategy": "gossip"}
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
    if "gossip" in STRATEGIES:
        return
    here = Path(__file__).parent
    sys.path += [str(here.parents[1] / "docs" / "examples"), str(here)]
    from gossip.facts import Gossip
    from paired import PairedGradients, PairedParameters

    for facts_of_one in (Gossip, PairedGradients, PairedParameters):
        STRATEGIES.register(facts_of_one)


@pytest.fixture
def gossip() -> Iterator[None]:
    """The strategy in this process, for one test."""
    _register()
    yield
    for name in ("gossip", "paired-gradients", "paired-parameters"):
        STRATEGIES.forget(name)


@contextmanager
def _right(rank: int, size: int) -> Iterator[None]:
    _register()
    yield


def _mean(wrong: Callable[[Any, Any, Any], Tensor]) -> Planted:
    """Replace the mean of a bucket by `wrong`, given the right function, the model and the bucket."""
    _register()
    from gossip.model import GossipModel

    return wrapped(GossipModel, "_mean", wrong)


def _weight_off(rank: int, size: int) -> Planted:
    """A rank itself counts by a hundredth more than its neighbours."""

    def wrong(right: Any, self: Any, bucket: Any) -> Tensor:
        own = bucket.values.clone()
        return right(self, bucket).mul_(0.99).add_(own, alpha=0.01)

    return _mean(wrong)


def _neighbour_skipped(rank: int, size: int) -> Planted:
    """The last rank averages with one neighbour of two, or with none."""

    def wrong(right: Any, self: Any, bucket: Any) -> Tensor:
        mean = right(self, bucket)
        return bucket.values.clone() if rank == size - 1 else mean

    return _mean(wrong)


def _never_averaged(rank: int, size: int) -> Planted:
    return _mean(lambda right, self, bucket: bucket.values.clone())


def _all_averaged(rank: int, size: int) -> Planted:
    """Take the mean over all ranks, which differs from the neighbours' mean on a ring of 4."""
    return _mean(lambda right, self, bucket: self._link.all_gather(bucket.values).mean(dim=0))


def _gradient_doubled(rank: int, size: int) -> Planted:
    _register()

    def wrong(right: Any, self: Any, *arguments: Any) -> Tensor:
        loss = right(self, *arguments)
        gradients_times(2 if rank == size - 1 else 1)(self)
        return loss

    return wrapped(ParallelModel, "compute_gradients", wrong)


@pytest.mark.parametrize("fields", [{}, {"accumulation": 2}, {"optimizer": "adamw:lr=0.001"}], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_averages_with_its_neighbours(proofs, size, fields) -> None:
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
def test_wrong_averages_are_caught(proofs, broken, size, found) -> None:
    first = proofs(size, NORMED, broken=broken)[0]
    assert not first["passed"]
    assert re.search(found, first["detail"]), first["detail"]


def _three_averaged(rank: int, size: int) -> Planted:
    """Ranks 1, 2 and 3 are one group, and rank 0 is another."""
    _register()
    import paired

    return patch.object(paired, "pair", lambda rank, ranks: [[0], [], [1, 2, 3]][min(rank, 2)])


@contextmanager
def _not_averaged(rank: int, size: int) -> Iterator[None]:
    _register()
    from paired import PairedGradientsModel, PairedParametersModel

    alone = ParallelModel.compute_gradients
    with (
        patch.object(PairedGradientsModel, "compute_gradients", alone),
        patch.object(PairedParametersModel, "updated", lambda self: None),
    ):
        yield


PAIRED = NORMED | {"strategy": "paired-gradients"}


@pytest.mark.parametrize(
    "fields",
    [
        PAIRED,
        PAIRED | {"accumulation": 2, "clip_norm": 0.1},
        PAIRED | {"workload": "py:proof_models:wide", "compression": "topk:0.1"},
        NORMED | {"strategy": "paired-parameters"},
    ],
    ids=["gradients", "accumulated", "compressed", "parameters"],
)
def test_every_rank_averages_with_its_pair(proofs, fields) -> None:
    for found in proofs(4, fields, broken=_right):
        assert (found["passed"], found["method"]) == (True, "serial-simulation"), found["detail"]
    if fields is PAIRED:
        assert "gradients, buffers and updates are equal bit for bit" in found["detail"]


@pytest.mark.parametrize("strategy", ["paired-gradients", "paired-parameters"])
@pytest.mark.parametrize("broken", [_three_averaged, _not_averaged], ids=lambda broken: broken.__name__)
def test_averages_with_others_than_the_pair_are_caught(proofs, broken, strategy) -> None:
    for found in proofs(4, NORMED | {"strategy": strategy}, broken=broken):
        assert not found["passed"]


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (
            "gossip",
            "the loss is finite; gossip keeps no replicas equal, so that none were compared; a serial",
        ),
        ("paired-gradients", "the parameters of replicas that average together are equal bit for bit after"),
    ],
)
def test_a_weaker_proof_says_what_is_true_of_it(proofs, strategy, words) -> None:
    found = proofs(4, NORMED | {"strategy": strategy}, broken=_no_time)[0]
    assert (found["passed"], found["method"]) == (True, "replica-agreement")
    assert found["detail"].startswith(words)


def _no_time(rank: int, size: int) -> Planted:
    _register()
    return no_time(rank, size)


@contextmanager
def _nothing_in_five_steps(rank: int, size: int) -> Iterator[None]:
    """It promises an average after every fifth step, and never makes one."""
    _register()
    from paired import PairedParameters, PairedParametersModel, pair

    promise = Promise(of="parameters", every=5, partners=pair, equal=False)
    with (
        patch.object(PairedParameters, "promise", promise),
        patch.object(PairedParametersModel, "updated", lambda self: None),
    ):
        yield


@contextmanager
def _three_of_five_steps(rank: int, size: int) -> Iterator[None]:
    with _nothing_in_five_steps(rank, size), patch.object(proof, "first_steps", lambda model: [True] * 3):
        yield


def _partners_of_none(rank: int, size: int) -> Planted:
    _register()
    from paired import PairedParameters

    promise = Promise(of="parameters", partners=lambda replica, replicas: [replica], equal=False)
    return patch.object(PairedParameters, "promise", promise)


def test_a_promise_is_proven_by_steps_that_keep_it(proofs) -> None:
    fields = NORMED | {"strategy": "paired-parameters"}
    assert not any(found["passed"] for found in proofs(2, fields, broken=_nothing_in_five_steps))
    found = proofs(2, fields, broken=_three_of_five_steps)[0]
    assert found["method"] == "replica-agreement"
    assert "no step that was checked ended in an average of parameters" in found["detail"]
    with pytest.raises(pytest.fail.Exception, match="no replica averages with another one"):
        proofs(2, fields, broken=_partners_of_none)


@contextmanager
def _weighted(rank: int, size: int) -> Iterator[None]:
    from paired import PairedParameters

    with _weight_of_a_third(rank, size):
        unproven = Promise(of="parameters", every=2, unproven="averages are weighted")
        with patch.object(PairedParameters, "promise", unproven):
            yield


def _weight_of_a_third(rank: int, size: int) -> Planted:
    _register()
    from paired import PairedParametersModel

    def wrong(self: Any) -> None:
        for parameter in self.parameters():
            share = parameter.detach() * (1 + rank) / 3
            self.link.all_reduce(share)
            parameter.data.copy_(share)

    return patch.object(PairedParametersModel, "updated", wrong)


def test_what_no_promise_expresses_is_declared_to_have_no_proof(whole_runs) -> None:
    fields = NORMED | {"strategy": "paired-parameters"}
    assert {found["outcome"] for found in whole_runs(2, fields, broken=_weight_of_a_third)} == {
        "proof_failed"
    }
    for found in whole_runs(2, fields, broken=_weighted):
        assert (found["outcome"], found["proof"], found["period"]) == ("ok", None, 2), found["reason"]
        assert "declared to be without a proof: averages are weighted" in found["absent"]["proof"]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (
            lambda: Promise(of="outer-step"),
            "Promise.of is 'outer-step' and must be 'gradients' or 'parameters'",
        ),
        (lambda: Promise(of="parameters", every=0), "Promise.every is 0 and must be a whole number"),
        (lambda: Promise(every=5), "Promise.every is 5 and must be 1 with of='gradients'"),
        (lambda: Promise(after=-1), "Promise.after is -1 and must be"),
        (lambda: Promise(partners=[0, 1]), "Promise.partners is .* and must be a function"),
        (
            lambda: Promise(outer=OuterStep(lr=0.7, momentum=0.9)),
            "Promise.outer is .* and must be None unless",
        ),
        (lambda: Promise(unproven=""), "Promise.unproven is '' and must be None or the reason"),
        (lambda: Largest(count=4), "Largest.count is 4 and must be a function"),
        (lambda: UnbiasedLevels(block=0, levels=127), "UnbiasedLevels.block is 0 and must be"),
        (lambda: Rounded(roundoff=-1.0), "Rounded.roundoff is -1.0 and must be"),
    ],
)
def test_a_promise_that_means_nothing_is_refused(make, error) -> None:
    with pytest.raises(SpecError, match=error):
        make()


def test_the_plan_knows_its_rules_and_its_traffic(gossip) -> None:
    """Two neighbours take all parameters each, of 4 bytes."""
    cell = Cell(gpus=4, **CELL)
    assert refusal(cell) is None
    told = refusal(Cell(gpus=4, **CELL, compression="bf16"))
    assert told.text.startswith("gossip needs --compression none and --collective default, not bf16 and")
    assert "each rank would scale its own loss" in str(refusal(Cell(gpus=4, **CELL, precision="fp16")))
    parts = facts(WORKLOADS.parse("gpt-nano")).parts
    [sent] = traffic(cell, parts)
    assert sent.payload_bytes == 2 * 4 * parts.values


def test_a_name_that_is_taken_is_refused(gossip) -> None:
    from gossip.facts import Gossip

    with pytest.raises(SpecError, match=r"strategy 'gossip' of gossip\.facts exists already"):
        STRATEGIES.register(Gossip)
