"""The idle share of an ideal pipeline: the closed form, by hand and by simulation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pipelines
import pytest

from strategies.pipeline.model import ideal_bubble

Ranks = Callable[..., list[Any]]


def idle_share(order: list[list[tuple[str, int]]], pieces: int) -> float:
    """Of stages that take 1 for a forward and 2 for a backward pass, in the order of each: by simulation."""
    done: dict[tuple[int, str, int], int] = {}
    free, todo = [0] * len(order), [list(each) for each in order]
    while any(todo):
        for stage, each in enumerate(todo):
            while each:
                kind, piece = each[0]
                before = (stage - 1, "F", piece) if kind == "F" else (stage + 1, "B", piece)
                if before[0] in range(len(order)) and before not in done:
                    break
                begin = max(free[stage], done.get(before, 0))
                free[stage] = done[stage, kind, piece] = begin + (1 if kind == "F" else 2)
                each.pop(0)
    return 1 - 3 * pieces / max(free)


def gpipe_order(stages: int, pieces: int) -> list[list[tuple[str, int]]]:
    return [[(kind, piece) for kind in "FB" for piece in range(pieces)] for _ in range(stages)]


def one_f_one_b_order(stages: int, pieces: int) -> list[list[tuple[str, int]]]:
    orders = []
    for stage in range(stages):
        ahead = min(stages - stage, pieces)
        order = [("F", piece) for piece in range(ahead)]
        for piece in range(pieces):
            order.append(("B", piece))
            if ahead + piece < pieces:
                order.append(("F", ahead + piece))
        orders.append(order)
    return orders


@pytest.mark.parametrize("order", [gpipe_order, one_f_one_b_order])
@pytest.mark.parametrize(("stages", "pieces"), [(2, 4), (3, 6), (4, 8), (4, 4), (8, 32)])
def test_the_ideal_bubble_is_that_of_a_simulation(order: Any, stages: int, pieces: int) -> None:
    assert ideal_bubble(stages, pieces) == pytest.approx(idle_share(order(stages, pieces), pieces))


def test_the_ideal_bubble_by_hand(ranks: Ranks) -> None:
    assert ideal_bubble(4, 8) == 3 / 11
    # Two stages a rank, each half as long: (p - 1) / v of 8 + (p - 1) / v.
    assert ideal_bubble(4, 8, 2) == pytest.approx(1.5 / 9.5)
    [first, _] = ranks(2, pipelines.step_of, "tied", "pipeline:interleaved:chunks=3:microbatches=2", {})
    assert first["ideal"] == 1 / (3 * 2 + 1)
    [first, *_] = ranks(4, pipelines.step_of, "tied", "pipeline:1f1b:dp=2", {})
    assert first["ideal"] == 1 / 5
