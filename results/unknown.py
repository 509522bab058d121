"""A fact that nobody has stated, with the reason: never 0, empty or a guess."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unknown:
    """Stands where a value would be; `str` of it goes on behind the name of what is not known."""

    reason: str
    """A clause: what goes on behind "because"."""

    def __str__(self) -> str:
        return f"unknown, because {self.reason}"
