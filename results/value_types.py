"""Annotated types: their values in words for errors, and their bounds."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from msgspec import Meta

_BOUNDS = {
    "minimum": ("at least", operator.ge),
    "exclusiveMinimum": ("more than", operator.gt),
    "maximum": ("at most", operator.le),
}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@dataclass(frozen=True, slots=True)
class Written:
    """The words for the values of an Annotated type."""

    words: str


def require_times(*texts: str | None) -> None:
    """Raises ValueError for a text that is not an ISO 8601 time with its zone; None or "" is unknown."""
    for text in texts:
        if text and datetime.fromisoformat(text).tzinfo is None:
            raise ValueError(f"the time {text!r} has no zone, such as the Z of 2026-01-31T12:00:00Z")


def seconds_between(earlier: str, later: str) -> float:
    """Seconds between two ISO 8601 times."""
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()


def takes(hint: Any) -> str:
    """The values of a type in words, such as `a whole number, at least 1 and at most 8`."""
    written = [note.words for note in notes(hint) if isinstance(note, Written)]
    words = written or [_word(kind) for kind in alternatives(hint) if kind is not NoneType]
    limits = " and ".join(f"{_BOUNDS[name][0]} {bound}" for name, bound in bounds(hint).items())
    return " or ".join(dict.fromkeys(words)) + (limits and f", {limits}")


def bounds(hint: Any) -> dict[str, float]:
    """The bounds of a type's numbers, by the names that JSON Schema has for them."""
    found: dict[str, float] = {}
    for note in notes(hint):
        if isinstance(note, Meta):
            own = {"minimum": note.ge, "exclusiveMinimum": note.gt, "maximum": note.le}
            given = own | (note.extra_json_schema or {})
            found |= {name: given[name] for name in _BOUNDS if given[name] is not None}
    return found


def within(limits: Mapping[str, float], number: float) -> bool:
    """Whether a number keeps some `bounds`."""
    return all(_BOUNDS[name][1](number, bound) for name, bound in limits.items())


def literal_texts(hint: Any) -> tuple[str, ...]:
    """The values of a type's Literal; empty if it lacks one."""
    return tuple(
        text for kind in alternatives(hint) if get_origin(kind) is Literal for text in get_args(kind)
    )


def notes(hint: Any) -> Iterator[Any]:
    """The annotations of a type, and of the members of a union."""
    if get_origin(hint) is Annotated:
        yield from notes(hint.__origin__)
        yield from hint.__metadata__
    elif get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from notes(member)


def alternatives(hint: Any) -> Iterator[Any]:
    """A type without annotations, or the members of a union."""
    if get_origin(hint) is Annotated:
        yield from alternatives(hint.__origin__)
    elif get_origin(hint) in (Union, UnionType):
        for member in get_args(hint):
            yield from alternatives(member)
    else:
        yield hint


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        *others, last = get_args(kind)
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(kind) in (list, tuple):
        return "a list"
    return _WORDS.get(kind, "`key: value` lines")
