"""Counts the paths through functions; ruff's C901 leaves out `and`, `or` and conditional expressions."""

from __future__ import annotations

import ast
from collections.abc import Iterator

BRANCHES = (
    *(ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.comprehension),
    *(ast.match_case, ast.Assert, ast.IfExp),
)


def paths_of_functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Each function of a module with its number of paths; functions inside of it count for themselves."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            yield function, 1 + sum(map(_branches, _own(function)))


def _branches(node: ast.AST) -> int:
    return len(node.values) - 1 if isinstance(node, ast.BoolOp) else int(isinstance(node, BRANCHES))


def _own(function: ast.AST) -> Iterator[ast.AST]:
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            waiting += ast.iter_child_nodes(node)
