"""A copy of all state that a training step changes, except the number of steps, to restore it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from strategies.devices import device_of
from strategies.trainer import Trainer

SPARE_SHARE = 0.1
"""The share of a device's memory that must stay free after a copy, as later steps may need more memory than
earlier ones."""


class Snapshot:
    """Parameters, buffers, optimizer, scaler and exchange state, and random state of one rank, at one moment.

    The copy of parameters, buffers and optimizer is on the device if that has enough free memory, else in
    host memory; the state of the exchange is copied where it is. `Trainer.state_dict` is for another process:
    it is in host memory, by names of the complete model. This copy is restored into the same trainer, tensor
    by tensor, during a measurement.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._with_state = set(trainer.model.local_state(trainer.optimizer))
        self._device = device_of(trainer.device)
        values = [value.detach() for value in _tensors(trainer)]
        figures = self._device.memory()
        room = figures is not None and (
            figures.free - sum(value.nbytes for value in values) >= SPARE_SHARE * figures.total
        )
        # Copies on a stream are made in its order, as are the copies back. Copies in host memory are not
        # pinned: torch would round each up to a power of two bytes, and keep it from all others until the
        # process ends.
        self._values = [value.clone() if room else value.to("cpu", copy=True) for value in values]
        self._scaler = trainer.scaler.state_dict()
        self._model = trainer.model.strategy_state()
        self._random = torch.get_rng_state()
        self._device_random = self._device.random_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore every value in place."""
        # A parameter has optimizer state from its first gradient on, which may have come after the copy.
        state = self._trainer.model.local_state(self._trainer.optimizer)
        for parameter in set(state) - self._with_state:
            del state[parameter]
        for value, kept in zip(_tensors(self._trainer), self._values, strict=True):
            value.copy_(kept)
        self._trainer.scaler.load_state_dict(self._scaler)
        self._trainer.model.load_strategy_state(self._model)
        torch.set_rng_state(self._random)
        if self._device_random is not None:
            self._device.set_random_state(self._device_random)


def _tensors(trainer: Trainer) -> Iterator[Tensor]:
    yield from trainer.model.parameters()
    yield from trainer.model.bare.buffers()
    every = trainer.model.local_state(trainer.optimizer)
    for parameter in trainer.model.parameters():
        state = every.get(parameter, {})
        yield from (value for _, value in sorted(state.items()) if isinstance(value, Tensor))
