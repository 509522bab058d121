"""What a compressor promises of one exchange of one bucket, beside the law of conservation.

The law says that nothing is lost, not that what is sent is worth sending. A compressor's facts list what it
promises (`CompressorFacts.promises`), and the proof checks it on the gradients of the cell, on every rank
(`harness/worker/promised.py`). What was sent for a rank is its values less its residual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

Count: TypeAlias = Callable[[int, int], int]
"""(values in the bucket, exchanges of it before this one) to how many of the values a rank sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireBytes:
    """A rank hands so many bytes to collectives."""

    of: Callable[[int, int, int], int]
    """(values in the bucket, ranks that exchange, exchanges of it before this one) to bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """What is sent has at least the energy (sum of squares) of the `part * count` largest values."""

    count: Count
    part: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestOfBlocks:
    """What is sent has at least the energy of the largest value of each of `count` blocks in a row, whose
    lengths differ by at most one, the longer ones first."""

    count: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """At most `count` values are sent, each as it is, or, if `scaled`, times values / count, rounded up or
    down."""

    count: Count
    scaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten:
    """Where a value was sent, and not all of `count`, nothing of it comes back in a later step."""

    count: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class UnbiasedLevels:
    """Blocks of `block` values are rounded up or down to multiples of max |x| / `levels`, without bias; the
    sum of a rank's shard (its part of the bucket, whole blocks) is rounded once more in the same way."""

    block: int
    levels: int
    smallest_step: float = 0.0
    """What a step is at least, of a block of smaller values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledSigns:
    """A rank's values in the shard of another rank are sent as their signs times the mean of |x| there;
    shards are multiples of `unit` values."""

    unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """What is sent and what is left are orthogonal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """Each value is sent with a relative error of at most `roundoff`."""

    roundoff: float


CompressorPromise: TypeAlias = (
    WireBytes
    | Largest
    | LargestOfBlocks
    | Chosen
    | Forgotten
    | UnbiasedLevels
    | ScaledSigns
    | Projection
    | Rounded
)
