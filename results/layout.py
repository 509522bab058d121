"""What a strategy may know of a model without importing the workload it came from."""

from __future__ import annotations

import msgspec


class ModelLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a model, by the names of its modules."""

    blocks: tuple[str, ...] = ()
    """The repeated blocks in the order of the forward pass: the unit of activation checkpointing."""
