"""The proof that a cell trains: its distributed step against a serial simulation of the same step.

For its first steps, all ranks compute gradients by the strategy under test; rank 0 then computes every
replica's micro-batches one after another, in a plain loop of its own, from the same parameters, buffers and
random state, and adds the gradients up in rank order. Replicas, not one big batch: BatchNorm and dropout
depend on how samples are grouped. The reference starts each step from the parameters of the strategy, so
that errors of one step are judged alone, and then replays the update from the strategy's own gradients.

A compressed exchange is not meant to give those gradients. It is held to its books instead
(`conservation`): what was applied, with what the ranks kept back, is what the simulation gives. Where ranks
train alone between averages, each recomputes its own replica, and the average is checked when it comes.
How near two computations must be, `findings` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from harness.worker.agreement import hash_number, replicas_agree
from harness.worker.clock import FirstStep
from harness.worker.conservation import (
    Balance,
    Ledger,
    compare_average,
    compare_balance,
    law_tolerance,
    something_sent,
)
from harness.worker.control import Control
from harness.worker.failure import out_of_memory
from harness.worker.findings import (
    TOLERANCE,
    Finding,
    Tensors,
    compare_gradients,
    compare_surroundings,
    compare_update,
    exact_arithmetic,
    exact_update,
)
from harness.worker.measure import DivergedError
from harness.worker.parts import Parts
from harness.worker.reference import (
    Reference,
    TooLongError,
    dense,
    finite,
    optimizer_history,
    replay_update,
    seed_step,
    simulate_step,
    summed_terms,
)
from results.cell import Cell
from results.record import Proof
from strategies.catalog import STRATEGIES
from strategies.parallel import Batch, ParallelModel
from strategies.trainer import Trainer

Beat = Callable[[], None]

STEPS = 3
LONGEST_S = 60.0
AFTER_RAMP = 2
"""Steps that are checked once a strategy works as it will: the second meets what the first has kept."""


def first_steps(model: ParallelModel) -> list[bool]:
    """The steps that every run of a cell begins with, and for each whether a proof checks it.

    They hold whole periods of a strategy, and go beyond the steps that it begins with differently.
    """
    period, ramp = model.period, model.ramp_steps
    wanted = max(STEPS, AFTER_RAMP) if not ramp else AFTER_RAMP
    local = -(-wanted // period) * period
    return [step < STEPS or step >= ramp for step in range(max(STEPS, ramp + local))]


def take_first_steps(
    parts: Parts, trainer: Trainer, batches: Iterator[Batch], beat: Beat, first: FirstStep
) -> None:
    """The steps that a proof takes, without one: a run that is not proven goes the same way."""
    for step in range(len(first_steps(trainer.model))):
        seed_step(parts.cell.seed, step, parts.replica)
        with first.part():
            trainer.step(batches)
        first.is_over()
        beat()


def prove(
    parts: Parts,
    trainer: Trainer,
    batches: Iterator[Batch],
    control: Control,
    beat: Beat = lambda: None,
    first: FirstStep | None = None,
) -> Proof:
    """Take the cell's first steps and compare them with the reference; collective.

    `beat` is called after each step: many are not silence. `first` times what is training of the first one.

    All ranks learn whether it passed; what was compared is rank 0's to say. Where the reference takes
    more than a minute or more memory than there is, the weaker proof is given, and says that it is: the
    replicas stay equal. Raises DivergedError on all ranks if one has a loss that is not finite.

    A memory limit of the cell holds for what the strategy takes in these steps, and not for what is simulated
    and gathered beside it.
    """
    exchange = trainer.model.gradient_exchange
    if exchange is not None:
        exchange.audited = parts.cell.compression != "none"
    try:
        with parts.memory.lifted():
            return _Examination(parts, trainer, batches, control).verdict(beat, first or FirstStep())
    finally:
        if exchange is not None:
            exchange.audited = False


class _Examination:
    """The first steps of a cell under examination, on this rank."""

    def __init__(self, parts: Parts, trainer: Trainer, batches: Iterator[Batch], control: Control) -> None:
        self._parts = parts
        self._checked = sum(first_steps(trainer.model))
        self._trainer = trainer
        self._batches = batches
        self._control = control
        self._lossy = parts.cell.compression != "none"
        self._findings: list[Finding] = []
        self._stale = False
        """Whether this replica's buffers were not what rank 0 computed for it."""
        self._first = FirstStep()
        self._alone = 0
        """Steps that the replicas took each on its own."""
        self._common: dict[str, Tensor] = {}
        """The parameters that the replicas last had in common."""

    def verdict(self, beat: Beat, first: FirstStep) -> Proof:
        """Calls `beat` after each step, and times what is training of the first one by `first`."""
        self._first = first
        obstacle = None
        for step, checked in enumerate(first_steps(self._trainer.model)):
            seed_step(self._parts.cell.seed, step, self._parts.replica)
            if obstacle is None and checked:
                take = self._together if self._trainer.model.exchanges_gradients else self._apart
                obstacle = take(step)
            else:
                self._alone += not self._trainer.model.exchanges_gradients
                with self._parts.memory.kept():
                    self._trainer.step(self._batches)
            first.is_over()
            beat()
        agreed = replicas_agree(self._trainer, self._control)
        if obstacle is not None:
            return _weaker(agreed, obstacle)
        different = any(not finding.passed for finding in self._findings)
        failed, stale = self._control.largest([float(different or self._stale), float(self._stale)])
        return _verdict(
            self._parts.cell,
            self._findings,
            agreed=agreed,
            failed=bool(failed),
            stale=bool(stale),
            steps=self._checked,
        )

    def _together(self, step: int) -> str | None:
        """A step whose gradients are the mean over replicas. Returns what stands in the way of a check."""
        cell, trainer = self._parts.cell, self._trainer
        start = self._start()
        ledger = Ledger(trainer.model) if self._lossy else None
        gradients = self._gradients(step)
        reference, obstacle = None, ""
        if self._parts.rank.rank == 0:
            reference, obstacle = self._simulated(start, step, range(cell.replicas))
        if self._control.from_first(float(reference is None)):
            self._update()
            return obstacle
        if exact_arithmetic(cell):
            self._stale |= not self._buffers_equal(reference)
        balance = None if ledger is None else ledger.balance(gradients, scale=trainer.scaler.get_scale())
        expected, history = {}, optimizer_history(trainer)
        buffers = self._buffers()
        if reference is not None:
            self._findings += compare_step(cell, gradients, buffers, reference, balance)
            expected = replay_update(self._parts, start, gradients, history)
        self._update()
        updated = self._parameters()
        if reference is not None:
            self._findings.append(compare_update(cell, updated, expected, start))
        return None

    def _apart(self, step: int) -> str | None:
        """A step that every replica takes alone, and after which it may be averaged with the others."""
        cell, trainer = self._parts.cell, self._trainer
        start = self._start()
        if self._alone % trainer.model.period == 0:
            self._common = start
        gradients = self._gradients(step)
        reference, obstacle = self._simulated(start, step, [self._parts.replica])
        if self._control.largest([float(reference is None)])[0]:
            self._update()
            return obstacle or "a rank could not recompute its replica"
        assert reference is not None
        self._findings += compare_step(cell, gradients, self._buffers(), reference, None)
        expected = replay_update(self._parts, start, gradients, optimizer_history(trainer))
        ledger = Ledger(trainer.model)
        self._update()
        self._alone += 1
        if self._alone % trainer.model.period:
            self._findings.append(compare_update(cell, self._parameters(), expected, start))
        else:
            balance = ledger.balance(self._parameters(), scale=1.0)
            self._findings += compare_average(cell, balance, expected, self._common)
            self._findings.append(something_sent(self._moved(self._parameters()), self._moved(expected)))
            self._stale |= not self._control.agree(hash_number(trainer.model.named_buffers()))
        return None

    def _moved(self, parameters: Tensors) -> dict[str, Tensor]:
        """How far parameters are from those that the replicas last had in common."""
        return {name: value - self._common[name].to(value.device) for name, value in parameters.items()}

    def _start(self) -> dict[str, Tensor]:
        # In host memory: a device that the cell nearly fills has no room for it.
        return {
            name: value.to("cpu", copy=True)
            for name, value in (*self._trainer.model.named_parameters(), *self._buffers().items())
        }

    def _gradients(self, step: int) -> dict[str, Tensor]:
        """Whole gradients after the exchange, the loss scaler's factor taken out."""
        with self._parts.memory.kept(), self._first.part():
            loss = self._trainer.compute_gradients(self._batches)
        if self._control.largest([float(not loss.isfinite())])[0]:
            raise DivergedError
        scale = self._trainer.scaler.get_scale()
        return {name: dense(value) / scale for name, value in self._trainer.model.named_gradients()}

    def _update(self) -> None:
        with self._parts.memory.kept(), self._first.part():
            self._trainer.update()

    def _simulated(
        self, start: dict[str, Tensor], step: int, replicas: Sequence[int]
    ) -> tuple[Reference | None, str]:
        """The reference of a step, or what stands in its way."""
        try:
            limit_s = LONGEST_S / self._checked
            return simulate_step(self._parts, start, step, replicas=replicas, longest_s=limit_s), ""
        except TooLongError as error:
            return None, f"a serial simulation would take about {self._checked * error.seconds:.0f} s"
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return None, "a serial simulation does not fit in memory beside the model"

    def _buffers_equal(self, reference: Reference | None) -> bool:
        """Whether this replica's buffers are, bit for bit, what rank 0 computed for it; collective."""
        none = [0.0] * self._parts.cell.replicas
        expected = self._control.largest(none if reference is None else reference.buffer_hashes)
        return hash_number(self._trainer.model.named_buffers()) == expected[self._parts.replica]

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self._trainer.model.named_buffers())

    def _parameters(self) -> dict[str, Tensor]:
        return dict(self._trainer.model.named_parameters())


def compare_step(
    cell: Cell, gradients: Tensors, buffers: Tensors, reference: Reference, balance: Balance | None
) -> list[Finding]:
    """One step against the reference: its gradients themselves, or the books of a lossy exchange."""
    if balance is None:
        return compare_gradients(cell, gradients, buffers, reference)
    findings = compare_surroundings(cell, gradients, buffers, reference)
    if finite(gradients):
        findings.append(something_sent(gradients, reference.gradients))
        findings += compare_balance(cell, balance, reference)
    return findings


def _verdict(
    cell: Cell, findings: list[Finding], *, agreed: bool, failed: bool, stale: bool, steps: int
) -> Proof:
    worst = max(findings, key=lambda finding: (not finding.passed, finding.difference), default=None)
    if failed or not agreed:
        detail = "replicas differ after the update" if not agreed else _failure(worst, stale=stale)
        if cell.workload.startswith("py:"):
            detail += (
                "; a model that draws from another generator than those of torch, numpy and random, "
                "or keeps state outside of its parameters and buffers, cannot be checked"
            )
        return Proof(method="serial-simulation", passed=False, detail=detail)
    gradients = [finding for finding in findings if finding.what.startswith("gradient ")]
    if findings and not gradients:
        return _weaker(agreed, "the loss scaler left out every step of the simulation: gradients overflowed")
    return Proof(
        method="serial-simulation",
        passed=True,
        detail=f"{steps} steps of {_replicas(cell)} recomputed on one device; {_rule(cell)}",
        max_difference=max((finding.difference for finding in gradients), default=None),
        max_bound=max((finding.bound for finding in gradients), default=None),
    )


def _failure(worst: Finding | None, *, stale: bool) -> str:
    """What this rank knows of it: gradients and updates of a common step are compared on rank 0."""
    if worst is not None and not worst.passed:
        return worst.what
    if stale:
        return "a replica's buffers differ from the serial simulation"
    return "another rank found a difference: its record says which"


def _replicas(cell: Cell) -> str:
    return "1 replica" if cell.replicas == 1 else f"{cell.replicas} replicas"


def _rule(cell: Cell) -> str:
    if cell.compression != "none":
        return (
            f"what was applied and what {cell.compression} kept back add up to their gradients within "
            f"{law_tolerance(cell):.2g} of their L2 norm"
        )
    if not exact_arithmetic(cell):
        return f"gradients agree within {TOLERANCE[cell.precision]:g} of their L2 norm"
    if STRATEGIES.parse(cell.strategy).name == "local-sgd":
        return "each rank's own gradients are equal bit for bit, averaged parameters within their rounding"
    few = summed_terms(cell, cell.replicas) <= 2
    if few and exact_update(cell):
        return "gradients, buffers and updates are equal bit for bit"
    sums = "are equal bit for bit" if few else "agree within the rounding of a sum in another order"
    updates = (
        "are equal bit for bit" if exact_update(cell) else "agree within the rounding of a norm over shards"
    )
    return f"gradients {sums}; updates {updates}"


def _weaker(agreed: bool, obstacle: str) -> Proof:
    """The proof that needs no reference; on one device it says nothing but that the loss is finite."""
    found = "are equal bit for bit" if agreed else "differ"
    return Proof(
        method="replica-agreement",
        passed=agreed,
        detail=f"the replicas' parameters {found} after the update; {obstacle}",
    )
