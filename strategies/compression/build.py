"""From a compressor's spec text to the compressor."""

from __future__ import annotations

from results.registry import load
from strategies.compression.base import Compressor
from strategies.compression.catalog import COMPRESSIONS


def build_compressor(text: str, *, seed: int, rank: int) -> Compressor:
    """The compressor that `text` names. What ranks draw alike follows from `seed` alone; what each draws
    for itself from `rank` as well. Raises SpecError for one that does not exist."""
    facts = COMPRESSIONS.facts(text)
    kind: type[Compressor] = load(facts.compressor)
    return kind.of(facts.spec, seed=seed, rank=rank)
