"""Steps of a cell under examination: each is taken by the strategy, recomputed, and compared."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from harness.worker.cell.sampler import Draws, batch_print
from harness.worker.cell.setup import CellSetup, seed_step
from harness.worker.exchange.group import OwnCollectiveError
from harness.worker.measure.clock import FirstStep
from harness.worker.proof.averages import (
    Balance,
    Ledger,
    OuterTaken,
    Partners,
    compare_average,
    compare_step,
    something_sent,
)
from harness.worker.proof.choices import Choices, recorded
from harness.worker.proof.comparison import (
    ProofFinding,
    compare_buffers,
    compare_history,
    compare_precision,
    compare_update,
    explained_by_rounding,
)
from harness.worker.proof.compressor_promises import Witness, compare_promises
from harness.worker.proof.fingerprints import compare_prints, compare_random_state, shared_batches
from harness.worker.proof.reference import (
    Beat,
    History,
    Reference,
    Replay,
    dense,
    exact_arithmetic,
    host_copy,
    optimizer_history,
)
from harness.worker.proof.sampled import Sampling, averages_whole_gradients
from harness.worker.proof.simulation import (
    ONCE_S,
    OWN_COLLECTIVES,
    Recomputed,
    Simulator,
    TrainedStep,
)
from harness.worker.proof.tallies import compare_settled, settled
from harness.worker.rank.control import Control, hash_number
from harness.worker.rank.failure import DivergedError
from strategies.catalog import COMPRESSIONS, STRATEGIES
from strategies.devices import device_of
from strategies.trainer import Trainer
from workloads.batch import Batch

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """The results of an examination."""

    findings: list[ProofFinding]
    """Findings of this rank."""
    agreed: bool
    """Whether the replicas that must be equal are equal."""
    failed: bool
    """Whether a rank found a difference."""
    stale: bool
    """Whether a replica's buffers are not what they must be."""
    by_blocks: bool = False
    """Whether the simulation added gradients block by block: see `ReferenceModel.by_blocks`."""
    exercised: bool = True
    """Whether a checked step averaged what the strategy promises to average."""
    shared: bool = False
    """Whether the ranks simulated a replica each."""
    sampled: int = 0
    """Number of steps whose gradients were compared in projections."""
    smallest: float = 0.0
    """Size of a defect that these steps may miss, as `Sampling.compare` says: the largest of them."""


@dataclass(kw_only=True)
class Examination:
    """Checks steps of one cell in a row, on this rank: all ranks examine the same ones."""

    setup: CellSetup
    trainer: Trainer
    batches: Draws
    control: Control
    longest_s: float
    """Most seconds that the simulation of a step may take."""
    beat: Beat
    """Called often while a step is checked: a long check is not silence."""
    witness: Witness | None
    """Records the inputs and outputs of the compressor; None if the exchange has no `Compressor`."""
    first: FirstStep = field(default_factory=FirstStep)
    """Times the training part of the first step."""
    unexpected: bool = False
    """Whether both sides compute with other micro-batches than the drawn ones (`Sampler.unexpected`)."""

    def __post_init__(self) -> None:
        setup, control = self.setup, self.control
        self._simulator = Simulator(setup, self.trainer, control, longest_s=self.longest_s, beat=self.beat)
        self._simulator.unexpected = self.unexpected
        self._promise = STRATEGIES.facts(setup.cell.strategy).promise
        self._partners = Partners(
            self._promise, setup.groups, setup.rank.rank, device=setup.device, control=control
        )
        self._findings: list[ProofFinding] = []
        self._given: list[ProofFinding] = []
        """Findings about the batches and random state that steps began with, and about what was chosen."""
        self._promised: list[ProofFinding] = []
        """Findings about what a compressor promises."""
        self._stale = False
        """Whether this replica's buffers were not what rank 0 computed for it."""
        self._sampled: list[float] = []
        """Sizes of the defects that are missed in steps that were not simulated, but sampled."""
        self._alone = 0
        """Number of steps that were not averaged over all replicas."""
        self._averages = 0
        """Number of averages of parameters that were checked."""
        self._common: dict[str, Tensor] = {}
        """This rank's parameters after the last average, and its partners' where these are equal."""
        self._outer_hash = self._hash_of_outer(initial=self.batches.drawn == 0)
        """Hash of the momentum of the outer step, as the last average must have left it."""
        initial = Replay(parameters={}, history={}, tolerance=0.0)
        self._replayed = initial if self.batches.drawn == 0 else None
        """The last update, whose state the next one must begin with; None where it was not replayed."""

    @property
    def _ends_period(self) -> bool:
        return self._alone % self._promise.every == 0

    @property
    def step(self) -> int:
        """Number of the next step, by the micro-batches that have been drawn."""
        return self.batches.drawn // self.setup.cell.accumulation

    def pass_over(self) -> None:
        """Take a step without a check."""
        self._alone += not self._promise.averages_all_gradients(self.step)
        self._replayed = None
        with self.setup.memory.kept():
            self.trainer.step(self.batches)
        if self._ends_period:
            self._outer_hash = self._hash_of_outer()

    def sample(self) -> None:
        """Take the next step, and check projections of its gradients (`sampled`) and what it begins with."""
        cell, step = self.setup.cell, self.step
        seed_step(cell.seed, step, self.setup.replica)
        self._replayed = None
        # The operating system draws the seed, so that no rounding can depend on it.
        seed = int(self.control.from_first(float(secrets.randbelow(2**52))))
        sampling = Sampling(cell, self.trainer.model, self.control, seed=seed, beat=self.beat)
        with sampling.watching():
            self._compute(step)
        found = sampling.compare()
        if found is not None:
            self._sampled.append(found[1])
            self._findings += found[0]
        self.beat()
        self._update()

    def check(self, *, by_each: bool = False) -> str | None:
        """Take the next step and check it. Returns the obstacle to this check, and all later ones, if any.

        Rank 0 recomputes all replicas of a step that averages all gradients, and each rank its own of any
        other, or if `by_each`.
        """
        step = self.step
        seed_step(self.setup.cell.seed, step, self.setup.replica)
        if self.witness is not None:
            self.witness.watching = True
        try:
            return self._examine(step, each=by_each or not self._promise.averages_all_gradients(step))
        finally:
            self._simulator.rest()
            if self.witness is not None:
                self.witness.watching = False
                facts = COMPRESSIONS.facts(self.setup.cell.compression)
                self._promised += compare_promises(facts.name, facts.promises, self.witness.taken())

    def begin_period(self) -> None:
        """Note that the replicas are equal now, and that the next step is the first of a period."""
        self._alone = 0
        self._common = self._state()
        self._outer_hash = self._hash_of_outer()

    def close(self) -> Examined:
        """Return what all ranks found, also in the state that the last update left; collective."""
        replayed = self._replayed
        history = optimizer_history(self.trainer, self.beat, kept=replayed is not None)
        if replayed is not None:
            self._findings += compare_history(history, replayed)
        parameters = self._beating(self.trainer.model.named_parameters())
        agreed = self._partners.agree(hash_number(parameters))
        given = [*self._given, *self._simulator.initial]
        wrong_start, broken = (
            [finding for finding in findings if not finding.passed] for findings in (given, self._promised)
        )
        different = wrong_start or broken or any(not finding.passed for finding in self._findings)
        failed, stale = self.control.largest([float(bool(different or self._stale)), float(self._stale)])
        return Examined(
            findings=[*wrong_start, *self._findings, *broken],
            agreed=agreed,
            failed=bool(failed),
            stale=bool(stale),
            by_blocks=self._simulator.by_blocks,
            shared=self._simulator.shared,
            exercised=self._promise.of == "gradients" or self._averages > 0,
            sampled=len(self._sampled),
            smallest=max(self._sampled, default=0.0),
        )

    def _examine(self, number: int, *, each: bool) -> str | None:
        """Take a step, recompute it and compare it. Returns the obstacle to a check, if any.

        Rank 0 recomputes all replicas, or, if `each`, every rank its own one, whose gradients, or parameters
        after the update, are then averaged with its partners'. If all have the same gradients, only rank 0
        compares them.
        """
        promise, first = self._promise, self.setup.rank.rank == 0
        averages_all = promise.averages_all_gradients(number)
        averages = averages_all or promise.of == "gradients"
        compares = first or not averages_all
        start = self._state(kept=first or each)
        if each:
            self._begin_own(start, averages_all=averages_all)
        lossy = self.setup.cell.compresses and averages
        ledger = Ledger(self.trainer.model, self._partners) if lossy else None
        step = self._train(number, start, kept=compares)
        found, obstacle = self._recompute(step, each=each, averages=averages, compares=compares)
        if obstacle is not None:
            self._replayed = None
            self._update()
            return obstacle
        findings, blurred, found = self._compared(
            step, found, ledger, average=each and averages, compares=compares
        )
        if self.control.largest([float(blurred is not None)])[0]:
            self._findings += [one for one in findings if one.of != "gradient"]
            self._take_update(step, found if compares else None, averaged=False)
            elsewhere = "on another rank no simulation can distinguish a defect from rounding"
            return blurred or (elsewhere if each else "")
        self._findings += findings
        self._alone += not averages_all
        self._take_update(step, found if compares else None, averaged=not averages)
        return None

    def _begin_own(self, start: dict[str, Tensor], *, averages_all: bool) -> None:
        """Prepare the check of this rank's own replica, which begins the step with `start`."""
        if averages_all:
            self._simulator.take_first_buffers(start)
        elif self._alone % self._promise.every == 0:
            self._common = start

    def _recompute(
        self, step: TrainedStep, *, each: bool, averages: bool, compares: bool
    ) -> tuple[Recomputed | None, str | None]:
        """Have rank 0 recompute all replicas, or, if `each`, this rank its own; collective.

        The second value says, on all ranks, why one of them could not; None if all could.
        """
        if each:
            own, averaged = [self.setup.replica], self._partners.count if averages else 1
            found, obstacle = self._simulator.replicas(step, own, averaged=averaged, replays=compares)
            elsewhere = "a rank could not recompute its replica"
        else:
            found, obstacle = self._all_replicas(step)
            elsewhere = ""
        simulates = each or self.setup.rank.rank == 0
        failed = self.control.largest([float(simulates and found is None)])[0]
        return found, (obstacle or elsewhere) if failed else None

    def _all_replicas(self, step: TrainedStep) -> tuple[Recomputed | None, str]:
        """Have rank 0 recompute all replicas, in the other order of a sum if the first one does not agree."""
        simulator = self._simulator
        found, obstacle = simulator.all_replicas(step)
        uncompressed = not self.setup.cell.compresses
        other_order = uncompressed and found is not None and simulator.may_be_by_blocks(found, step.gradients)
        if self.control.from_first(float(other_order)):
            simulator.by_blocks = not simulator.by_blocks
            found, obstacle = simulator.all_replicas(step)
        if exact_arithmetic(self.setup.cell) and not self.control.from_first(float(found is None)):
            # Bit for bit, the buffers of every replica are what rank 0 computed for it.
            none = [0.0] * self.setup.cell.replicas
            expected = self.control.largest(none if found is None else found.reference.buffer_hashes)
            buffers = hash_number(self.trainer.model.named_buffers())
            self._stale |= buffers != expected[self.setup.replica]
        return found, obstacle

    def _compared(
        self,
        step: TrainedStep,
        found: Recomputed | None,
        ledger: Ledger | None,
        *,
        average: bool,
        compares: bool,
    ) -> tuple[list[ProofFinding], str | None, Recomputed | None]:
        """Compare a step with its simulation, or with the `average` of the partners' simulations; collective.

        Returns the findings; why gradients that differ may be right, if rounding may explain it; and the
        recomputed step, whose update is replayed again if the model was used meanwhile.
        """
        cell, model = self.setup.cell, self.trainer.model
        reference = None if found is None else found.reference
        if average:
            assert reference is not None
            parameters = {name: step.start[name] for name, _ in model.bare.named_parameters()}
            reference = self._partners.mean(reference, parameters)
        balance = None if ledger is None else ledger.balance(self._dense_gradients(), scale=step.scale)
        buffers = self._gathered(model.named_buffers(), kept=found is not None)
        if found is None or reference is None:
            return [], None, None
        if not compares:
            return compare_buffers(cell, buffers, reference), None, found
        findings = compare_step(cell, step.gradients, buffers, reference, balance)
        applied = step.gradients if balance is None else balance.values
        findings += compare_precision(cell, applied, reference.gradients, found.in_fp32)
        wrong = {finding.of for finding in findings if not finding.passed}
        if wrong != {"gradient"} or exact_arithmetic(cell) or not averages_whole_gradients(cell):
            return findings, None, found
        blurred = self._blurred(step, findings, reference)
        return findings, blurred, replace(found, replay=self._simulator.replay(step, found.start))

    def _blurred(self, step: TrainedStep, findings: list[ProofFinding], reference: Reference) -> str | None:
        """Return why gradients that differ may be right, if rounding may explain it."""
        try:
            exact, rounded = self._simulator.off_by_rounding(step)
        except OwnCollectiveError:
            return OWN_COLLECTIVES
        compared = (step.gradients, reference.gradients, exact, rounded)
        return explained_by_rounding(self.setup.cell, findings, *compared)

    def _train(self, number: int, start: dict[str, Tensor], *, kept: bool) -> TrainedStep:
        """Have the trainer compute the gradients of a step, with the exchange; collective."""
        with recorded(self.trainer.model.bare, self.setup.cell) as own:
            scale = self._compute(number)
        gradients = self._gathered(self._dense_gradients(), kept=kept)
        history = optimizer_history(self.trainer, self.beat, kept=kept)
        return TrainedStep(
            number=number,
            start=start,
            gradients=gradients,
            history=history,
            scale=scale,
            choices=Choices(self.setup.cell, self.setup.groups, self.control.objects(own), self._given),
        )

    def _compute(self, number: int) -> float:
        """Compute the gradients of a step, check what it begins with, and return the loss scaler's factor."""
        cell = self.setup.cell
        self._given.append(compare_random_state(self.setup, number, self.control))
        with self.setup.memory.kept(), self.first.part():
            batches = list(islice(self.batches, cell.accumulation))
        self._compare_batches(number, batches)
        scale = self.trainer.scaler.get_scale()
        used: Iterator[Batch] = iter(batches)
        if self.unexpected:
            first = number * cell.accumulation
            used = self.batches.sampler.unexpected(batches, self.setup.replica, first)
        began_s = time.thread_time()
        with self.setup.memory.kept(), self.first.part():
            loss = self.trainer.compute_gradients(used)
        if not device_of(self.setup.device).asynchronous and not cell.compile:
            # CPU time excludes waiting for the exchange. It measures nothing where kernels are only queued.
            computed_s = time.thread_time() - began_s
            if cell.activation_checkpointing:
                # A simulation computes no forward pass again, which takes no longer than all the rest.
                computed_s /= 2
            self._simulator.least_s = max(0.0, computed_s - ONCE_S)
        left = len(list(used))
        what = f"a step used {cell.accumulation - left} of its {cell.accumulation} micro-batches"
        self._given.append(ProofFinding.within("samples", what, float(left), 0.0))
        if self.control.largest([float(not loss.isfinite())])[0]:
            raise DivergedError
        return scale

    def _compare_batches(self, number: int, batches: Sequence[Batch]) -> None:
        """Compare the micro-batches of a step, on all ranks."""
        groups, sampler = self.setup.groups, self.batches.sampler
        expected = sampler.prints(groups.replica(dist.get_rank()), number * len(batches), len(batches))
        prints = [batch_print(batch) for batch in batches]
        self._given.append(compare_prints("micro-batches", prints, expected, self.control, groups))
        if self.batches.shared is None and sampler.reads_own:
            self.batches.shared = shared_batches(self.control.of_all(prints), groups)

    def _update(self) -> None:
        with self.setup.memory.kept(), self.first.part():
            self.trainer.update()

    def _take_update(self, step: TrainedStep, found: Recomputed | None, *, averaged: bool) -> None:
        """Take the update, and compare it on a rank that has recomputed it; collective.

        If parameters are `averaged`, it may be the last one of a period, which ends in their average.
        """
        if averaged and self._ends_period:
            assert found is not None
            return self._check_average(step, found)
        self._compare_history(step.history, found)
        parts = settled(self.setup, self.trainer.model, self.control)
        self._update()
        self._findings += compare_settled(self.trainer.model.bare, parts)
        updated = self._gathered(self.trainer.model.named_parameters(), kept=found is not None)
        if found is not None and found.replay is not None:
            finding = compare_update(updated, found.replay, step.start)
            moved = [name for name in found.replay.parameters if found.start[name] is not step.start[name]]
            if moved:
                what = f"{finding.what}; forward itself changes {', '.join(moved[:3])}"
                finding = replace(finding, what=what)
            self._findings.append(finding)

    def _compare_history(self, history: History, found: Recomputed | None) -> None:
        """Compare the optimizer state before this update with the state after the last replay."""
        if found is not None and self._replayed is not None:
            self._findings += compare_history(history, self._replayed)
        # Only the state is kept: this rank has room for so many copies of the parameters.
        replay = None if found is None else found.replay
        self._replayed = None if replay is None else replace(replay, parameters={})

    def _check_average(self, step: TrainedStep, found: Recomputed) -> None:
        """Check an update that ends in an average of the parameters that the replay has."""
        assert found.replay is not None
        cell, model, partners = self.setup.cell, self.trainer.model, self._partners
        expected = found.replay.parameters
        self._compare_history(step.history, found)
        ledger = Ledger(model, partners)
        buffers = self._averaged_buffers()
        what = "the momentum of the outer step changed between two averages"
        changed = self._hash_of_outer() != self._outer_hash
        self._findings.append(ProofFinding.within("state", what, float(changed), 0.0))
        momentum = self._gathered(model.named_outer_state(), host_copy)
        self._update()
        updated = self._gathered(model.named_parameters())
        balance = ledger.balance(model.named_parameters(), scale=1.0)
        common = self._common if self._promise.equal else None
        outer = self._outer_taken(momentum, updated)
        self._findings += compare_average(cell, balance, expected, common, partners, outer)
        moved, expected_to_move = (
            {name: value - self._common[name] for name, value in each.items()} for each in (updated, expected)
        )
        self._findings.append(something_sent(moved, expected_to_move))
        after = Balance(values=self._averaged_buffers(), residuals=dict.fromkeys(buffers, torch.zeros(())))
        self._findings += compare_average(cell, after, buffers, common, partners)
        self._averages += 1
        self._stale |= not partners.agree(hash_number(model.named_buffers()))

    def _outer_taken(self, before: dict[str, Tensor], updated: dict[str, Tensor]) -> OuterTaken | None:
        promised, after = self._promise.outer, self._gathered(self.trainer.model.named_outer_state())
        self._outer_hash = self._hash_of_outer()
        if promised is None:
            return None
        return OuterTaken(promised=promised, before=before, after=after, parameters=updated)

    def _hash_of_outer(self, *, initial: bool = False) -> float:
        """Hash the momentum of the outer step as it is, or as it must be before the first average."""
        momenta = self.trainer.model.named_outer_state()
        return hash_number((name, value * 0 if initial else value) for name, value in momenta)

    def _averaged_buffers(self) -> dict[str, Tensor]:
        """Copy the buffers that the next average replaces by their mean; all ranks copy the same ones."""
        if not self._promise.mean_buffers:
            return {}
        return {
            name: value.clone()
            for name, value in self._gathered(self.trainer.model.named_buffers()).items()
            if value.is_floating_point() and self._common[name].isfinite().all()
        }

    def _state(self, *, kept: bool = True) -> dict[str, Tensor]:
        """Copy parameters and buffers to host memory, as all that follows; collective."""
        model = self.trainer.model
        return self._gathered(chain(model.named_parameters(), model.named_buffers()), host_copy, kept=kept)

    def _gathered(
        self,
        named: Iterable[tuple[str, Tensor]],
        take: Callable[[Tensor], Tensor] = lambda value: value.cpu(),
        *,
        kept: bool = True,
    ) -> dict[str, Tensor]:
        """Gather named tensors of the model into host memory; collective even where they are not `kept`."""
        return {name: take(value) for name, value in self._beating(named) if kept}

    def _dense_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Whole gradients, the loss scaler's factor taken out."""
        scale = self.trainer.scaler.get_scale()
        named = self._beating(self.trainer.model.named_gradients())
        return ((name, dense(value) / scale) for name, value in named)

    def _beating(self, values: Iterable[T]) -> Iterator[T]:
        """Yield the values of a long iteration over a model, with a beat before each."""
        for value in values:
            self.beat()
            yield value
