"""A copy of everything a training step changes but its count (`Trainer.steps`), to put it back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from strategies.devices import DeviceKind, device_of
from strategies.trainer import Trainer

SPARE_SHARE = 0.1
"""The share of a device's memory that must stay free after a copy, as the steps after it may take more than
those before."""


class Snapshot:
    """Parameters, buffers, optimizer, scaler and exchange state, and random state of one rank, at one moment.

    The copy of parameters, buffers and optimizer lies on the device if that has room to spare, else in host
    memory; the state of the exchange is copied where it is. `Trainer.state_dict` serves another process: it
    is in host memory, by names of the whole model; this goes back in the same trainer, tensor by tensor, in
    the middle of a measurement.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._with_state = set(trainer.model.local_state(trainer.optimizer))
        self._device = device_of(trainer.device)
        self._values = _copies([value.detach() for value in _tensors(trainer)], self._device)
        self._scaler = trainer.scaler.state_dict()
        self._model = trainer.model.strategy_state()
        self._random = torch.get_rng_state()
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


def _copies(values: Sequence[Tensor], device: DeviceKind) -> list[Tensor]:
    """On the device where there is room; on a stream they are made in its order, as is what is copied back.

    Those in host memory are not pinned: torch would round each up to a power of two bytes, and keep it from
    everybody else until the process ends.
    """
    figures = device.memory()
    room = figures is not None and (
        figures.free - sum(value.nbytes for value in values) >= SPARE_SHARE * figures.total
    )
    return [value.clone() if room else value.to("cpu", copy=True) for value in values]


def _tensors(trainer: Trainer) -> Iterator[Tensor]:
    yield from trainer.model.parameters()
    yield from trainer.model.bare.buffers()
    every = trainer.model.local_state(trainer.optimizer)
    for parameter in trainer.model.parameters():
        state = every.get(parameter, {})
        yield from (value for _, value in sorted(state.items()) if isinstance(value, Tensor))
