"""What in a user's model may be why its proof failed, though the strategy under test is right."""

from __future__ import annotations

from itertools import islice

from harness.worker.cell_setup import CellSetup
from harness.worker.sampler import batch_print
from harness.worker.seeds import seed_step
from workloads.catalog import WORKLOADS, facts
from workloads.data import POOL


def own_code_cause(setup: CellSetup) -> str:
    """A clause for the end of a failed proof; empty for a model of ours.

    Changes torch's, numpy's and Python's random state.
    """
    if not facts(WORKLOADS.parse(setup.cell.workload)).own_code:
        return ""
    if not data_follow_generator(setup):
        return (
            "; the batches of synthetic(generator, samples) do not follow the generator that it is given: "
            "draw them from that generator alone"
        )
    return (
        "; a model that draws from another generator than those of torch, numpy and random, "
        "or keeps state outside of its parameters and buffers, cannot be checked"
    )


def data_follow_generator(setup: CellSetup) -> bool:
    """Whether `synthetic` gives the same batches for the same generator, whatever the global random state."""
    if not setup.cell.synthetic:
        return True
    workload = setup.workload()
    drawn = set()
    for state in range(2):
        seed_step(setup.cell.seed, state, setup.replica)
        batches = islice(setup.batches(workload, setup.replica), POOL)
        drawn.add(tuple(batch_print(batch) for batch in batches))
    return len(drawn) == 1
