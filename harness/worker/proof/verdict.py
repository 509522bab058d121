"""Make a Proof of the comparisons, in the words that a reader of the report sees.

`own_code_cause` names what in a user's model may be why its proof failed, though the strategy under test is
right.
"""

from __future__ import annotations

from itertools import islice

from harness.worker.cell.sampler import batch_print
from harness.worker.cell.setup import CellSetup, seed_step
from harness.worker.proof.averages import law_tolerance
from harness.worker.proof.comparison import TOLERANCE
from harness.worker.proof.examination import Examined
from harness.worker.proof.reference import exact_arithmetic, exact_update, summed_terms
from harness.worker.proof.sampled import ELEMENTS, MISSED, PROJECTIONS
from results.cell import Cell
from results.record import Proof
from strategies.catalog import STRATEGIES
from strategies.promise import Promise
from workloads.catalog import WORKLOADS, facts
from workloads.data import POOL
from workloads.datasets.facts import DATASETS, Own


def simulation_verdict(cell: Cell, found: Examined, *, steps: int) -> Proof:
    """Return the proof by a simulation of `steps` steps."""
    findings = found.findings
    if found.failed or not found.agreed:
        return Proof(method="serial-simulation", passed=False, detail=failure(found))
    gradients = [finding for finding in findings if finding.of == "gradient"]
    if findings and not gradients:
        return weaker(
            cell, found.agreed, "the loss scaler left out every step of the simulation: gradients overflowed"
        )
    if not found.exercised:
        return weaker(cell, found.agreed, "no step that was checked ended in an average of parameters")
    where = ", one on a device of each" if found.shared else " on one device"
    return Proof(
        method="serial-simulation",
        passed=True,
        detail=f"{steps} steps of {_replicas(cell)} recomputed{where}; {_rule(cell)}"
        + ("; gradients of an input that blocks share are added block by block" if found.by_blocks else ""),
        max_difference=max((finding.difference for finding in gradients), default=None),
        max_bound=max((finding.bound for finding in gradients), default=None),
    )


def sampled_verdict(cell: Cell, found: Examined, obstacle: str) -> Proof:
    """Return the proof by projections of the gradients of some steps, which were not simulated (`obstacle`).

    If no step was sampled, or too little is seen so, it is the weakest proof.
    """
    if found.failed or (found.sampled and not found.agreed):
        return Proof(method="sampled-gradients", passed=False, detail=failure(found))
    if not found.sampled or found.smallest > 1:
        return weaker(cell, found.agreed, obstacle)
    steps = _counted(found.sampled, "step")
    return Proof(
        method="sampled-gradients",
        passed=True,
        detail=f"{steps} of {_replicas(cell)}: {PROJECTIONS} projections and {ELEMENTS} elements of each "
        f"parameter's gradient are the mean of the replicas' within their rounding; a defect of "
        f"{found.smallest:.2g} of such a gradient is missed with a probability of at most {MISSED:g}; "
        f"the replicas' parameters are equal bit for bit after the update; {obstacle}",
    )


def weaker(cell: Cell, agreed: bool, obstacle: str) -> Proof:
    """Return the proof without a reference: replicas are equal that the strategy promises to keep equal.

    On one device, and if no replicas need be equal, it says only that the loss is finite.
    """
    promise, found = _promise(cell), "are equal bit for bit" if agreed else "differ"
    compared = f"the replicas' parameters {found} after the update"
    if not promise.equal:
        compared = f"the loss is finite; {cell.strategy} keeps no replicas equal, so that none were compared"
    elif not promise.all_equal:
        compared = f"the parameters of replicas that average together {found} after the update"
    return Proof(method="replica-agreement", passed=agreed, detail=f"{compared}; {obstacle}")


def failure(found: Examined) -> str:
    """Return what this rank knows of a failed examination: rank 0 compares gradients and updates of a common
    step.

    The first of several differences is named: the others may follow from it.
    """
    if not found.agreed:
        return "replicas differ after the update"
    otherwise = "another rank found a difference: its record says which"
    if found.stale:
        otherwise = "a replica's buffers differ from the serial simulation"
    return next((finding.what for finding in found.findings if not finding.passed), otherwise)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _replicas(cell: Cell) -> str:
    return _counted(cell.replicas, "replica")


def _promise(cell: Cell) -> Promise:
    return STRATEGIES.facts(cell.strategy).promise


def _rule(cell: Cell) -> str:
    if cell.compresses:
        return (
            f"what was applied and the residuals of {cell.compression} add up to their gradients within "
            f"{law_tolerance(cell):.2g} of their L2 norm"
        )
    if not exact_arithmetic(cell):
        each = ", parameter by parameter" if cell.model_parallel > 1 else ""
        return f"gradients agree within {TOLERANCE[cell.precision]:g} of their L2 norm{each}"
    promise = _promise(cell)
    if promise.of == "parameters":
        means = "averaged parameters" if promise.all_equal else "parameters averaged with its partners'"
        return f"each rank's own gradients are equal bit for bit, {means} within their rounding"
    few = summed_terms(cell, len(promise.partners(0, cell.replicas))) <= 2
    if few and exact_update(cell):
        return "gradients, buffers and updates are equal bit for bit"
    sums = "are equal bit for bit" if few else "agree within the rounding of a sum in another order"
    updates = (
        "are equal bit for bit" if exact_update(cell) else "agree within the rounding of a norm over shards"
    )
    return f"gradients {sums}; updates {updates}"


def own_code_cause(setup: CellSetup) -> str:
    """Return a clause for the end of a failed proof; it is empty for a model of ours.

    Changes torch's, numpy's and Python's random state.
    """
    if not facts(WORKLOADS.parse(setup.cell.workload)).own_code:
        return ""
    if not data_are_repeated(setup):
        if setup.cell.synthetic:
            return (
                "; the batches of synthetic(generator, samples) do not follow the generator that it is "
                "given: draw them only from that generator"
            )
        return "; data= gives other samples when it is read again: seed what is random in them by their index"
    return (
        "; a model that draws from a generator other than torch's, numpy's and random's, "
        "or keeps state outside of its parameters and buffers, cannot be checked"
    )


def data_are_repeated(setup: CellSetup) -> bool:
    """Return whether a user's data give the same batches again, whatever the global random state."""
    if DATASETS.facts(setup.cell.dataset).takes not in (None, Own.takes):
        return True
    workload = setup.workload(with_values=True)
    drawn = set()
    for state in range(2):
        seed_step(setup.cell.seed, state, setup.replica)
        batches = islice(setup.batches(workload, setup.replica), POOL)
        drawn.add(tuple(batch_print(batch) for batch in batches))
    return len(drawn) == 1
