"""The proof of cells that compress, collect or average: real ones pass, and wrong exchanges are caught."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
from planting import NORMED, WIDE, Fields, Planted, after, wrapped
from torch import Tensor, nn

from harness.worker.proof.proof import first_steps
from strategies.catalog import STRATEGIES
from strategies.collectives.link import Link
from strategies.collectives.wire import Wire
from strategies.compression import casts, randomk, selection, topk
from strategies.compression.base import Compressor
from strategies.compression.facts import share_of
from strategies.compression.int8 import Int8
from strategies.compression.memory import BucketMemory
from strategies.compression.powersgd import compressor as powersgd
from strategies.compression.signsgd import ScaledSign
from strategies.compression.topk import TopK, sum_chosen
from strategies.exchange.buckets import Bucket
from strategies.gradient_exchange import GradientExchange
from strategies.local_sgd.model import LocalSgdModel
from strategies.local_sgd.model import _Mean as Averages
from strategies.trainer import Trainer
from strategies.training.parallel import ParallelModel
from strategies.training.replicas import take_from_first

SCRATCH: Fields = WIDE | {"strategy": "scratch-ddp:bucket_mb=0.01"}
LOCAL: Fields = NORMED | {"strategy": "local-sgd:4"}
OUTER: Fields = NORMED | {"strategy": "local-sgd:2:outer=nesterov"}
DILOCO = "local-sgd:2:outer=nesterov:outer_lr=0.5:outer_momentum=0.8:warmup=1"
HIERARCHICAL: Fields = SCRATCH | {"collective": "hierarchical", "node_size": 2}
PLAIN_SGD: Fields = {"optimizer": "sgd:lr=0.05:momentum=0.0"}

COMPRESSED = [
    "fp16",
    "bf16",
    "topk:0.01",
    "topk:0.01:select=sampled",
    "topk:0.01:select=block:feedback=false",
    "randomk:0.1",
    "randomk:0.1:feedback=false",
    "powersgd:4",
    "powersgd:2:warmup=4",
    "int8",
    "int8:feedback=true",
    "signsgd",
]


# Two ranks see every path; three have sums that are rounded in another order.
@pytest.mark.parametrize(("size", "strategy"), [(2, "ddp"), (3, "scratch-ddp")])
@pytest.mark.parametrize("compression", COMPRESSED)
def test_a_compressed_cell_keeps_its_books(proofs, size, strategy, compression) -> None:
    found = proofs(size, WIDE | {"strategy": strategy, "compression": compression})[0]
    assert (found["passed"], found["method"]) == (True, "serial-simulation"), found["detail"]
    assert f"the residuals of {compression} add up to their gradients" in found["detail"]
    assert 0 < found["max_difference"] <= found["max_bound"]


@pytest.mark.parametrize(
    ("size", "fields"),
    [
        (2, WIDE | {"compression": "torch-powersgd:2"}),
        (3, SCRATCH | PLAIN_SGD | {"compression": "dgc:0.01:warmup=2"}),
        (2, NORMED | PLAIN_SGD | {"compression": "dgc:0.25", "accumulation": 2}),
        # One node, and two.
        (2, HIERARCHICAL | {"compression": "topk:0.01"}),
        (4, HIERARCHICAL | {"compression": "topk:0.01"}),
        (4, HIERARCHICAL | {"collective": "hierarchical:via=leaders", "compression": "powersgd:2"}),
        (3, SCRATCH | {"collective": "ring", "compression": "topk:0.01"}),
        (4, SCRATCH | {"collective": "tree", "compression": "bf16"}),
        (2, SCRATCH | {"precision": "bf16", "compression": "fp16"}),
        (3, SCRATCH | {"precision": "fp16", "compression": "bf16"}),
        (4, LOCAL | {"compression": "topk:0.1"}),
        (3, OUTER | {"compression": "topk:0.1"}),
        (2, LOCAL | {"compression": "signsgd", "strategy": "local-sgd:2"}),
        # The ramp of the compressor is two averages: a hole between the steps that are checked.
        (3, WIDE | {"compression": "powersgd:2:warmup=2", "strategy": "local-sgd:3"}),
    ],
)
def test_so_do_all_that_go_together(proofs, size, fields) -> None:
    found = proofs(size, fields)[0]
    assert (found["passed"], found["method"]) == (True, "serial-simulation"), found["detail"]


@pytest.mark.parametrize(
    "fields",
    [
        SCRATCH,
        NORMED | {"strategy": "scratch-ddp", "accumulation": 2},
        SCRATCH | {"collective": "ring"},
        WIDE | {"strategy": "ddp", "collective": "ring:chunk_mb=0.001"},
        SCRATCH | {"collective": "tree"},
        SCRATCH | {"collective": "hierarchical", "node_size": 1},
        WIDE | {"strategy": "ddp", "collective": "hierarchical:via=leaders", "node_size": 1},
    ],
)
def test_an_uncompressed_exchange_of_two_is_exact_by_any_way(proofs, fields) -> None:
    found = proofs(2, fields)[0]
    assert found["passed"], found["detail"]
    assert (found["max_difference"], found["max_bound"]) == (0.0, 0.0)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "strategy",
    ["local-sgd:1", "local-sgd:4", "local-sgd:2:warmup=5", "local-sgd:4:outer=nesterov", DILOCO],
)
def test_replicas_that_train_alone_are_recomputed_and_their_average_too(proofs, size, strategy) -> None:
    found = proofs(size, NORMED | {"strategy": strategy})[0]
    assert found["passed"], found["detail"]
    assert ("outer steps within their rounding" in found["detail"]) is ("outer" in strategy)


@pytest.mark.parametrize(
    "fields",
    [
        SCRATCH | {"compression": "topk:0.1"},
        SCRATCH | {"compression": "powersgd:2"},
        SCRATCH | {"compression": "int8"},
        {"strategy": "ddp", "compression": "torch-powersgd:2"},
    ],
)
def test_after_a_step_that_overflows_the_books_go_on(proofs, fields) -> None:
    loud = {"workload": "py:proof_models:loud", "micro_batch": 4, "optimizer": "sgd:lr=0.001"}
    found = proofs(2, fields | loud | {"precision": "fp16"})[0]
    assert (found["passed"], found["method"]) == (True, "serial-simulation"), found["detail"]


def test_steps_that_overflow_are_left_out_of_the_books(proofs) -> None:
    fields = {"workload": "py:proof_models:deafening", "micro_batch": 4, "optimizer": "sgd:lr=0.001"}
    found = proofs(2, SCRATCH | fields | {"precision": "fp16", "compression": "bf16"})[0]
    assert (found["passed"], found["method"]) == (True, "replica-agreement"), found["detail"]


@pytest.mark.parametrize(
    ("period", "ramp_steps", "checked"),
    [
        (1, 0, "xxx"),
        # Whole periods: the averages come after steps 2 and 4, and after step 8.
        (2, 0, "xxxx"),
        (8, 0, "xxxxxxxx"),
        # The ramp is gone through, and the two steps after it are checked, or the period that they begin.
        (1, 2, "xxxx"),
        (1, 5, "xxx--xx"),
        (4, 5, "xxx--xxxx"),
    ],
)
def test_a_proof_checks_the_first_steps_and_those_after_the_ramp(period, ramp_steps, checked) -> None:
    model = ParallelModel(nn.Linear(1, 1))
    model.period, model.ramp_steps = period, ramp_steps
    assert first_steps(model) == [mark == "x" for mark in checked]


def test_a_proof_of_outer_steps_checks_the_second_one_too() -> None:
    """The first has no momentum. A ramp is gone through before them."""
    model = ParallelModel(nn.Linear(1, 1))
    model.period = 8
    model.shown_after = STRATEGIES.facts("local-sgd:8:outer=nesterov").promise.shown_after
    assert first_steps(model) == [True] * 16
    model.ramp_steps = 4
    assert first_steps(model) == [True] * 3 + [False] + [True] * 16


def _the_residual_is_never_added_back(rank: int, size: int) -> Planted:
    return patch.object(Compressor, "compensate", lambda self, bucket, kept: None)


def _residuals_are_forgotten(rank: int, size: int) -> Planted:
    def forget(exchange: GradientExchange) -> None:
        for _, _, vector in exchange._residuals.vectors():
            vector.zero_()

    return after(GradientExchange, "sum_shares", forget)


def _residuals_are_lost_when_buckets_are_rebuilt(rank: int, size: int) -> Planted:
    def wrong(self: BucketMemory) -> None:
        self._loose, self._vectors = {}, {}

    return patch.object(BucketMemory, "_loosen", wrong)


def _sums_times(factor: float) -> Planted:
    def wrong(original: Any, self: GradientExchange, bucket: Bucket) -> None:
        original(self, bucket)
        bucket.values.mul_(factor)

    return wrapped(GradientExchange, "sum_shares", wrong)


def _a_thousandth_too_much(rank: int, size: int) -> Planted:
    return _sums_times(1.001)


def _mean_of_means(rank: int, size: int) -> Planted:
    return _sums_times(1 / size)


def _one_rank_is_not_heard(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: Link, values: Tensor) -> Tensor:
        gathered = original(self, values)
        # Whole numbers compare what ranks have before they train.
        if values.dtype != torch.int64:
            gathered[-1] = 0
        return gathered

    return wrapped(Link, "all_gather", wrong)


def _all_goes_into_the_residual(rank: int, size: int) -> Planted:
    def wrong(self: Compressor, bucket: Bucket, residual: Tensor | None, wire: object) -> None:
        if residual is not None:
            residual.copy_(bucket.values)
        bucket.values.zero_()

    return patch.object(TopK, "sum_shares", wrong)


def _a_gradient_is_lost(rank: int, size: int) -> Planted:
    return wrapped(ParallelModel, "named_gradients", lambda original, self: list(original(self))[1:])


def _ranks_skip_the_exchange(rank: int, size: int) -> Planted:
    def wrong(self: Compressor, bucket: Bucket, residual: Tensor | None, wire: object) -> None:
        if residual is not None:
            residual.zero_()

    return patch.object(TopK, "sum_shares", wrong)


def _averaged_a_step_late(rank: int, size: int) -> Planted:
    return after(LocalSgdModel, "__init__", lambda self: setattr(self, "_alone", -1))


def _never_averaged(rank: int, size: int) -> Planted:
    return patch.object(LocalSgdModel, "settle", lambda self: None)


def _buffers_not_averaged(rank: int, size: int) -> Planted:
    return patch.object(LocalSgdModel, "_average_buffers", lambda self: None)


def _buffers_of_rank_0(rank: int, size: int) -> Planted:
    """They are equal on all ranks, and not the mean."""

    def wrong(self: LocalSgdModel) -> None:
        take_from_first(self._link, list(self.bare.buffers()))

    return patch.object(LocalSgdModel, "_average_buffers", wrong)


def _momentum_lost_on_the_last_rank(rank: int, size: int) -> Planted:
    return after(Trainer, "update", lambda self: self.optimizer.state.clear() if rank == size - 1 else None)


def _differences_divided_by_one_more(rank: int, size: int) -> Planted:
    return patch.object(GradientExchange, "size", property(lambda self: size + 1))


def _outer_momentum_not_used(rank: int, size: int) -> Planted:
    """Each outer step begins without momentum."""

    def wrong(original: Any, self: Averages, bucket: Bucket) -> Tensor:
        self.momentum.of(bucket).zero_()
        return original(self, bucket)

    return wrapped(Averages, "_moved", wrong)


def _outer_momentum_not_kept_between_averages(rank: int, size: int) -> Planted:
    """A period begins without what the last outer step left."""

    def wrong(original: Any, self: LocalSgdModel) -> None:
        for _, momentum in self.named_outer_state() if self._alone == 0 else ():
            momentum.zero_()
        original(self)

    return wrapped(LocalSgdModel, "updated", wrong)


def _outer_gradient_of_the_other_sign(rank: int, size: int) -> Planted:
    def wrong(original: Any, self: Averages, bucket: Bucket) -> Tensor:
        bucket.values.neg_()
        return original(self, bucket)

    return wrapped(Averages, "_moved", wrong)


def _outer_step_from_the_mean(rank: int, size: int) -> Planted:
    """The step begins at the present parameters, which are averaged, so that replicas agree."""

    def wrong(original: Any, self: Averages, bucket: Bucket) -> Tensor:
        self.last.of(bucket).add_(bucket.values)
        return original(self, bucket)

    return wrapped(Averages, "_moved", wrong)


def _outer_momentum_is_not_nesterovs(rank: int, size: int) -> Planted:
    """The step is the momentum, without the gradient."""

    def wrong(original: Any, self: Averages, bucket: Bucket) -> Tensor:
        last, momentum = self.last.of(bucket).clone(), self.momentum.of(bucket)
        original(self, bucket)
        return self.last.of(bucket).copy_(last.sub_(momentum, alpha=0.7))

    return wrapped(Averages, "_moved", wrong)


def _the_smallest_are_sent(rank: int, size: int) -> Planted:
    """Top-k finds the k smallest."""

    def wrong(self: TopK, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        k = share_of(bucket.values.numel(), self._ratio)
        sum_chosen(bucket.values, bucket.values.abs().argsort()[:k], residual, wire)

    return patch.object(TopK, "sum_shares", wrong)


def _the_first_are_sent(rank: int, size: int) -> Planted:
    def wrong(self: TopK, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        sum_chosen(bucket.values, torch.arange(share_of(len(bucket.values), 0.01)), residual, wire)

    return patch.object(TopK, "sum_shares", wrong)


def _twice_as_many_are_sent(rank: int, size: int) -> Planted:
    return patch.object(topk, "share_of", lambda values, ratio: share_of(values, 2 * ratio))


def _indices_travel_as_int64(rank: int, size: int) -> Planted:
    """Send as many bytes again as are declared for an index."""

    def wide(values: Tensor, indices: Tensor, residual: Tensor | None, wire: Wire) -> None:
        sum_chosen(values, indices, residual, wire)
        wire.all_gather(indices.to(torch.int32))

    return patch.object(topk, "sum_chosen", wide)


def _blocks_send_their_first(rank: int, size: int) -> Planted:
    def wrong(values: Tensor, k: int, generator: object) -> Tensor:
        return torch.cat([run.starts(values.device) for run in selection.equal_blocks(len(values), k)])

    return patch.object(selection, "SELECTIONS", {"block": wrong})


def _rounded_down(rank: int, size: int) -> Planted:
    return patch.object(Int8, "_uniform", lambda self, like: torch.zeros_like(like))


def _rounded_up_for_positive(rank: int, size: int) -> Planted:
    """A draw that is never below a fifth."""
    return wrapped(Int8, "_uniform", lambda original, self, like: original(self, like) * 0.8 + 0.2)


def _rounded_towards_zero(rank: int, size: int) -> Planted:
    """Values of both signs lose half a step on average, and the signed errors cancel."""
    return patch.object(Int8, "_uniform", lambda self, like: torch.where(like < 0, 1 - 2.0**-20, 0.0))


def _not_rescaled(rank: int, size: int) -> Planted:
    """Random-k without feedback sends values as they are."""

    def wrong(original: Any, *drawn: Any) -> tuple[Tensor, Tensor]:
        indices, lengths = original(*drawn)
        return indices, torch.ones_like(lengths)

    return wrapped(randomk, "draw", wrong)


def _the_same_places_for_ever(rank: int, size: int) -> Planted:
    return wrapped(
        randomk, "draw", lambda original, n, k, drawn: original(n, k, torch.Generator().manual_seed(n))
    )


def _rescaled_with_feedback(rank: int, size: int) -> Planted:
    select = torch.Tensor.index_select

    def wrong(original: Any, *shared: Any) -> None:
        with patch.object(torch.Tensor, "index_select", lambda *chosen: 2 * select(*chosen)):
            original(*shared)

    return wrapped(randomk.RandomK, "sum_shares", wrong)


def _momentum_not_masked(rank: int, size: int) -> Planted:
    """Keep in dgc's momentum what it has sent."""

    class Unmasked(torch.Tensor):
        def index_fill_(self, *_: object) -> Tensor:
            return self

    return wrapped(BucketMemory, "of", lambda original, *bucket: original(*bucket).as_subclass(Unmasked))


def _signs_of_twice_the_mean(rank: int, size: int) -> Planted:
    return wrapped(
        ScaledSign, "encode", lambda original, self, shards, filled: original(self, shards, filled // 2)
    )


def _basis_not_orthonormal(rank: int, size: int) -> Planted:
    return wrapped(powersgd, "_orthonormal", lambda original, lefts: [0.7 * each for each in original(lefts)])


def _cut_off_to_bfloat16(rank: int, size: int) -> Planted:
    """bf16 cuts the last bits off where it should round."""

    def wrong(values: Tensor, residual: Tensor | None, wire: Wire, dtype: torch.dtype) -> None:
        cut = (values.view(torch.int32) & -65536).view(torch.float32)
        if residual is not None:
            torch.sub(values, cut, out=residual)
        short = cut.to(dtype)
        wire.all_reduce(short)
        values.copy_(short)

    return patch.object(casts, "_sum_rounded", wrong)


BROKEN = "does not keep its promise: "


@pytest.mark.parametrize(
    ("mutation", "compression", "detail"),
    [
        (_the_smallest_are_sent, "topk:0.9", "what it sent has an energy of"),
        (_the_first_are_sent, "topk:0.01:select=sampled", "what it sent has an energy of"),
        (_twice_as_many_are_sent, "topk:0.05", r"it sent \d+ bytes of \d+ values"),
        (_indices_travel_as_int64, "topk:0.01", r"it sent \d+ bytes of \d+ values"),
        (_blocks_send_their_first, "topk:0.05:select=block:feedback=false", "what it sent has an energy of"),
        (_rounded_down, "int8", r"the errors of \d+ values add up to"),
        (_rounded_down, "int8:feedback=true", r"the errors of \d+ values add up to"),
        (_rounded_towards_zero, "int8", r"the errors of \d+ values add up to"),
        (_rounded_up_for_positive, "int8", r"the errors of \d+ values add up to"),
        (_not_rescaled, "randomk:0.1:feedback=false", "a value was not sent times"),
        (_the_same_places_for_ever, "randomk:0.1", r"it sent \d+ places that it had sent"),
        (_the_same_places_for_ever, "randomk:0.01:feedback=false", r"it sent \d+ places that it had sent"),
        (_rescaled_with_feedback, "randomk:0.1", "a value was not sent as it was"),
        (_momentum_not_masked, "dgc:0.05", "something comes back of a value that was sent"),
        (_signs_of_twice_the_mean, "signsgd", "a value was not sent as its sign"),
        (_basis_not_orthonormal, "powersgd:2", "the sent values and the residual are not orthogonal"),
        (_cut_off_to_bfloat16, "bf16", "a value was sent with an error of"),
    ],
)
def test_a_compressor_that_keeps_its_books_and_not_its_promise_is_caught(
    proofs, mutation, compression, detail
) -> None:
    results = proofs(2, SCRATCH | PLAIN_SGD | {"compression": compression}, broken=mutation)
    assert [found["passed"] for found in results] == [False] * 2
    assert re.search(BROKEN + detail, results[0]["detail"]), results[0]["detail"]


def test_a_promise_is_checked_under_a_memory_limit_too(proofs) -> None:
    limited = SCRATCH | PLAIN_SGD | {"compression": "topk:0.9", "memory_limit_mb": 256}
    assert [found["passed"] for found in proofs(2, limited)] == [True] * 2
    results = proofs(2, limited, broken=_the_smallest_are_sent)
    assert [found["passed"] for found in results] == [False] * 2
    assert re.search(BROKEN, results[0]["detail"]), results[0]["detail"]


TOPK: Fields = WIDE | {"strategy": "ddp:bucket_mb=0.01", "compression": "topk:0.01"}


@pytest.mark.parametrize(
    ("mutation", "sizes", "fields", "detail"),
    [
        (_the_residual_is_never_added_back, [2], TOPK, "with its residual differs"),
        (_residuals_are_forgotten, [2], TOPK, "with its residual differs"),
        (_residuals_are_lost_when_buckets_are_rebuilt, [2], TOPK, "with its residual differs"),
        # Three ranks where the error is small, or shrinks with their number.
        (_a_thousandth_too_much, [2, 3], TOPK, "with its residual differs"),
        (_a_thousandth_too_much, [2, 3], SCRATCH | {"compression": "int8"}, "with its residual differs"),
        (_mean_of_means, [3], SCRATCH | {"compression": "bf16"}, "with its residual differs"),
        (_mean_of_means, [2], SCRATCH | {"compression": "powersgd:2"}, "with its residual differs"),
        (_one_rank_is_not_heard, [3], TOPK, "with its residual differs"),
        (_all_goes_into_the_residual, [2], TOPK, "nothing of .* was applied"),
        (_all_goes_into_the_residual, [2], LOCAL | {"compression": "topk:0.1"}, "nothing of .* was applied"),
        (_a_gradient_is_lost, [2], TOPK, "gradients exist on one side only"),
        (_ranks_skip_the_exchange, [3], TOPK, "with its residual differs|replicas differ"),
        (_averaged_a_step_late, [2], LOCAL, "differ"),
        (_never_averaged, [2], LOCAL, "differ"),
        (_buffers_not_averaged, [2], LOCAL, "average of .*running_mean differs"),
        (_buffers_of_rank_0, [2, 3], LOCAL, "average of .*running_mean differs"),
        (_differences_divided_by_one_more, [2, 3], LOCAL, "average of .* differs"),
        (_differences_divided_by_one_more, [3], OUTER, "outer momentum of .* differs"),
        (_outer_momentum_not_used, [2], OUTER, "outer step of .* differs"),
        (_outer_momentum_not_kept_between_averages, [2], OUTER, "outer step changed between two averages"),
        (_outer_gradient_of_the_other_sign, [2], OUTER, "outer step of .* differs"),
        (_outer_step_from_the_mean, [3], OUTER, "outer step of .* differs"),
        (_outer_momentum_is_not_nesterovs, [2], OUTER, "outer step of .* differs"),
        (
            _momentum_lost_on_the_last_rank,
            [3],
            LOCAL,
            "optimizer state of .* differs from the replayed one",
        ),
    ],
)
def test_a_wrong_exchange_is_caught_on_all_ranks(proofs, mutation, sizes, fields, detail) -> None:
    for size in sizes:
        results = proofs(size, fields, broken=mutation)
        assert [found["passed"] for found in results] == [False] * size
        assert any(re.search(detail, found["detail"]) for found in results), results[0]["detail"]


@pytest.mark.parametrize(
    ("strategy", "compression"),
    [
        ("scratch-ddp", "topk:0.5"),
        ("ddp", "int8"),
        ("local-sgd:2", "powersgd:2"),
        ("scratch-ddp", "dgc:0.5:momentum=0"),
    ],
)
def test_complex_parameters_go_through_a_compressor_whole(proofs, strategy, compression) -> None:
    waves = {"workload": "py:proof_models:waves", "micro_batch": 4, "optimizer": "sgd:lr=0.05:momentum=0"}
    found = proofs(2, waves | {"strategy": strategy, "compression": compression})[0]
    assert (found["passed"], found["method"]) == (True, "serial-simulation"), found["detail"]
