"""Checks of what compressors promise of an exchange (`strategies.compression.promise`), on every rank."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import TypeVar

import torch
from torch import Tensor

from harness.worker.proof.comparison import ProofFinding
from strategies.collectives.wire import Wire
from strategies.compression.base import Compressor, State
from strategies.compression.promise import (
    Chosen,
    CompressorPromise,
    Forgotten,
    Largest,
    LargestOfBlocks,
    Projection,
    RandomPlaces,
    Rounded,
    ScaledSigns,
    Unbiased,
    UnbiasedLevels,
    WireBytes,
)
from strategies.exchange.buckets import Bucket

T = TypeVar("T")

ROUNDING = 1e-4
"""Relative error that sums and differences in single precision are allowed."""
FALSE_ALARM = 1e-12
"""Probability with which a mean of random roundings that are right is called biased, at most."""


@dataclass(slots=True, kw_only=True)
class Repeats:
    """Counts places that an exchange sent and the exchange before it had sent as well, over all buckets."""

    places: dict[int, Tensor] = field(default_factory=dict)
    """For each bucket, a mask (values,) of the places that its last exchange sent."""
    again: int = 0
    expected: float = 0.0
    """The mean of `again` for places that are drawn at random, or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """One exchange of one bucket on this rank; vectors are (values,), in host memory."""

    values: Tensor
    """Input of the exchange: the share with the residual of earlier steps."""
    sent: Tensor
    """The part of the input that was sent for this rank."""
    sums: Tensor
    """Result on all ranks."""
    residual: Tensor
    """Residual that the next exchange will add to this rank's share; zeros without feedback."""
    wire_bytes: int
    rank: int
    size: int
    before: int
    """Number of exchanges of the bucket before this one."""
    bucket: int = 0
    repeats: Repeats = field(default_factory=Repeats)
    """The places of all exchanges that one witness has seen."""

    @property
    def count(self) -> int:
        return self.values.numel()


class Witness(Compressor):
    """Delegates to another compressor, and keeps its inputs and outputs while `watching` is set.

    A memory limit of the cell does not count what it keeps (`beside_the_limit`).
    """

    def __init__(self, inner: Compressor, *, after_ramp: bool) -> None:
        """`after_ramp`: every bucket has been exchanged at least `ramp_steps` times."""
        super().__init__(feedback=inner.feedback, ramp_steps=inner.ramp_steps)
        self.inner = inner
        self.watching = False
        self._seen: list[Exchanged] = []
        self._earlier = inner.ramp_steps if after_ramp else 0
        self._counts: Counter[int] = Counter()
        self._repeats = Repeats()

    def taken(self) -> list[Exchanged]:
        """Return the exchanges that were seen since the last call."""
        seen, self._seen = self._seen, []
        return seen

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        before = self._earlier + self._counts[bucket.index]
        self._counts[bucket.index] += 1
        if not self.watching or residual is None:
            self.inner.sum_shares(bucket, residual, wire)
            return
        values = beside_the_limit(bucket.values)
        counting = _CountingWire(wire)
        self.inner.sum_shares(bucket, residual, counting)
        unsent = beside_the_limit(residual)
        sent = torch.sub(values, unsent, out=unsent)
        added = self.inner.carried(bucket.index, residual) if self.feedback else None
        self._seen.append(
            Exchanged(
                values=values,
                sent=sent,
                sums=beside_the_limit(bucket.values),
                residual=torch.zeros(()).expand_as(values) if added is None else beside_the_limit(added),
                wire_bytes=counting.bytes,
                rank=wire.rank,
                size=wire.size,
                before=before,
                bucket=bucket.index,
                repeats=self._repeats,
            )
        )

    def compensate(self, bucket: Bucket, residual: Tensor) -> None:
        self.inner.compensate(bucket, residual)

    def carried(self, bucket_index: int, residual: Tensor) -> Tensor:
        return self.inner.carried(bucket_index, residual)

    def rescale(self, factor: float) -> None:
        self.inner.rescale(factor)

    def state_dict(self) -> State:
        return self.inner.state_dict()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.inner.load_state_dict(state)


def beside_the_limit(vector: Tensor) -> Tensor:
    """Copy a vector (n,) to host memory that a limit on this rank's memory does not count.

    Shared memory is not data of the process (RLIMIT_DATA of getrlimit(2)), and a limit on a GPU leaves the
    host out. So the limit stays the strategy's while its exchange runs on another thread.
    """
    room = torch.frombuffer(mmap.mmap(-1, vector.nbytes), dtype=vector.dtype)
    return room.copy_(vector)


class _CountingWire:
    """A wire that counts the bytes that this rank hands to it."""

    def __init__(self, wire: Wire) -> None:
        self.rank, self.size = wire.rank, wire.size
        self.bytes = 0
        self.all_reduce, self.largest = self._counted(wire.all_reduce), self._counted(wire.largest)
        self.all_gather, self.all_to_all = self._counted(wire.all_gather), self._counted(wire.all_to_all)

    def _counted(self, call: Callable[[Tensor], T]) -> Callable[[Tensor], T]:
        def counting(values: Tensor) -> T:
            self.bytes += values.nbytes
            return call(values)

        return counting


def compare_promises(
    compression: str, promises: Sequence[CompressorPromise], seen: Sequence[Exchanged]
) -> Iterator[ProofFinding]:
    """Check each promise of a compressor in each exchange whose values are finite, on all ranks."""
    for promise in promises:
        for exchanged in seen:
            # The values of another rank may have overflowed, and then the sums are not finite either.
            if exchanged.values.isfinite().all() and exchanged.sums.isfinite().all():
                what, difference, bound = _check(promise, exchanged)
                what = f"{compression} does not keep its promise: {what}"
                yield ProofFinding.within("promise", what, difference, bound)


PromiseCheck = tuple[str, float, float]
"""A sentence for the failure, the difference found, and the bound: the check fails above the bound."""


@singledispatch
def _check(promise: object, exchanged: Exchanged) -> PromiseCheck:
    raise TypeError(f"{promise!r} is not one of the promises in strategies.compression.promise")


@_check.register
def _(promise: WireBytes, exchanged: Exchanged) -> PromiseCheck:
    promised = promise.of(exchanged.count, exchanged.size, exchanged.before)
    what = f"it sent {exchanged.wire_bytes} bytes of {exchanged.count} values, not {promised}"
    return what, abs(exchanged.wire_bytes - promised), 0.0


@_check.register
def _(promise: Largest, exchanged: Exchanged) -> PromiseCheck:
    count = promise.count(exchanged.count, exchanged.before)
    best = exchanged.values.abs().topk(max(1, int(promise.part * count))).values
    return _energy(exchanged, _square(best), f"the {len(best)} largest")


@_check.register
def _(promise: LargestOfBlocks, exchanged: Exchanged) -> PromiseCheck:
    count = promise.count(exchanged.count, exchanged.before)
    length, longer = divmod(exchanged.count, count)
    cut = longer * (length + 1)
    energies = exchanged.values.double().square()
    least = sum(
        float(run.view(-1, size).amax(dim=1).sum())
        for run, size in ((energies[:cut], length + 1), (energies[cut:], length))
        if len(run)
    )
    return _energy(exchanged, least, f"the largest of {count} blocks")


def _energy(exchanged: Exchanged, least: float, of: str) -> PromiseCheck:
    sent = _square(exchanged.sent)
    what = f"what it sent has an energy of {sent:.3g}, and {of} have {least:.3g}"
    return what, least - sent, ROUNDING * least


@_check.register
def _(promise: Chosen, exchanged: Exchanged) -> PromiseCheck:
    count = promise.count(exchanged.count, exchanged.before)
    places = exchanged.sent.nonzero()[:, 0]
    if len(places) > count:
        return f"it sent {len(places)} of {exchanged.count} values, not {count}", len(places), count
    values, sent = exchanged.values[places].double(), exchanged.sent[places].double()
    length = exchanged.count / count if promise.scaled else 1.0
    low, high = math.floor(length) * values.abs(), math.ceil(length) * values.abs()
    signed = sent * values.sign()
    off = torch.maximum(low - signed, signed - high) / values.abs().clamp(min=1e-30)
    worst = float(off.max()) if len(off) else 0.0
    times = f"times {length:.4g}" if promise.scaled else "as it was"
    return f"a value was not sent {times}", worst, ROUNDING * math.ceil(length)


@_check.register
def _(promise: RandomPlaces, exchanged: Exchanged) -> PromiseCheck:
    """Random places repeat as often as here with a probability of at most exp(-difference) (Chernoff)."""
    repeats, sent = exchanged.repeats, exchanged.sent != 0
    earlier = repeats.places.get(exchanged.bucket)
    repeats.places[exchanged.bucket] = sent
    if earlier is not None and len(earlier) == len(sent):
        count = promise.count(exchanged.count, exchanged.before)
        repeats.again += int((sent & earlier).sum())
        repeats.expected += count / (exchanged.count // count)
    again, expected = repeats.again, repeats.expected
    what = f"it sent {again} places that it had sent in the exchange before, by chance about {expected:.3g}"
    exponent = again * math.log(again / expected) - again + expected if again > expected else 0.0
    return what, exponent, -math.log(FALSE_ALARM)


@_check.register
def _(promise: Forgotten, exchanged: Exchanged) -> PromiseCheck:
    if promise.count(exchanged.count, exchanged.before) >= exchanged.count:
        return "", 0.0, 0.0
    back = exchanged.residual[exchanged.sent != 0].abs()
    what = "something comes back of a value that was sent"
    return what, float(back.max()) if len(back) else 0.0, 0.0


@_check.register
def _(promise: UnbiasedLevels, exchanged: Exchanged) -> PromiseCheck:
    largest = _largest_of_block(exchanged.values, promise.block)
    steps, used = _steps(largest, promise), largest > 0
    length = promise.block * math.ceil(exchanged.count / (exchanged.size * promise.block))
    own = slice(exchanged.rank * length, (exchanged.rank + 1) * length)
    largest = _largest_of_block(exchanged.sums, promise.block)[own]
    steps[own] += _steps(largest, promise)
    used[own] |= largest > 0
    return _without_bias(exchanged, steps, used)


@_check.register
def _(promise: Unbiased, exchanged: Exchanged) -> PromiseCheck:
    values = exchanged.values.double()
    steps = promise.step(values.abs())
    off = (exchanged.sent.double() - values).abs() - steps
    worst = float((off / values.abs().clamp(min=1e-30)).max())
    if worst > ROUNDING:
        return "a value was sent with an error of more than a step", worst, ROUNDING
    return _without_bias(exchanged, steps, steps > 0)


def _without_bias(exchanged: Exchanged, steps: Tensor, used: Tensor) -> PromiseCheck:
    """Check that the errors of the `used` values add up to about 0, as they are and times the signs of the
    values.

    Rounding towards zero gives errors of both signs, whose plain sum can be small.

    Each error is one of two numbers that lie one step apart. By chance, each sum exceeds `allowed` with a
    probability of at most half of FALSE_ALARM (Azuma 1967).
    """
    errors = ((exchanged.sent - exchanged.values).double() / steps)[used]
    plain, signed = float(errors.sum()), float((errors * exchanged.values[used].sign()).sum())
    allowed = math.sqrt(len(errors) * math.log(4 / FALSE_ALARM) / 2)
    what = (
        f"the errors of {len(errors)} values add up to {plain:.3g} steps, and to {signed:.3g} times the "
        f"signs of the values; by chance to {allowed:.3g}"
    )
    return what, max(abs(plain), abs(signed)), allowed + ROUNDING * len(errors)


def _largest_of_block(values: Tensor, length: int) -> Tensor:
    """Return the largest |x| of each value's block."""
    padding = -len(values) % length
    blocks = torch.nn.functional.pad(values.double().abs(), (0, padding)).view(-1, length)
    return blocks.amax(dim=1).repeat_interleave(length)[: len(values)]


def _steps(largest: Tensor, promise: UnbiasedLevels) -> Tensor:
    return (largest / promise.levels).clamp(min=promise.smallest_step)


@_check.register
def _(promise: ScaledSigns, exchanged: Exchanged) -> PromiseCheck:
    length = promise.unit * math.ceil(exchanged.count / (exchanged.size * promise.unit))
    worst = 0.0
    shards = zip(torch.split(exchanged.values, length), torch.split(exchanged.sent, length), strict=True)
    for shard, (values, sent) in enumerate((a.double(), b.double()) for a, b in shards):
        if shard == exchanged.rank:
            continue
        signs = torch.where(values >= 0, 1.0, -1.0)
        mean = float(values.abs().mean())
        # What was sent is a difference: its rounding is a share of the larger of its terms.
        # The rounding of a subnormal number is as large as that of the smallest normal number.
        size = float(values.abs().max()) + mean + torch.finfo(torch.float32).tiny
        worst = max(worst, float((sent - mean * signs).abs().max()) / size)
    return "a value was not sent as its sign times the mean of its shard", worst, ROUNDING


@_check.register
def _(promise: Projection, exchanged: Exchanged) -> PromiseCheck:
    residual = exchanged.values - exchanged.sent
    product = abs(float((exchanged.sent.double() * residual.double()).sum()))
    what = "the sent values and the residual are not orthogonal"
    return what, product, 10 * ROUNDING * _square(exchanged.values)


@_check.register
def _(promise: Rounded, exchanged: Exchanged) -> PromiseCheck:
    error = (exchanged.values - exchanged.sent).abs().double()
    allowed = promise.roundoff * exchanged.values.abs().double() + torch.finfo(torch.float32).tiny
    worst = float((error / allowed).max()) if len(error) else 0.0
    return f"a value was sent with an error of {worst:.3g} of what its type has", worst, 1 + ROUNDING


def _square(values: Tensor) -> float:
    return float(values.double().square().sum())
