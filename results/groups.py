"""The groups of a launch's ranks: a grid of stages, replicas, shards, parts of sequences and tensor parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Literal

import msgspec

Dimension = Literal["pipeline", "replicate", "shard", "context", "tensor", "expert-shard", "expert"]
GRID: tuple[Dimension, ...] = ("pipeline", "replicate", "shard", "context", "tensor")
"""The dimensions whose product are the ranks, from the one whose neighbours lie farthest apart to the one
whose neighbours are adjacent ranks."""
DIMENSIONS: tuple[Dimension, ...] = (*GRID, "expert-shard", "expert")
"""The dimensions of the grid, then the two dimensions of layers of experts."""


class GroupLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The degree of each dimension; rank = (((p * replicate + r) * shard + s) * context + c) * tensor + t of
    places p, r, s, c, t.

    Tensor parallelism communicates most and a pipeline least, so neighbours in `tensor` share a node first
    (Narayanan et al. 2021, arXiv:2104.04473, section 3.1).
    """

    pipeline: int = 1
    """Stages."""
    replicate: int = 1
    """Groups that have equal parameters and see different data."""
    shard: int = 1
    """Ranks that see different data and own a shard of the parameters each."""
    context: int = 1
    """Ranks that compute each sequence together."""
    tensor: int = 1
    """Ranks that compute each layer together."""
    expert: int = 1
    """Adjacent ranks among which the experts of a layer are dealt. For layers of experts the
    shard * context * tensor ranks of a stage are numbered anew, as expert-shard * expert."""

    @property
    def expert_shard(self) -> int:
        """Ranks among which the same experts are sharded."""
        return self.shard_ranks * self.tensor // self.expert

    @property
    def dimensions(self) -> list[Dimension]:
        """The dimensions in which this layout has groups of several ranks."""
        named = DIMENSIONS if self.expert > 1 else GRID
        return [dimension for dimension in named if self.degree(dimension) > 1]

    @property
    def ranks(self) -> int:
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The degrees of the grid: pipeline, replicate, shard, context, tensor."""
        return tuple(map(self.degree, GRID))

    def degree(self, dimension: Dimension) -> int:
        """Ranks of a group along a dimension."""
        degree: int = getattr(self, dimension.replace("-", "_"))
        return degree

    @property
    def replicas(self) -> int:
        """The data-parallel degree: the number of parts of the ranks that see different data."""
        return self.replicate * self.shard

    @property
    def model_parallel(self) -> int:
        """Ranks that one replica is split over."""
        return self.pipeline * self.context * self.tensor

    @property
    def shard_ranks(self) -> int:
        """Ranks among which the same parameters are sharded; ranks of one sequence are among them."""
        return self.shard * self.context

    def place(self, rank: int) -> dict[Dimension, int]:
        """The place of a rank in each dimension of the grid."""
        found: dict[Dimension, int] = {}
        for dimension, degree in zip(reversed(GRID), reversed(self.shape), strict=True):
            rank, found[dimension] = divmod(rank, degree)
        return found

    def replica(self, rank: int) -> int:
        """The number of the replica that a rank is a part of: which data it sees."""
        place = self.place(rank)
        return place["replicate"] * self.shard + place["shard"]

    def groups(self, *dimensions: Dimension) -> list[list[int]]:
        """All ranks in groups whose members differ only in these dimensions of the grid, each in ascending
        order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(product(*map(range, self.shape))):
            key = tuple(at for at, name in zip(place, GRID, strict=True) if name not in dimensions)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def dimension(self, ranks: Sequence[int]) -> Dimension | None:
        """The dimension in which the ranks of a group differ; None if they differ in several, or if two
        dimensions have this group, because shards lie on nothing but the ranks of one sequence."""
        named = DIMENSIONS if self.expert > 1 else ()
        if exact := [name for name in named if list(ranks) in self.peers(name)]:
            return exact[0] if len(exact) == 1 else None
        return self._of_grid(ranks)

    def _of_grid(self, ranks: Sequence[int]) -> Dimension | None:
        places = [self.place(rank) for rank in ranks]
        apart = [one for one in GRID if len({place[one] for place in places}) > 1]
        if apart == ["shard", "context"]:
            return "shard"
        return apart[0] if len(apart) == 1 and (apart != ["context"] or self.shard > 1) else None

    def peers(self, dimension: Dimension) -> list[list[int]]:
        """The groups that exchange along a dimension; shards lie on the ranks of one sequence too."""
        if dimension in ("expert", "expert-shard"):
            stages = self.groups("shard", "context", "tensor")
            if dimension == "expert-shard":
                return [stage[at :: self.expert] for stage in stages for at in range(self.expert)]
            firsts = range(0, len(stages[0]), self.expert)
            return [stage[first : first + self.expert] for stage in stages for first in firsts]
        return self.groups("shard", "context") if dimension == "shard" else self.groups(dimension)
