"""The promises of a compressor for one exchange of one bucket, in addition to the law of conservation.

The law says that no value is lost, not that the sent values are worth sending. A compressor's facts list what
it promises (`CompressorFacts.promises`), and the proof checks it on the gradients of the cell, on every rank
(`harness/worker/proof/compressor_promises.py`). What was sent for a rank is its values less its residual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from strategies.promise import require_field, whole_number

Count: TypeAlias = Callable[[int, int], int]
"""(values in the bucket, exchanges of it before this one) to the number of values that a rank sends."""


def _number(value: object) -> bool:
    return type(value) in (int, float)


_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "of": (callable, "a function"),
    "count": (callable, "a function"),
    "step": (callable, "a function"),
    "part": (lambda part: _number(part) and 0 < part <= 1, "a number above 0 and at most 1"),
    "scaled": (lambda scaled: isinstance(scaled, bool), "True or False"),
    "block": (lambda block: whole_number(block, 1), "a whole number of at least 1"),
    "levels": (lambda levels: whole_number(levels, 1), "a whole number of at least 1"),
    "unit": (lambda unit: whole_number(unit, 1), "a whole number of at least 1"),
    "smallest_step": (lambda step: _number(step) and step >= 0, "a number of at least 0"),
    "roundoff": (lambda roundoff: _number(roundoff) and roundoff >= 0, "a number of at least 0"),
}
"""The condition for the value of each field, and its words."""


class _Promise:
    """A promise, which raises SpecError for an invalid value of a field."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]  # Each subclass is a dataclass.
            allowed, words = _ALLOWED[field.name]
            require_field(self, field.name, allowed(getattr(self, field.name)), words)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireBytes(_Promise):
    """A rank hands `of(...)` bytes to collectives."""

    of: Callable[[int, int, int], int]
    """(values in the bucket, ranks that exchange, exchanges of it before this one) to bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest(_Promise):
    """The sent values have at least the energy (sum of squares) of the `part * count` largest values."""

    count: Count
    part: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestOfBlocks(_Promise):
    """The sent values have at least the energy of the largest value of each of `count` blocks in a row, whose
    lengths differ by at most one, the longer ones first."""

    count: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen(_Promise):
    """At most `count` values are sent, each as it is, or, if `scaled`, times values / count, rounded up or
    down."""

    count: Count
    scaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPlaces(_Promise):
    """The places of `count` values are drawn anew in each exchange, each from about values / count places."""

    count: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten(_Promise):
    """A value that was sent does not come back in a later step, unless `count` is all of the values."""

    count: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class UnbiasedLevels(_Promise):
    """Blocks of `block` values are rounded up or down to multiples of max |x| / `levels`, without bias; the
    sum of a rank's shard (its part of the bucket, whole blocks) is rounded once more in the same way."""

    block: int
    levels: int
    smallest_step: float = 0.0
    """The least step, for a block of smaller values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbiased(_Promise):
    """Each value is rounded without bias, up or down to one of two numbers that lie a step apart.

    For powers of two (natural compression): `Unbiased(step=lambda size: 2.0 ** size.log2().floor())`.
    """

    step: Callable[[Any], Any]
    """The absolute values, a tensor (n,) of float64, to the steps, (n,): 0 where a value is sent as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledSigns(_Promise):
    """A rank's values in the shard of another rank are sent as their signs times the mean of |x| there;
    shards are multiples of `unit` values."""

    unit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection(_Promise):
    """The sent values and the residual are orthogonal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded(_Promise):
    """Each value is sent with a relative error of at most `roundoff`."""

    roundoff: float


CompressorPromise: TypeAlias = (
    WireBytes
    | Largest
    | LargestOfBlocks
    | Chosen
    | RandomPlaces
    | Forgotten
    | UnbiasedLevels
    | Unbiased
    | ScaledSigns
    | Projection
    | Rounded
)
