"""What in a user's model may be why its proof failed, though the strategy under test is right."""

from __future__ import annotations

from itertools import islice

from harness.worker.cell.sampler import batch_print
from harness.worker.cell.setup import CellSetup, seed_step
from workloads.catalog import WORKLOADS, facts
from workloads.data import POOL
from workloads.datasets.facts import DATASETS, Own


def own_code_cause(setup: CellSetup) -> str:
    """A clause for the end of a failed proof; empty for a model of ours.

    Changes torch's, numpy's and Python's random state.
    """
    if not facts(WORKLOADS.parse(setup.cell.workload)).own_code:
        return ""
    if not data_are_repeated(setup):
        if setup.cell.synthetic:
            return (
                "; the batches of synthetic(generator, samples) do not follow the generator that it is "
                "given: draw them from that generator alone"
            )
        return "; data= gives other samples when it is read again: seed what is random in them by their index"
    return (
        "; a model that draws from another generator than those of torch, numpy and random, "
        "or keeps state outside of its parameters and buffers, cannot be checked"
    )


def data_are_repeated(setup: CellSetup) -> bool:
    """Whether a user's data give the same batches again, whatever the global random state."""
    if DATASETS.facts(setup.cell.dataset).takes not in (None, Own.takes):
        return True
    workload = setup.whole_workload()
    drawn = set()
    for state in range(2):
        seed_step(setup.cell.seed, state, setup.replica)
        batches = islice(setup.batches(workload, setup.replica), POOL)
        drawn.add(tuple(batch_print(batch) for batch in batches))
    return len(drawn) == 1
