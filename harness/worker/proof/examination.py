"""Steps of a cell under examination: each is taken by the strategy, recomputed, and compared."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from harness.worker.cell.sampler import Draws, batch_print
from harness.worker.cell.setup import CellSetup, seed_step
from harness.worker.exchange.group import OwnCollectiveError, no_collectives
from harness.worker.measure.clock import FirstStep
from harness.worker.proof.averages import (
    Balance,
    Ledger,
    Partners,
    compare_average,
    compare_step,
    something_sent,
)
from harness.worker.proof.comparison import (
    TOLERANCE,
    ProofFinding,
    Tensors,
    all_used,
    compare_buffers,
    compare_history,
    compare_precision,
    compare_update,
    distance,
    elementwise,
    same_values,
    size_of,
)
from harness.worker.proof.compressor_promises import Witness, compare_promises
from harness.worker.proof.fingerprints import compare_prints, compare_random_state, shared_batches
from harness.worker.proof.reference import (
    HALF,
    Beat,
    History,
    Reference,
    ReferenceModel,
    Replay,
    Simulated,
    TooLongError,
    dense,
    exact_arithmetic,
    finite,
    host_copy,
    optimizer_history,
    replay_update,
    rounded_otherwise,
    simulate_step,
)
from harness.worker.proof.sampled import Sampled, Sampling, averages_whole_gradients
from harness.worker.proof.shares import HALVINGS, NO_MEMORY, Shares, summed_s, too_long
from harness.worker.rank.control import Control, hash_number
from harness.worker.proof.simulation import HALVINGS, NO_MEMORY, Shares, no_room, summed_s, too_long
from harness.worker.rank.control import Control
from harness.worker.rank.failure import DivergedError, out_of_memory
from results.proof_limits import COPIES, SHARED_COPIES
from strategies.catalog import COMPRESSIONS, STRATEGIES
from strategies.devices import device_of
from strategies.training.trainer import Trainer
from workloads.batch import Batch

T = TypeVar("T")

MORE_THAN_ROUNDING = 3.0
"""Times what one rounding of every parameter changes: what is further apart is a defect."""
LARGEST_CHANGE_OF_NORM = 0.25
"""Of all gradients, in parts of their norm: the mean of two gradients that have nothing in common is shorter
than each by 0.29, and one that misses a division by 2 longer by 1."""
OWN_COLLECTIVES = "the model or its loss calls torch.distributed, which one rank cannot recompute by itself"
ONCE_S = 5.0
"""Of a step's computation, what may be done once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What an examination came to."""

    findings: list[ProofFinding]
    """Of this rank."""
    agreed: bool
    """Whether those replicas are equal that must be."""
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
    """Steps whose gradients were compared in projections."""
    smallest: float = 0.0
    """Of these the largest `Sampled.smallest`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recomputed:
    """A step on one device."""

    reference: Reference
    start: Tensors
    """The state before the update: that before the step, with the parameters that forward has changed."""
    replay: Replay | None
    """None on a rank that compares no update."""
    in_fp32: Tensors = field(default_factory=dict)
    """Gradients in fp32, for a cell in half precision; empty where the step is not compared with them."""


class Examination:
    """Steps of one cell in a row, on this rank: all ranks examine the same ones."""

    def __init__(
        self, setup: CellSetup, trainer: Trainer, batches: Draws, control: Control, *, longest_s: float
    ) -> None:
        """The simulation of a step may take `longest_s`."""
        self._scale = 1.0
        """The loss scaler's factor in the step that is checked."""
        self.unexpected = False
        """Whether both sides compute with other micro-batches than those that are drawn
        (`Sampler.unexpected`)."""
        self._setup = setup
        self._longest_s = longest_s
        self._trainer = trainer
        self._batches = batches
        self._control = control
        self._lossy = setup.cell.compresses
        self._promise = STRATEGIES.facts(setup.cell.strategy).promise
        self._partners = Partners(
            self._promise, setup.groups, setup.rank.rank, device=setup.device, control=control
        )
        self._findings: list[ProofFinding] = []
        self._given: list[ProofFinding] = []
        """Of batches and random state that steps began with."""
        self._promised: list[ProofFinding] = []
        """Of what a compressor promises."""
        self.witness: Witness | None = None
        """Records what goes through the compressor; None: nothing does."""
        self._stale = False
        """Whether this replica's buffers were not what rank 0 computed for it."""
        self.first = FirstStep()
        """Times what is training of the first step."""
        self.beat: Beat = lambda: None
        """Called often while a step is checked: a long check is not silence."""
        self._model: ReferenceModel | None = None
        """Built for the first simulation of this rank."""
        self._initial: Tensors | None = None
        """Parameters before the very first step, kept until the simulation's model is built."""
        self._replica_s: float | None = None
        """What rank 0 takes for one replica, where all together take it too long."""
        self._precision_known = False
        """Whether a step was also simulated in fp32."""
        self._by_blocks = False
        """Which of two orders the last simulation added gradients in."""
        self._least_s = 0.0
        """What it takes at least, known before anything is built."""
        self._sampled: list[Sampled] = []
        """Steps that were not simulated, but sampled."""
        self._alone = 0
        """Steps that were not averaged over all replicas."""
        self._averages = 0
        """Averages of parameters that were checked."""
        self._common: dict[str, Tensor] = {}
        """This rank's parameters after the last average, and its partners' where these are equal."""
        self._history: History | None = {} if batches.drawn == 0 else None
        """The optimizer state that the next update must begin with; None where the last was not replayed."""

    @property
    def setup(self) -> CellSetup:
        return self._setup

    @property
    def trainer(self) -> Trainer:
        return self._trainer

    @property
    def control(self) -> Control:
        return self._control

    @property
    def step(self) -> int:
        """The number of the next step, by the micro-batches that have been drawn."""
        return self._batches.drawn // self._setup.cell.accumulation

    def pass_over(self) -> None:
        """Take a step without a check."""
        self._alone += not self._promise.averages_all_gradients(self.step)
        self._history = None
        with self._setup.memory.kept():
            self._trainer.step(self._batches)

    def sample(self) -> None:
        """Take the next step, and check projections of its gradients (`sampled`) and what it begins with."""
        cell, step = self._setup.cell, self.step
        seed_step(cell.seed, step, self._setup.replica)
        self._history = None
        # Of the operating system's random numbers, so that no rounding knows of it.
        seed = int(self._control.from_first(float(secrets.randbelow(2**52))))
        sampling = Sampling(cell, self._trainer.model, self._control, seed=seed, beat=self.beat)
        with sampling.watching():
            self._computed(step)
        found = sampling.compare()
        if found is not None:
            self._sampled.append(found)
            self._findings += found.findings
        self.beat()
        self._update()

    def check(self, *, by_each: bool = False) -> str | None:
        """Take the next step and check it. Returns what stands in the way of a check, and all later ones.

        Rank 0 recomputes all replicas of a step that averages all gradients, and each rank its own of any
        other, or if `by_each`.
        """
        step = self.step
        seed_step(self._setup.cell.seed, step, self._setup.replica)
        take = self._by_each if by_each or not self._promise.averages_all_gradients(step) else self._by_first
        if self.witness is not None:
            self.witness.watching = True
        try:
            return take(step)
        finally:
            if self._model is not None:
                self._model.rest()
            if self.witness is not None:
                self.witness.watching = False
                facts = COMPRESSIONS.facts(self._setup.cell.compression)
                self._promised += compare_promises(facts.name, facts.promises, self.witness.taken())

    def begin_period(self) -> None:
        """The replicas are equal now, and the next step is the first of a period."""
        self._alone = 0
        self._common = self._start()

    def close(self) -> Examined:
        """What all ranks found; collective."""
        agreed = self._partners.agree(hash_number(self._beating(self._trainer.model.named_parameters())))
        wrong_start = [finding for finding in self._given if not finding.passed]
        broken = [finding for finding in self._promised if not finding.passed]
        different = wrong_start or broken or any(not finding.passed for finding in self._findings)
        failed, stale = self._control.largest([float(bool(different or self._stale)), float(self._stale)])
        return Examined(
            findings=[*wrong_start, *self._findings, *broken],
            agreed=agreed,
            failed=bool(failed),
            stale=bool(stale),
            by_blocks=self._by_blocks,
            shared=self._replica_s is not None,
            exercised=self._promise.of == "gradients" or self._averages > 0,
            sampled=len(self._sampled),
            smallest=max((step.smallest for step in self._sampled), default=0.0),
        )

    def _by_first(self, step: int) -> str | None:
        """A step whose gradients are the mean over all replicas, recomputed by rank 0. Returns what stands in
        the way of a check."""
        cell, trainer = self._setup.cell, self._trainer
        first = self._setup.rank.rank == 0
        start = self._start(kept=first)
        self._initial = start if step == 0 else None
        ledger = Ledger(trainer.model, self._partners) if self._lossy else None
        gradients = self._gradients(step, kept=first)
        buffers, history = self._buffers(kept=first), optimizer_history(trainer, self.beat, kept=first)
        found, obstacle = self._all_recomputed(start, step, gradients, history)
        if self._control.from_first(float(found is not None and self._may_be_by_blocks(found, gradients))):
            self._by_blocks = not self._by_blocks
            found, obstacle = self._all_recomputed(start, step, gradients, history)
        if self._control.from_first(float(found is None)):
            self._update()
            return obstacle
        if exact_arithmetic(cell):
            self._stale |= not self._buffers_equal(found)
        balance = None
        if ledger is not None:
            balance = ledger.balance(self._dense_gradients(), scale=trainer.scaler.get_scale())
        findings: list[ProofFinding] = []
        blurred = None
        if found is not None:
            findings = compare_step(cell, gradients, buffers, found.reference, balance)
            applied = gradients if balance is None else balance.values
            findings += compare_precision(cell, applied, found.reference.gradients, found.in_fp32)
            if self._may_be_rounding(findings):
                blurred = self._blurred(start, step, gradients, found.reference, findings)
                found = self._replayed_again(found, gradients, history)
        if self._control.from_first(float(blurred is not None)):
            self._findings += _of_all_else(findings)
            self._update_checked(start, history, found)
            return blurred or ""
        self._findings += findings
        self._update_checked(start, history, found)
        return None

    def _by_each(self, step: int) -> str | None:
        """A step of which every rank recomputes its own replica, whose gradients, or parameters after the
        update, are then averaged with its partners'. Where all have the same, rank 0 alone compares them."""
        cell, trainer, promise = self._setup.cell, self._trainer, self._promise
        averages_all, averages_gradients = promise.averages_all_gradients(step), promise.of == "gradients"
        averages_gradients |= averages_all
        compares = not averages_all or self._setup.rank.rank == 0
        start = self._start()
        self._initial = start if step == 0 else None
        if averages_all:
            self._take_first_buffers(start)
        elif self._alone % promise.every == 0:
            self._common = start
        ledger = Ledger(trainer.model, self._partners) if self._lossy and averages_gradients else None
        gradients = self._gradients(step, kept=compares)
        history = optimizer_history(trainer, self.beat, kept=compares)
        count = self._partners.count if averages_gradients else 1
        found, obstacle = self._recomputed(
            start, step, gradients, history if compares else None, [self._setup.replica], averaged=count
        )
        if self._control.largest([float(found is None)])[0]:
            self._update()
            return obstacle or "a rank could not recompute its replica"
        assert found is not None
        reference = found.reference
        balance = None
        if averages_gradients:
            reference = self._partners.mean(reference, self._parameters_of(start))
        if ledger is not None:
            balance = ledger.balance(self._dense_gradients(), scale=trainer.scaler.get_scale())
        buffers, blurred = self._buffers(), None
        if compares:
            findings = compare_step(cell, gradients, buffers, reference, balance)
            findings += compare_precision(cell, gradients, reference.gradients, found.in_fp32)
            if self._may_be_rounding(findings):
                blurred = self._blurred(start, step, gradients, reference, findings)
                found = self._replayed_again(found, gradients, history)
        else:
            findings = compare_buffers(cell, buffers, reference)
        if self._control.largest([float(blurred is not None)])[0]:
            self._findings += _of_all_else(findings)
            self._update_checked(start, history, found if compares else None)
            return blurred or "on another rank no simulation tells a defect from rounding"
        self._findings += findings
        self._alone += not averages_all
        if averages_gradients or self._alone % promise.every:
            self._update_checked(start, history, found if compares else None)
        else:
            assert found.replay is not None
            self._compare_history(history, found)
            self._check_average(found.replay.parameters)
        return None

    def _in_fp32(self, model: ReferenceModel, start: dict[str, Tensor], what: Simulated) -> dict[str, Tensor]:
        """The gradients of the very first step in fp32; none where the cell asks for fp32, where the model
        does not compute in it, and where this rank recomputes a part of what is averaged."""
        part = what.averaged > len(what.replicas)
        if self._precision_known or part or self.unexpected or self._setup.cell.precision not in HALF:
            return {}
        self._precision_known = True
        try:
            return self._simulated(model, start, replace(what, in_fp32=True), {}).gradients
        except RuntimeError:
            # A user's model may have tensors in half precision, which torch multiplies under autocast alone.
            return {}

    def _may_be_by_blocks(self, found: _Recomputed, gradients: Tensors) -> bool:
        """Whether gradients differ in exact arithmetic, and their terms may have been added in the other
        order (`ReferenceModel.by_blocks`)."""
        if self._lossy or not exact_arithmetic(self._setup.cell) or not self._awake().blocks:
            return False
        reference = found.reference
        compared = elementwise("gradient", gradients, reference.gradients, reference.bounds)
        return any(not finding.passed for finding in compared)

    def _may_be_rounding(self, findings: Sequence[ProofFinding]) -> bool:
        """Whether only gradients differ, in inexact arithmetic, and they are the mean of whole ones."""
        cell, wrong = self._setup.cell, {finding.of for finding in findings if not finding.passed}
        return wrong == {"gradient"} and not exact_arithmetic(cell) and averages_whole_gradients(cell)

    def _replayed_again(
        self, found: _Recomputed, gradients: dict[str, Tensor], history: History
    ) -> _Recomputed:
        """A simulation after the replay has overwritten the model that has its parameters."""
        assert self._model is not None
        return replace(found, replay=self._replayed(self._model, found.start, gradients, history))

    def _replayed(
        self, model: ReferenceModel, start: Tensors, gradients: dict[str, Tensor], history: History
    ) -> Replay:
        """The update by these gradients, the sparse ones as they are: a plain SGD adds what several samples
        give a row one after another, and not their sum."""
        named = self._trainer.model.bare.named_parameters()
        scale = self._trainer.scaler.get_scale()
        sparse = {
            name: parameter.grad.cpu() / scale
            for name, parameter in named
            if parameter.grad is not None and parameter.grad.is_sparse
        }
        return replay_update(self._setup, model, start, gradients | sparse, history)

    def _blurred(
        self,
        start: Tensors,
        step: int,
        gradients: Tensors,
        reference: Reference,
        findings: Sequence[ProofFinding],
    ) -> str | None:
        """Why gradients that failed may be right: no simulation tells the defect from rounding; else None.

        A compiler rounds at other places. Some models (BatchNorm in half precision, at first) make so much
        of it that the gradient of a right step has another direction. How much it is tells a second
        simulation of one replica, whose parameters are off by one rounding of the cell's precision. The norm
        of all gradients hardly changes by that, and still has to be that of the simulation.
        """
        cell, wrong = self._setup.cell, [finding for finding in findings if not finding.passed]
        assert self._model is not None
        what = self._what(step, [self._setup.replica])
        try:
            with no_collectives():
                exact, rounded = (
                    simulate_step(self._setup, self._model, begin, what, beat=self.beat).gradients
                    for begin in (start.items, partial(rounded_otherwise, start, cell.precision))
                )
        except OwnCollectiveError:
            return OWN_COLLECTIVES
        size, size_of_one = size_of(reference.gradients), size_of(exact)
        found = max(finding.difference for finding in wrong) / size
        by_rounding = distance([(rounded[name], exact[name]) for name in exact]) / size_of_one
        # Of a simulation that is not finite nothing is known.
        if not TOLERANCE[cell.precision] < by_rounding < math.inf or found > MORE_THAN_ROUNDING * by_rounding:
            return None
        longer = abs(size_of(gradients) / size - 1)
        longer_by_rounding = max(TOLERANCE[cell.precision], abs(size_of(rounded) / size_of_one - 1))
        if longer > min(MORE_THAN_ROUNDING * longer_by_rounding, LARGEST_CHANGE_OF_NORM):
            return None
        return (
            f"gradients differ from a serial simulation by {found:.2g} of their L2 norm, and by "
            f"{by_rounding:.2g} where parameters are off by one rounding of {cell.precision}; the norm "
            f"itself differs by {longer:.2g}"
        )

    def _take_first_buffers(self, start: dict[str, Tensor]) -> None:
        """A step that averages all gradients begins with rank 0's buffers on every rank."""
        for name, _ in self._trainer.model.bare.named_buffers():
            octets = start[name].flatten().view(torch.uint8).to(self._setup.device)
            self._control.broadcast(octets)
            start[name] = octets.cpu().view(start[name].dtype).view(start[name].shape)

    def _update_checked(self, start: Tensors, history: History, found: _Recomputed | None) -> None:
        """The update, and on a rank that has recomputed it how it compares; collective."""
        self._compare_history(history, found)
        self._update()
        updated = self._parameters(kept=found is not None)
        if found is not None and found.replay is not None:
            expected = found.replay.parameters
            finding = compare_update(self._setup.cell, updated, expected, start)
            moved = [name for name in expected if found.start[name] is not start[name]]
            if moved:
                finding = replace(
                    finding, what=f"{finding.what}; forward itself changes {', '.join(moved[:3])}"
                )
            self._findings.append(finding)

    def _parameters_of(self, start: Tensors) -> dict[str, Tensor]:
        return {name: start[name] for name, _ in self._trainer.model.bare.named_parameters()}

    def _check_average(self, expected: Tensors) -> None:
        """An update that ends in an average of parameters; without it they would be `expected`."""
        cell, model, partners = self._setup.cell, self._trainer.model, self._partners
        ledger = Ledger(model, partners)
        buffers = self._averaged_buffers()
        self._update()
        updated = self._parameters()
        balance = ledger.balance(model.named_parameters(), scale=1.0)
        common = self._common if self._promise.equal else None
        self._findings += compare_average(cell, balance, expected, common, partners)
        self._findings.append(something_sent(self._moved(updated), self._moved(expected)))
        after = Balance(values=self._averaged_buffers(), held=dict.fromkeys(buffers, torch.zeros(())))
        self._findings += compare_average(cell, after, buffers, common, partners)
        self._averages += 1
        self._stale |= not partners.agree(hash_number(model.named_buffers()))

    def _averaged_buffers(self) -> dict[str, Tensor]:
        """Copies of the buffers that the next average makes their mean; the same names on all ranks."""
        if not self._promise.mean_buffers:
            return {}
        return {
            name: value.clone()
            for name, value in self._buffers().items()
            if value.is_floating_point() and self._common[name].isfinite().all()
        }

    def _compare_history(self, history: History, found: _Recomputed | None) -> None:
        """The state that this update begins with against the one that the last replay left."""
        if found is not None and self._history is not None:
            self._findings += compare_history(self._setup.cell, history, self._history)
        replay = None if found is None else found.replay
        self._history = None if replay is None else replay.history

    def _moved(self, parameters: Tensors) -> dict[str, Tensor]:
        """How far parameters are from those after the last average."""
        return {name: value - self._common[name] for name, value in parameters.items()}

    def _start(self, *, kept: bool = True) -> dict[str, Tensor]:
        """Copies of parameters and buffers, as all that follows in host memory, and nothing where not `kept`;
        collective all the same."""
        model = self._trainer.model
        named = chain(model.named_parameters(), model.named_buffers())
        return {name: host_copy(value) for name, value in self._beating(named) if kept}

    def _parameters(self, *, kept: bool = True) -> dict[str, Tensor]:
        named = self._trainer.model.named_parameters()
        return {name: value.cpu() for name, value in self._beating(named) if kept}

    def _buffers(self, *, kept: bool = True) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self._trainer.model.named_buffers() if kept}

    def _beating(self, values: Iterable[T]) -> Iterator[T]:
        """The values of a long walk over a model."""
        for value in values:
            self.beat()
            yield value

    def _gradients(self, step: int, *, kept: bool = True) -> dict[str, Tensor]:
        """Whole gradients after the exchange, the loss scaler's factor taken out."""
        self._computed(step)
        return {name: value.cpu() for name, value in self._dense_gradients() if kept}

    def _computed(self, step: int) -> None:
        """Have the trainer compute the gradients of a step, and check what it begins with."""
        accumulation = self._setup.cell.accumulation
        self._given.append(compare_random_state(self._setup, step, self._control))
        with self._setup.memory.kept(), self.first.part():
            batches = list(islice(self._batches, accumulation))
        self._compare_batches(step, batches)
        self._scale = self._trainer.scaler.get_scale()
        used = iter(batches)
        if self.unexpected:
            used = self._batches.sampler.unexpected(batches, self._setup.replica, step * accumulation)
        began_s = time.thread_time()
        with self._setup.memory.kept(), self.first.part():
            loss = self._trainer.compute_gradients(used)
        if not device_of(self._setup.device).asynchronous and not self._setup.cell.compile:
            # Without waiting for the exchange; where a kernel is only queued, nothing is known of it.
            computed_s = time.thread_time() - began_s
            if self._setup.cell.activation_checkpointing:
                # A simulation computes no forward pass again, which takes no longer than all the rest.
                computed_s /= 2
            self._least_s = max(0.0, computed_s - ONCE_S)
        self._given.append(all_used(accumulation, left=len(list(used))))
        if self._control.largest([float(not loss.isfinite())])[0]:
            raise DivergedError

    def _compare_batches(self, step: int, batches: Sequence[Batch]) -> None:
        """The micro-batches of a step, on all ranks."""
        groups = self._setup.groups
        replica = groups.replica(dist.get_rank())
        first = step * self._setup.cell.accumulation
        expected = self._batches.sampler.prints(replica, first, len(batches))
        prints = [batch_print(batch) for batch in batches]
        self._given.append(compare_prints("micro-batches", prints, expected, self._control, groups))
        if self._batches.shared is None and self._batches.sampler.reads_own:
            self._batches.shared = shared_batches(self._control.of_all(prints), groups)

    def _dense_gradients(self) -> Iterator[tuple[str, Tensor]]:
        scale = self._trainer.scaler.get_scale()
        for name, value in self._beating(self._trainer.model.named_gradients()):
            yield name, dense(value) / scale

    def _update(self) -> None:
        with self._setup.memory.kept(), self.first.part():
            self._trainer.update()

    def _all_recomputed(
        self, start: dict[str, Tensor], step: int, gradients: dict[str, Tensor], history: History
    ) -> tuple[_Recomputed | None, str]:
        """The step of all replicas on rank 0, nothing on the others, or what stands in the way; collective.

        Rank 0 simulates all of them; where that takes it too long, or would by what the step itself took, the
        ranks simulate one each. They do so too if the model calls collectives, which need all their
        ranks.
        """
        first, replicas = self._setup.rank.rank == 0, self._setup.cell.replicas
        found, obstacle = None, ""
        if self._replica_s is None:
            if first and replicas * self._least_s > self._longest_s:
                self._replica_s = self._least_s
            elif first:
                try:
                    with no_collectives():
                        found, obstacle = self._recomputed(start, step, gradients, history, range(replicas))
                except OwnCollectiveError:
                    obstacle = OWN_COLLECTIVES
                    if self._setup.cell.model_parallel == 1:
                        self._replica_s = self._least_s + ONCE_S
            self._replica_s = self._control.from_first(self._replica_s or 0.0) or None
            if self._replica_s is None:
                return found, obstacle
        alone_s = replicas * self._replica_s
        shared_s = self._replica_s + summed_s(self._trainer.parameter_bytes)
        if replicas == 1 or shared_s > self._longest_s:
            shared = f", and about {shared_s:.0f} s shared out over {replicas} ranks" if replicas > 1 else ""
            return None, too_long(alone_s) + shared
        return self._recomputed_by_all(start, step, gradients, history)

    def _recomputed_by_all(
        self, start: dict[str, Tensor], step: int, gradients: dict[str, Tensor], history: History
    ) -> tuple[_Recomputed | None, str]:
        """As `_all_recomputed`, by one rank of every replica."""
        trainer, control, first = self._trainer, self._control, self._setup.rank.rank == 0
        shares = Shares(self._setup, trainer.model, control, self.beat)
        copies = (COPIES if first else SHARED_COPIES) if shares.simulates else 0
        obstacle = no_room(control, trainer.parameter_bytes, copies=copies)
        if obstacle is not None:
            return None, obstacle
        buffers = {
            name: start[name] if first else host_copy(value) for name, value in self._buffers().items()
        }
        self._take_first_buffers(buffers)
        model = self._fitting(self._awake) if shares.simulates else None
        if control.largest([float(shares.simulates and model is None)])[0]:
            return None, NO_MEMORY
        what = self._what(step, range(self._setup.cell.replicas))
        reference, obstacle = shares.simulate(model, buffers, what, gradients, longest_s=self._longest_s)
        if reference is None or model is None:
            return None, obstacle
        begun = model.moved(start)
        replay = self._fitting(lambda: self._replayed(model, begun, gradients, history))
        if replay is None:
            return None, NO_MEMORY
        return _Recomputed(reference=reference, start=begun, replay=replay), ""

    def _awake(self) -> ReferenceModel:
        if self._model is None:
            self._model = ReferenceModel(self._setup)
            if self._initial is not None:
                self._given.append(self._compare_initial(self._model, self._initial))
                self._initial = None
        self._model.wake()
        return self._model

    def _compare_initial(self, model: ReferenceModel, start: Tensors) -> ProofFinding:
        """The parameters that training begins with against those that the cell's seed gives."""
        built = dict(model.module.named_parameters())
        own = {name: start[name] for name in built if name in start}
        wrong = [name for name, value in own.items() if not same_values(value, built[name].detach().cpu())]
        if wrong:
            # A user's model may draw values from a generator that nobody seeds.
            again = dict(ReferenceModel(self._setup).module.named_parameters())
            wrong = [name for name in wrong if same_values(again[name].detach(), built[name].detach())]
        return ProofFinding(
            passed=not wrong,
            of="fingerprints",
            what=f"seed {self._setup.cell.seed} gives other initial parameters: {', '.join(wrong[:3])}",
            difference=float(len(wrong)),
            bound=0.0,
        )

    @staticmethod
    def _fitting(take: Callable[[], T]) -> T | None:
        """What `take` gives; None if it does not fit in memory."""
        try:
            return take()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return None

    def _what(self, step: int, replicas: Sequence[int], averaged: int | None = None) -> Simulated:
        return Simulated(
            step=step,
            replicas=replicas,
            averaged=averaged or len(replicas),
            scale=self._scale,
            unexpected=self.unexpected,
            by_blocks=self._by_blocks,
        )

    def _recomputed(
        self,
        start: dict[str, Tensor],
        step: int,
        gradients: dict[str, Tensor],
        history: History | None,
        replicas: Sequence[int],
        *,
        averaged: int | None = None,
    ) -> tuple[_Recomputed | None, str]:
        """The step of these replicas on this device, and with a `history` its update, or what stands in the
        way."""

        def recomputed() -> _Recomputed:
            model, what = self._awake(), self._what(step, replicas, averaged)
            reference = self._simulated(model, start, what, gradients)
            begun = model.moved(start)
            # After the simulation that is compared: a user's model may count its forward passes.
            in_fp32 = self._in_fp32(model, start, what)
            replay = None if history is None else self._replayed(model, begun, gradients, history)
            return _Recomputed(reference=reference, start=begun, replay=replay, in_fp32=in_fp32)

        try:
            found = self._fitting(recomputed)
        except TooLongError as error:
            self._replica_s = error.seconds / error.replicas
            return None, too_long(error.seconds)
        return found, "" if found is not None else NO_MEMORY

    def _simulated(
        self, model: ReferenceModel, start: dict[str, Tensor], what: Simulated, gradients: Tensors
    ) -> Reference:
        """The step with the trainer's scale of the loss, so that both sides lose the same small numbers.

        Where the trainer's gradients are finite and those of the simulation are not, another kernel's
        rounding stands between them at the edge of fp16's range: then half the scale, up to `HALVINGS` times.
        """
        for _ in range(HALVINGS + 1):
            reference = simulate_step(
                self._setup, model, start.items, what, longest_s=self._longest_s, beat=self.beat
            )
            if what.scale <= 1 or finite(reference.gradients) or not finite(gradients):
                break
            what = replace(what, scale=what.scale / 2)
        return reference

    def _buffers_equal(self, found: _Recomputed | None) -> bool:
        """Whether this replica's buffers are, bit for bit, what rank 0 computed for it; collective."""
        none = [0.0] * self._setup.cell.replicas
        expected = self._control.largest(none if found is None else found.reference.buffer_hashes)
        return hash_number(self._trainer.model.named_buffers()) == expected[self._setup.replica]


def _of_all_else(findings: Iterable[ProofFinding]) -> list[ProofFinding]:
    """Those that are not of gradients."""
    return [finding for finding in findings if finding.of != "gradient"]
