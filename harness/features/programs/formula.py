"""Arithmetic of a program's file. Python parses a formula, and never runs it."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Collection, Mapping
from fractions import Fraction
from functools import cache
from typing import Any

from results.errors import SpecError, nearest

_CHARACTERS = re.compile(r"[\w\s+*/()-]{1,200}", re.ASCII)
_SUMS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_SIGNS = {**_SUMS, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv}
_NODES = (ast.BinOp, ast.Name, ast.Load, ast.Constant, *_SIGNS)


@cache
def _parsed(text: str) -> ast.expr:
    """The tree of a formula. Raises SpecError for anything else, such as a call."""
    try:
        tree = ast.parse(" ".join(text.split()) if _CHARACTERS.fullmatch(text) else "", mode="eval").body
        formula = all(
            isinstance(node, _NODES) and type(getattr(node, "value", 0)) is int for node in ast.walk(tree)
        )
    except SyntaxError:
        formula = False
    if not formula:
        raise SpecError(f"{text!r}: a formula takes whole numbers, variables, + - * / // ( and )")
    return tree


def names(text: str, known: Collection[str] | None = None) -> set[str]:
    """The variables of a formula. Raises SpecError for another text, and for a variable that is not known."""
    found = {node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name)}
    for name in sorted(found):
        if known is not None and name not in known:
            there = f"{nearest(name, known)}; there are: {', '.join(known)}"
            raise SpecError(f"the formula {text!r} has no variable {name!r}{there}")
    return found


def value(text: str, variables: Mapping[str, int], *, least: int | None = 1) -> int:
    """The result of a formula. Raises SpecError as `names`, for a division by zero, and for a result that is
    not whole or is below `least` (None: any)."""
    used = ", ".join(f"{name} {variables[name]}" for name in sorted(names(text, variables)))
    with_these = used and f" with {used}"
    try:
        result = _evaluated(_parsed(text), variables)
    except ZeroDivisionError as error:
        raise SpecError(f"the formula {text!r} divides by zero{with_these}") from error
    if result.denominator != 1 or (least is not None and result < least):
        rule = "a whole number" if result.denominator != 1 else f"at least {least}"
        raise SpecError(f"the formula {text!r} gives {result}{with_these}, and must give {rule}")
    return int(result)


def _evaluated(node: Any, variables: Mapping[str, int]) -> Fraction:
    if isinstance(node, ast.BinOp):
        left, right = _evaluated(node.left, variables), _evaluated(node.right, variables)
        return Fraction(_SIGNS[type(node.op)](left, right))
    return Fraction(variables[node.id] if isinstance(node, ast.Name) else node.value)
