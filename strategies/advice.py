"""The strategies that an error names as the way out: the one place that chooses them."""

from __future__ import annotations

ANY_MODEL = ("ddp", "scratch-ddp")
"""They take every model whole, whatever its parameters and gradients are like."""
SPARSE_GRADIENTS = f"use {ANY_MODEL[-1]}"
"""The way out where sparse gradients cannot be exchanged or clipped."""
ANY_SPLIT = "fsdp"
"""It splits models that stages and tensor parallelism do not."""

WHOLE = f"use {' or '.join(ANY_MODEL)}"
SPLIT = f"use {ANY_SPLIT}"
WITH_UNUSED = tuple(f"{name}:find_unused=true" for name in ANY_MODEL)
"""They go on without the gradient of a parameter that a step does not use; the last one over any exchange."""
