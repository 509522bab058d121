"""Trained parameters without a gradient: refused if a strategy cannot leave them out, on all ranks or on
one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from results.errors import UsageError
from strategies.advice import WITH_UNUSED
from strategies.collectives.link import Link

SAME_PARAMETERS = f"use the same parameters on all ranks in every step, or use {' or '.join(WITH_UNUSED)}"


class UnlikeStepError(UsageError):
    """A step used the model otherwise than the strategy expects; a closer look at the model may say why."""


class MissingGradients:
    """A check of all ranks at the end of a step, before its gradients are exchanged or applied."""

    def __init__(self, link: Link, device: torch.device, *, reason: str) -> None:
        """`link` connects all ranks, `device` is one that it can send from; `reason` says why no parameter
        can be left out."""
        self._link = link
        self._device = device
        self._reason = reason
        self._agreed = False
        """Whether all ranks have had all gradients in a step, as all ranks know."""

    def refuse(self, names: Sequence[str]) -> None:
        """Raise UsageError if parameters, of these `names` on this rank, have no gradient.

        Until a step in which all gradients came it is collective, and raises on all ranks. Later it raises on
        the rank where a gradient is missing, and the other ranks wait for it.
        """
        if not self._agreed:
            most = torch.tensor([float(len(names))], device=self._device)
            self._link.largest(most)
            self._agreed = not most.item()
            if not self._agreed and not names:
                raise UsageError("a parameter has no gradient on another rank, whose error names it")
        if names:
            raise UsageError(
                f"no gradient came for {', '.join(names[:3])} ({len(names)} parameters), and {self._reason}: "
                f"freeze what is not used, or use {' or '.join(WITH_UNUSED)}"
            )


class UnlikeGradients:
    """A check of all ranks at the end of a step of torch's FSDP.

    FSDP averages gradients by their positions: if ranks lack the gradients of different parameters, it would
    average the gradients of different parameters, or fail in the backend if their sizes differ.
    """

    def __init__(self, link: Link, device: torch.device, places: Sequence[str]) -> None:
        """`link` connects all ranks, `device` is one that it can send from; `places` describe the kinds of
        operations."""
        self._link = link
        self._device = device
        self._places = [*places, "ends"]
        self._agreed: set[str] | None = None
        """The parameters without a gradient in the first step, the same on all ranks."""
        self._first: list[tuple[int, int]] = []
        """The operations of the first step, the same on all ranks."""
        self._now = 0
        """Number of operations of this step so far."""
        self._watches = False

    def begin(self) -> None:
        """Begin to compare the operations of a step."""
        self._now, self._watches = 0, True
        if self._agreed is None:
            self._first = []

    def end(self) -> None:
        """End the step: later operations (such as a validation) are not compared."""
        self._watches = False

    def meet(self, place: int, values: int) -> None:
        """Raise UsageError if the next operation of a step is not the same on all ranks: its kind (`place`,
        an index of `places`; -1 for the end of a step), and its number of `values`.

        The first step is collective and raises on all ranks. In later steps each rank compares its operations
        with its own first step, which exchanges nothing, and the other ranks wait for a rank that raises.
        Gloo ends the process of a rank that receives more than it expects.
        """
        if not self._watches:
            return
        if self._agreed is not None:
            expected = self._first[self._now] if self._now < len(self._first) else (-1, 0)
            if (place, values) != expected:
                raise UnlikeStepError(
                    f"rank {self._link.rank} {self._places[place]} ({values:,} values) where in the first "
                    f"step it {self._places[expected[0]]} ({expected[1]:,} values): {SAME_PARAMETERS}"
                )
            self._now += 1
            return
        self._first.append((place, values))
        mine = torch.tensor([place, values])
        both = torch.cat([mine, -mine]).to(self._device)
        self._link.largest(both)
        most, least = both.view(2, 2).tolist()
        if most != [-number for number in least]:
            others = "others " if most[1] == -least[1] else ""
            raise UnlikeStepError(
                f"ranks use different parameters of the model (they exchange {-least[1]:,} values on one "
                f"rank, {most[1]:,} {others}on another): {SAME_PARAMETERS}"
            )

    def refuse(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise UsageError if ranks lack the gradients of different `parameters`.

        In the first step it is collective, and raises on all ranks. Later it raises on a rank that lacks
        other gradients than in the first step, and the other ranks wait for it. That rank is refused even if
        all ranks change in the same way, for example skip the same layers: to compare again, all would have
        to join a collective, and a rank that sees no change does not know that.
        """
        self.meet(-1, 0)
        missing = {name for name, value in parameters.items() if value.requires_grad and value.grad is None}
        if self._agreed is None:
            lacking = torch.tensor([float(name in missing) for name in parameters], device=self._device)
            self._link.all_reduce(lacking)
            ranks = dict(zip(parameters, lacking.tolist(), strict=True))
            unlike = [name for name, count in ranks.items() if 0 < count < self._link.size]
            said = "came on some ranks and not on others"
            self._agreed = None if unlike else missing
        else:
            unlike = sorted(missing ^ self._agreed)
            said = (
                "came in this step or in the first, not in both (refused even where all ranks change alike)"
            )
        if unlike:
            raise UnlikeStepError(
                f"the gradient of {', '.join(unlike[:3])} ({len(unlike)} parameters) {said}: "
                f"{SAME_PARAMETERS}"
            )
