"""A drawing, in characters, of how a strategy groups its ranks into stages, shards, parts and replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from reports.text import count
from results.groups import GRID, Dimension, GroupLayout
from results.plan import Plan, placement_of
from strategies.catalog import STRATEGIES, group_layout

_MOST = 8
"""Rows, columns or ranks in brackets that are drawn; of more, the first ones and the last."""
_WIDEST = 80
"""Characters of a line."""
_FIRST = 2
_ELIDED = "..."
_NOUNS: dict[Dimension, str] = {
    "pipeline": "stage",
    "replicate": "replica",
    "shard": "shard",
    "context": "sequence part",
    "tensor": "tensor part",
}
_DEEDS: dict[Dimension, str] = {
    "pipeline": "are the stages of one replica",
    "replicate": "average their gradients",
    "shard": "hold a shard each",
    "context": "compute each sequence together",
    "tensor": "compute each layer together",
    "expert-shard": "hold a shard of the same experts each",
    "expert": "have different experts",
}


def group_lines(plan: Plan) -> Iterator[str]:
    """A drawing for each strategy and size of a plan whose ranks form groups of more than one kind."""
    drawn = dict.fromkeys(
        (cell.strategy, cell.gpus, cell.node_size or placement_of(cell, per_node).gpus_per_node)
        for per_node in [plan.request.gpus_per_node]
        for cell in plan.cells
    )
    for strategy, gpus, node_size in drawn:
        groups = group_layout(strategy, gpus, node_size)
        if is_grid(groups):
            stages = STRATEGIES.facts(strategy).placement(gpus)
            yield f"{strategy} on {gpus}, {description(groups, stages)}"
            yield from (f"  {line}" for line in drawing(groups, stages))


def is_grid(groups: GroupLayout) -> bool:
    """Whether ranks form groups of more than one kind, or one model is split over ranks."""
    return groups.model_parallel > 1 or (groups.replicate > 1 and groups.shard > 1)


def description(groups: GroupLayout, stages: Sequence[Sequence[int]] = ()) -> str:
    """`2 stages x 2 replicas: 0 and 2 are the stages of one replica, 0 and 1 average their gradients`."""
    used = groups.dimensions
    has = {**_DEEDS, "pipeline": "have the stages of one replica"} if stages else _DEEDS
    each = len(stages[0]) if stages else 1
    sizes = " x ".join(
        count(groups.degree(name) * (each if name == "pipeline" else 1), _noun(groups, name))
        for name in used
        if name in GRID
    )
    deeds = []
    for name in used:
        *first, last = _short([str(rank) for rank in groups.peers(name)[0]], most=4)
        deeds.append(f"{', '.join(first)} and {last} {has[name]}")
    return f"{sizes}: {', '.join(deeds)}"


def drawing(groups: GroupLayout, stages: Sequence[Sequence[int]] = ()) -> list[str]:
    """A grid of ranks: rows are stages or nodes, columns are data-parallel places, and ranks in brackets
    compute each sequence and each layer together. `stages` are those of each row that has several."""
    rows: Dimension = "pipeline" if groups.pipeline > 1 else "replicate"
    columns: tuple[Dimension, ...] = ("shard",) if rows == "replicate" else ("replicate", "shard")
    bands, inner = groups.groups(*columns, "context", "tensor"), groups.context * groups.tensor
    titles = [""] if len(bands) == 1 else [f"{_noun(groups, rows)} {row}" for row in range(len(bands))]
    if stages:
        titles = [f"stages {' '.join(_short([str(stage) for stage in own]))}" for own in stages]
    table = [[title, *_places(band, inner)] for title, band in zip(titles, bands, strict=True)]
    width = len(bands[0]) // inner
    if len(table) > _MOST:
        table = [*table[:_FIRST], [_ELIDED, *[""] * (len(table[0]) - 1)], table[-1]]
    if width > 1:
        noun = _noun(groups, "shard" if groups.shard > 1 else "replicate")
        title, names = "", [f"{noun} {column}" for column in range(width)]
        if width > groups.shard > 1:
            # Both places of replicas of stages in shards.
            title = f"replica.{noun}"
            names = [f"{at // groups.shard}.{at % groups.shard}" for at in range(width)]
        table.insert(0, [title, *names])
    return _aligned(table)


def _places(band: Sequence[int], inner: int) -> list[str]:
    """The data-parallel places of a row: a rank each, or in brackets the `inner` ranks of its parts."""
    if inner == 1:
        return [str(rank) for rank in band]
    parts = ([str(rank) for rank in band[at : at + inner]] for at in range(0, len(band), inner))
    return [f"[{' '.join(_short(part))}]" for part in parts]


def _noun(groups: GroupLayout, dimension: Dimension) -> str:
    """The noun of a dimension: a replica that is sharded is a node, but for one in stages. The ranks of one
    sequence have different shards, so that a place among the shards is only one in the batch."""
    if dimension == "shard" and groups.context > 1:
        return "batch part"
    nodes = dimension == "replicate" and groups.shard > 1 and groups.pipeline == 1
    return "node" if nodes else _NOUNS[dimension]


def _short(words: list[str], most: int = _MOST) -> list[str]:
    return words if len(words) <= most else [*words[:_FIRST], _ELIDED, words[-1]]


def _aligned(table: list[list[str]]) -> list[str]:
    """Titles to the left, ranks to the right of their columns."""
    widths = _widths(table)
    if len(widths) - 1 > _MOST or sum(widths) + 2 * len(widths) > _WIDEST:
        # The row of dots between rows stays empty in its columns.
        table = [[*row[: 1 + _FIRST], _ELIDED if row[-1] else "", row[-1]] for row in table]
        widths = _widths(table)
    lines = []
    for title, *ranks in table:
        places = [rank.rjust(width) for rank, width in zip(ranks, widths[1:], strict=True)]
        lines.append("  ".join([title.ljust(widths[0])] * bool(widths[0]) + places).rstrip())
    return lines


def _widths(table: list[list[str]]) -> list[int]:
    return [max(len(row[column]) for row in table) for column in range(len(table[0]))]
