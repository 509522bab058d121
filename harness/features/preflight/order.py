"""How a campaign carries out a preflight, and which nodes exchange with each other in it."""

from __future__ import annotations

from harness.launch.conduct import Conduct
from reports.text import devices
from results.store import Study

MOST_ROUNDS = 7
"""Rounds of pairs: of up to eight nodes each meets each other, of more each meets a few."""


def rounds_of_pairs(nodes: int) -> list[list[tuple[int, ...]]]:
    """Rounds of disjoint pairs of nodes, by the circle method of tournaments: no pair meets twice."""
    places, rounds = [*range(nodes), *([-1] * (nodes % 2))], []
    for _ in range(min(len(places) - 1, MOST_ROUNDS)):
        met = zip(places, reversed(places[len(places) // 2 :]), strict=False)
        rounds.append([tuple(sorted(pair)) for pair in met if -1 not in pair])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


class PreflightConduct(Conduct):
    """Examines all nodes once, by products for the budget of its cell."""

    def header(self, study: Study, left: int) -> list[str]:
        size = devices(max(self.plan.request.gpus), self.plan.request.device)
        return [f"preflight of {size} in {study.root}: products, then all-reduces over groups of nodes"]
