"""From a compressor's spec text to the compressor."""

from __future__ import annotations

from collections.abc import Callable

from results.spec import Spec
from strategies.catalog import COMPRESSIONS
from strategies.compression.base import Compressor
from strategies.compression.dense import Dense


def build_compressor(text: str, *, seed: int, rank: int) -> Compressor:
    """The compressor that `text` names. What ranks draw alike follows from `seed` alone; what each draws
    for itself from `rank` as well. Raises SpecError for one that does not exist."""
    spec = COMPRESSIONS.parse(text)
    return _BUILDERS[spec.name](spec, seed, rank)


Builder = Callable[[Spec, int, int], Compressor]

_BUILDERS: dict[str, Builder] = {
    "none": lambda spec, seed, rank: Dense(),
}
