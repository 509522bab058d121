"""How a configuration trains, beside plain data parallelism: as its facts say when it runs."""

from __future__ import annotations

import msgspec

from results.spec import split


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """What the facts of a strategy and of a collective say, for those who compare throughputs."""

    differences: tuple[str, ...] = ()
    """From plain data parallelism, as verbs: `averages every 4 steps`."""
    averages_all_gradients: bool = True
    """Whether all replicas average their gradients in each step."""
    exchanges_by_nodes: bool | msgspec.UnsetType = msgspec.UNSET
    """Whether the exchange goes inside of nodes and across them; unset in older records."""


def training_before(strategy: str) -> Training:
    """Of a run from before runs recorded it: by the names that there were (results 0.1)."""
    name, period, options = split(strategy)
    gathered = options.get("params", "fp32")
    differences = (f"gathers parameters in {gathered}",) if gathered != "fp32" else ()
    if name != "local-sgd" or period is None:
        return Training(differences=differences)
    every = f"averages every {period} step{'' if period == '1' else 's'}"
    return Training(differences=(every, *differences), averages_all_gradients=False)


def by_nodes_before(collective: str) -> bool:
    """Of a run from before runs recorded it: by the only such collective that there was (results 0.1)."""
    return split(collective)[0] == "hierarchical"
