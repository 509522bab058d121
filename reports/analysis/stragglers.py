"""Slow ranks, whether they always are slow, and the cost, with node, rank and step distinguished.

Ranks are compared by their compute, the step without any exchange, in which nobody waits for anybody. The
wait that follows from it is split into what a lasting imbalance costs and what random skew costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr

from reports.analysis.figures import CellFigures
from reports.text import capital, count, duration, percent
from results.run import RankColumns

SLOW_ABOVE = 0.03
"""Share by which a rank's compute must exceed the median rank's for it to be called slow."""
FALSE_ALARM = 0.001
"""Chance that of equal ranks, whose steps are independent and normal, any passes the test in a run."""
LISTED = 8
"""Largest number of slow ranks that a sentence names; of more it gives the number."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One source of variance."""

    sd_ns: float
    share: float
    """The share in the sum of the components; 0 if all are 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VarianceSplit:
    """The compute of a step as mean + node + rank of the node + step."""

    node: Component | None
    """Between nodes; None on one node."""
    rank: Component | None
    """Between the ranks of a node; None with one rank a node, where it cannot be told from the node."""
    step: Component
    """Between the steps of a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """The ranks of a cell compared with each other, over the runs that recorded them."""

    runs: int
    steps: int
    """Without exchange, of all runs."""
    nodes: tuple[int, ...]
    """The node of each rank, in the newest run."""
    excess: tuple[float, ...]
    """The excess of each rank: compute over the median of the ranks, less 1; the mean over runs."""
    slowest_share: tuple[float, ...]
    """The share of the steps in which each rank was the slowest; 1 / ranks by chance."""
    persistent: tuple[int, ...]
    """Ranks that are slow in every run, and by more than the spread of their steps explains."""
    slow_nodes: tuple[int, ...]
    """Nodes of several ranks, all of them persistently slow; never all nodes, as some ranks are no slower
    than the median."""
    variance: VarianceSplit
    persistent_wait_ns: float
    """Time that the mean rank loses a step because one is slower on the mean; 0 where none is persistently
    slow, since of equal ranks one is the slowest by chance."""
    random_wait_ns: float | None
    """The rest of the exposed wait: in each step another one is the slowest. None: no wait is known."""

    @property
    def ranks(self) -> int:
        return len(self.excess)

    @property
    def finding(self) -> str:
        """Who is slow, by how much and at what cost, or that nobody is, in one or two sentences."""
        if not self.persistent:
            return f"No rank of {self.ranks:,} is persistently slow{self._random}."
        who, several = self._slow
        excess = sum(self.excess[rank] for rank in self.persistent) / len(self.persistent)
        share = sum(self.slowest_share[rank] for rank in self.persistent)
        mean = "on the mean " if len(self.persistent) > 1 else ""
        where = f"each of {count(self.runs, 'run')}" if self.runs > 1 else "the one run"
        return (
            f"{who} {'are' if several else 'is'} persistently slow: {mean}{percent(excess)} above the median "
            f"rank in {where}, and the slowest of all in {percent(share)} of the steps "
            f"({percent(len(self.persistent) / self.ranks)} by chance). "
            f"The mean rank loses {duration(self.persistent_wait_ns)} a step to that."
        )

    @property
    def _slow(self) -> tuple[str, bool]:
        """The slow nodes and ranks, as the beginning of a sentence, and whether they are several."""
        of_nodes = [rank for rank in self.persistent if self.nodes[rank] in self.slow_nodes]
        alone = [rank for rank in self.persistent if rank not in of_nodes]
        texts = []
        if self.slow_nodes:
            texts.append(f"{numbered('node', self.slow_nodes)} ({numbered('rank', of_nodes)})")
        if alone:
            texts.append(numbered("rank", alone))
        text = " and ".join(texts)
        return capital(text), len(self.slow_nodes) + len(alone) > 1

    @property
    def _random(self) -> str:
        if self.random_wait_ns is None or self.random_wait_ns <= 0:
            return ""
        return f"; the mean rank loses {duration(self.random_wait_ns)} a step to random skew"


def stragglers(figures: CellFigures) -> Stragglers | None:
    """The ranks of a cell; None for one rank, where no counted run recorded them, and for a pipeline, whose
    stages do unlike work: that one takes longer is no fault of its rank."""
    if any(run.bubble_ideal is not None for run in figures.runs):
        return None
    columns = [run.ranks for run in figures.runs if run.ranks is not None and len(run.ranks.compute_ns) > 1]
    if not columns:
        return None
    waits = [run.budget.wait_ns.value for run in figures.runs if run.budget is not None]
    persistent = persistently_slow(columns)
    lasting, random = split_wait(columns, waits, slow=bool(persistent))
    nodes = tuple(columns[-1].node)
    return Stragglers(
        runs=len(columns),
        steps=sum(ranks.steps for ranks in columns),
        nodes=nodes,
        excess=_mean_by_rank(_excess(ranks) for ranks in columns),
        slowest_share=_mean_by_rank(np.asarray(ranks.slowest_share) for ranks in columns),
        persistent=persistent,
        slow_nodes=_slow_nodes(nodes, persistent),
        variance=variance_split(columns),
        persistent_wait_ns=lasting,
        random_wait_ns=random,
    )


def persistently_slow(runs: Sequence[RankColumns]) -> tuple[int, ...]:
    """The ranks that are slow in each run, on the same node.

    In a run a rank is slow if its mean compute exceeds the median of the ranks by `SLOW_ABOVE` and by what
    its steps explain: one-sided t = (mean - median) / (sd / sqrt(steps)) with steps - 1 degrees of freedom
    at `FALSE_ALARM` over the number of ranks (Bonferroni). That the median varies too is made up for by its
    containing the rank: for normal means of variance v, var(mean - median) = v + var(median) - 2 v / ranks,
    which is below v, since var(median) is below 2 v / ranks.
    """
    slow = np.all([_slow(ranks) for ranks in runs], axis=0)
    same_node = np.all([np.equal(ranks.node, runs[0].node) for ranks in runs], axis=0)
    return tuple(map(int, np.flatnonzero(slow & same_node)))


def _slow(ranks: RankColumns) -> npt.NDArray[np.bool_]:
    means = np.asarray(ranks.compute_ns, dtype=np.float64)
    above = means - np.median(means)
    if ranks.steps < 2:
        return np.zeros(len(means), dtype=np.bool_)
    error = np.asarray(ranks.compute_sd_ns) / ranks.steps**0.5
    # Steps that do not vary at all explain nothing.
    t = np.divide(above, error, out=np.where(above > 0, np.inf, 0.0), where=error > 0)
    chance = stdtr(ranks.steps - 1, -t)
    slow: npt.NDArray[np.bool_] = (_excess(ranks) > SLOW_ABOVE) & (chance < FALSE_ALARM / len(means))
    return slow


def variance_split(runs: Sequence[RankColumns]) -> VarianceSplit:
    """The variance of single steps in three, by the method of moments, each the mean over runs.

    X = mean + node_i + rank_ij + step_ijk, with y the means of p ranks over n steps each, m_i of them on
    node i of N. The mean squares are set equal to what is expected of them and solved from below:
    step = mean of the ranks' variances; rank = sum (y_ij - y_i)^2 / (p - N) - step / n;
    node = (sum m_i (y_i - y)^2 / (N - 1) - rank - step / n) / m0, m0 = (p - sum m_i^2 / p) / (N - 1)
    (Searle, Casella & McCulloch, Variance Components, 1992, ch. 3, and ch. 5 for nested classes of unequal
    size). A negative estimate stands for 0. With one rank a node, `node` contains the rank.
    """
    found = [_moments(ranks) for ranks in runs]
    node, rank, step = (_mean([moments[place] for moments in found]) for place in range(3))
    total = sum(value or 0.0 for value in (node, rank, step))

    def component(variance: float) -> Component:
        return Component(sd_ns=variance**0.5, share=variance / total if total else 0.0)

    return VarianceSplit(
        node=None if node is None else component(node),
        rank=None if rank is None else component(rank),
        step=component(step or 0.0),
    )


def _moments(ranks: RankColumns) -> tuple[float | None, float | None, float]:
    """Variance of node, rank and step in ns^2, of one run; below 0 where chance has it so."""
    means, node = np.asarray(ranks.compute_ns, dtype=np.float64), np.asarray(ranks.node)
    step = float(np.mean(np.square(np.asarray(ranks.compute_sd_ns, dtype=np.float64))))
    of_means = step / ranks.steps
    names, place, sizes = np.unique(node, return_inverse=True, return_counts=True)
    node_means = np.bincount(place, means) / sizes
    inside = None
    if len(means) > len(names):
        inside = float(np.square(means - node_means[place]).sum()) / (len(means) - len(names))
    if len(names) == 1:
        return None, inside - of_means if inside is not None else None, step
    between = float((sizes * np.square(node_means - means.mean())).sum()) / (len(names) - 1)
    ranks_a_node = (len(means) - float(np.square(sizes).sum()) / len(means)) / (len(names) - 1)
    if inside is None:
        return between - of_means, None, step
    return (between - inside) / ranks_a_node, inside - of_means, step


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of what is known, 0 instead of less."""
    known = [value for value in values if value is not None]
    return max(0.0, sum(known) / len(known)) if known else None


def split_wait(
    runs: Sequence[RankColumns], waits_ns: Sequence[float], *, slow: bool
) -> tuple[float, float | None]:
    """Split the wait of the mean rank in a step into lasting imbalance and random skew, in ns, over runs.

    Imbalance = max over ranks of their mean compute - the mean of them, 0 unless some rank or node is slow
    for good: of equal ranks one is the slowest by chance. random = the rest of the exposed wait (`waits_ns`,
    of the runs' budgets; none: unknown), at least 0. If the slowest of each step is chosen anew, it is slower
    than any one rank on the mean: the maximum of means is at most the mean of maxima.
    """
    means = np.mean([ranks.compute_ns for ranks in runs], axis=0)
    lasting = float(means.max() - means.mean()) if slow else 0.0
    if not waits_ns:
        return lasting, None
    return lasting, max(0.0, sum(waits_ns) / len(waits_ns) - lasting)


def _excess(ranks: RankColumns) -> Floats:
    means = np.asarray(ranks.compute_ns, dtype=np.float64)
    median = float(np.median(means))
    return means / median - 1 if median > 0 else np.zeros_like(means)


def _mean_by_rank(rows: Iterable[Floats]) -> tuple[float, ...]:
    return tuple(map(float, np.mean(list(rows), axis=0)))


def _slow_nodes(nodes: Sequence[int], persistent: Sequence[int]) -> tuple[int, ...]:
    found = []
    for node in sorted(set(nodes)):
        ranks = [rank for rank, other in enumerate(nodes) if other == node]
        if len(ranks) > 1 and set(ranks) <= set(persistent):
            found.append(node)
    return tuple(found)


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 4 to 7`, `ranks 1, 3 and 6`, `12 ranks`."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"{noun} {first}"
    if len(numbers) > 2 and list(numbers) == list(range(first, last + 1)):
        return f"{noun}s {first} to {last}"
    if len(numbers) > LISTED:
        return f"{len(numbers)} {noun}s"
    return f"{noun}s {', '.join(map(str, numbers[:-1]))} and {last}"
