"""A user's own model, `py:MODULE:FUNCTION`, of which planning knows only where its code is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from results.spec import Option, Spec
from results.unknown import Unknown
from workloads.shape import Shape, WorkloadFacts


@dataclass(frozen=True, kw_only=True)
class UserShape(Shape):
    """What a user's file makes: nothing else is known before it runs."""

    function: str = ""
    """MODULE:FUNCTION."""

    @property
    def positional(self) -> Option:
        return Option(kind="str", help="MODULE:FUNCTION", example="mypackage.mymodule:build")

    def of(self, spec: Spec) -> Self:
        return type(self)(function=str(spec.positional))

    def facts(self) -> WorkloadFacts:
        unknown = Unknown("planning does not run a user's own code")
        return WorkloadFacts(
            family="py",
            builder=self.function,
            own_code=True,
            unit=unknown,
            units_per_sample=unknown,
            parts=unknown,
            heads=unknown,
            batch_norm=unknown,
            minimum_batch=unknown,
            memory_formats=unknown,
            datasets=unknown,
        )
