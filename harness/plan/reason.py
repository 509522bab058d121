"""Why a point of the matrix is no cell, as data: by which rule, and the sentence of it."""

from __future__ import annotations

from dataclasses import dataclass

from results.plan import Rule


@dataclass(frozen=True, slots=True)
class Reason:
    """Reasons of one rule say the same of other sizes or options."""

    rule: Rule
    text: str
    predicate: str | None = None
    """The text after the name of the strategy that is its subject, where one rule refuses several."""
