"""The promise of a strategy for a step: with which replicas a replica averages, and when.

The proof (`harness/worker/proof/proof.py`) checks each strategy only by its promise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from results.errors import SpecError

PartnersOf = Callable[[int, int], Sequence[int]]
"""(replica, replicas) to the replicas whose values it averages with equal weights, including its own."""


Averaged = Literal["gradients", "parameters"]


def everyone(replica: int, replicas: int) -> Sequence[int]:
    """Return all replicas."""
    return range(replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class OuterStep:
    """A step that replaces the mean of the replicas (DiLoCo: Douillard et al. 2023, arXiv:2311.08105).

    The parameters of the last average take a step of torch's SGD with Nesterov momentum. Its gradient is the
    mean over the replicas of (parameters of the last average - parameters now).
    """

    lr: float
    momentum: float
    """Above 0; the state starts at 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A replica computes the gradients of its samples, and averages them, or its parameters after the
    update, with its partners. Raises SpecError for an invalid value of a field."""

    of: Averaged = "gradients"
    every: int = 1
    """The period in steps: parameters are averaged at its end, gradients in each step. Timed blocks, and the
    steps that the proof checks, are a multiple of it."""
    after: int = 0
    """Steps at the start that average gradients over all replicas instead."""
    partners: PartnersOf = everyone
    equal: bool = True
    """Whether replicas with the same partners hold the same bits after an average."""
    mean_buffers: bool = False
    """Whether an average of parameters also makes each floating-point buffer without infinities its mean.
    With `equal`, all buffers are equal after an average in any case."""
    outer: OuterStep | None = None
    """The step from the parameters of the last average, by which an average of parameters ends; None: it ends
    in their mean. The model shows the state of that step (`ParallelModel.named_outer_state`)."""
    unproven: str | None = None
    """Why the other fields cannot describe the average (an average that is delayed or weighted). The runs are
    then reported as runs without a proof, with this reason; `every` and `equal` still hold."""

    def __post_init__(self) -> None:
        averaged = get_args(Averaged)
        require_field(self, "of", self.of in averaged, " or ".join(map(repr, averaged)))
        require_field(self, "every", whole_number(self.every, 1), "a whole number of at least 1")
        each_step = self.every == 1 or self.of == "parameters" or self.unproven is not None
        require_field(self, "every", each_step, "1 with of='gradients', which are averaged in each step")
        require_field(self, "after", whole_number(self.after, 0), "a whole number of at least 0")
        partners = "a function (replica, replicas) to a sequence of replicas"
        require_field(self, "partners", callable(self.partners), partners)
        common = self.outer is None or (self.of == "parameters" and self.equal)
        require_field(self, "outer", common, "None unless parameters are averaged, which are then equal")
        reason = self.unproven is None or (isinstance(self.unproven, str) and self.unproven != "")
        require_field(self, "unproven", reason, "None or the reason, as a string")

    @property
    def shown_after(self) -> int:
        """Steps that show all of it: a period, or two with an outer step, as the first has no momentum."""
        return self.every if self.outer is None else 2 * self.every

    @property
    def all_equal(self) -> bool:
        """Whether all replicas hold the same bits after an average."""
        return self.partners is everyone and self.equal

    def averages_all_gradients(self, step: int) -> bool:
        """Whether all replicas average their gradients in a step, counted from 0."""
        return step < self.after or (self.of == "gradients" and self.partners is everyone)


def whole_number(value: object, least: int) -> bool:
    """Whether a value is an integer of at least `least`."""
    return type(value) is int and value >= least


def require_field(promise: object, field: str, met: bool, allowed: str) -> None:
    """Raise SpecError, with the words `allowed`, if the field of a promise does not meet its condition."""
    if not met:
        value, name = getattr(promise, field), type(promise).__name__
        raise SpecError(f"{name}.{field} is {value!r} and must be {allowed}")
