"""The replay against the strategies' own code: real steps over a group whose operations take modelled time.

Time is a number here: blocks move it when their passes begin, and operations end at a moment of it. So
nothing depends on this machine. What the code of torch and of the strategies decides is real: what is handed
over, when, in which order, and what waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import recorded_world
from recorded_world import Call, RecordedGroup
from test_traffic import BY_OPERATION, terms_of, third_step
from torch import Tensor, nn

from results.groups import GroupLayout
from strategies.catalog import group_layout
from strategies.closed_form.replay import Operation, Work, operations_of, replay
from strategies.closed_form.terms import Piece, Term
from workloads.gpt import GPTShape
from workloads.gpt.model import build_gpt

SHAPE = GPTShape(layers=20, width=16, heads=4, context=8, vocabulary=61, seq=8)
PARTS = SHAPE.parts()
FORWARD_S = 1.0
"""Forward of the model; backward takes twice as long."""
LAYOUT = GroupLayout(replicate=4)
WORK = Work(forward_s=FORWARD_S, backward_s=2 * FORWARD_S)
LATENCY_S = 0.002
LINK = {"fast": 2e6, "even": 5e5, "slow": 8e4}
"""Bytes that a rank sends a second: ddp's messages take about a tenth of the passes, a third, and twice as
long."""


class Clock:
    """Modelled time of one rank and of its link, on which operations are one after another."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.begin()

    def begin(self) -> None:
        self.now = self.free = 0.0
        self.sums: list[tuple[int, float]] = []

    @property
    def end(self) -> float:
        return max(self.now, self.free)

    def seconds(self, operation: str, ranks: int, payload: float) -> float:
        """A sum sends its payload twice, a gathering and a broadcast send all that others lack once."""
        factor = {"sum": 2 * (ranks - 1) / ranks, "all_gather": ranks - 1, "broadcast": 1}[operation]
        return LATENCY_S + factor * payload / self.rate

    def of(self, operation: Operation) -> float:
        kind = BY_OPERATION.get(operation.collective, operation.collective.replace("-", "_"))
        return self.seconds(kind, operation.ranks, operation.payload_bytes)

    def operate(self, call: Call, *, blocks: bool) -> None:
        kind = BY_OPERATION.get(call.operation, call.operation)
        if not blocks:
            self.sums.append((call.payload_bytes, self.now))
        self.free = max(self.now, self.free) + self.seconds(kind, call.ranks, call.payload_bytes)
        if blocks:
            self.now = self.free


@contextmanager
def timed(clocks: Sequence[Clock], strategy: str) -> Iterator[None]:
    """Have every operation take its time. The passes continue during sums of buckets; all others block."""
    note = RecordedGroup._done

    def done(group: RecordedGroup, operation: str, sent: list[Tensor], result: Any) -> Any:
        work = note(group, operation, sent, result)
        blocks = operation != "all_reduce" or "fsdp" in strategy or strategy == "hsdp"
        for clock in clocks:
            clock.operate(group.calls[-1], blocks=blocks)
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedGroup, "_done", done)
        yield


def with_naps(module: nn.Module, clocks: Sequence[Clock]) -> None:
    """Move the clocks by each part's share of the FLOPs when its passes begin."""
    parts = {f"h.{index}": block for index, block in enumerate(PARTS.blocks)} | {"ln_f": PARTS.head}
    for name, part in parts.items():
        seconds = FORWARD_S * part.flops / PARTS.flops

        def nap(*_: Any, seconds: float = seconds) -> None:
            for clock in clocks:
                clock.now += seconds

        def long_nap(*_: Any, seconds: float = seconds) -> None:
            nap(seconds=2 * seconds)

        module.get_submodule(name).register_forward_pre_hook(nap)
        module.get_submodule(name).register_full_backward_pre_hook(long_nap)


def own_step(strategy: str, size: int, *clocks: Clock, **settings: Any) -> None:
    """Take steps of a strategy until the buckets are final; each clock has the last, over its own link."""
    with recorded_world.opened(0, size) as (group, calls), timed(clocks, strategy):
        workload = build_gpt(SHAPE)
        with_naps(workload.module, clocks)

        def begin() -> None:
            calls.clear()
            for clock in clocks:
                clock.begin()

        third_step(0, group, workload, strategy, settings, before_it=begin)
        group.reset()


def replayed(
    terms: list[Term], strategy: str, size: int, clock: Clock, node_size: int | None = None
) -> float:
    operations = operations_of(terms, WORK, group_layout(strategy, size, node_size), size)
    return replay(WORK, operations, clock.of).step_s


STRATEGIES = [
    ("ddp", 4, {}), ("ddp:bucket_mb=0.02", 2, {}), ("ddp:bucket_mb=0.02", 256, {}), ("zero1", 4, {}),
    ("fsdp", 4, {}), ("fsdp", 256, {}), ("fsdp:reshard=false", 4, {}), ("hsdp", 8, {"node_size": 4}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("strategy", "size", "settings"), STRATEGIES)
def test_the_replay_is_within_three_percent_of_the_strategys_own_code(strategy, size, settings) -> None:
    clocks = [Clock(rate) for rate in LINK.values()]
    own_step(strategy, size, *clocks, **settings)
    terms = terms_of(strategy, size, PARTS, micro_batch=4, **settings)
    for clock in clocks:
        assert replayed(terms, strategy, size, clock, **settings) == pytest.approx(clock.end, rel=0.03)
        if clock.sums:
            # With the moments of the buckets as they were, it is the same.
            shares = [(at - FORWARD_S) / (2 * FORWARD_S) for _, at in clock.sums]
            pieces = tuple(
                Piece(payload, share) for (payload, _), share in zip(clock.sums, shares, strict=True)
            )
            recorded = [replace(terms[0], pieces=pieces), *terms[1:]]
            assert replayed(recorded, strategy, size, clock, **settings) == pytest.approx(clock.end, rel=1e-9)


@pytest.mark.parametrize(("strategy", "size"), [("ddp:bucket_mb=0.02", 4), ("fsdp", 4)])
def test_an_operation_that_is_left_out_is_noticed(strategy, size) -> None:
    """Without one of the longest operations the replay is off by what that takes."""
    clock = Clock(LINK["slow"])
    own_step(strategy, size, clock)
    terms = terms_of(strategy, size, PARTS, micro_batch=4)
    longest = max(terms, key=lambda term: max(piece.payload_bytes for piece in term.pieces))
    piece = max(longest.pieces, key=lambda piece: piece.payload_bytes)
    less = replace(
        longest,
        pieces=tuple(each for each in longest.pieces if each is not piece),
        operations=longest.operations - 1,
        payload_bytes=longest.payload_bytes - piece.payload_bytes,
    )
    without = [less if term is longest else term for term in terms]
    missing = clock.of(one_of(longest, piece))
    assert abs(replayed(terms, strategy, size, clock) - clock.end) < 0.2 * missing
    assert clock.end - replayed(without, strategy, size, clock) > 0.8 * missing


def one_of(term: Term, piece: Piece) -> Operation:
    [found] = operations_of([replace(term, pieces=(piece,), operations=1, overlap="none")], WORK, LAYOUT, 4)
    return found
