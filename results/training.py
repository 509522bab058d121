"""How a configuration trains, beside plain data parallelism: as its strategy says when it runs."""

from __future__ import annotations

import msgspec

from results.spec import split


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What a strategy says of its training, for those who compare throughputs."""

    differences: tuple[str, ...] = ()
    """From plain data parallelism, as verbs: `averages every 4 steps`."""
    averages_all_gradients: bool = True
    """Whether all replicas average their gradients in each step."""


def training_before(strategy: str) -> Training:
    """Of a run from before runs recorded it: by the names that there were (results 0.1)."""
    name, period, options = split(strategy)
    gathered = options.get("params", "fp32")
    differences = (f"gathers parameters in {gathered}",) if gathered != "fp32" else ()
    if name != "local-sgd" or period is None:
        return Training(differences=differences)
    every = f"averages every {period} step{'' if period == '1' else 's'}"
    return Training(differences=(every, *differences), averages_all_gradients=False)
