"""How a pipeline lies over a model's blocks, without torch: which stage has which, and what it keeps."""

from __future__ import annotations

from collections.abc import Sequence

from results.parts import ModelParts
from strategies.closed_form.sizes import Stage


def in_flight(schedule: str, *, microbatches: int, ranks: int, chunks: int, rank: int) -> int:
    """Microbatches of a stage of `rank` that are forward and not yet backward, at most; of all its stages.

    GPipe: all m. 1F1B: p - s of stage s, at most m (Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1).
    Interleaved with v stages a rank: (v - 1) p + 2 (p - s - 1) + 1, at most v m, which for s = 0 is v p
    (1 + (p - 1) / (p v)) (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.3).
    """
    if schedule == "gpipe":
        return microbatches
    if schedule == "1f1b":
        return min(microbatches, ranks - rank)
    return min(chunks * microbatches, (chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1)


def stages_of(parts: ModelParts, *, ranks: int, chunks: int) -> list[list[Stage]]:
    """The stages of each rank, `chunks` each: runs of blocks, the dearest of which is as cheap as can be."""
    count = ranks * chunks
    costs = [block.flops for block in parts.blocks]
    costs[0] += parts.stem.flops
    costs[-1] += parts.head.flops
    runs = balanced_cut(costs, count)
    stages = [Stage(blocks=run, stem=at == 0, head=at == count - 1) for at, run in enumerate(runs)]
    return [stages[rank::ranks] for rank in range(ranks)]


def balanced_cut(costs: Sequence[int], stages: int) -> list[range]:
    """Runs of blocks, one a stage and none empty, whose largest cost is as small as it can be.

    `costs` are of at least as many blocks as there are stages. Where several cuts are as good, blocks lie as
    late as they may: an early stage keeps the activations of more microbatches (1F1B).
    """
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _late_runs(costs, stages, middle)[0].start == 0:
            high = middle
        else:
            low = middle + 1
    return _late_runs(costs, stages, low)


def _late_runs(costs: Sequence[int], stages: int, most: int) -> list[range]:
    """From the last stage on, each run as long as a cost of `most` and the stages before it allow.

    The first run begins after block 0 if the blocks do not fit.
    """
    runs = []
    end = len(costs)
    for before in reversed(range(stages)):
        begin = end - 1
        held = costs[begin]
        while begin > before and held + costs[begin - 1] <= most:
            begin -= 1
            held += costs[begin]
        runs.append(range(begin, end))
        end = begin
    return runs[::-1]
