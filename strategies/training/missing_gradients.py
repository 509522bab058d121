"""Trained parameters without a gradient, where no rank can leave one out: refused on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from results.errors import UsageError
from strategies.advice import WITH_UNUSED
from strategies.collectives.link import Link


class MissingGradients:
    """What all ranks ask at the end of a step, before they exchange or update anything by its gradients."""

    def __init__(self, link: Link, device: torch.device, *, reason: str) -> None:
        """`link` is to all ranks, `device` one that it reaches; `reason` is why none can be left out."""
        self._link = link
        self._device = device
        self._reason = reason
        self._agreed = False
        """Whether all ranks know that all have had all gradients in a step."""

    def refuse(self, names: Sequence[str]) -> None:
        """Raise UsageError if parameters, of these `names` on this rank, have no gradient.

        Collective, and on all ranks, until a step in which all came; after it on the rank where one is
        missing, and the others wait for it.
        """
        if not self._agreed:
            most = torch.tensor([float(len(names))], device=self._device)
            self._link.largest(most)
            self._agreed = not most.item()
            if not self._agreed and not names:
                raise UsageError("no gradient came for a parameter on another rank, which says for which")
        if names:
            raise UsageError(
                f"no gradient came for {', '.join(names[:3])} ({len(names)} parameters), and {self._reason}: "
                f"freeze what is not used, or use {' or '.join(WITH_UNUSED)}"
            )
