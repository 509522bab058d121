"""Check that the compiler compiled a cell's model, and let the compiled model draw the random numbers of the
uncompiled reference during the proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from harness.worker.proof.fingerprints import random_print
from results.cell import Cell


class NotCompiledError(Exception):
    """The compiler left the model as it is."""


class Compilation:
    """The compiled code of one run's model.

    A compiled dropout draws other numbers than an eager one, so that the two could never be compared. The
    measured model is compiled as a user would compile it. A model that draws random numbers is therefore
    compiled three times: for the proof, for what is measured, and for the late proof. Any other model is
    compiled once, and the code that is measured is the code that was proven.
    """

    def __init__(self, cell: Cell, device: torch.device) -> None:
        self._compiles = cell.compile
        self._device = device
        self._draws: bool | None = None
        """Whether the model draws random numbers; None: not known yet."""

    @contextmanager
    def reproducible(self, model: nn.Module) -> Iterator[None]:
        """Have the model draw the random numbers of an uncompiled one in this context."""
        if not self._compiles:
            yield
            return
        if self._draws is not False:
            _forget_compiled()
        with torch._inductor.config.patch(fallback_random=True), self.watched(model):
            yield
        if self._draws is not False:
            _forget_compiled()
            torch._dynamo.utils.counters.clear()

    @contextmanager
    def watched(self, model: nn.Module) -> Iterator[None]:
        """Find out whether the model draws random numbers in the steps that are taken in this context."""
        if not self._compiles:
            yield
            return
        forward = model.forward

        def watching(*inputs: object, **named: object) -> object:
            graphs, before = _graphs(), random_print(self._device)
            outputs = forward(*inputs, **named)
            # The compiler draws random numbers as well.
            if graphs == _graphs():
                self._draws = bool(self._draws) or random_print(self._device) != before
            return outputs

        model.forward = watching
        try:
            yield
        finally:
            model.forward = forward


def _forget_compiled() -> None:
    """Forget what was compiled. Torch forgets the callbacks of compilations as well: they are kept."""
    from torch._dynamo.callback import callback_handler as compiler

    starts, ends = list(compiler.start_callbacks), list(compiler.end_callbacks)
    torch._dynamo.reset()
    compiler.start_callbacks += starts
    compiler.end_callbacks += ends


def require_compiled() -> None:
    """Raises NotCompiledError if the steps so far have captured no graph."""
    if not _graphs():
        raise NotCompiledError(
            "torch.compile captured no graph of this model, so it would run uncompiled: leave --compile out"
        )


def _graphs() -> int:
    """Return how many graphs the compiler captured since its counters were cleared."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
