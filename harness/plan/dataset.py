"""What planning must know of a data set: the user's file behind it, and whether it fits what is trained."""

from __future__ import annotations

from collections.abc import Sequence

from results.errors import UsageError
from results.unknown import Unknown
from workloads.catalog import DATASETS, WORKLOADS, facts


def data_file(dataset: str) -> str | None:
    """The path in `text:PATH`, as written; None for a data set that is not a user's file."""
    spec = DATASETS.parse(dataset)
    positional = DATASETS.entries[spec.name].positional
    if positional is None or spec.positional == positional.default:
        return None
    return str(spec.positional)


def require_fit(dataset: str, workloads: Sequence[str]) -> None:
    """Raise UsageError if no workload takes the data set; where some do, or may, the others become skips."""
    name = DATASETS.parse(dataset).name
    takes = {workload: facts(WORKLOADS.parse(workload)).datasets for workload in workloads}
    refusing = {
        workload: names
        for workload, names in takes.items()
        if not isinstance(names, Unknown) and name not in names
    }
    if len(refusing) == len(takes):
        what = "; ".join(f"{workload} takes {', '.join(names)}" for workload, names in refusing.items())
        raise UsageError(f"--dataset {name} fits none of the workloads: {what}")
