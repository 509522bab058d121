"""Host lists as Slurm writes them (`n[1-3,07-09]`), expanded and compressed without asking Slurm.

The rules are those of Slurm's hostlist.c: brackets multiply from left to right, the lower bound's leading
zeros give the width, and order and repeats are kept. Beyond it, text after the last bracket is allowed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

MOST = 65_536
"""Hosts in one list; more is a typing error."""

_EXPRESSION = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PIECES = re.compile(r"([^\[]+)|\[([^\]]*)\]")
_RANGE = re.compile(r"(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?")
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<number>\d{1,9})", re.DOTALL)


def expand_hosts(text: str) -> tuple[str, ...]:
    """The hosts that a list names, in its order. Raises ValueError if it is none."""
    expressions = _EXPRESSION.findall(text)
    if ",".join(expressions) != text:
        raise ValueError(f"{text!r} is not a host list such as n[1-3,07-09]")
    hosts = tuple(
        itertools.islice(itertools.chain.from_iterable(_expanded(each) for each in expressions), MOST + 1)
    )
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


def compress(hosts: Iterable[str]) -> str:
    """A short list that `expand_hosts` turns back into `hosts`, their order and repeats kept.

    A name that has text after its number is written out, because Slurm before 23.11 reads no text after a
    bracket. Raises ValueError for a name that a list cannot hold.
    """
    texts = []
    for (prefix, numbered), group in itertools.groupby(
        map(_split, hosts), key=lambda name: (name[0], bool(name[1]))
    ):
        numbers = [number for _, number in group]
        texts += [f"{prefix}{_bracket(numbers)}"] if numbered else [prefix] * len(numbers)
    return ",".join(texts)


def _split(host: str) -> tuple[str, str]:
    """A name and the number that ends it, which is empty if none does."""
    if not _EXPRESSION.fullmatch(host) or "[" in host:
        raise ValueError(f"{host!r} is not a host name")
    match = _NUMBERED.fullmatch(host)
    return (match["prefix"], match["number"]) if match else (host, "")


def _bracket(numbers: list[str]) -> str:
    """`[1-3,07]`, or the one number bare."""
    ranges: list[list[str]] = []
    for number in numbers:
        if ranges and number == f"{int(ranges[-1][-1]) + 1:0{len(ranges[-1][0])}}":
            ranges[-1].append(number)
        else:
            ranges.append([number])
    texts = [each[0] if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in ranges]
    return numbers[0] if len(numbers) == 1 else f"[{','.join(texts)}]"
