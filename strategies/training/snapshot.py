"""A copy of everything a training step changes but its count (`Trainer.steps`), to put it back."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from strategies.devices import device_of
from strategies.training.trainer import Trainer


class Snapshot:
    """Parameters, buffers, optimizer, scaler and exchange state, and random state of one rank, at one moment.

    The copy of parameters, buffers and optimizer lies in host memory, so that it takes no room on a device
    that is nearly full; what the exchange keeps is copied where it is.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._with_state = set(trainer.model.local_state(trainer.optimizer))
        self._values = [value.detach().to("cpu", copy=True) for value in _tensors(trainer)]
        self._scaler = trainer.scaler.state_dict()
        self._model = trainer.model.strategy_state()
        self._random = torch.get_rng_state()
        self._device = device_of(trainer.device)
        self._device_random = self._device.random_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Put every value back, in place."""
        # A parameter has optimizer state from its first gradient on, which may have come since.
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
