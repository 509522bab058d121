"""`dgc`: top-k that accumulates momentum instead of gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from results.cell import Cell
from results.spec import Option, Spec
from strategies.compression.base import Compressor, State
from strategies.compression.facts import SELECT, WARMUP, share_of
from strategies.compression.streams import Streams
from strategies.compression.topk import TopKFacts, sum_chosen
from strategies.optimizers import OPTIMIZERS

if TYPE_CHECKING:
    from torch import Tensor

    from strategies.collectives.wire import Wire
    from strategies.compression.selection import Select
    from strategies.exchange.buckets import Bucket


class DgcFacts(TopKFacts):
    """Each rank compresses the accumulated momentum of its gradients, and promises what `topk` does."""

    name = "dgc"
    help = "deep gradient compression: top-k with momentum correction and masking"
    options = MappingProxyType(
        {
            "momentum": Option(
                kind="float", default=0.9, minimum=0, maximum=1, help="momentum, kept before compression"
            ),
            "warmup": WARMUP,
            "select": SELECT,
        }
    )
    compressor = "strategies.compression.dgc:Dgc"
    instead = TopKFacts.name
    gradients_alone = "it corrects the momentum of gradients"
    own_gradients_alone = "it clears the momentum of the gradients that a rank itself has sent"

    def refusal(self, cell: Cell) -> str | None:
        if OPTIMIZERS.facts(cell.optimizer).state_values:
            return (
                f"dgc needs --optimizer sgd:momentum=0, not {cell.optimizer}: it applies momentum itself, "
                f"before it compresses"
            )
        return None

    def count_sent(self, values: int, before: int) -> int:
        """Return the values that are sent: in the warm-up their share falls from 25 % to the final one, by
        the same factor in each step."""
        final, ramp = self.spec.ratio, self.spec.integer("warmup")
        ratio = final if before >= ramp else max(final, 0.25 * (final / 0.25) ** (before / ramp))
        return share_of(values, ratio)


_FIRST_RATIO = 0.25


class Dgc(Compressor):
    """Deep gradient compression (Lin et al. 2018, arXiv:1712.01887, section 3).

    Momentum correction: u = m u + g and v = v + u on each rank; the largest of v are sent, and the optimizer
    has no momentum. Momentum factor masking: u and v are zeroed where v was sent, so that late gradients do
    not continue in the momentum. If everything is sent, no value is late, so none is masked: at ratio 1 it is
    SGD with momentum. Warm-up: over the first steps the ratio falls exponentially from
    25 % (75 %, 93.75 %, 98.44 %, ... left out, for 0.1 % in four steps). v is the residual.

    Nesterov momentum is left out, and so is the clipping of local gradients: the trainer clips after the
    exchange. It works only with flat collectives: a rank must know which part of its u was sent.
    """

    def __init__(
        self, ratio: float, select: Select, streams: Streams, *, momentum: float, warmup: int
    ) -> None:
        """`streams` are this rank's own; `warmup` is in steps."""
        super().__init__(feedback=True, ramp_steps=warmup)
        self._final_ratio, self._select, self._streams = ratio, select, streams
        self._momentum = momentum
        from strategies.compression.memory import BucketMemory

        self._velocity = BucketMemory()

    @classmethod
    def of(cls, spec: Spec, *, seed: int, rank: int) -> Dgc:
        from strategies.compression.selection import SELECTIONS

        return cls(
            spec.ratio,
            SELECTIONS[spec.word("select")],
            Streams(seed, rank),
            momentum=spec.number("momentum"),
            warmup=spec.integer("warmup"),
        )

    def compensate(self, bucket: Bucket, residual: Tensor) -> None:
        import torch

        velocity = self._velocity.of(bucket)
        velocity.mul_(self._momentum).add_(bucket.values)
        torch.add(velocity, residual, out=bucket.values)

    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        values = bucket.values
        n, step, ratio = values.numel(), self._streams.count(bucket), self._final_ratio
        if step < self.ramp_steps:
            # The ratios of the warm-up steps are a geometric sequence that ends in the final ratio.
            falling = _FIRST_RATIO * math.pow(self._final_ratio / _FIRST_RATIO, step / self.ramp_steps)
            ratio = max(falling, self._final_ratio)
        k = share_of(n, ratio)
        indices = self._select(values, k, self._streams.next(bucket))
        sum_chosen(values, indices, residual, wire)
        if k < n:
            self._velocity.of(bucket).index_fill_(0, indices, 0.0)

    def carried(self, bucket_index: int, residual: Tensor) -> Tensor:
        for index, _, velocity in self._velocity.vectors():
            if index == bucket_index:
                return residual + self._momentum * velocity
        return residual

    def rescale(self, factor: float) -> None:
        self._velocity.scale(factor)

    def state_dict(self) -> State:
        return {"velocity": self._velocity.state_dict(), **self._streams.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._velocity.load_state_dict(cast(State, state["velocity"]))
        self._streams.load_state_dict(state)
