"""The simulation of a step shared out: one rank of every replica simulates it, and a sum goes to rank 0.

Each loads the parameters from the cell's own model, a tensor at a time, so that no host has more copies of a
large model than it has simulations. Rank 0's own copy, taken before the step, is what the update is replayed
from; a rank whose parameters are not the same is found when the replicas are compared. The sum goes over the
default group, Gloo's in host memory, and through none of the code that exchanges gradients.

Whether there is memory for the simulation of a step, before anything of it is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from harness.worker.cell.setup import CellSetup
from harness.worker.proof.comparison import Tensors
from harness.worker.proof.reference import (
    Beat,
    Reference,
    ReferenceModel,
    Simulated,
    TooLongError,
    finite,
    simulate_step,
)
from harness.worker.rank.control import Control
from harness.worker.rank.failure import out_of_memory
from harness.worker.rank.usage import available_bytes, host_number
from results.proof_limits import SUMMED_BYTES_PER_S
from strategies.devices import device_of
from strategies.training.parallel import ParallelModel

HALVINGS = 4
"""Of the scale of the loss, where a simulated step in fp16 overflows and the trainer's did not."""


def too_long(seconds: float) -> str:
    return f"a serial simulation of a step would take about {seconds:.0f} s"


NO_MEMORY = "a serial simulation does not fit in memory beside the model"


def summed_s(parameter_bytes: int) -> float:
    """Seconds that the sum of the replicas' gradients takes."""
    return parameter_bytes / SUMMED_BYTES_PER_S


class Shares:
    """What ranks simulate of the steps of one cell, each rank a replica or nothing."""

    def __init__(self, setup: CellSetup, model: ParallelModel, control: Control, beat: Beat) -> None:
        self._setup, self._model, self._control, self._beat = setup, model, control, beat
        groups = setup.groups
        ranks = range(groups.ranks)
        first = next(rank for rank in ranks if groups.replica(rank) == setup.replica)
        self.simulates = first == setup.rank.rank
        """Whether this rank does: the first one of each replica."""

    def simulate(
        self,
        reference: ReferenceModel | None,
        buffers: Mapping[str, Tensor],
        what: Simulated,
        gradients: Tensors,
        *,
        longest_s: float,
    ) -> tuple[Reference | None, str]:
        """The step of all replicas, on rank 0 alone, or what stands in the way; collective.

        `reference` is for a rank that simulates, `buffers` are those that the step began with, on every rank,
        and `gradients` the trainer's, on rank 0.
        """
        for _ in range(HALVINGS + 1):
            own, blank, obstacle = self._own(reference, buffers, what, longest_s)
            failed, seconds = self._control.largest([float(obstacle is not None), obstacle or 0.0])
            if failed:
                return None, too_long(seconds) if seconds else NO_MEMORY
            found = self._sum(own, blank)
            again = what.scale > 1 and found is not None and not finite(found.gradients) and finite(gradients)
            if not self._control.from_first(float(again)):
                return found, ""
            what = replace(what, scale=what.scale / 2)
        return found, ""

    def _own(
        self,
        reference: ReferenceModel | None,
        buffers: Mapping[str, Tensor],
        what: Simulated,
        longest_s: float,
    ) -> tuple[Reference | None, Tensors, float | None]:
        """This rank's share, if it has one; all parameters, on the meta device; and the seconds that its
        simulation would take (0: no room for it), None if nothing stands in the way; collective."""
        blank: dict[str, Tensor] = {}
        gathering = False

        def start() -> Iterator[tuple[str, Tensor]]:
            nonlocal gathering
            gathering = True
            for name, value in self._model.named_parameters():
                gathering = False
                blank[name] = torch.empty_like(value, device="meta")
                yield name, value
                self._beat()
                gathering = True
            gathering = False

        walk = start()
        share, seconds = None, None
        if reference is not None:
            try:
                share = simulate_step(
                    self._setup,
                    reference,
                    lambda: chain(walk, buffers.items()),
                    replace(what, replicas=[self._setup.replica]),
                    longest_s=longest_s,
                    beat=self._beat,
                )
            except TooLongError as error:
                seconds = error.seconds
            except (RuntimeError, MemoryError) as error:
                # A rank that has no room for what it gathers cannot go on with the others.
                if gathering or not out_of_memory(error):
                    raise
                seconds = 0.0
        # Parameters are gathered by all ranks: also by one with no share, and by one that has no room for it.
        for _ in walk:
            pass
        return share, blank, seconds

    def _sum(self, own: Reference | None, blank: Tensors) -> Reference | None:
        """The mean over the replicas on rank 0, None on the others; collective."""
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
        # What is left on the other ranks is nothing to keep.
        return total if self._setup.rank.rank == 0 else total.new_empty(0)


GIB = 2**30
ON_DEVICE = 2
"""Of its parameters, on a device with memory of its own: what a simulation has there at least, which are
parameters and gradients."""


def no_room(control: Control, parameter_bytes: int, *, copies: int) -> str | None:
    """Why a host or a device has too little memory for simulations; None if all have enough. Collective, the
    same answer on all ranks.

    `copies` of its parameters are what this rank takes of its host's memory; 0: it simulates nothing. The
    kernel would end a rank that takes too much, and with it a run whose figures are not written yet.
    """
    figures = device_of(control.device).memory()
    free = math.inf if figures is None else figures.free + figures.reserved - figures.allocated
    rows = [row for row in control.of_all([host_number(), available_bytes(), copies, free]) if row[2]]
    for host in dict.fromkeys(row[0] for row in rows):
        here = [row for row in rows if row[0] == host]
        needed, left = parameter_bytes * sum(row[2] for row in here), min(row[1] for row in here)
        if needed > left:
            return (
                f"to recompute a step takes about {needed / GIB:.2g} GiB of host memory "
                f"(ranks on the host: {len(here)}), and {left / GIB:.2g} GiB are available"
            )
    on_device, least = ON_DEVICE * parameter_bytes, min(row[3] for row in rows)
    if on_device > least:
        return (
            f"to recompute a step takes at least {on_device / GIB:.2g} GiB of a device beside the cell's own "
            f"memory, and {least / GIB:.2g} GiB are free"
        )
    return None
