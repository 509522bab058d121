"""The memory of a rank at the moments of a training step at which it may be largest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from strategies.closed_form.sizes import Sizes, Units

Moment = Literal["model built", "backward begins", "backward ends", "update"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of a rank at one moment; `total` is their sum."""

    moment: Moment
    parameters: int
    gradients: int = 0
    optimizer: int = 0
    """State of the optimizer, and temporaries of an update."""
    gathered: int = 0
    """Gathered parameters of sharded units."""
    buckets: int = 0
    """Copies of gradients or activations that are to be sent, or that have been received."""
    activations: int = 0
    estimated: int = 0
    """The part of all these, except activations, that can be smaller, such as temporaries of an update."""

    @property
    def certain(self) -> int:
        """The bytes that a rank certainly has at this moment."""
        return self.total - self.activations - self.estimated

    @property
    def total(self) -> int:
        state = self.parameters + self.gradients + self.optimizer
        return state + self.gathered + self.buckets + self.activations


def step_moments(sizes: Sizes, base: Footprint, *, in_buckets: bool = False) -> Iterator[Footprint]:
    """Yield the moments of a rank that has every layer, or a part of each. It holds `base` at all of them,
    except its gradients, which it holds once all have been computed.

    `in_buckets`: gradients are views of the buckets, into which the last micro-batch moves them.
    """
    kept, whole = sizes.activations(), base.gradients
    copied = sizes.built - sizes.parameters
    yield Footprint(moment="model built", parameters=sizes.built, buckets=base.buckets, estimated=copied)
    before = whole if sizes.accumulates else 0
    yield replace(base, moment="backward begins", gradients=before, activations=kept.begin)
    after = (before if in_buckets else whole) + sizes.shared
    yield replace(base, moment="backward ends", gradients=after, activations=kept.end)
    extra = sizes.update(whole)
    yield replace(
        base,
        moment="update",
        gradients=0 if in_buckets else whole,
        optimizer=base.optimizer + extra,
        estimated=extra,
    )


def built_whole(sizes: Sizes, shard: int) -> Iterator[Footprint]:
    """Yield the moments at which a complete model has been built, and is then sharded."""
    yield Footprint(moment="model built", parameters=sizes.built, estimated=sizes.built - sizes.parameters)
    yield Footprint(moment="model built", parameters=sizes.parameters + shard, estimated=shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Bytes of gathered parameters of a sharded model at three moments of backward, and in the update."""

    at_loss: int
    at_block: int
    at_end: int
    at_update: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingBytes:
    """Bytes of gradients of a sharded model that are being averaged into shards."""

    held: int
    """Gradients of earlier micro-batches."""
    at_block: int
    """Copies while a block is averaged."""
    at_end: int
    """Copies while the gradients of the parameters around the blocks are computed."""


def sharded_moments(
    sizes: Sizes, units: Units, rest: Footprint, gathered: Gathered, averaging: AveragingBytes
) -> Iterator[Footprint]:
    """Yield the moments of a rank that has shards. It holds `rest` at all moments after the model is built;
    the gradients of `rest` only in the update."""
    kept, held = sizes.activations(), averaging.held
    begins = replace(rest, moment="backward begins", gradients=held)
    yield replace(begins, gathered=gathered.at_loss, activations=kept.at_loss)
    yield replace(begins, gathered=gathered.at_block, activations=kept.at_block)
    ends = replace(rest, moment="backward ends", activations=kept.end)
    own = max(held, units.trained.shard)
    still = max(gathered.at_end, min(gathered.at_block, units.around + units.block))
    yield replace(ends, gathered=still, gradients=own + units.trained.full_block, buckets=averaging.at_block)
    last = own + units.trained.full_around + sizes.shared
    yield replace(ends, gathered=gathered.at_end, gradients=last, buckets=averaging.at_end)
    extra = sizes.update(rest.gradients)
    yield replace(rest, gathered=gathered.at_update, optimizer=rest.optimizer + extra, estimated=extra)
