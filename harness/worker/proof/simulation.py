"""Simulation of a cell's steps: by rank 0, by each rank for its own replica, or shared by one rank per
replica.

In a shared simulation each rank loads the parameters from the cell's own model, a tensor at a time, so that
no host has more copies of a large model than it has simulations. Rank 0's own copy, taken before the step, is
what the update is replayed from; a rank whose parameters are not the same is found when the replicas are
compared. The sum goes over the default group, Gloo's in host memory, and through none of the code that
exchanges gradients. Before anything is built, `memory_shortage` says whether there is memory for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from harness.worker.cell.setup import CellSetup
from harness.worker.exchange.group import OwnCollectiveError, no_collectives
from harness.worker.proof.choices import Choices
from harness.worker.proof.comparison import ProofFinding, Tensors, elementwise, same_values
from harness.worker.proof.reference import (
    HALF,
    Beat,
    History,
    Reference,
    ReferenceModel,
    Replay,
    Simulated,
    TooLongError,
    exact_arithmetic,
    finite,
    host_copy,
    replay_update,
    rounded_otherwise,
    simulate_step,
)
from harness.worker.rank.control import Control
from harness.worker.rank.failure import out_of_memory
from harness.worker.rank.usage import available_bytes, host_number
from results.record import COPIES, SHARED_COPIES, SUMMED_BYTES_PER_S
from strategies.devices import device_of
from strategies.trainer import Trainer

T = TypeVar("T")

GIB = 2**30
COPIES_ON_DEVICE = 2
"""Fewest copies of its parameters that a simulation has on a device: parameters and gradients."""
HALVINGS = 4
"""How often the scale of the loss is halved if a simulated fp16 step overflows and the trainer's did not."""
ONCE_S = 5.0
"""Seconds of a step's computation that may be spent on work that is done once."""
NO_MEMORY = "a serial simulation does not fit in memory in addition to the model"
OWN_COLLECTIVES = "the model or its loss calls torch.distributed, which one rank cannot recompute by itself"


def memory_shortage(control: Control, parameter_bytes: int, *, copies: int) -> str | None:
    """Return why a host or a device has too little memory for simulations, or None if all have enough.

    Collective, with the same answer on all ranks. This rank takes `copies` times its parameters of its host's
    memory; 0: it simulates nothing. The kernel would end a rank that takes too much, and with it a run whose
    figures are not written yet.
    """
    figures = device_of(control.device).memory()
    free = math.inf if figures is None else figures.free + figures.reserved - figures.allocated
    rows = [row for row in control.of_all([host_number(), available_bytes(), copies, free]) if row[2]]
    hosts: dict[float, list[list[float]]] = {}
    for row in rows:
        hosts.setdefault(row[0], []).append(row)
    for here in hosts.values():
        needed, left = parameter_bytes * sum(row[2] for row in here), min(row[1] for row in here)
        if needed > left:
            return (
                f"to recompute a step takes about {needed / GIB:.2g} GiB of host memory "
                f"(ranks on the host: {len(here)}), and {left / GIB:.2g} GiB are available"
            )
    on_device, least = COPIES_ON_DEVICE * parameter_bytes, min(row[3] for row in rows)
    if on_device > least:
        return (
            f"to recompute a step takes at least {on_device / GIB:.2g} GiB of a device in addition to "
            f"the cell's own memory, and {least / GIB:.2g} GiB are free"
        )
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """One step as the strategy computed it, in host memory; tensors are kept only on ranks that need them."""

    number: int
    """Number of the step, counted from 0."""
    start: dict[str, Tensor]
    """Parameters and buffers before the step."""
    gradients: dict[str, Tensor]
    """Gradients after the exchange, dense, without the loss scaler's factor."""
    history: History
    """State of the optimizer before the update."""
    scale: float
    """The loss scaler's factor."""
    choices: Choices
    """The discrete choices of all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """A step that was simulated on one device."""

    reference: Reference
    start: Tensors
    """The state before the update: that before the step, with the parameters that forward has changed."""
    replay: Replay | None
    """The update; None on a rank that compares no update."""
    in_fp32: Tensors = field(default_factory=dict)
    """Gradients in fp32, for a cell in half precision; empty where the step is not compared with them."""


class Simulator:
    """Simulates steps of one cell and replays their updates.

    It builds one model for its first simulation. Between steps that model gives up its memory (`rest`).
    """

    def __init__(
        self, setup: CellSetup, trainer: Trainer, control: Control, *, longest_s: float, beat: Beat
    ) -> None:
        """`longest_s` are the most seconds that the simulation of a step may take."""
        self._setup, self._trainer, self._control = setup, trainer, control
        self._longest_s, self._beat = longest_s, beat
        self.unexpected = False
        """Whether the steps use other micro-batches than the drawn ones (`Sampler.unexpected`)."""
        self.by_blocks = False
        """Which of two orders the last simulation added gradients in (`ReferenceModel.by_blocks`)."""
        self.least_s = 0.0
        """Fewest seconds that the simulation of a replica takes, known before a model is built."""
        self.initial: list[ProofFinding] = []
        """Comparison of the parameters that training began with, once a model is built in the first step."""
        self._model: ReferenceModel | None = None
        self._replica_s: float | None = None
        """Seconds that rank 0 takes for one replica, if it takes too long for all of them."""
        self._precision_known = False
        """Whether a step was also simulated in fp32."""
        groups = setup.groups
        self._simulates = setup.rank.rank == next(
            rank for rank in range(groups.ranks) if groups.replica(rank) == setup.replica
        )
        """Whether this rank takes part in a shared simulation: the first rank of each replica does."""

    @property
    def shared(self) -> bool:
        """Whether the ranks simulate a replica each."""
        return self._replica_s is not None

    def rest(self) -> None:
        """Give up the memory of the simulation's model."""
        if self._model is not None:
            self._model.rest()

    def all_replicas(self, step: TrainedStep) -> tuple[Recomputed | None, str]:
        """Simulate all replicas; return the step on rank 0, or the obstacle to a simulation; collective.

        Rank 0 simulates all of them. If that takes too long, or would take too long by an estimate from the
        step itself, the ranks simulate one replica each. They do so too if the model calls collectives, which
        need all their ranks.
        """
        replicas = self._setup.cell.replicas
        found, obstacle = None, ""
        if self._replica_s is None:
            if self._setup.rank.rank == 0:
                found, obstacle = self._by_first(step)
            self._replica_s = self._control.from_first(self._replica_s or 0.0) or None
            if self._replica_s is None:
                return found, obstacle
        shared_s = self._replica_s + self._trainer.parameter_bytes / SUMMED_BYTES_PER_S
        if replicas == 1 or shared_s > self._longest_s:
            shared = f", and about {shared_s:.0f} s shared out over {replicas} ranks" if replicas > 1 else ""
            return None, _too_long(replicas * self._replica_s) + shared
        return self._by_all_ranks(step)

    def _by_first(self, step: TrainedStep) -> tuple[Recomputed | None, str]:
        """Do the work of `all_replicas` on this rank; where each rank is to simulate its own replica, set
        `_replica_s`."""
        replicas = self._setup.cell.replicas
        if replicas * self.least_s > self._longest_s:
            self._replica_s = self.least_s
            return None, ""
        try:
            with no_collectives():
                return self.replicas(step, range(replicas))
        except OwnCollectiveError:
            if self._setup.cell.model_parallel == 1:
                self._replica_s = self.least_s + ONCE_S
            return None, OWN_COLLECTIVES

    def replicas(
        self, step: TrainedStep, replicas: Sequence[int], *, averaged: int | None = None, replays: bool = True
    ) -> tuple[Recomputed | None, str]:
        """Simulate these replicas on this device; return the step, or the obstacle to a simulation.

        The strategy's gradients are the mean over `averaged` replicas (default: these). If `replays`, the
        update is recomputed as well.
        """

        def recomputed() -> Recomputed:
            model, what = self._awake(step), self._what(step, replicas, averaged)
            reference = self._simulated(model, step, what)
            begun = model.moved(step.start)
            # It runs after the simulation that is compared, because a user's model may count its forward
            # passes.
            in_fp32 = self._in_fp32(model, step, self._what(step, replicas, averaged, judged=False))
            replay = self.replay(step, begun) if replays else None
            return Recomputed(reference=reference, start=begun, replay=replay, in_fp32=in_fp32)

        try:
            found = _if_it_fits(recomputed)
        except TooLongError as error:
            self._replica_s = error.seconds / error.replicas
            return None, _too_long(error.seconds)
        return found, "" if found is not None else NO_MEMORY

    def replay(self, step: TrainedStep, start: Tensors) -> Replay:
        """Replay the update from `start`; this overwrites the parameters of earlier replays.

        Sparse gradients are used as they are: a plain SGD adds what several samples give a row one after
        another, and not their sum.
        """
        assert self._model is not None
        sparse = {
            name: parameter.grad.cpu() / step.scale
            for name, parameter in self._trainer.model.bare.named_parameters()
            if parameter.grad is not None and parameter.grad.is_sparse
        }
        return replay_update(self._setup, self._model, start, step.gradients | sparse, step.history)

    def off_by_rounding(self, step: TrainedStep) -> tuple[Tensors, Tensors]:
        """Simulate this rank's own replica twice, the second time with state that is off by one rounding of
        the cell's precision; return both gradients. Raises OwnCollectiveError if the model calls
        collectives."""
        assert self._model is not None
        what, model = self._what(step, [self._setup.replica], judged=False), self._model
        rounded = partial(rounded_otherwise, step.start, self._setup.cell.precision)
        with no_collectives():
            exact, other = (
                simulate_step(self._setup, model, begin, what, beat=self._beat).gradients
                for begin in (step.start.items, rounded)
            )
        return exact, other

    def may_be_by_blocks(self, found: Recomputed, gradients: Tensors) -> bool:
        """Return whether gradients differ in exact arithmetic, so that their terms may have been added in the
        other order (`ReferenceModel.by_blocks`)."""
        if not exact_arithmetic(self._setup.cell) or self._model is None or not self._model.blocks:
            return False
        reference = found.reference
        compared = elementwise(gradients, reference.gradients, reference.bounds)
        return any(not finding.passed for finding in compared)

    def take_first_buffers(self, values: dict[str, Tensor]) -> None:
        """Replace buffers by rank 0's, with which a step that averages all gradients begins; collective."""
        for name, _ in self._trainer.model.bare.named_buffers():
            octets = values[name].flatten().view(torch.uint8).to(self._setup.device)
            self._control.broadcast(octets)
            values[name] = octets.cpu().view(values[name].dtype).view(values[name].shape)

    def _awake(self, step: TrainedStep) -> ReferenceModel:
        """Return the simulation's model with its memory."""
        if self._model is None:
            self._model = ReferenceModel(self._setup)
            if step.number == 0:
                self.initial.append(self._compare_initial(self._model, step.start))
        self._model.wake()
        return self._model

    def _compare_initial(self, model: ReferenceModel, start: Tensors) -> ProofFinding:
        """Compare the parameters at the start of training with the parameters that the cell's seed gives."""
        built = dict(model.module.named_parameters())
        own = {name: start[name] for name in built if name in start}
        wrong = [name for name, value in own.items() if not same_values(value, built[name].detach().cpu())]
        if wrong:
            # A user's model may draw values from a generator that nobody seeds.
            again = dict(ReferenceModel(self._setup).module.named_parameters())
            wrong = [name for name in wrong if same_values(again[name].detach(), built[name].detach())]
        what = f"seed {self._setup.cell.seed} gives other initial parameters: {', '.join(wrong[:3])}"
        return ProofFinding.within("fingerprints", what, float(len(wrong)), 0.0)

    def _what(
        self,
        step: TrainedStep,
        replicas: Sequence[int],
        averaged: int | None = None,
        *,
        judged: bool = True,
    ) -> Simulated:
        """`judged`: whether the simulation judges the choices of the ranks."""
        return Simulated(
            step=step.number,
            replicas=replicas,
            averaged=averaged or len(replicas),
            scale=step.scale,
            unexpected=self.unexpected,
            by_blocks=self.by_blocks,
            choices=partial(step.choices.repeated, judged=judged),
        )

    def _simulated(self, model: ReferenceModel, step: TrainedStep, what: Simulated) -> Reference:
        """Simulate the step with the trainer's scale of the loss, so that both sides lose the same small
        numbers.

        If the trainer's gradients are finite and the simulated ones are not, another kernel's rounding
        stands between them at the edge of fp16's range: then half the scale, up to `HALVINGS` times.
        """
        for _ in range(HALVINGS + 1):
            reference = simulate_step(
                self._setup, model, step.start.items, what, longest_s=self._longest_s, beat=self._beat
            )
            if what.scale <= 1 or finite(reference.gradients) or not finite(step.gradients):
                break
            what = replace(what, scale=what.scale / 2)
        return reference

    def _in_fp32(self, model: ReferenceModel, step: TrainedStep, what: Simulated) -> dict[str, Tensor]:
        """Simulate the very first step in fp32.

        Returns nothing if the cell asks for fp32, if the model does not compute in it, or if this rank
        recomputes only a part of what is averaged.
        """
        part = what.averaged > len(what.replicas)
        if self._precision_known or part or self.unexpected or self._setup.cell.precision not in HALF:
            return {}
        self._precision_known = True
        try:
            # The trainer's gradients are left out, so that the loss keeps its scale.
            return self._simulated(model, replace(step, gradients={}), replace(what, in_fp32=True)).gradients
        except RuntimeError:
            # A user's model may have tensors in half precision, which torch multiplies under autocast alone.
            return {}

    def _by_all_ranks(self, step: TrainedStep) -> tuple[Recomputed | None, str]:
        """Do the work of `all_replicas` by one rank of every replica."""
        control, first = self._control, self._setup.rank.rank == 0
        copies = (COPIES if first else SHARED_COPIES) if self._simulates else 0
        obstacle = memory_shortage(control, self._trainer.parameter_bytes, copies=copies)
        if obstacle is not None:
            return None, obstacle
        buffers = {
            name: step.start[name] if first else host_copy(value.cpu())
            for name, value in self._trainer.model.named_buffers()
        }
        self.take_first_buffers(buffers)
        model = _if_it_fits(lambda: self._awake(step)) if self._simulates else None
        if control.largest([float(self._simulates and model is None)])[0]:
            return None, NO_MEMORY
        reference, obstacle = self._mean_of_replicas(model, buffers, step)
        if reference is None or model is None:
            return None, obstacle
        begun = model.moved(step.start)
        replay = _if_it_fits(lambda: self.replay(step, begun))
        if replay is None:
            return None, NO_MEMORY
        return Recomputed(reference=reference, start=begun, replay=replay), ""

    def _mean_of_replicas(
        self, model: ReferenceModel | None, buffers: Mapping[str, Tensor], step: TrainedStep
    ) -> tuple[Reference | None, str]:
        """Simulate all replicas at the same time; return the step on rank 0, or the obstacle to that.

        Collective. `model` is for a rank that simulates, and `buffers` are those that the step began with, on
        every rank.
        """
        what = self._what(step, range(self._setup.cell.replicas))
        for _ in range(HALVINGS + 1):
            own, blank, obstacle = self._own_replica(model, buffers, what)
            failed, seconds = self._control.largest([float(obstacle is not None), obstacle or 0.0])
            if failed:
                return None, _too_long(seconds) if seconds else NO_MEMORY
            found = self._sum(own, blank)
            overflowed = what.scale > 1 and found is not None and not finite(found.gradients)
            if not self._control.from_first(float(overflowed and finite(step.gradients))):
                return found, ""
            what = replace(what, scale=what.scale / 2)
        return found, ""

    def _own_replica(
        self, model: ReferenceModel | None, buffers: Mapping[str, Tensor], what: Simulated
    ) -> tuple[Reference | None, Tensors, float | None]:
        """Simulate this rank's replica, if `model` is given; collective.

        Returns three values: the simulated step or None; an empty meta tensor for each parameter, by name;
        and the obstacle: None, 0.0 (too little memory), or the estimated seconds if the simulation would take
        too long.
        """
        blank: dict[str, Tensor] = {}
        gathering = False

        def start() -> Iterator[tuple[str, Tensor]]:
            nonlocal gathering
            gathering = True
            for name, value in self._trainer.model.named_parameters():
                gathering = False
                blank[name] = torch.empty_like(value, device="meta")
                yield name, value
                self._beat()
                gathering = True
            gathering = False

        walk = start()
        own, seconds = None, None
        if model is not None:
            try:
                own = simulate_step(
                    self._setup,
                    model,
                    lambda: chain(walk, buffers.items()),
                    replace(what, replicas=[self._setup.replica]),
                    longest_s=self._longest_s,
                    beat=self._beat,
                )
            except TooLongError as error:
                seconds = error.seconds
            except (RuntimeError, MemoryError) as error:
                # A rank that has no room for what it gathers cannot go on with the others.
                if gathering or not out_of_memory(error):
                    raise
                seconds = 0.0
        # All ranks gather the parameters, even a rank that simulates nothing or has no memory for it.
        for _ in walk:
            pass
        return own, blank, seconds

    def _sum(self, own: Reference | None, blank: Tensors) -> Reference | None:
        """Return the mean over the replicas on rank 0, None on the others; collective."""
        gradients = {} if own is None else own.gradients
        sizes = {} if own is None else own.sizes
        there, sized = [float(name in gradients) for name in blank], float(bool(sizes))
        *there, sized = self._control.largest([*there, sized])
        hashes = [0.0] * self._setup.cell.replicas
        if own is not None:
            [hashes[self._setup.replica]] = own.buffer_hashes
        hashes = self._control.largest(hashes)
        present = [name for name, some in zip(blank, there, strict=True) if some]
        summed = {name: self._mean(gradients.get(name), blank[name]) for name in present}
        summed_sizes = {name: self._mean(sizes.get(name), blank[name]) for name in present if sized}
        if own is None or self._setup.rank.rank:
            return None
        return replace(own, gradients=summed, sizes=summed_sizes, buffer_hashes=hashes)

    def _mean(self, own: Tensor | None, blank: Tensor) -> Tensor:
        total = (
            torch.zeros_like(blank, device="cpu") if own is None else own / self._setup.cell.replicas
        ).contiguous()
        self._control.sum_to_first(total)
        self._beat()
        # Only rank 0 has the sum; the values on the other ranks are meaningless.
        return total if self._setup.rank.rank == 0 else total.new_empty(0)


def _too_long(seconds: float) -> str:
    return f"a serial simulation of a step would take about {seconds:.0f} s"


def _if_it_fits(take: Callable[[], T]) -> T | None:
    """Return what `take` returns, or None if it does not fit in memory."""
    try:
        return take()
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return None
