"""The proof that a cell trains: its distributed step against a serial simulation of the same step.

For its first steps, all ranks compute gradients by the strategy under test; rank 0 then computes every
replica's micro-batches one after another, in a separate plain loop, from the same parameters, buffers and
random state, and adds the gradients up in rank order; where that takes it too long, the ranks simulate a
replica each (`simulation`). Replicas, not one big batch: BatchNorm and dropout depend on how samples are
grouped. The reference starts each step from the parameters of the strategy, so that errors of one step are
judged by themselves, and then replays the update from the strategy's own gradients and optimizer state. What
state the replay leaves is what the next step must begin with.

What a strategy splits is gathered a tensor at a time, and kept in host memory only by the rank that compares
it: a device that the cell nearly fills has no room for full tensors.

A compressed exchange is not meant to give those gradients. Its books are checked instead (`averages`): what
was applied, with the residuals of the ranks, must equal the simulated gradients.

A strategy's facts promise whose gradients, or parameters after the update, a replica averages, and when
(`strategies.promise`). Where not all replicas average their gradients, each rank recomputes its own replica
from its own parameters, and an average is checked against what its partners (`averages`) recomputed. How near
two computations must be, `comparison` says.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice

import msgspec

from harness.worker.cell.sampler import Draws, batch_print
from harness.worker.cell.setup import CellSetup, seed_step
from harness.worker.measure.clock import FirstStep
from harness.worker.proof.averages import law_tolerance
from harness.worker.proof.comparison import tolerance_of
from harness.worker.proof.compressor_promises import Witness
from harness.worker.proof.examination import Examination, Examined
from harness.worker.proof.reference import (
    Beat,
    computes_together,
    exact_arithmetic,
    exact_update,
    summed_terms,
)
from harness.worker.proof.sampled import ELEMENTS, MISSED, PROJECTIONS, cannot_sample
from harness.worker.proof.simulation import memory_shortage
from harness.worker.rank.control import Control
from harness.worker.rank.failure import DivergedError
from results.cell import Cell
from results.record import COPIES, LATE_STEPS, LONGEST_S, STEPS, Proof
from strategies.catalog import STRATEGIES
from strategies.gradient_exchange import GradientExchange
from strategies.promise import Promise
from strategies.trainer import Trainer
from strategies.training.observer import SilentObserver
from strategies.training.parallel import ParallelModel
from workloads.catalog import WORKLOADS, facts
from workloads.data import POOL
from workloads.datasets.facts import DATASETS, Own

DIVERGED = "the loss was not finite"
AFTER_RAMP = 2
"""Number of steps that are checked after the steps in which a strategy works differently at first: the second
one adds the residual that the first one kept."""


def first_steps(model: ParallelModel) -> list[bool]:
    """Return, for each of the first steps of a run, whether a proof checks it.

    They contain only complete periods of a strategy, as many as show all of it, and continue beyond the steps
    in which it works differently at first.
    """
    period, ramp = model.period, model.ramp_steps
    wanted = max(model.shown_after, max(STEPS, AFTER_RAMP) if not ramp else AFTER_RAMP)
    local = -(-wanted // period) * period
    return [step < STEPS or step >= ramp for step in range(max(STEPS, ramp + local))]


def prove(
    setup: CellSetup,
    trainer: Trainer,
    batches: Draws,
    control: Control,
    beat: Beat = lambda: None,
    first: FirstStep | None = None,
) -> Proof:
    """Take the cell's first steps and compare them with the reference; collective.

    `beat` is called often, also while a step is simulated: a long check is not silence. `first` times the
    training part of the first step.

    All ranks learn whether it passed; rank 0 says what was compared. If the reference takes more than a
    minute or more memory than there is, the steps that are left are sampled, or, if that says nothing, the
    weakest proof is given: the replicas stay equal. Raises DivergedError on all ranks if one has a loss that
    is not finite.

    A memory limit of the cell holds for the strategy in these steps, and not for the simulation and what it
    gathers.
    """
    checked = sum(first_steps(trainer.model))
    with setup.memory.lifted(), _audited(setup, trainer, after_ramp=False) as witness:
        examination = Examination(
            setup=setup,
            trainer=trainer,
            batches=batches,
            control=control,
            longest_s=LONGEST_S / checked,
            beat=beat,
            witness=witness,
            first=FirstStep() if first is None else first,
        )
        promise = STRATEGIES.facts(setup.cell.strategy).promise
        # Every rank may simulate its own replica in the steps after a warm-up, so each of them needs memory.
        simulates = setup.rank.rank == 0 or not promise.averages_all_gradients(promise.after)
        obstacle = memory_shortage(control, trainer.parameter_bytes, copies=COPIES if simulates else 0)
        for step_checked in first_steps(trainer.model):
            if step_checked:
                obstacle = _check_or_sample(examination, obstacle)
            else:
                _take_unchecked(examination)
            examination.first.is_over()
            beat()
        found = examination.close()
        if obstacle is not None and (found.sampled or not found.failed):
            return sampled_verdict(setup.cell, found, obstacle)
        proof = simulation_verdict(setup.cell, found, steps=checked)
        if proof.passed or proof.method != "serial-simulation":
            return proof
        return msgspec.structs.replace(proof, detail=proof.detail + own_code_cause(setup))


def _check_or_sample(examination: Examination, obstacle: str | None) -> str | None:
    """Take a step with the strongest check there is; return the obstacle to a simulation, if any."""
    if obstacle is None:
        return examination.check()
    if examination.step and not cannot_sample(examination.setup.cell):
        # The very first step is not sampled: the record has its time and memory, without those of
        # projections.
        examination.sample()
    else:
        _take_unchecked(examination)
    return obstacle


def _take_unchecked(examination: Examination) -> None:
    seed_step(examination.setup.cell.seed, examination.step, examination.setup.replica)
    examination.pass_over()


@dataclass(frozen=True, slots=True, kw_only=True)
class LateProof:
    """Result of a check after the timed blocks; only the text of a failure differs between ranks."""

    first: int
    """Number of the first step that was checked."""
    steps: int
    failure: str | None
    obstacle: str | None
    """Why no step was recomputed, or no further one."""
    sampled: bool = False
    """Whether the one step of `steps` was not recomputed, but sampled; a failure is then of projections."""


def _each_simulates(cell: Cell) -> bool:
    """Return whether every rank recomputes its own replica of a late step: not if no rank has all of the
    model."""
    facts = STRATEGIES.facts(cell.strategy)
    whole = cell.model_parallel == 1 and not facts.shards
    return whole or not facts.promise.averages_all_gradients(facts.promise.after)


def prove_late(
    setup: CellSetup, trainer: Trainer, batches: Draws, control: Control, *, longest_s: float, beat: Beat
) -> LateProof:
    """Check steps after the timed ones, from a place that is drawn now; collective.

    Up to `LATE_STEPS` in a row, as many as rank 0's `longest_s` seconds allow and at least one, which may
    take up to `LONGEST_S`: what goes wrong in every n-th step is met with the probability min(1, steps / n),
    what has gone wrong for good with certainty. Where none can be recomputed, one is sampled. Where bits are
    not compared, other micro-batches replace the drawn ones (`Sampler.unexpected`). The
    replicas are settled, so that a period of averaged parameters begins here; its last steps are checked,
    with the average: together they may take `LONGEST_S`.
    """
    promise = STRATEGIES.facts(setup.cell.strategy).promise
    # Each rank has timed its own steps, and every step that is checked has collectives of all ranks.
    longest_s = control.from_first(longest_s)
    simulates = _each_simulates(setup.cell) or setup.rank.rank == 0
    obstacle = memory_shortage(control, trainer.parameter_bytes, copies=COPIES if simulates else 0)
    if obstacle is not None and cannot_sample(setup.cell):
        return LateProof(first=0, steps=0, failure=None, obstacle=obstacle)
    before, trainer.observer = trainer.observer, SilentObserver()
    averages = promise.of == "parameters" and promise.every > 1
    fewest = min(promise.every, LATE_STEPS) if averages else 1
    try:
        with setup.memory.lifted(), _audited(setup, trainer, after_ramp=True) as witness:
            examination = Examination(
                setup=setup,
                trainer=trainer,
                batches=batches,
                control=control,
                longest_s=LONGEST_S / fewest,
                beat=beat,
                witness=witness,
                unexpected=not exact_arithmetic(setup.cell),
            )
            passed = int(control.from_first(float(secrets.randbelow(LATE_STEPS))))
            if averages:
                if not promise.all_equal:
                    why = "replicas that are not all equal begin no period together"
                    return LateProof(first=examination.step, steps=0, failure=None, obstacle=why)
                passed = passed // promise.every * promise.every
            _pass_over(examination, passed, beat)
            if fewest > 1:
                examination.begin_period()
                _pass_over(examination, promise.every - fewest, beat)
            return _late(examination, fewest, longest_s, obstacle)
    finally:
        trainer.observer = before


def _pass_over(examination: Examination, steps: int, beat: Beat) -> None:
    for _ in range(steps):
        examination.pass_over()
        beat()


def _late(examination: Examination, fewest: int, longest_s: float, obstacle: str | None) -> LateProof:
    """Check steps from this one on, a multiple of `fewest`; `obstacle` says why none can be recomputed."""
    first, steps = examination.step, 0
    if obstacle is None:
        steps, obstacle = _check_late(examination, fewest, longest_s)
    if obstacle not in (None, DIVERGED) and not steps and not cannot_sample(examination.setup.cell):
        first = examination.step
        try:
            examination.sample()
        except DivergedError:
            obstacle = DIVERGED
    found = examination.close()
    if obstacle is not None and fewest > 1:
        # Replicas may differ in the middle of a period.
        found = replace(found, agreed=True)
    failed = None
    if found.failed or not found.agreed:
        failed = failure(found) + ("" if found.sampled else own_code_cause(examination.setup))
    if obstacle == "":
        obstacle = "rank 0 could not recompute the step"
    sampled = found.sampled > 0 and (found.smallest <= 1 or failed is not None)
    steps = 1 if sampled else steps
    return LateProof(first=first, steps=steps, failure=failed, obstacle=obstacle, sampled=sampled)


def _check_late(examination: Examination, fewest: int, longest_s: float) -> tuple[int, str | None]:
    """Check whole periods of `fewest` steps, within which replicas may differ. Returns the number of steps,
    and the obstacle to the next one, if any."""
    by_each = _each_simulates(examination.setup.cell)
    began, steps, spent_s = time.perf_counter(), 0, 0.0
    while (
        steps % fewest
        or not steps
        or (steps + fewest <= LATE_STEPS and spent_s * (steps + fewest) / steps <= longest_s)
    ):
        try:
            obstacle = examination.check(by_each=by_each)
        except DivergedError:
            # On all ranks: targets that a model does not expect may be more than its learning rate bears.
            obstacle = DIVERGED
        examination.beat()
        if obstacle is not None:
            return steps, obstacle
        steps += 1
        [spent_s] = examination.control.largest([time.perf_counter() - began])
    return steps, None


@contextmanager
def _audited(setup: CellSetup, trainer: Trainer, *, after_ramp: bool) -> Iterator[Witness | None]:
    """Have a lossy exchange keep its residuals, with feedback or without, and a witness record the exchanges
    of a compressor of ours."""
    exchange = trainer.model.gradient_exchange
    if exchange is None or not setup.cell.compresses:
        yield None
        return
    witness = None
    exchange.audited = True
    if isinstance(exchange, GradientExchange):
        witness = exchange.compressor = Witness(exchange.compressor, after_ramp=after_ramp)
    try:
        yield witness
    finally:
        exchange.audited = False
        if isinstance(exchange, GradientExchange) and witness is not None:
            exchange.compressor = witness.inner


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
        detail=f"{steps} steps of {_counted(cell.replicas, 'replica')} recomputed{where}; {_rule(cell)}"
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
        detail=f"{steps} of {cell.replicas} replicas: {PROJECTIONS} projections and {ELEMENTS} elements of "
        f"each parameter's gradient are the mean of the replicas' within their rounding; a defect of "
        f"{found.smallest:.2g} of such a gradient is missed with a probability of at most {MISSED:g}; "
        f"the replicas' parameters are equal bit for bit after the update; {obstacle}",
    )


def weaker(cell: Cell, agreed: bool, obstacle: str) -> Proof:
    """Return the proof without a reference: replicas are equal that the strategy promises to keep equal.

    On one device, and if no replicas need be equal, it says only that the loss is finite.
    """
    promise, found = STRATEGIES.facts(cell.strategy).promise, "are equal bit for bit" if agreed else "differ"
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


def _rule(cell: Cell) -> str:
    if cell.compresses:
        return (
            f"what was applied and the residuals of {cell.compression} add up to their gradients within "
            f"{law_tolerance(cell):.2g} of their L2 norm"
        )
    if not exact_arithmetic(cell):
        each = ", parameter by parameter" if computes_together(cell) else ""
        return f"gradients agree within {tolerance_of(cell):g} of their L2 norm{each}"
    promise = STRATEGIES.facts(cell.strategy).promise
    if promise.of == "parameters":
        return f"each rank's own gradients are equal bit for bit, {_ends(promise)} within their rounding"
    few = summed_terms(cell, len(promise.partners(0, cell.replicas))) <= 2
    if few and exact_update(cell):
        return "gradients, buffers and updates are equal bit for bit"
    sums = "are equal bit for bit" if few else "agree within the rounding of a sum in another order"
    updates = (
        "are equal bit for bit" if exact_update(cell) else "agree within the rounding of a norm over shards"
    )
    return f"gradients {sums}; updates {updates}"


def _ends(promise: Promise) -> str:
    """Return what a period of a promise of averaged parameters ends in."""
    if promise.outer is not None:
        return "outer steps"
    return "averaged parameters" if promise.all_equal else "parameters averaged with its partners'"


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
