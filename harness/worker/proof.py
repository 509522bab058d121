"""The proof that a cell trains: its distributed step against a serial simulation of the same step.

For its first steps, all ranks compute gradients by the strategy under test; rank 0 then computes every
replica's micro-batches one after another, in a plain loop of its own, from the same parameters, buffers and
random state, and adds the gradients up in rank order. Replicas, not one big batch: BatchNorm and dropout
depend on how samples are grouped. The reference starts each step from the parameters of the strategy, so
that errors of one step are judged alone, and then replays the update from the strategy's own gradients and
optimizer state. What state the replay leaves is what the next step must begin with.

What a strategy splits is gathered a tensor at a time, and kept in host memory by the rank that compares it
alone: a device that the cell nearly fills has no room for full tensors.

A compressed exchange is not meant to give those gradients. It is held to its books instead
(`conservation`): what was applied, with what the ranks kept back, is what the simulation gives.

A strategy's facts promise whose gradients, or parameters after the update, a replica averages, and when
(`strategies.promise`). Where not all replicas average their gradients, each rank recomputes its own replica
from its own parameters, and an average is checked against what its partners (`partners`) recomputed. How near
two computations must be, `findings` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import msgspec
import torch
from torch import Tensor

from harness.worker.agreement import hash_number
from harness.worker.cell_setup import CellSetup
from harness.worker.clock import FirstStep
from harness.worker.conservation import (
    Balance,
    Ledger,
    compare_average,
    compare_balance,
    something_sent,
)
from harness.worker.control import Control
from harness.worker.exactness import exact_arithmetic
from harness.worker.failure import out_of_memory
from harness.worker.findings import (
    Finding,
    Tensors,
    compare_gradients,
    compare_history,
    compare_surroundings,
    compare_update,
)
from harness.worker.fingerprints import compare_prints, expected_random_print, random_print
from harness.worker.measure import DivergedError
from harness.worker.own_code import own_code_cause
from harness.worker.partners import Partners
from harness.worker.reference import (
    History,
    Reference,
    Replay,
    TooLongError,
    dense,
    finite,
    host_copy,
    optimizer_history,
    replay_update,
    simulate_step,
)
from harness.worker.sampler import Draws, batch_print
from harness.worker.seeds import seed_step
from harness.worker.verdict import verdict, weaker
from results.cell import Cell
from results.record import Proof
from strategies.catalog import STRATEGIES
from strategies.training.parallel import Batch, ParallelModel
from strategies.training.trainer import Trainer

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
    setup: CellSetup, trainer: Trainer, batches: Iterator[Batch], beat: Beat, first: FirstStep
) -> None:
    """The steps that a proof takes, without one: a run that is not proven goes the same way."""
    for step in range(len(first_steps(trainer.model))):
        seed_step(setup.cell.seed, step, setup.replica)
        with first.part():
            trainer.step(batches)
        first.is_over()
        beat()


def prove(
    setup: CellSetup,
    trainer: Trainer,
    batches: Draws,
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
        exchange.audited = setup.cell.compresses
    try:
        with setup.memory.lifted():
            return _Examination(setup, trainer, batches, control).verdict(beat, first or FirstStep())
    finally:
        if exchange is not None:
            exchange.audited = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recomputed:
    """A step on one device."""

    reference: Reference
    replay: Replay


class _Examination:
    """The first steps of a cell under examination, on this rank."""

    def __init__(self, setup: CellSetup, trainer: Trainer, batches: Draws, control: Control) -> None:
        self._setup = setup
        self._checked = sum(first_steps(trainer.model))
        self._trainer = trainer
        self._batches = batches
        self._control = control
        self._lossy = setup.cell.compresses
        self._promise = STRATEGIES.facts(setup.cell.strategy).promise
        self._partners = Partners(self._promise, setup.groups, setup.rank.rank, setup.device)
        self._findings: list[Finding] = []
        self._given: list[Finding] = []
        """Of what steps began with: batches, and random state."""
        self._stale = False
        """Whether this replica's buffers were not what rank 0 computed for it."""
        self._first = FirstStep()
        self._alone = 0
        """Steps that were not averaged over all replicas."""
        self._common: dict[str, Tensor] = {}
        """This rank's parameters after the last average, and its partners' where these are equal."""
        self._history: History | None = {}
        """The optimizer state that the next update must begin with; None where the last was not replayed."""

    def verdict(self, beat: Beat, first: FirstStep) -> Proof:
        """Calls `beat` after each step, and times what is training of the first one by `first`."""
        self._first = first
        obstacle = None
        for step, checked in enumerate(first_steps(self._trainer.model)):
            seed_step(self._setup.cell.seed, step, self._setup.replica)
            if obstacle is None and checked:
                take = self._by_first if self._promise.averages_all_gradients(step) else self._by_each
                obstacle = take(step)
            else:
                self._history = None
                self._alone += not self._promise.averages_all_gradients(step)
                with self._setup.memory.kept():
                    self._trainer.step(self._batches)
            first.is_over()
            beat()
        agreed = self._partners.agree(self._control, hash_number(self._trainer.model.named_parameters()))
        wrong_start = [finding for finding in self._given if not finding.passed]
        different = wrong_start or any(not finding.passed for finding in self._findings)
        failed, stale = self._control.largest([float(bool(different or self._stale)), float(self._stale)])
        if obstacle is not None and not failed:
            return weaker(self._setup.cell, agreed, obstacle)
        proof = verdict(
            self._setup.cell,
            [*wrong_start, *self._findings],
            agreed=agreed,
            failed=bool(failed),
            stale=bool(stale),
            steps=self._checked,
        )
        if proof.passed or proof.method != "serial-simulation":
            return proof
        return msgspec.structs.replace(proof, detail=proof.detail + own_code_cause(self._setup))

    def _by_first(self, step: int) -> str | None:
        """A step whose gradients are the mean over all replicas, recomputed by rank 0. Returns what stands in
        the way of a check."""
        cell, trainer = self._setup.cell, self._trainer
        first = self._setup.rank.rank == 0
        start = self._start(kept=first)
        ledger = Ledger(trainer.model, self._partners) if self._lossy else None
        gradients = self._gradients(step, kept=first)
        buffers, history = self._buffers(kept=first), optimizer_history(trainer, kept=first)
        found, obstacle = None, ""
        if first:
            found, obstacle = self._recomputed(start, step, gradients, history, range(cell.replicas))
        if self._control.from_first(float(found is None)):
            self._update()
            return obstacle
        if exact_arithmetic(cell):
            self._stale |= not self._buffers_equal(found)
        balance = None
        if ledger is not None:
            balance = ledger.balance(self._dense_gradients(), scale=trainer.scaler.get_scale())
        if found is not None:
            self._findings += compare_step(cell, gradients, buffers, found.reference, balance)
        self._compare_history(history, found)
        self._update()
        updated = self._parameters(kept=first)
        if found is not None:
            self._findings.append(compare_update(cell, updated, found.replay.parameters, start))
        return None

    def _by_each(self, step: int) -> str | None:
        """A step of which every rank recomputes its own replica, whose gradients, or parameters after the
        update, are then averaged with its partners'."""
        cell, trainer, promise = self._setup.cell, self._trainer, self._promise
        averages_gradients = promise.of == "gradients"
        start = self._start()
        if self._alone % promise.every == 0:
            self._common = start
        ledger = Ledger(trainer.model, self._partners) if self._lossy and averages_gradients else None
        gradients, history = self._gradients(step), optimizer_history(trainer)
        count = self._partners.count if averages_gradients else 1
        found, obstacle = self._recomputed(
            start, step, gradients, history, [self._setup.replica], averaged=count
        )
        if self._control.largest([float(found is None)])[0]:
            self._update()
            return obstacle or "a rank could not recompute its replica"
        assert found is not None
        reference = found.reference
        balance = None
        if averages_gradients:
            reference = partner_mean(reference, self._parameters_of(start), self._partners)
        if ledger is not None:
            balance = ledger.balance(self._dense_gradients(), scale=trainer.scaler.get_scale())
        self._findings += compare_step(cell, gradients, self._buffers(), reference, balance)
        self._compare_history(history, found)
        self._alone += 1
        if averages_gradients or self._alone % promise.every:
            self._update()
            expected = found.replay.parameters
            self._findings.append(compare_update(cell, self._parameters(), expected, start))
        else:
            self._check_average(found.replay.parameters)
        return None

    def _parameters_of(self, start: Tensors) -> dict[str, Tensor]:
        return {name: start[name] for name, _ in self._trainer.model.bare.named_parameters()}

    def _check_average(self, expected: Tensors) -> None:
        """An update that ends in an average of parameters; without it they would be `expected`."""
        cell, model, partners = self._setup.cell, self._trainer.model, self._partners
        ledger = Ledger(model, partners)
        self._update()
        updated = self._parameters()
        balance = ledger.balance(model.named_parameters(), scale=1.0)
        common = self._common if self._promise.equal else None
        self._findings += compare_average(cell, balance, expected, common, partners)
        self._findings.append(something_sent(self._moved(updated), self._moved(expected)))
        self._stale |= not partners.agree(self._control, hash_number(model.named_buffers()))

    def _compare_history(self, history: History, found: _Recomputed | None) -> None:
        """The state that this update begins with against the one that the last replay left."""
        if found is not None and self._history is not None:
            self._findings += compare_history(self._setup.cell, history, self._history)
        self._history = None if found is None else found.replay.history

    def _moved(self, parameters: Tensors) -> dict[str, Tensor]:
        """How far parameters are from those after the last average."""
        return {name: value - self._common[name] for name, value in parameters.items()}

    def _start(self, *, kept: bool = True) -> dict[str, Tensor]:
        """Copies of parameters and buffers, as all that follows in host memory, and nothing where not `kept`;
        collective all the same."""
        model = self._trainer.model
        named = chain(model.named_parameters(), model.named_buffers())
        return {name: host_copy(value) for name, value in named if kept}

    def _parameters(self, *, kept: bool = True) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self._trainer.model.named_parameters() if kept}

    def _buffers(self, *, kept: bool = True) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self._trainer.model.named_buffers() if kept}

    def _gradients(self, step: int, *, kept: bool = True) -> dict[str, Tensor]:
        """Whole gradients after the exchange, the loss scaler's factor taken out."""
        accumulation = self._setup.cell.accumulation
        begins_with = random_print(self._setup.device)
        with self._setup.memory.kept(), self._first.part():
            batches = list(islice(self._batches, accumulation))
        self._compare_start(step, begins_with, batches)
        used = iter(batches)
        with self._setup.memory.kept(), self._first.part():
            loss = self._trainer.compute_gradients(used)
        self._given.append(all_used(accumulation, left=len(list(used))))
        if self._control.largest([float(not loss.isfinite())])[0]:
            raise DivergedError
        return {name: value.cpu() for name, value in self._dense_gradients() if kept}

    def _compare_start(self, step: int, random_state: float, batches: Sequence[Batch]) -> None:
        """The micro-batches of a step and the random state that it begins with, on all ranks."""
        setup, groups = self._setup, self._setup.groups
        replica = groups.replica(torch.distributed.get_rank())
        expected = self._batches.sampler.prints(replica, step * setup.cell.accumulation, len(batches))
        prints = [batch_print(batch) for batch in batches]
        self._given.append(compare_prints("micro-batches", prints, expected, self._control, groups))
        state = expected_random_print(setup.cell.seed, step, replica, setup.device)
        self._given.append(compare_prints("random state", [random_state], [state], self._control, groups))

    def _dense_gradients(self) -> Iterator[tuple[str, Tensor]]:
        scale = self._trainer.scaler.get_scale()
        for name, value in self._trainer.model.named_gradients():
            yield name, dense(value) / scale

    def _update(self) -> None:
        with self._setup.memory.kept(), self._first.part():
            self._trainer.update()

    def _recomputed(
        self,
        start: dict[str, Tensor],
        step: int,
        gradients: dict[str, Tensor],
        history: History,
        replicas: Sequence[int],
        *,
        averaged: int | None = None,
    ) -> tuple[_Recomputed | None, str]:
        """The step of these replicas and its update on this device, or what stands in the way."""
        try:
            limit_s = LONGEST_S / self._checked
            reference = simulate_step(
                self._setup, start, step, replicas=replicas, averaged=averaged, longest_s=limit_s
            )
            replay = replay_update(self._setup, start, gradients, history)
        except TooLongError as error:
            return None, f"a serial simulation would take about {self._checked * error.seconds:.0f} s"
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return None, "a serial simulation does not fit in memory beside the model"
        return _Recomputed(reference=reference, replay=replay), ""

    def _buffers_equal(self, found: _Recomputed | None) -> bool:
        """Whether this replica's buffers are, bit for bit, what rank 0 computed for it; collective."""
        none = [0.0] * self._setup.cell.replicas
        expected = self._control.largest(none if found is None else found.reference.buffer_hashes)
        return hash_number(self._trainer.model.named_buffers()) == expected[self._setup.replica]


def all_used(micro_batches: int, *, left: int) -> Finding:
    """Of the micro-batches that a step was given, `left` were not asked for."""
    return Finding(
        passed=not left,
        what=f"a step used {micro_batches - left} of its {micro_batches} micro-batches",
        difference=float(left),
        bound=0.0,
    )


def partner_mean(reference: Reference, parameters: Tensors, partners: Partners) -> Reference:
    """The mean of the gradients that partners recomputed each for itself; collective.

    `parameters` are all of the model's: of some a partner may have no gradient, which counts as zero.
    """
    gradients, sizes = {}, {}
    for name, parameter in parameters.items():
        own = reference.gradients.get(name)
        gradient = torch.zeros_like(parameter) if own is None else own
        size = reference.sizes.get(name, gradient.abs())
        mean, mean_size = partners.sum(gradient / partners.count), partners.sum(size / partners.count)
        if partners.sum(torch.tensor([float(own is not None)])).item():
            gradients[name], sizes[name] = mean.cpu(), mean_size.cpu()
    return replace(reference, gradients=gradients, sizes=sizes)


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
