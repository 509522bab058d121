"""The GPU-hours of jobs before they are submitted: their sums, and the refusal of more than are allowed."""

from __future__ import annotations

from collections.abc import Sequence

from harness.jobs.documents import Document
from results.errors import UsageError


def require_within_budget(documents: Sequence[Document], gpu_hours_allowed: float | None) -> None:
    """Raises UsageError if the jobs may take more GPU-hours than are allowed (None: any number)."""
    if gpu_hours_allowed is None:
        return
    expected, most = gpu_hours(documents)
    if expected is None or most is None:
        raise UsageError(
            "--max-gpu-hours cannot be checked: the site gives whole nodes (exclusive), and its profile "
            "does not say how many GPUs a node has; add gpus_per_node to the profile"
        )
    if most > gpu_hours_allowed:
        raise UsageError(
            f"--max-gpu-hours {gpu_hours_allowed:g}: the jobs may take {most:.2f} by their time limits "
            f"({expected:.2f} expected); ask for fewer sizes or repeats, a shorter --time, or more "
            f"hours. Nothing was submitted"
        )


def gpu_hours(documents: Sequence[Document]) -> tuple[float | None, float | None]:
    """Expected and at most, of all jobs; None if that of one is not known."""
    expected = [document.gpu_hours_expected for document in documents]
    most = [document.gpu_hours_at_most for document in documents]
    return _sum(expected), _sum(most)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
