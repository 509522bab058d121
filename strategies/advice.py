"""The strategies that error messages advise: the one place that chooses them."""

from __future__ import annotations

ANY_MODEL = ("ddp", "scratch-ddp")
"""Strategies that take every model, whatever its parameters and gradients are."""
SPARSE_GRADIENTS = f"use {ANY_MODEL[-1]}"
"""Advice where sparse gradients cannot be exchanged or clipped."""
ANY_PARAMETER = "use scratch-fsdp"
"""Advice where only torch's sharding cannot take a parameter."""
ANY_SPLIT = "fsdp"
"""A strategy that shards models which a pipeline and tensor parallelism cannot split."""

WHOLE = f"use {' or '.join(ANY_MODEL)}"
SPLIT = f"use {ANY_SPLIT}"
WITH_UNUSED = tuple(f"{name}:find_unused=true" for name in ANY_MODEL)
"""Strategies that accept a step without a gradient of some parameter; the last one with any exchange."""
