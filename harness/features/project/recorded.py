"""Reads from the records of ranks what a replay on other sizes needs: buckets, and how much ranks differ.

Ranks are compared by their steps without any exchange, in which no rank waits for another. Such a step is
mean + node + rank + step + stall, where `stall` is a rare step far beyond the spread of the others. Ranks of
a size that was not measured are drawn from these components (`Stragglers.delays_s`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from results.record import RankRecord
from strategies.closed_form.terms import Piece

Floats = npt.NDArray[np.float64]
STALL_SPREADS = 8.0
"""Robust standard deviations of its run by which a stall exceeds the median of its rank."""
CLUSTERS, STEPS, DELAYS = 8, 16, 16
"""The number of drawn sets of ranks, of steps of each set, and of means that represent all these steps."""


def recorded_buckets(ranks: Sequence[RankRecord]) -> tuple[Piece, ...]:
    """Return the sums of a backward pass as torch's DDP recorded them: bytes, and when each was ready.

    The last bucket has the gradient that is computed last, so that its issue ends the backward pass; medians
    over ranks and steps. Empty without recorded steps, or if most steps differ in their buckets. Not for an
    exchange on another thread, which may issue later than gradients are ready.
    """
    steps = [step for rank in ranks for step in _sums_of_steps(rank)]
    if not steps:
        return ()
    [(sizes, number)] = Counter(sizes for sizes, _ in steps).most_common(1)
    if 2 * number <= len(steps):
        return ()
    shares = zip(*(shares for own, shares in steps if own == sizes), strict=True)
    return tuple(Piece(size, median(share)) for size, share in zip(sizes, shares, strict=True))


def _sums_of_steps(rank: RankRecord) -> Iterator[tuple[tuple[int, ...], list[float]]]:
    """Yield the bytes of each all-reduce of a recorded step, and the shares of backward at its issue."""
    recorded, phases = rank.recorded, rank.steps
    if recorded is None or not phases.forward_ns:
        return
    rows = recorded.operations
    everyone = f"0-{rank.gpus - 1}"
    before, forward = median(phases.data_ns), median(phases.forward_ns)
    for step in range(len(recorded.step_ns)):
        issued = [
            (at, size)
            for of, name, group, size, at in zip(
                rows.step, rows.name, rows.group, rows.payload_bytes, rows.issued_ns, strict=True
            )
            if of == step and rows.names[name] == "allreduce" and rows.groups[group] == everyone
        ]
        if issued:
            last = issued[-1][0]
            # All micro-batches are alike, and the exchange is in the last one.
            backward = max(1.0, last - before - forward)
            yield tuple(size for _, size in issued), [1 - (last - at) / backward for at, _ in issued]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stragglers:
    """Deviations from the mean computation of a step, in seconds, by their source."""

    node_s: tuple[float, ...] = ()
    """The deviation of each measured node; empty: there was one, and how nodes differ is not known."""
    rank_s: tuple[float, ...] = ()
    """The deviation of each rank from its node; empty: each node had one rank, and `node_s` contains it."""
    step_s: tuple[float, ...] = ()
    """The deviations of single steps from their rank."""
    stall_s: tuple[float, ...] = ()
    """The deviation of each stall."""
    stall_share: float = 0.0
    """Share of the steps of a rank that are stalls."""

    @classmethod
    def of(cls, runs: Sequence[tuple[Floats, Sequence[int]]]) -> Stragglers:
        """Split steps without exchange, in seconds, of shape (ranks, steps), with the node of each rank.

        Each run is one such pair.
        """
        found = [_components(np.asarray(steps, dtype=np.float64), np.asarray(nodes)) for steps, nodes in runs]
        return cls(
            node_s=tuple(value for each in found for value in each.node_s),
            rank_s=tuple(value for each in found for value in each.rank_s),
            step_s=tuple(value for each in found for value in each.step_s),
            stall_s=tuple(value for each in found for value in each.stall_s),
            stall_share=fmean(each.stall_share for each in found) if found else 0.0,
        )

    def delays_s(self, ranks: int, nodes: int) -> tuple[float, ...]:
        """Draw how much longer than the mean rank the slowest of `ranks` on equal nodes computes, in seconds.

        Nodes and ranks are drawn in equal numbers (balanced resampling: Davison, Hinkley & Schechtman 1986,
        Biometrika 73), so that a measured size has its own ranks again; steps and stalls are drawn at random.
        """
        random, per_node = np.random.default_rng(0), -(-ranks // nodes)
        lasting = [
            np.repeat(_drawn(self.node_s, nodes, random), per_node)[:ranks]
            + _drawn(self.rank_s, ranks, random)
            for _ in range(CLUSTERS)
        ]
        shape = CLUSTERS, STEPS, ranks
        single = random.choice(np.array(self.step_s or (0.0,)), shape)
        if self.stall_s:
            stalled = random.random(shape) < self.stall_share
            single[stalled] = random.choice(np.array(self.stall_s), int(stalled.sum()))
        slowest = (np.array(lasting)[:, None, :] + single).max(axis=2)
        return tuple(map(float, np.sort(slowest, axis=None).reshape(DELAYS, -1).mean(axis=1)))


def _drawn(effects: Sequence[float], number: int, random: np.random.Generator) -> Floats:
    """Draw `number` effects, each as often as the others, give or take one; zeros without effects."""
    if not effects:
        return np.zeros(number)
    rounds = [random.permutation(effects) for _ in range(-(-number // len(effects)))]
    drawn: Floats = np.concatenate(rounds)[:number]
    return random.permutation(drawn)


def _components(steps: Floats, nodes: npt.NDArray[np.int64]) -> Stragglers:
    """Split the steps of one run.

    The effects of nodes and ranks are deviations of means, which contain a part of the noise below them: each
    is shrunk to the variance that the method of moments leaves (Searle, Casella & McCulloch, Variance
    Components, 1992, ch. 3 and 5). With y the means of p ranks over n steps and m_i of them on node i of N:
    step = mean variance of a rank; rank = sum (y_ij - y_i)^2 / (p - N) - step / n;
    node = (sum m_i (y_i - y)^2 / (N - 1) - rank - step / n) / m, with m = (p - sum m_i^2 / p) / (N - 1).
    """
    means = steps.mean(axis=1)
    residuals = steps - means[:, None]
    names, place, sizes = np.unique(nodes, return_inverse=True, return_counts=True)
    ranks, count = len(means), steps.shape[1]
    of_mean = float(steps.var(axis=1, ddof=1).mean()) / count if count > 1 else 0.0
    of_node = np.bincount(place, means) / sizes
    inside, between = means - of_node[place], of_node - means.mean()
    rank_s: tuple[float, ...] = ()
    rank_variance = 0.0
    if ranks > len(names):
        rank_variance = float(np.square(inside).sum()) / (ranks - len(names)) - of_mean
        rank_s = _shrunk(inside, rank_variance)
    node_s: tuple[float, ...] = ()
    if len(names) > 1:
        squares = float((sizes * np.square(between)).sum()) / (len(names) - 1)
        each = (ranks - float(np.square(sizes).sum()) / ranks) / (len(names) - 1)
        node_s = _shrunk(between, (squares - max(0.0, rank_variance) - of_mean) / each)
    from_median = steps - np.median(steps, axis=1)[:, None]
    spread = 1.4826 * float(np.median(np.abs(from_median)))
    stalls = from_median > STALL_SPREADS * spread
    return Stragglers(
        node_s=node_s,
        rank_s=rank_s,
        step_s=tuple(map(float, residuals[~stalls])),
        stall_s=tuple(map(float, residuals[stalls])),
        stall_share=float(stalls.mean()),
    )


def _shrunk(effects: Floats, variance: float) -> tuple[float, ...]:
    """Scale effects around 0 to a variance, of which a negative estimate counts as 0; never widen them."""
    raw = float(np.square(effects).sum()) / max(1, len(effects) - 1)
    scale = min(1.0, (max(0.0, variance) / raw) ** 0.5) if raw else 0.0
    return tuple(float(scale * effect) for effect in effects)
