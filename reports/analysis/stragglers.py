"""Slow ranks: whether they are persistently slow, by how much, and what it costs.

Ranks are compared by their compute, the step without any exchange, in which no rank waits for another. The
resulting wait is split into the cost of a lasting imbalance and the cost of random skew. A rank is laden, and
not slow, if the rows of its experts explain its longer compute.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from scipy.special import stdtr

from reports.analysis.figures import CellFigures
from reports.text import capital, count, duration, listed, percent
from results.derivation.load import over_median, share_of_rows
from results.grouping import grouped
from results.run import RankColumns

SLOW_ABOVE = 0.03
"""Share by which a rank's compute must exceed the median rank's for it to be called slow."""
FALSE_ALARM = 0.001
"""Probability that any of equal ranks with independent, normal steps passes the test in a run."""
LISTED = 8
"""Largest number of slow ranks that a sentence names; if there are more, it says how many."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """The ranks of a cell compared with each other, over the runs that recorded them."""

    runs: int
    nodes: tuple[int, ...]
    """The node of each rank, in the newest run."""
    hosts: tuple[str, ...]
    """The host of each rank, in the newest run; empty where it was not kept."""
    excess: tuple[float, ...]
    """The excess of each rank: compute over the median of the ranks, less 1; the mean over runs."""
    slowest_share: tuple[float, ...]
    """The share of the steps in which each rank was the slowest; 1 / ranks by chance."""
    persistent: tuple[int, ...]
    """Ranks that are slow in every run, by more than the spread of their steps and their rows explain."""
    laden: tuple[int, ...] = ()
    """Ranks that are slow in every run because their experts compute more rows than the median rank's."""
    more_rows: tuple[float, ...] = ()
    """The rows of each rank over the median of the ranks, less 1; the mean over runs; empty if unknown."""
    slow_nodes: tuple[int, ...]
    """Nodes of several ranks that are all persistently slow; never all nodes, as some ranks are not slower
    than the median."""
    persistent_wait_ns: float
    """Time that the mean rank loses a step because one rank has a larger mean compute; 0 where no rank is
    persistently slow, because one of equal ranks is the slowest by chance."""
    random_wait_ns: float | None
    """The rest of the exposed wait, as another rank is the slowest in each step; None if the wait is
    unknown."""

    @property
    def ranks(self) -> int:
        return len(self.excess)

    @property
    def finding(self) -> str:
        """One or two sentences on the slow ranks, by how much and at what cost, or that no rank is slow."""
        if not self.marked:
            return f"No rank of {self.ranks:,} is persistently slow{self._random}."
        share = sum(self.slowest_share[rank] for rank in self.marked)
        return (
            f"{self.clause}, and the slowest of all in {percent(share)} of the steps "
            f"({percent(len(self.marked) / self.ranks)} by chance). "
            f"The mean rank loses {duration(self.persistent_wait_ns)} a step to that."
        )

    @property
    def marked(self) -> tuple[int, ...]:
        """The ranks that are slow in every run, whatever the reason."""
        return tuple(sorted((*self.persistent, *self.laden)))

    @property
    def clause(self) -> str:
        """The slow and the laden ranks, and by how much they are slow."""
        parts = []
        if self.persistent:
            who, several = self._slow
            verb = "are" if several else "is"
            parts.append(f"{who} {verb} persistently slow: {_mean_text(self.excess, self.persistent)} above")
        if self.laden:
            who, verb = numbered("rank", self.laden), "are" if len(self.laden) > 1 else "is"
            rows, excess = (_mean_text(each, self.laden) for each in (self.more_rows, self.excess))
            parts.append(f"{who} {verb} laden: {rows} more rows, and {excess} more compute, than")
        where = f"each of {count(self.runs, 'run')}" if self.runs > 1 else "the one run"
        return capital("; ".join(f"{part} the median rank in {where}" for part in parts))

    @property
    def slow_names(self) -> str:
        """Name what is slow: `host node-05`, `rank 3 on node-00`, `4 ranks`; without any, what is laden."""
        if not self.persistent:
            return numbered("rank", self.laden)
        if self.slow_nodes:
            return self.node_names
        on = (
            f" on {listed(self._hosts_of(self.persistent))}"
            if self.hosts and len(self.persistent) == 1
            else ""
        )
        return f"{numbered('rank', self.persistent)}{on}"

    @property
    def _slow(self) -> tuple[str, bool]:
        """The slow nodes and ranks, as the beginning of a sentence, and whether they are several."""
        of_nodes = [rank for rank in self.persistent if self.nodes[rank] in self.slow_nodes]
        alone = [rank for rank in self.persistent if rank not in of_nodes]
        texts = []
        if self.slow_nodes:
            texts.append(f"{self.node_names} ({numbered('rank', of_nodes)})")
        if alone:
            on = f" on {listed(self._hosts_of(alone))}" if self.hosts else ""
            texts.append(f"{numbered('rank', alone)}{on}")
        text = " and ".join(texts)
        return capital(text), len(self.slow_nodes) + len(alone) > 1

    @property
    def node_names(self) -> str:
        """The slow nodes, by the names of their hosts if these are known and differ: `host node-05`."""
        places = {node: self.nodes.index(node) for node in self.slow_nodes}
        hosts = self._hosts_of(places.values()) if self.hosts else []
        if len(hosts) < len(places):
            return numbered("node", self.slow_nodes)
        return f"host{'' if len(hosts) == 1 else 's'} {listed(hosts, most=LISTED)}"

    @property
    def slow_places(self) -> tuple[object, ...]:
        """Return a key of what is slow: equal at several sizes if the same hosts are slow as a whole."""
        whole = all(self.nodes[rank] in self.slow_nodes for rank in self.persistent)
        known = bool(self.hosts) and whole
        slow = tuple(self._hosts_of(self.persistent)) if known else (self.ranks, self.persistent)
        return (*slow, self.ranks, self.laden) if self.laden else slow

    def _hosts_of(self, ranks: Iterable[int]) -> list[str]:
        return list(dict.fromkeys(self.hosts[rank] for rank in ranks))

    @property
    def _random(self) -> str:
        if self.random_wait_ns is None or self.random_wait_ns <= 0:
            return ""
        return f"; the mean rank loses {duration(self.random_wait_ns)} a step to random skew"


def stragglers(figures: CellFigures) -> Stragglers | None:
    """The ranks of a cell; None for one rank, where no counted run recorded them, and for a pipeline, whose
    stages do different work, so that a longer time does not mean a slow rank."""
    if any(run.bubble_ideal is not None for run in figures.runs):
        return None
    columns = [run.ranks for run in figures.runs if run.ranks is not None and len(run.ranks.compute_ns) > 1]
    if not columns:
        return None
    waits = [run.budget.waits_ns for run in figures.runs if run.budget is not None]
    slow, excess = persistently_slow(columns), _mean_by_rank(map(_excess, columns))
    lasting, random = split_wait(columns, waits, slow=bool(slow))
    more_rows = _more_rows(columns)
    explained = set(laden(more_rows, excess)).intersection(slow)
    persistent = tuple(sorted({*slow} - explained))
    return Stragglers(
        runs=len(columns),
        nodes=tuple(columns[-1].node),
        hosts=() if isinstance(columns[-1].host, msgspec.UnsetType) else tuple(columns[-1].host),
        excess=excess,
        slowest_share=_mean_by_rank(np.asarray(ranks.slowest_share) for ranks in columns),
        persistent=persistent,
        laden=tuple(sorted(explained)),
        more_rows=more_rows,
        slow_nodes=_slow_nodes(columns[-1].node, persistent),
        persistent_wait_ns=lasting,
        random_wait_ns=random,
    )


def _slow_nodes(nodes: Sequence[int], persistent: Collection[int]) -> tuple[int, ...]:
    """The nodes of several ranks that are all `persistent`; `nodes` has the node of each rank."""
    of_node = grouped((node, rank) for rank, node in enumerate(nodes))
    slow = {node for node, ranks in of_node.items() if len(ranks) > 1 and set(ranks) <= set(persistent)}
    return tuple(sorted(slow))


def persistently_slow(runs: Sequence[RankColumns]) -> tuple[int, ...]:
    """The ranks that are slow in each run, on the same host (where hosts were not kept: node).

    In a run a rank is slow if its mean compute exceeds the median of the ranks by `SLOW_ABOVE` and by what
    its steps explain: one-sided t = (mean - median) / (sd / sqrt(steps)) with steps - 1 degrees of freedom at
    `FALSE_ALARM` over the number of ranks (Bonferroni). The variance of the median needs no term: for normal
    means of variance v, var(mean - median) = v + var(median) - 2 v / ranks, as the median contains the rank.
    This is below v, because var(median) is below 2 v / ranks.
    """
    slow = np.all([_slow(ranks) for ranks in runs], axis=0)
    kept = not any(isinstance(ranks.host, msgspec.UnsetType) for ranks in runs)
    places = np.array([ranks.host if kept else ranks.node for ranks in runs])
    return tuple(map(int, np.flatnonzero(slow & (places == places[0]).all(axis=0))))


def laden(more_rows: Sequence[float], excess: Sequence[float]) -> tuple[int, ...]:
    """The ranks whose rows explain by how much their compute exceeds the median rank's, to `SLOW_ABOVE`.

    `more_rows` x(r) are the rows of each rank over the median less 1 (none: unknown), and `excess` y(r) is
    the same of its compute. Rank r is laden if x(r) and y(r) exceed `SLOW_ABOVE`, and y(r) - s x(r) with the
    share s of rows (`share_of_rows`) does not.
    """
    if not more_rows:
        return ()
    share = share_of_rows(more_rows, excess)
    pairs = zip(more_rows, excess, strict=True)
    within = [min(x, y) > SLOW_ABOVE and y - share * x <= SLOW_ABOVE for x, y in pairs]
    return tuple(rank for rank, explained in enumerate(within) if explained)


def _slow(ranks: RankColumns) -> npt.NDArray[np.bool_]:
    means = np.asarray(ranks.compute_ns, dtype=np.float64)
    above = means - np.median(means)
    if ranks.steps < 2:
        return np.zeros(len(means), dtype=np.bool_)
    error = np.asarray(ranks.compute_sd_ns) / ranks.steps**0.5
    # Steps that do not vary explain no difference.
    t = np.divide(above, error, out=np.where(above > 0, np.inf, 0.0), where=error > 0)
    chance = stdtr(ranks.steps - 1, -t)
    slow: npt.NDArray[np.bool_] = (_excess(ranks) > SLOW_ABOVE) & (chance < FALSE_ALARM / len(means))
    return slow


def split_wait(
    runs: Sequence[RankColumns], waits_ns: Sequence[float], *, slow: bool
) -> tuple[float, float | None]:
    """Split the wait of the mean rank in a step into lasting imbalance and random skew, in ns, over runs.

    Imbalance = the largest mean compute of a rank less the mean over ranks. It is 0 unless some rank or node
    is persistently slow, because one of equal ranks is the slowest by chance. random = the rest of the
    exposed wait (`waits_ns`, from the runs' budgets; empty: unknown), at least 0: the mean of the slowest
    rank of each step is at least the largest mean of a rank.
    """
    means = np.mean([ranks.compute_ns for ranks in runs], axis=0)
    lasting = float(means.max() - means.mean()) if slow else 0.0
    if not waits_ns:
        return lasting, None
    return lasting, max(0.0, sum(waits_ns) / len(waits_ns) - lasting)


def _excess(ranks: RankColumns) -> Floats:
    return over_median(ranks.compute_ns)


def _more_rows(runs: Sequence[RankColumns]) -> tuple[float, ...]:
    """The rows of each rank over the median less 1, the mean over runs; none unless every run has them."""
    known = [over_median(ranks.rows) for ranks in runs if ranks.rows is not None]
    return _mean_by_rank(known) if len(known) == len(runs) else ()


def _mean_by_rank(rows: Iterable[Floats]) -> tuple[float, ...]:
    return tuple(map(float, np.mean(list(rows), axis=0)))


def _mean_text(values: Sequence[float], ranks: Sequence[int]) -> str:
    """`14.4 %`, or `on the mean 20.0 %` of several ranks."""
    mean = sum(values[rank] for rank in ranks) / len(ranks)
    return f"{'on the mean ' if len(ranks) > 1 else ''}{percent(mean)}"


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
