"""The base class of all compressors, and the law of conservation that each of them keeps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from results.spec import Spec

if TYPE_CHECKING:
    from torch import Tensor

    from strategies.collectives.wire import Wire
    from strategies.exchange.buckets import Bucket

State = dict[str, object]


class Compressor(ABC):
    """Sums buckets over the ranks in fewer bytes than they have.

    The law of conservation: each value is applied or is in a residual. With `values` the shares before and
    `sums` the result after, `sum over ranks(values) = sums + sum over ranks(residual)`, up to rounding.
    Error feedback adds the residual to the share of the next step (Seide et al. 2014; Karimireddy et al.
    2019, arXiv:1901.09847), so that a bias of the compression does not add up.
    """

    def __init__(self, *, feedback: bool = False, ramp_steps: int = 0) -> None:
        self.feedback = feedback
        """Whether the residual is added to the next share of the same bucket."""
        self.ramp_steps = ramp_steps
        """Number of first steps that are compressed differently from all later steps."""

    @classmethod
    def of(cls, spec: Spec, *, seed: int, rank: int) -> Compressor:
        """Build the compressor with the options of a spec. Random numbers that are equal on all ranks follow
        from `seed` only; random numbers of one rank follow from `rank` as well."""
        return cls()

    def compensate(self, bucket: Bucket, residual: Tensor) -> None:
        """Add the residual of earlier steps to the bucket's values; called for compressors with feedback."""
        bucket.values.add_(residual)

    @abstractmethod
    def sum_shares(self, bucket: Bucket, residual: Tensor | None, wire: Wire) -> None:
        """Replace the bucket's values by the sum over the ranks of the values that each of them sent.

        `residual`, as long as the values, is overwritten by this rank's share less what was sent for it; None
        if the caller does not need it. An error that a rank makes for all (such as rounding the sum again)
        belongs to that rank's `residual`. All ranks end with the same bits. Unless all values are zero, at
        least the largest is sent: the proof fails a step that applies nothing.
        """

    def carried(self, bucket_index: int, residual: Tensor) -> Tensor:
        """Return the vector that the next `compensate` will add to a share, given its residual: by default
        the residual itself."""
        return residual

    def rescale(self, factor: float) -> None:  # noqa: B027  # most have no such state
        """Multiply state that is in the units of shares by `factor`, by which shares are multiplied from now
        on."""

    def state_dict(self) -> State:
        """Return all state, other than the residual, that decides later exchanges: counters, factors,
        generators."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume from a `state_dict`."""
        assert not state, f"{type(self).__name__} keeps no state"
