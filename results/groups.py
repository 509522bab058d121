"""The groups of a launch's ranks: a grid of stages, replicas, shards, parts of sequences and tensor parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Literal

import msgspec

Dimension = Literal["pipeline", "replicate", "shard", "context", "tensor"]
DIMENSIONS: tuple[Dimension, ...] = ("pipeline", "replicate", "shard", "context", "tensor")
"""The dimensions, from the one whose neighbours lie farthest apart to the one whose neighbours are adjacent
ranks."""


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

    @property
    def ranks(self) -> int:
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The degrees in the order of `DIMENSIONS`."""
        return tuple(getattr(self, dimension) for dimension in DIMENSIONS)

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
        """The place of a rank in each dimension."""
        found: dict[Dimension, int] = {}
        for dimension, degree in zip(reversed(DIMENSIONS), reversed(self.shape), strict=True):
            rank, found[dimension] = divmod(rank, degree)
        return found

    def replica(self, rank: int) -> int:
        """The number of the replica that a rank is a part of: which data it sees."""
        place = self.place(rank)
        return place["replicate"] * self.shard + place["shard"]

    def groups(self, *dimensions: Dimension) -> list[list[int]]:
        """All ranks in groups whose members differ only in these dimensions, each in ascending order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(product(*map(range, self.shape))):
            key = tuple(at for at, name in zip(place, DIMENSIONS, strict=True) if name not in dimensions)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def dimension(self, ranks: Sequence[int]) -> Dimension | None:
        """The dimension in which the ranks of a group differ; None if they differ in several, or if two
        dimensions have this group, because shards lie on nothing but the ranks of one sequence."""
        places = [self.place(rank) for rank in ranks]
        apart = [one for one in DIMENSIONS if len({place[one] for place in places}) > 1]
        if apart == ["shard", "context"]:
            return "shard"
        return apart[0] if len(apart) == 1 and (apart != ["context"] or self.shard > 1) else None

    def peers(self, dimension: Dimension) -> list[list[int]]:
        """The groups that exchange along a dimension; shards lie on the ranks of one sequence too."""
        return self.groups("shard", "context") if dimension == "shard" else self.groups(dimension)
