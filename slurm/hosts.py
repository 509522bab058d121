"""Host lists as Slurm writes them (`n[1-3,07-09]`), expanded without asking Slurm.

It follows the rules of Slurm's hostlist.c: brackets multiply from left to right, the lower bound's leading
zeros give the width, and order and repeats are kept. Beyond it, text after the last bracket is allowed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

MOST = 65_536
"""Hosts in one list; more is a typing error."""

_EXPRESSION = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PIECES = re.compile(r"([^\[]+)|\[([^\]]*)\]")
_RANGE = re.compile(r"(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts that a list names, in its order. Raises ValueError if the text is not a host list."""
    expressions = _EXPRESSION.findall(text)
    if ",".join(expressions) != text:
        raise ValueError(f"{text!r} is not a host list such as n[1-3,07-09]")
    hosts = tuple(itertools.islice(itertools.chain.from_iterable(map(_expanded, expressions)), MOST + 1))
    if len(hosts) > MOST:
        raise ValueError(f"{text!r} names more than {MOST} hosts")
    return hosts


def _expanded(expression: str) -> Iterator[str]:
    choices = [
        [literal] if literal else list(_numbers(ranges)) for literal, ranges in _PIECES.findall(expression)
    ]
    return ("".join(parts) for parts in itertools.product(*choices))


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a range such as 1-3 or 07")
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if not 0 <= last - first < MOST:
            raise ValueError(f"{part!r} runs backward or over more than {MOST} hosts")
        width = len(match["first"])
        yield from (f"{number:0{width}}" for number in range(first, last + 1))
